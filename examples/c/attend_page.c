/* Maps one page of a mount and attends to it where it lies.
 *
 *     mount-scripts/build-c-library.sh --release
 *     cc -Iinclude examples/c/attend_page.c -Ltarget/release -Wl,-rpath,$PWD/target/release \
 *         -lkvfs -o attend_page
 *     ./attend_page MODEL/manifest.json MODEL/sequences/NAME/000/0001024.safetensors 0 1024
 *
 * The last two arguments are the layer and the first token, as in the page's name. Prints the
 * output of each query head, a value per line. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <kvfs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct file {
    const void *data;
    size_t bytes;
};

/* Page files are made to be mapped: the tensors start at byte 4096, and a sealed page never
 * changes. */
static struct file map(const char *path) {
    struct stat status;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        perror(path);
        exit(1);
    }
    struct file file = {NULL, (size_t)status.st_size};
    file.data = mmap(NULL, file.bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (file.data == MAP_FAILED) {
        perror(path);
        exit(1);
    }
    close(descriptor);
    return file;
}

static void check(kvfs_status status) {
    if (status != KVFS_STATUS_OK) {
        fprintf(stderr, "%s\n", kvfs_last_error());
        exit(1);
    }
}

static float *floats(size_t count) {
    float *values = calloc(count, sizeof *values);
    if (!values)
        abort();
    return values;
}

int main(int argc, char **argv) {
    if (argc != 5 || kvfs_abi_version() != KVFS_ABI_VERSION) {
        fprintf(stderr, "usage: attend_page MANIFEST PAGE LAYER FIRST_TOKEN\n");
        return 2;
    }
    struct file json = map(argv[1]), page = map(argv[2]);
    uint32_t layer_index = (uint32_t)strtoul(argv[3], NULL, 10);
    uint64_t start = strtoull(argv[4], NULL, 10);

    /* The manifest tells the shape of K and V, and what the layer looks at. */
    kvfs_manifest *manifest = NULL;
    check(kvfs_manifest_create(json.data, json.bytes, &manifest));
    kvfs_geometry geometry = {.size = sizeof geometry};
    check(kvfs_manifest_geometry(manifest, &geometry));
    kvfs_layer layer = {.size = sizeof layer};
    check(kvfs_manifest_layer(manifest, layer_index, &layer));

    /* The model tells the query heads; here there are two for each KV head. */
    kvfs_attention_config config = {
        .size = sizeof config,
        .num_qo_heads = 2 * geometry.num_kv_heads,
        .num_kv_heads = geometry.num_kv_heads,
        .head_dim = geometry.head_dim,
        .v_head_dim = geometry.v_head_dim,
    };
    kvfs_attention *attention = NULL;
    check(kvfs_attention_create(&config, &attention));

    /* K and V of the page, in place. A whole sequence is an array of such blocks. */
    kvfs_block block = {.size = sizeof block};
    check(kvfs_page_block(manifest, layer_index, start, page.data, page.bytes, &block));

    /* One query, standing at the last token of the page. */
    size_t num_q = (size_t)config.num_qo_heads * config.head_dim;
    float *q = floats(num_q);
    for (size_t i = 0; i < num_q; i++)
        q[i] = (float)(i % 7) / 4 - 0.75f;
    uint64_t position = start + block.tokens - 1;
    kvfs_queries queries = {
        .size = sizeof queries,
        .q = q,
        .positions = &position,
        .num_queries = 1,
        .num_qo_heads = config.num_qo_heads,
        .head_dim = config.head_dim,
    };

    uint32_t v_head_dim = geometry.v_head_dim ? geometry.v_head_dim : geometry.head_dim;
    size_t num_out = (size_t)config.num_qo_heads * v_head_dim;
    kvfs_partials partials = {
        .size = sizeof partials,
        .o = floats(num_out),
        .m = floats(config.num_qo_heads),
        .l = floats(config.num_qo_heads),
        .num_queries = 1,
        .num_qo_heads = config.num_qo_heads,
        .v_head_dim = v_head_dim,
    };
    kvfs_options options = {.size = sizeof options, .window = layer.window};
    check(kvfs_attention_run(attention, &queries, &block, 1, &options, &partials));

    /* Partials of other pages, threads or devices would be merged here. */
    float *out = partials.o;
    check(kvfs_partials_finish(&partials, NULL, 0, out, num_out));
    for (size_t i = 0; i < num_out; i++)
        printf("%.9g\n", (double)out[i]);

    kvfs_attention_free(attention);
    kvfs_manifest_free(manifest);
    return 0;
}
