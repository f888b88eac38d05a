/* A page that is mapped while its file is replaced, removed, or its mount goes away.
 *
 *     held MANIFEST LAYER FIRST_TOKEN PAGE
 *
 * Maps and verifies PAGE, and then once for each line of the standard input prints a line: the status
 * and the first value of attending to the mapping, and what opening and verifying the file by its
 * name gives now. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <kvfs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static kvfs_manifest *manifest;
static uint32_t layer;
static uint64_t start;

/* 0, or why not. */
static int map(const char *path, const void **data, size_t *bytes) {
    struct stat status;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return errno;
    int failed = fstat(descriptor, &status) != 0 ? errno : 0;
    if (!failed) {
        *bytes = (size_t)status.st_size;
        *data = mmap(NULL, *bytes, PROT_READ, MAP_SHARED, descriptor, 0);
        failed = *data == MAP_FAILED ? errno : 0;
    }
    close(descriptor);
    return failed;
}

/* Statuses and the first value of the result. */
static void attend(const void *data, size_t bytes) {
    enum { HEADS_MAX = 64, VALUES_MAX = 1 << 14 };
    static float q[VALUES_MAX], o[VALUES_MAX], m[HEADS_MAX], l[HEADS_MAX];
    kvfs_geometry g = {.size = sizeof g};
    kvfs_block block = {.size = sizeof block};
    kvfs_status status = kvfs_manifest_geometry(manifest, &g);
    if (!status)
        status = kvfs_page_block(manifest, layer, start, data, bytes, &block);
    kvfs_attention_config config = {.size = sizeof config, .num_qo_heads = g.num_kv_heads,
                                    .num_kv_heads = g.num_kv_heads, .head_dim = g.head_dim};
    kvfs_attention *attention = NULL;
    if (!status)
        status = kvfs_attention_create(&config, &attention);
    uint64_t position = start + block.tokens;
    kvfs_queries queries = {sizeof queries, q, &position, 1, g.num_kv_heads, g.head_dim};
    kvfs_partials partials = {.size = sizeof partials, .o = o, .m = m, .l = l, .num_queries = 1,
                              .num_qo_heads = g.num_kv_heads, .v_head_dim = g.head_dim};
    if (!status)
        status = kvfs_attention_run(attention, &queries, &block, 1, NULL, &partials);
    if (!status)
        status = kvfs_partials_finish(&partials, NULL, 0, o, g.num_kv_heads * g.head_dim);
    kvfs_attention_free(attention);
    printf("%u %u ", (unsigned)kvfs_page_verify(manifest, layer, start, data, bytes),
           (unsigned)status);
    /* The sign of what is no number differs between processors. */
    if (o[0] != o[0])
        printf("nan");
    else
        printf("%.6g", (double)o[0]);
}

int main(int argc, char **argv) {
    const void *json, *page, *again;
    size_t json_bytes, page_bytes, bytes;
    if (argc != 5 || map(argv[1], &json, &json_bytes) || map(argv[4], &page, &page_bytes) ||
        kvfs_manifest_create(json, json_bytes, &manifest))
        return 2;
    layer = (uint32_t)strtoul(argv[2], NULL, 10);
    start = strtoull(argv[3], NULL, 10);
    for (char line[16]; fgets(line, sizeof line, stdin); fflush(stdout)) {
        attend(page, page_bytes);
        int failed = map(argv[4], &again, &bytes);
        if (failed) {
            printf(" %s\n", strerror(failed));
            continue;
        }
        printf(" ");
        attend(again, bytes);
        printf("\n");
        munmap((void *)(size_t)again, bytes);
    }
    kvfs_manifest_free(manifest);
    return 0;
}
