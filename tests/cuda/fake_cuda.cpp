// A driver without a GPU: what kvfs calls of libcuda.so.1, with the kernels run on the CPU.
//
// A stream is a thread with a queue. Copies and kernels take random times, so what no event orders
// comes in any order. Memory that nobody has written is NaN, and freed memory becomes so at once.
// Copies from pinned memory read it when their turn comes, as the device does.
//
//   KVFS_FAKE_MODULES     directory of the modules (tests/kernels/module.cpp)
//   KVFS_FAKE_SEED        of all that is random
//   KVFS_FAKE_COPY_US     longest random time of an upload; KVFS_FAKE_COPY_US_LEAST the shortest.
//                         Tables and queries, of less than 8 KiB, take none
//   KVFS_FAKE_BACK_US     longest random time of a download
//   KVFS_FAKE_KERNEL_US   the same of a kernel; KVFS_FAKE_KERNEL_US_LEAST
//   KVFS_FAKE_SERIAL      one copy or kernel at a time, whatever the stream
//   KVFS_FAKE_MEMORY      bytes of device memory
//   KVFS_FAKE_FAIL        CALL:N:CODE, a comma list: the Nth call fails so; CALL:N+:CODE all from
//                         the Nth on; kernel:N:CODE a kernel fails while it runs
//   KVFS_FAKE_IGNORE      what the driver forgets, as if the program had not asked for it: `copies` and
//                         `computes`, the waits of streams without and with kernels; `host`, waits of
//                         the program for events; `synchronize`, for streams; `end`, the last 64
//                         bytes of an upload of pages; `split`, the last row of blocks of an attention kernel
//   KVFS_FAKE_WRONG       what the driver does as if the program had reckoned wrongly: `tokens`, the last
//                         split of a launch has one token less; `stride`, tokens of K lie 16 bytes
//                         further apart; `scale`, that of the logits is 1 % too large; `parts`, a merge
//                         leaves out one; `weights`, it takes m for l; `slot`, an upload of pages goes
//                         to where the one before it went; `head`, queries are a head further on
//   KVFS_FAKE_CAPTURE     1 while streams are captured into a graph
//   KVFS_FAKE_DEVICES, KVFS_FAKE_VERSION, KVFS_FAKE_CAPABILITY (52), KVFS_FAKE_SHARED
#include <dlfcn.h>

#include "attend.h"
#include "fake_device.h"
#include "merge.h"
#include "prepare.h"

using namespace fake;

namespace {

struct Module {
    void* library;
    int (*find)(const char*, size_t*);
    void (*run)(int, unsigned, unsigned, unsigned, uint64_t, const void*);
};

struct Function {
    Module* module;
    std::string name;
    int kernel;
    size_t bytes;
};

bool is_wrong(const char* what) {
    static const char* wrong = std::getenv("KVFS_FAKE_WRONG");
    return wrong != nullptr && std::strcmp(wrong, what) == 0;
}

// Arguments as they would be if the program had reckoned wrongly.
void spoil(const std::string& kernel, unsigned splits, void* arguments) {
    if (kernel.compare(0, 7, "attend_") == 0) {
        auto& a = *static_cast<kvfs::AttendArguments*>(arguments);
        auto* last = const_cast<kvfs::Split*>(a.attention.splits) + splits - 1;
        if (is_wrong("tokens") && last->tokens > 0) --last->tokens;
        if (is_wrong("stride")) const_cast<kvfs::Page*>(a.attention.pages)->k_token_stride += 16;
        if (is_wrong("head")) a.attention.q += a.attention.heads.head_dim;
    } else if (kernel == "prepare") {
        if (is_wrong("scale")) static_cast<kvfs::PrepareArguments*>(arguments)->scale *= 1.01f;
    } else if (kernel == "merge") {
        auto& a = *static_cast<kvfs::MergeArguments*>(arguments);
        if (is_wrong("parts") && a.parts > 1) --a.parts;
        if (is_wrong("weights")) a.l = a.m;
    }
}

// The only context, and what is current.
char primary;
thread_local void* current = nullptr;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define NEEDS_CONTEXT \
    if (current != &primary) return 201

// How often a function was called so far.
EXPORTED long kvfs_fake_calls(const char* name) { return Calls::instance().add(name, 0); }

EXPORTED int cuInit(unsigned) {
    FAIL_AS_PLANNED("cuInit");
    return 0;
}

EXPORTED int cuDriverGetVersion(int* version) {
    *version = number("KVFS_FAKE_VERSION", 12040);
    return 0;
}

EXPORTED int cuGetErrorName(int code, const char** name) {
    static thread_local std::string text;
    text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "FAKE_" + std::to_string(code);
    *name = text.c_str();
    return 0;
}

EXPORTED int cuGetErrorString(int, const char** text) {
    *text = "as planned";
    return 0;
}

EXPORTED int cuDeviceGetCount(int* count) {
    *count = number("KVFS_FAKE_DEVICES", 1);
    return 0;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
    if (ordinal >= number("KVFS_FAKE_DEVICES", 1)) return 101;
    *device = ordinal;
    return 0;
}

EXPORTED int cuDeviceGetName(char* name, int bytes, int) {
    std::snprintf(name, bytes, "no GPU at all");
    return 0;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int) {
    const int capability = number("KVFS_FAKE_CAPABILITY", 52);
    switch (attribute) {
        case 6: *value = 65535; return 0;
        case 8: *value = 48 << 10; return 0;
        case 16: *value = 4; return 0;
        case 75: *value = capability / 10; return 0;
        case 76: *value = capability % 10; return 0;
        case 113: *value = 1; return 0;
        default: return INVALID_VALUE;
    }
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int) {
    FAIL_AS_PLANNED("cuDevicePrimaryCtxRetain");
    *context = &primary;
    return 0;
}

EXPORTED int cuDevicePrimaryCtxRelease_v2(int) { return 0; }

EXPORTED int cuCtxSetCurrent(void* context) {
    current = context;
    return 0;
}

EXPORTED int cuCtxGetCurrent(void** context) {
    *context = current;
    return 0;
}

EXPORTED int cuMemGetInfo_v2(size_t* free, size_t* total) {
    NEEDS_CONTEXT;
    *total = memory_bytes();
    *free = *total - device_memory().total();
    return 0;
}

EXPORTED int cuStreamCreate(void** stream, unsigned) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuStreamCreate");
    *stream = new Stream;
    return 0;
}

EXPORTED int cuStreamDestroy_v2(void* stream) {
    delete static_cast<Stream*>(stream);
    return 0;
}

// All of them, while the variable is set.
EXPORTED int cuStreamIsCapturing(void*, int* status) {
    NEEDS_CONTEXT;
    *status = number("KVFS_FAKE_CAPTURE", 0);
    return 0;
}

EXPORTED int cuStreamSynchronize(void* stream) {
    NEEDS_CONTEXT;
    if (!forgets("synchronize")) static_cast<Stream*>(stream)->synchronize();
    return lost;
}

EXPORTED int cuEventCreate(void** event, unsigned) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuEventCreate");
    *event = new Event;
    return 0;
}

// A stream may still be about to use it.
EXPORTED int cuEventDestroy_v2(void*) { return 0; }

EXPORTED int cuEventRecord(void* handle, void* stream) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuEventRecord");
    Event* event = static_cast<Event*>(handle);
    uint64_t generation;
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        generation = ++event->recorded;
    }
    static_cast<Stream*>(stream)->push([event, generation] {
        const std::lock_guard<std::mutex> lock(event->mutex);
        event->happened = std::max(event->happened, generation);
        event->changed.notify_all();
    });
    return 0;
}

EXPORTED int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuStreamWaitEvent");
    Event* event = static_cast<Event*>(handle);
    const uint64_t generation = event->generation();
    if (forgets(static_cast<Stream*>(stream)->has_kernels ? "computes" : "copies")) return 0;
    static_cast<Stream*>(stream)->push([event, generation] { event->wait(generation); });
    return 0;
}

EXPORTED int cuEventSynchronize(void* handle) {
    NEEDS_CONTEXT;
    Calls::instance().add("cuEventSynchronize", 1);
    Event* event = static_cast<Event*>(handle);
    if (!forgets("host")) event->wait(event->generation());
    return lost;
}

EXPORTED int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuMemAlloc");
    if (bytes == 0) return INVALID_VALUE;
    if (device_memory().total() + bytes > memory_bytes()) return OUT_OF_MEMORY;
    void* memory = poisoned(bytes);
    if (memory == nullptr) return OUT_OF_MEMORY;
    *address = reinterpret_cast<uintptr_t>(memory);
    device_memory().add(*address, bytes);
    return 0;
}

EXPORTED int cuMemFree_v2(uint64_t address) {
    NEEDS_CONTEXT;
    const size_t bytes = device_memory().remove(address);
    if (bytes == 0) return INVALID_VALUE;
    std::memset(reinterpret_cast<void*>(address), 0xff, bytes);
    return 0;
}

EXPORTED int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuMemHostAlloc");
    *memory = poisoned(bytes);
    if (*memory == nullptr) return OUT_OF_MEMORY;
    host_memory().add(reinterpret_cast<uintptr_t>(*memory), bytes);
    return 0;
}

EXPORTED int cuMemFreeHost(void* memory) {
    NEEDS_CONTEXT;
    const size_t bytes = host_memory().remove(reinterpret_cast<uintptr_t>(memory));
    if (bytes == 0) return INVALID_VALUE;
    std::memset(memory, 0xff, bytes);
    return 0;
}

EXPORTED int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuMemHostRegister");
    host_memory().add(reinterpret_cast<uintptr_t>(memory), bytes);
    return 0;
}

// A driver that is so old that it lacks one.
#ifndef KVFS_FAKE_OLD
EXPORTED int cuMemHostUnregister(void* memory) {
    NEEDS_CONTEXT;
    return host_memory().remove(reinterpret_cast<uintptr_t>(memory)) == 0 ? 713 : 0;
}
#endif

EXPORTED int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuMemcpyHtoDAsync");
    if (!device_memory().holds(to, bytes)) return ILLEGAL_ADDRESS;
    // The driver copies other memory before it returns; nothing here may need that.
    if (!host_memory().holds(reinterpret_cast<uintptr_t>(from), bytes)) return INVALID_VALUE;
    const bool is_small = bytes < 8 << 10;
    if (forgets("end") && !is_small) bytes -= std::min<size_t>(bytes, 64);
    static uint64_t before = to;
    const uint64_t there = std::exchange(before, is_small ? before : to);
    if (is_wrong("slot") && !is_small && device_memory().holds(there, bytes)) to = there;
    static_cast<Stream*>(stream)->push([=] {
        const auto lock = turn();
        if (!is_small) Random::instance().sleep("KVFS_FAKE_COPY_US_LEAST", "KVFS_FAKE_COPY_US");
        if (lost == 0) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    });
    return 0;
}

EXPORTED int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuMemcpyDtoHAsync");
    if (!device_memory().holds(from, bytes)) return ILLEGAL_ADDRESS;
    if (!host_memory().holds(reinterpret_cast<uintptr_t>(to), bytes)) return INVALID_VALUE;
    static_cast<Stream*>(stream)->push([=] {
        Random::instance().sleep("KVFS_FAKE_BACK_US_LEAST", "KVFS_FAKE_BACK_US");
        if (lost == 0) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    });
    return 0;
}

EXPORTED int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    NEEDS_CONTEXT;
    if (!device_memory().holds(from, bytes) || !device_memory().holds(to, bytes)) {
        return ILLEGAL_ADDRESS;
    }
    static_cast<Stream*>(stream)->push([=] {
        std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    });
    return 0;
}

// The PTX begins with the line that names its module.
EXPORTED int cuModuleLoadData(void** handle, const void* image) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuModuleLoadData");
    static const std::string head = "// module ";
    const std::string text = static_cast<const char*>(image);
    const std::string name = text.substr(head.size(), text.find('\n') - head.size());
    if (text.compare(0, head.size(), head) != 0 || text.find(".version") == std::string::npos) {
        return 218;
    }
    const std::string path = std::string(std::getenv("KVFS_FAKE_MODULES")) + "/" + name + ".so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::fprintf(stderr, "fake driver: %s\n", dlerror());
        return NOT_FOUND;
    }
    Module* module = new Module{library, nullptr, nullptr};
    module->find = reinterpret_cast<decltype(module->find)>(dlsym(library, "kvfs_module_find"));
    module->run = reinterpret_cast<decltype(module->run)>(dlsym(library, "kvfs_module_run"));
    *handle = module;
    return 0;
}

EXPORTED int cuModuleUnload(void*) { return 0; }

EXPORTED int cuModuleGetFunction(void** handle, void* of, const char* name) {
    Module* module = static_cast<Module*>(of);
    size_t bytes = 0;
    const int kernel = module->find(name, &bytes);
    if (kernel < 0) return NOT_FOUND;
    *handle = new Function{module, name, kernel, bytes};
    return 0;
}

EXPORTED int cuFuncGetAttribute(int* value, int attribute, void*) {
    switch (attribute) {
        case 0: *value = 512; return 0;
        case 1: *value = number("KVFS_FAKE_SHARED", 17 << 10); return 0;
        default: return INVALID_VALUE;
    }
}

EXPORTED int cuLaunchKernel(void* handle, unsigned x, unsigned y, unsigned z, unsigned threads,
                            unsigned threads_y, unsigned threads_z, unsigned, void* stream,
                            void** parameters, void**) {
    NEEDS_CONTEXT;
    FAIL_AS_PLANNED("cuLaunchKernel");
    if (x == 0 || y == 0 || z != 1 || y > 65535 || threads_y != 1 || threads_z != 1) {
        return INVALID_VALUE;
    }
    const Function* function = static_cast<Function*>(handle);
    const char* arguments = static_cast<const char*>(parameters[0]);
    const std::vector<char> copy(arguments, arguments + function->bytes);
    const uint64_t seed = Random::instance().next();
    static_cast<Stream*>(stream)->has_kernels = true;
    if (forgets("split") && y > 1) --y;
    static_cast<Stream*>(stream)->push([=] {
        const auto lock = turn();
        Random::instance().sleep("KVFS_FAKE_KERNEL_US_LEAST", "KVFS_FAKE_KERNEL_US");
        if (const int failure = planned("kernel")) {
            lost = failure;
            return;
        }
        // Aligned as the parameters of a kernel are.
        void* aligned = std::aligned_alloc(16, (copy.size() + 15) / 16 * 16);
        std::memcpy(aligned, copy.data(), copy.size());
        spoil(function->name, y, aligned);
        function->module->run(function->kernel, x, y, threads, seed, aligned);
        std::free(aligned);
    });
    return 0;
}
