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

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

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

    static Block*& current() {
        static Block* block = nullptr;
        return block;
    }

    // Runs all blocks, one after the other.
    KVFS_UNSEEN void launch(dim3 grid, unsigned count, const std::function<void()>& kernel,
                            uint64_t seed) {
        std::mt19937_64 random(seed);
        std::vector<unsigned> order(grid.x * grid.y * grid.z);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        // Blocks may not have each other's memory: they would seem to share it.
        std::vector<void*> memory(order.size());
        // Who launches comes before every block and after it; blocks are in no order.
        release(&launched_);
        for (unsigned number = 0; number < order.size(); ++number) {
            const unsigned index = order[number];
            block = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
            shared_ = &memory[number];
            run(kernel, count, number, random);
        }
        acquire(&finished_);
        for (void* of_block : memory) std::free(of_block);
    }

    // The block that is the `number`th to run.
    KVFS_UNSEEN void run(const std::function<void()>& kernel, unsigned count, unsigned number,
                         std::mt19937_64& random) {
        kernel_ = &kernel;
        std::vector<Fiber>& fibers = all_fibers_[number % TOLD_APART];
        if (fibers.size() < count) fibers.resize(count);
        fibers_ = fibers.data();
        exchanged_.assign(2 * count, 0);
        generation_.assign(count, 0);
        block_barrier_ = {count};
        warp_barriers_.assign((count + WARP - 1) / WARP, Barrier{WARP});
        if (count % WARP != 0) fail("a block of threads that are no whole warps");
        for (Fiber& fiber : fibers) start(fiber);
        std::vector<unsigned> order(count);
        std::iota(order.begin(), order.end(), 0);
        unsigned left = count;
        while (left > 0) {
            progress_ = false;
            std::shuffle(order.begin(), order.end(), random);
            for (unsigned index : order) {
                if (fibers_[index].done) continue;
                resume(index);
                left -= fibers_[index].done;
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
        uint32_t* places = exchanged_.data() + generation_[me] % 2 * generation_.size();
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
    const std::function<void()>* kernel_ = nullptr;
    // Only their addresses count.
    char launched_ = 0, finished_ = 0;
    std::vector<Fiber> all_fibers_[TOLD_APART];
    // Those of the block.
    Fiber* fibers_ = nullptr;
    std::vector<uint32_t> exchanged_;
    std::vector<unsigned> generation_;
    Barrier block_barrier_;
    std::vector<Barrier> warp_barriers_;
    // Of the block, once it is asked for.
    void** shared_ = nullptr;
    void* scheduler_ = nullptr;
    void* scheduler_sanitizer_ = nullptr;
    unsigned running_ = 0;
    bool progress_ = false;

    void start(Fiber& fiber) {
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
        (*block.kernel_)();
        release(&block.finished_);
        block.fibers_[block.running_].done = true;
        block.progress_ = true;
        block.suspend();
        std::abort();
    }

    KVFS_UNSEEN void resume(unsigned index) {
        Fiber& fiber = fibers_[index];
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
        Fiber& fiber = fibers_[running_];
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
inline void launch(dim3 grid, unsigned threads, uint64_t seed, const std::function<void()>& kernel) {
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
