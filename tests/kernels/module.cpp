// The kernels of one module (-DKVFS_ELEMENT=F16 -DKVFS_WIDTH=128), or those that all share, as a
// library: what the tests load, and the fake driver in place of PTX.
#include <mutex>

#include "kernels.cu"

namespace {

template <class Arguments>
void call(void (*kernel)(const Arguments), const void* arguments) {
    kernel(*static_cast<const Arguments*>(arguments));
}

#define KVFS_ENTRY(name, Arguments) \
    {#name, sizeof(kvfs::Arguments), [](const void* a) { call<kvfs::Arguments>(&name, a); }}

struct Entry {
    const char* name;
    size_t bytes;
    void (*call)(const void*);
};

const Entry ENTRIES[] = {
#ifdef KVFS_ELEMENT
    KVFS_ENTRY(attend_1, AttendArguments), KVFS_ENTRY(attend_2, AttendArguments),
    KVFS_ENTRY(attend_4, AttendArguments), KVFS_ENTRY(attend_5, AttendArguments),
    KVFS_ENTRY(attend_8, AttendArguments), KVFS_ENTRY(attend_masked_8, AttendArguments),
    KVFS_ENTRY(add_mass_4, MassArguments), KVFS_ENTRY(summarise_pages, SummaryArguments),
#else
    KVFS_ENTRY(prepare, PrepareArguments), KVFS_ENTRY(merge, MergeArguments),
    KVFS_ENTRY(finish, MergeArguments),    KVFS_ENTRY(bound_pages, BoundArguments),
#endif
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The number of a kernel and the size of its parameter, or -1.
EXPORTED int kvfs_module_find(const char* name, size_t* bytes) {
    int index = 0;
    for (const Entry& entry : ENTRIES) {
        if (std::strcmp(entry.name, name) == 0) {
            *bytes = entry.bytes;
            return index;
        }
        ++index;
    }
    return -1;
}

EXPORTED void kvfs_module_run(int kernel, unsigned x, unsigned y, unsigned threads, uint64_t seed,
                              const void* arguments) {
    // The shim runs one grid at a time.
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    shim::launch({x, y, 1}, threads, seed, {ENTRIES[kernel].call, arguments});
}

#ifdef KVFS_ELEMENT
// The elements of a row, as the lanes convert them.
EXPORTED void kvfs_module_convert(const uint8_t* row, unsigned elements, float* out) {
    typedef kvfs::KVFS_ELEMENT Element;
    for (unsigned part = 0; part < elements / kvfs::LANE_ELEMENTS; ++part) {
        float values[kvfs::LANE_ELEMENTS];
        Element::values(Element::load(row, part, elements), values);
        for (unsigned i = 0; i < kvfs::LANE_ELEMENTS; ++i) {
            out[Element::index(part, i, elements)] = values[i];
        }
    }
}
#endif
