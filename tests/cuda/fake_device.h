// What the fake driver is made of: plans from the environment, streams, events, memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fake {

constexpr int INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700;

inline long number(const char* name, long otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atol(text);
}

inline bool forgets(const char* what) {
    static const char* forgotten = std::getenv("KVFS_FAKE_IGNORE");
    return forgotten != nullptr && std::strcmp(forgotten, what) == 0;
}

// What the device reports from now on, whatever is asked.
inline std::atomic<int> lost{0};

// How often something was called.
class Calls {
public:
    long add(const std::string& call, long more) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return counts_[call] += more;
    }

    static Calls& instance() {
        static Calls* calls = new Calls;
        return *calls;
    }

private:
    std::mutex mutex_;
    std::map<std::string, long> counts_;
};

// Whether this call is one that fails, and how.
inline int planned(const std::string& call) {
    const long count = Calls::instance().add(call, 1);
    const char* plan = std::getenv("KVFS_FAKE_FAIL");
    std::string rest = plan == nullptr ? "" : plan;
    while (!rest.empty()) {
        const size_t comma = rest.find(',');
        const std::string item = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        const size_t first = item.find(':'), second = item.rfind(':');
        if (item.substr(0, first) != call) continue;
        const std::string nth = item.substr(first + 1, second - first - 1);
        const bool and_later = nth.back() == '+';
        if (count == std::atol(nth.c_str()) || (and_later && count > std::atol(nth.c_str()))) {
            return std::atoi(item.c_str() + second + 1);
        }
    }
    return lost;
}

#define FAIL_AS_PLANNED(name) \
    if (const int failure = planned(name)) return failure

class Random {
public:
    void sleep(const char* least, const char* most) {
        const long from = number(least, 0), to = std::max(from, number(most, 0));
        if (to == 0) return;
        long time;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            time = std::uniform_int_distribution<long>(from, to)(engine_);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(time));
    }

    uint64_t next() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return engine_();
    }

    static Random& instance() {
        static Random* random = new Random;
        return *random;
    }

private:
    std::mutex mutex_;
    std::mt19937_64 engine_{static_cast<uint64_t>(number("KVFS_FAKE_SEED", 1))};
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, happened = 0;

    uint64_t generation() {
        const std::lock_guard<std::mutex> lock(mutex);
        return recorded;
    }

    void wait(uint64_t generation) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return happened >= generation; });
    }
};

class Stream {
public:
    std::atomic<bool> has_kernels{false};

    Stream() : thread_([this] { work(); }) {}

    ~Stream() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            end_ = true;
            changed_.notify_all();
        }
        thread_.join();
    }

    void push(std::function<void()> task) {
        const std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push(std::move(task));
        changed_.notify_all();
    }

    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return tasks_.empty() && !busy_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::queue<std::function<void()>> tasks_;
    bool busy_ = false, end_ = false;
    std::thread thread_;

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return end_ || !tasks_.empty(); });
            if (tasks_.empty()) return;
            const std::function<void()> task = std::move(tasks_.front());
            tasks_.pop();
            busy_ = true;
            lock.unlock();
            task();
            lock.lock();
            busy_ = false;
            changed_.notify_all();
        }
    }
};

// Ranges of addresses. What is freed stays allocated, so that late readers find NaN.
class Ranges {
public:
    void add(uintptr_t start, size_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        ranges_[start] = bytes;
        total_ += bytes;
    }

    // Its size, or 0.
    size_t remove(uintptr_t start) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = ranges_.find(start);
        if (found == ranges_.end()) return 0;
        const size_t bytes = found->second;
        ranges_.erase(found);
        total_ -= bytes;
        return bytes;
    }

    bool holds(uintptr_t start, size_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto found = ranges_.upper_bound(start);
        if (found == ranges_.begin()) return false;
        --found;
        return start + bytes <= found->first + found->second;
    }

    size_t total() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return total_;
    }

private:
    std::mutex mutex_;
    std::map<uintptr_t, size_t> ranges_;
    size_t total_ = 0;
};

inline Ranges& device_memory() {
    static Ranges* ranges = new Ranges;
    return *ranges;
}

inline Ranges& host_memory() {
    static Ranges* ranges = new Ranges;
    return *ranges;
}

inline size_t memory_bytes() { return number("KVFS_FAKE_MEMORY", 1L << 30); }

// What copies and kernels hold where they are to come one after the other.
inline std::unique_lock<std::mutex> turn() {
    static std::mutex mutex;
    static const bool serial = std::getenv("KVFS_FAKE_SERIAL") != nullptr;
    return serial ? std::unique_lock<std::mutex>(mutex) : std::unique_lock<std::mutex>();
}

inline void* poisoned(size_t bytes) {
    void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (memory != nullptr) std::memset(memory, 0xff, bytes);
    return memory;
}

}  // namespace fake
