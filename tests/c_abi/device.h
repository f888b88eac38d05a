/* A stream and memory of a program's own on a GPU. The driver is found by name, as a program does that
 * runs without one. */
#include <dlfcn.h>
#include <kvfs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t device_address;
static int (*allocate)(device_address *, size_t), (*make_current)(void *), (*get_current)(void **);
static int (*allocate_host)(void **, size_t, unsigned), (*wait_for_stream)(void *);
static int (*upload)(device_address, const void *, size_t, void *);
static int (*download)(void *, device_address, size_t, void *);

static inline void need(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, kvfs_last_error());
        exit(1);
    }
}

static inline void find(void *library, const char *name, void *function) {
    void *address = dlsym(library, name);
    need(address != NULL, name);
    memcpy(function, &address, sizeof address);
}

/* The primary context, which becomes current, and a stream in it; NULL without a driver. */
static inline void *open_stream(void **context) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *stream;
    int (*start)(unsigned), (*retain)(void **, int), (*create_stream)(void **, unsigned);
    if (library == NULL) return NULL;
    find(library, "cuInit", &start), find(library, "cuDevicePrimaryCtxRetain", &retain);
    find(library, "cuCtxSetCurrent", &make_current), find(library, "cuCtxGetCurrent", &get_current);
    find(library, "cuStreamCreate", &create_stream), find(library, "cuMemAlloc_v2", &allocate);
    find(library, "cuMemHostAlloc", &allocate_host), find(library, "cuMemcpyHtoDAsync_v2", &upload);
    find(library, "cuMemcpyDtoHAsync_v2", &download);
    find(library, "cuStreamSynchronize", &wait_for_stream);
    need(start(0) == 0 && retain(context, 0) == 0 && make_current(*context) == 0, "context");
    need(create_stream(&stream, 1) == 0, "stream");
    return stream;
}

static inline device_address device(size_t bytes) {
    device_address address = 0;
    need(allocate(&address, bytes) == 0, "device memory");
    return address;
}

static inline float *pinned(size_t count) {
    void *memory = NULL;
    need(allocate_host(&memory, count * sizeof(float), 0) == 0, "pinned memory");
    return memory;
}
