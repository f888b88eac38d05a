/* Stands before an engine's base library: everything is that library's, but for what the variable PLANTED
 * names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *(*function)();

static bool planted(const char *name) {
    const char *value = getenv("PLANTED");
    return value && strcmp(value, name) == 0;
}

static function real(const char *name) { return (function)dlsym(RTLD_NEXT, name); }

const char *ggml_version(void) {
    const char *version = getenv("PLANTED_VERSION");
    return version ? version : (const char *)real("ggml_version")();
}

/* Operations renamed. */
const char *ggml_op_name(int op) {
    const char *name = ((const char *(*)(int))real("ggml_op_name"))(op);
    if (name && planted(name)) return "RENAMED";
    return name;
}

/* Slots moved: the engine looks one further, or one before. */
static void *slot(void *structure, int words) { return ((void **)structure)[words]; }

void ggml_backend_buffer_clear(void *buffer, uint8_t value) {
    if (planted("clear moved")) ((function)slot(buffer, 10))(buffer, value);
    else real("ggml_backend_buffer_clear")(buffer, value);
}

void ggml_backend_tensor_set(void *tensor, const void *data, size_t offset, size_t size) {
    if (planted("set_tensor moved")) {
        void *buffer = *(void **)((char *)tensor + 8);
        ((function)slot(buffer, 5))(buffer, tensor, data, offset, size);
    } else real("ggml_backend_tensor_set")(tensor, data, offset, size);
}

size_t ggml_backend_buft_get_alignment(void *kind) {
    int moved = planted("alignment moved") ? 3 : 2;
    return ((size_t(*)(void *))slot(kind, moved))(kind);
}

bool ggml_backend_dev_supports_op(void *device, const void *op) {
    int moved = planted("supports_op moved") ? 10 : 9;
    return ((bool (*)(void *, const void *))slot(device, moved))(device, op);
}

int ggml_backend_graph_compute_async(void *backend, void *graph) {
    if (planted("graph_compute moved")) return ((int (*)(void *, void *))slot(backend, 14))(backend, graph);
    return ((int (*)(void *, void *))real("ggml_backend_graph_compute_async"))(backend, graph);
}

/* Fields added: to a buffer, behind its functions; to a backend; to a tensor, before its shape. */
struct interface { void *words[11]; };
void *ggml_backend_buffer_init(void *kind, struct interface interface, void *context, size_t size) {
    if (!planted("buffer field added"))
        return ((void *(*)(void *, struct interface, void *, size_t))real("ggml_backend_buffer_init"))(
            kind, interface, context, size);
    void **buffer = calloc(32, sizeof *buffer);
    memcpy(buffer, &interface, sizeof interface);
    buffer[12] = kind;
    buffer[13] = context;
    buffer[14] = (void *)size;
    return buffer;
}

void *ggml_backend_get_device(void *backend) {
    return slot(backend, planted("backend field added") ? 18 : 17);
}

void *ggml_new_tensor_4d(void *context, int type, int64_t a, int64_t b, int64_t c, int64_t d) {
    char *tensor = ((char *(*)(void *, int, int64_t, int64_t, int64_t, int64_t))real("ggml_new_tensor_4d"))(
        context, type, a, b, c, d);
    if (!planted("tensor field added")) return tensor;
    char *longer = calloc(1, 512);
    memcpy(longer, tensor, 16);
    memcpy(longer + 24, tensor + 16, 320);
    return longer;
}

/* A type whose blocks have another size. */
size_t ggml_type_size(int type) {
    size_t size = ((size_t(*)(int))real("ggml_type_size"))(type);
    return size + (planted("q4_0 of another size") && type == 2 ? 2 : 0);
}

/* A structure that is longer. */
void ggml_backend_dev_get_props(void *device, void *props) {
    real("ggml_backend_dev_get_props")(device, props);
    if (planted("properties longer")) memset((char *)props + 56, 0, 8);
}

/* An engine that ends the process that looks at it, or never answers. */
const char *ggml_backend_dev_name(void *device) {
    if (planted("crash")) *(volatile int *)8 = 1;
    if (planted("abort")) abort();
    if (planted("hang")) for (;;) pause();
    return ((const char *(*)(void *))slot(device, 0))(device);
}
