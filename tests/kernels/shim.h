// Runs the kernels on a CPU: what they take from CUDA (kernels/device.h), as C++.
//
// Each thread of a block is a fiber with a stack of its own. Fibers change only where threads must
// wait for each other, in an order that a seed decides, so a run can be repeated. Blocks come in a
// seeded order too. Shared memory is filled with NaN before each block and is as large as it says,
// to the byte.
//
// With -fsanitize=address and thread the sanitizers know the fibers. For ThreadSanitizer a change of
// fibers orders nothing, only barriers of the block do: so it finds every race on the way that was
// taken, whatever the order was, and races between blocks.
#pragma once

// Few headers: each module compiles them once more.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define KVFS_SHARED(type, name) type& name = *shim::shared<type>()

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

// The shim itself is one thread, and no part of what is tested.
#define KVFS_UNSEEN __attribute__((no_sanitize_thread))

namespace shim {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t SHARED_BYTES_MAX = 48 << 10;

// Which of the bugs that are planted in the kernels is there (bugs.rs), 0 for none. Known when the
// library is loaded: a test of a flag would order threads.
static const int PLANTED = std::getenv("KVFS_PLANTED") ? std::atoi(std::getenv("KVFS_PLANTED")) : 0;
inline bool planted(int bug) { return bug == PLANTED; }

// A kernel with its argument.
struct Call {
    void (*function)(const void*);
    const void* argument;
};

// What a vector would do, unseen by ThreadSanitizer.
template <class T>
class Array {
public:
    Array() = default;
    Array(const Array&) = delete;
    KVFS_UNSEEN ~Array() { std::free(values_); }

    KVFS_UNSEEN T& operator[](size_t index) { return values_[index]; }
    KVFS_UNSEEN size_t size() const { return size_; }

    KVFS_UNSEEN void assign(size_t size, T value) {
        if (size > capacity_) {
            values_ = static_cast<T*>(std::realloc(values_, size * sizeof(T)));
            capacity_ = size;
        }
        size_ = size;
        for (size_t i = 0; i < size; ++i) values_[i] = value;
    }

private:
    T* values_ = nullptr;
    size_t size_ = 0, capacity_ = 0;
};

// Orders by xorshift64*.
class Seeded {
public:
    KVFS_UNSEEN explicit Seeded(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 | 1) {}

    // The numbers from 0 on in a random order.
    KVFS_UNSEEN void order(size_t count, Array<unsigned>& numbers) {
        numbers.assign(count, 0);
        for (unsigned i = 0; i < count; ++i) numbers[i] = i;
        shuffle(numbers);
    }

    KVFS_UNSEEN void shuffle(Array<unsigned>& numbers) {
        for (size_t left = numbers.size(); left > 1; --left) {
            const size_t other = next() % left;
            const unsigned number = numbers[other];
            numbers[other] = numbers[left - 1];
            numbers[left - 1] = number;
        }
    }

private:
    uint64_t state_;

    KVFS_UNSEEN uint64_t next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return state_ * 0x2545f4914f6cdd1d >> 16;
    }
};

[[noreturn]] inline void fail(const char* why) {
    std::fprintf(stderr, "shim: %s\n", why);
    std::exit(3);
}

// Saves the registers that a function keeps, and continues where `to` was saved.
extern "C" void kvfs_shim_switch(void** from, void* to);
#if defined(__x86_64__)
__asm__(
    ".text\n.globl kvfs_shim_switch\nkvfs_shim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#else
#error "the shim changes stacks on x86-64 only"
#endif

// What came before `release` of an address comes before what follows `acquire` of it.
inline void release([[maybe_unused]] const void* address) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(const_cast<void*>(address));
#endif
}

inline void acquire([[maybe_unused]] const void* address) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(const_cast<void*>(address));
#endif
}

// Blocks whose threads ThreadSanitizer can tell apart; a block so many later has the same. It knows
// 8192 threads at most.
#if defined(__SANITIZE_THREAD__)
constexpr unsigned TOLD_APART = 16;
#else
constexpr unsigned TOLD_APART = 1;
#endif

struct Fiber {
    void* saved = nullptr;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    // What a sanitizer knows it by.
    void* sanitizer = nullptr;
    bool done = false;

#if defined(__SANITIZE_THREAD__)
    Fiber() : sanitizer(__tsan_create_fiber(0)) {}
#endif
};

// Threads that wait for each other.
struct Barrier {
    unsigned members = 0, waiting = 0, generation = 0;
};

class Block {
public:
    dim3 thread, block;

    Block() = default;

    KVFS_UNSEEN ~Block() {
        for (Array<Fiber*>& fibers : all_fibers_) {
            for (size_t i = 0; i < fibers.size(); ++i) delete fibers[i];
        }
    }

    static Block*& current() {
        static Block* block = nullptr;
        return block;
    }

    // Runs all blocks, one after the other.
    KVFS_UNSEEN void launch(dim3 grid, unsigned count, const Call& kernel, uint64_t seed) {
        Seeded random(seed);
        Array<unsigned> order;
        random.order(size_t{grid.x} * grid.y * grid.z, order);
        // Blocks may not have each other's memory: they would seem to share it.
        Array<void*> memory;
        memory.assign(order.size(), nullptr);
        // Who launches comes before every block and after it; blocks are in no order.
        release(&launched_);
        for (unsigned number = 0; number < order.size(); ++number) {
            const unsigned index = order[number];
            block = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
            shared_ = &memory[number];
            run(kernel, count, number, random);
        }
        acquire(&finished_);
        for (size_t i = 0; i < memory.size(); ++i) std::free(memory[i]);
    }

    // The block that is the `number`th to run.
    KVFS_UNSEEN void run(const Call& kernel, unsigned count, unsigned number, Seeded& random) {
        kernel_ = &kernel;
        Array<Fiber*>& fibers = all_fibers_[number % TOLD_APART];
        if (fibers.size() == 0) {
            fibers.assign(count, nullptr);
            for (unsigned i = 0; i < count; ++i) fibers[i] = new Fiber;
        }
        if (fibers.size() != count) fail("blocks of different sizes");
        fibers_ = &fibers;
        exchanged_.assign(2 * count, 0);
        generation_.assign(count, 0);
        block_barrier_ = {count, 0, 0};
        warp_barriers_.assign((count + WARP - 1) / WARP, Barrier{WARP, 0, 0});
        if (count % WARP != 0) fail("a block of threads that are no whole warps");
        for (unsigned i = 0; i < count; ++i) start(*fibers[i]);
        Array<unsigned> order;
        random.order(count, order);
        unsigned left = count;
        while (left > 0) {
            progress_ = false;
            random.shuffle(order);
            for (unsigned i = 0; i < count; ++i) {
                const unsigned index = order[i];
                if (fiber(index).done) continue;
                resume(index);
                left -= fiber(index).done;
            }
            if (!progress_) fail("threads wait for others that never come");
        }
    }

    KVFS_UNSEEN void wait_for_block() {
        release(&block_barrier_);
        wait(block_barrier_);
        acquire(&block_barrier_);
    }

    // Values lie in two places in turns, so that one barrier is enough. A shuffle orders no other
    // memory.
    KVFS_UNSEEN uint32_t exchange(unsigned mask, uint32_t value, unsigned distance) {
        if (mask != 0xffffffffu) fail("a shuffle of part of a warp");
        const unsigned me = thread.x;
        uint32_t* places = &exchanged_[generation_[me] % 2 * generation_.size()];
        generation_[me]++;
        places[me] = value;
        wait(warp_barriers_[me / WARP]);
        return places[me ^ distance];
    }

    // The memory of one declaration; a kernel has one at most.
    template <class T>
    KVFS_UNSEEN T* shared() {
        if (sizeof(T) > SHARED_BYTES_MAX) fail("more shared memory than there is");
        if (*shared_ == nullptr) {
            // NaN in every float.
            *shared_ = std::memset(std::malloc(sizeof(T)), 0xff, sizeof(T));
            release(*shared_);
        }
        acquire(*shared_);
        return static_cast<T*>(*shared_);
    }

private:
    const Call* kernel_ = nullptr;
    // Only their addresses count.
    char launched_ = 0, finished_ = 0;
    Array<Fiber*> all_fibers_[TOLD_APART];
    // Those of the block.
    Array<Fiber*>* fibers_ = nullptr;
    Array<uint32_t> exchanged_;
    Array<unsigned> generation_;
    Barrier block_barrier_;
    Array<Barrier> warp_barriers_;
    // Of the block, once it is asked for.
    void** shared_ = nullptr;
    void* scheduler_ = nullptr;
    void* scheduler_sanitizer_ = nullptr;
    unsigned running_ = 0;
    bool progress_ = false;

    KVFS_UNSEEN Fiber& fiber(unsigned index) { return *(*fibers_)[index]; }

    KVFS_UNSEEN void start(Fiber& fiber) {
        // The stack as kvfs_shim_switch leaves it: six registers, where to go on, and nowhere to
        // return to.
        auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK_BYTES) & ~uintptr_t{63};
        void** frame = reinterpret_cast<void**>(top) - 8;
        std::memset(frame, 0, 8 * sizeof(void*));
        frame[6] = reinterpret_cast<void*>(&entry);
        fiber.saved = frame;
        fiber.done = false;
    }

    KVFS_UNSEEN static void entry() {
        Block& block = *current();
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_size_);
#endif
        acquire(&block.launched_);
        block.kernel_->function(block.kernel_->argument);
        release(&block.finished_);
        block.fiber(block.running_).done = true;
        block.progress_ = true;
        block.suspend();
        std::abort();
    }

    KVFS_UNSEEN void resume(unsigned index) {
        Fiber& fiber = this->fiber(index);
        running_ = index;
        thread.x = index;
#if defined(__SANITIZE_ADDRESS__)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), STACK_BYTES);
#endif
#if defined(__SANITIZE_THREAD__)
        scheduler_sanitizer_ = __tsan_get_current_fiber();
        __tsan_switch_to_fiber(fiber.sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
        kvfs_shim_switch(&scheduler_, fiber.saved);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    }

    KVFS_UNSEEN void suspend() {
        Fiber& fiber = this->fiber(running_);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fiber.sanitizer, scheduler_stack_,
                                       scheduler_size_);
#endif
#if defined(__SANITIZE_THREAD__)
        __tsan_switch_to_fiber(scheduler_sanitizer_, __tsan_switch_to_fiber_no_sync);
#endif
        kvfs_shim_switch(&fiber.saved, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fiber.sanitizer, &scheduler_stack_, &scheduler_size_);
#endif
    }

    KVFS_UNSEEN void wait(Barrier& barrier) {
        const unsigned generation = barrier.generation;
        if (++barrier.waiting == barrier.members) {
            barrier.waiting = 0;
            barrier.generation++;
            progress_ = true;
        }
        while (barrier.generation == generation) suspend();
    }

#if defined(__SANITIZE_ADDRESS__)
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_size_ = 0;
#endif
};

template <class T>
T* shared() {
    return Block::current()->shared<T>();
}

// Runs all blocks of a grid.
inline void launch(dim3 grid, unsigned threads, uint64_t seed, const Call& kernel) {
    static Block block;
    Block::current() = &block;
    block.launch(grid, threads, kernel, seed);
}

inline float half_value(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, sizeof(half));
    return static_cast<float>(half);
}

template <class To, class From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

}  // namespace shim

#define threadIdx (shim::Block::current()->thread)
#define blockIdx (shim::Block::current()->block)

inline void __syncthreads() { shim::Block::current()->wait_for_block(); }

inline float __shfl_xor_sync(unsigned mask, float value, unsigned distance) {
    const uint32_t word = shim::bits<uint32_t>(value);
    return shim::bits<float>(shim::Block::current()->exchange(mask, word, distance));
}

template <class T>
T __ldg(const T* address) {
    return *address;
}

inline float __uint_as_float(unsigned bits) { return shim::bits<float>(bits); }
