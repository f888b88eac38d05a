/* Every wrong call has its status and a text that names what is wrong. Prints nothing if so. */
#define _POSIX_C_SOURCE 200809L
#include <kvfs.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

static void expect(int line, kvfs_status status, kvfs_status expected, const char *text) {
    if (status == expected && (!text || strstr(kvfs_last_error(), text)))
        return;
    printf("line %d: status %u (%s), expected %u (%s)\n", line, (unsigned)status, kvfs_last_error(),
           (unsigned)expected, text ? text : "");
    failures++;
}

static void expect_true(int line, int found, const char *condition) {
    if (found)
        return;
    printf("line %d: not so: %s\n", line, condition);
    failures++;
}

#define OK(call) expect(__LINE__, call, KVFS_STATUS_OK, NULL)
#define OK_AND(call, text) expect(__LINE__, call, KVFS_STATUS_OK, text)
#define ARGUMENT(call, text) expect(__LINE__, call, KVFS_STATUS_ARGUMENT, text)
#define BLOCK(call, text) expect(__LINE__, call, KVFS_STATUS_BLOCK, text)
#define UNSUPPORTED(call, text) expect(__LINE__, call, KVFS_STATUS_UNSUPPORTED, text)
#define PAGE(call, text) expect(__LINE__, call, KVFS_STATUS_PAGE, text)
#define TRUE(condition) expect_true(__LINE__, condition, #condition)

/* 2 query heads on 1 KV head of 32, 4 tokens in f32. */
enum { HEADS = 2, DIM = 32, TOKENS = 4 };
static float rows[TOKENS * DIM], q[HEADS * DIM], o[HEADS * DIM], m[HEADS], l[HEADS], mass[TOKENS];
static const uint64_t position = TOKENS - 1;

static kvfs_attention_config attention_config(void) {
    return (kvfs_attention_config){.size = sizeof(kvfs_attention_config), .num_qo_heads = HEADS,
                                   .num_kv_heads = 1, .head_dim = DIM, .threads = 2};
}

static kvfs_queries queries(void) {
    return (kvfs_queries){sizeof(kvfs_queries), q, &position, 1, HEADS, DIM};
}

static kvfs_block block(void) {
    kvfs_tensor tensor = {rows, sizeof rows, sizeof rows, DIM * sizeof(float)};
    return (kvfs_block){.size = sizeof(kvfs_block), .dtype = KVFS_DTYPE_F32, .tokens = TOKENS,
                        .k = tensor, .v = tensor};
}

static kvfs_partials partials(void) {
    return (kvfs_partials){.size = sizeof(kvfs_partials), .o = o, .m = m, .l = l, .num_queries = 1,
                           .num_qo_heads = HEADS, .v_head_dim = DIM};
}

static kvfs_options options(void) {
    return (kvfs_options){.size = sizeof(kvfs_options)};
}

static kvfs_attention *attention;

static kvfs_status run_queries(kvfs_queries changed) {
    kvfs_block b = block();
    kvfs_partials p = partials();
    return kvfs_attention_run(attention, &changed, &b, 1, NULL, &p);
}

static kvfs_status run_block(kvfs_block changed) {
    kvfs_queries qs = queries();
    kvfs_block both[2] = {block(), changed};
    kvfs_partials p = partials();
    return kvfs_attention_run(attention, &qs, both, 2, NULL, &p);
}

static kvfs_status run_options(kvfs_options changed) {
    kvfs_queries qs = queries();
    kvfs_block b = block();
    kvfs_partials p = partials();
    return kvfs_attention_run(attention, &qs, &b, 1, &changed, &p);
}

static kvfs_status run_partials(kvfs_partials changed) {
    kvfs_queries qs = queries();
    kvfs_block b = block();
    return kvfs_attention_run(attention, &qs, &b, 1, NULL, &changed);
}

static kvfs_status run_attention_config(kvfs_attention_config changed) {
    kvfs_attention *other = (kvfs_attention *)&failures;
    kvfs_status status = kvfs_attention_create(&changed, &other);
    TRUE(other == NULL);
    return status;
}

/* Runs with one structure, c, that differs from the right one. */
#define WITH(kind, change, EXPECTED, text)                                                         \
    do {                                                                                           \
        kvfs_##kind c = kind();                                                                    \
        change;                                                                                    \
        EXPECTED(run_##kind(c), text);                                                             \
    } while (0)

static void creating(void) {
    kvfs_attention *other = (kvfs_attention *)&failures;
    ARGUMENT(kvfs_attention_create(NULL, &other), "kvfs_attention_config is NULL");
    TRUE(other == NULL);
    WITH(attention_config, c.size = 3, ARGUMENT,
         "kvfs_attention_config.size is 3: set it to sizeof(kvfs_attention_config), here 32");
    WITH(attention_config, c.size = 1u << 30, ARGUMENT, ".size is 1073741824");
    WITH(attention_config, c.num_qo_heads = 0, ARGUMENT, "num_qo_heads is 0");
    WITH(attention_config, c.head_dim = 5000, ARGUMENT, "head_dim is 5000");
    WITH(attention_config, c.threads = 257, ARGUMENT, "257 threads");
    WITH(attention_config, c.instructions = 77, ARGUMENT, "instructions 77");
    kvfs_attention_config c = attention_config();
    ARGUMENT(kvfs_attention_create(&c, NULL), "handle to be created is NULL");
    kvfs_attention_free(NULL);
}

/* Older programs have less, newer ones more. */
static void sizes(void) {
    struct {
        kvfs_attention_config config;
        uint64_t added;
    } newer = {attention_config(), 0};
    newer.config.size = sizeof newer;
    kvfs_attention *other = NULL;
    OK(kvfs_attention_create(&newer.config, &other));
    kvfs_attention_free(other);
    newer.added = 1;
    UNSUPPORTED(kvfs_attention_create(&newer.config, &other),
                "has 40 bytes, this version knows 32");
    TRUE(other == NULL);
    /* Without threads and instructions, which lie behind. */
    struct kvfs_attention_config older = attention_config();
    older.size = offsetof(kvfs_attention_config, threads);
    older.threads = older.instructions = 1000;
    OK(kvfs_attention_create(&older, &other));
    kvfs_attention_free(other);
    kvfs_options none = {.size = sizeof(size_t), .causality = 1000};
    OK(run_options(none));
    /* An array of larger structures. */
    struct {
        kvfs_block block;
        uint64_t added;
    } blocks[2] = {{block(), 0}, {block(), 0}};
    blocks[0].block.size = blocks[1].block.size = sizeof blocks[0];
    kvfs_queries qs = queries();
    kvfs_partials p = partials();
    OK(kvfs_attention_run(attention, &qs, &blocks[0].block, 2, NULL, &p));
    blocks[1].block.size = sizeof(kvfs_block);
    ARGUMENT(kvfs_attention_run(attention, &qs, &blocks[0].block, 2, NULL, &p),
             "kvfs_block 1 has size 104");
}

static void running(void) {
    kvfs_queries qs = queries();
    kvfs_block b = block();
    kvfs_partials p = partials();
    ARGUMENT(kvfs_attention_run(NULL, &qs, &b, 1, NULL, &p), "attention is NULL");
    ARGUMENT(kvfs_attention_run(attention, NULL, &b, 1, NULL, &p), "kvfs_queries is NULL");
    ARGUMENT(kvfs_attention_run(attention, &qs, NULL, 1, NULL, &p), "kvfs_block is NULL");
    ARGUMENT(kvfs_attention_run(attention, &qs, &b, 1, NULL, NULL), "kvfs_partials is NULL");
    ARGUMENT(kvfs_attention_run(attention, &qs, &b, SIZE_MAX / 8, NULL, &p), "kvfs_block");
    OK(kvfs_attention_run(attention, &qs, NULL, 0, NULL, &p));
    TRUE(l[0] == 0 && m[0] < -1e29f && o[0] == 0);

    WITH(queries, c.q = NULL, ARGUMENT, "q is NULL");
    WITH(queries, c.q = (const float *)((const char *)q + 1), ARGUMENT,
         "must be aligned to 4 bytes");
    WITH(queries, c.positions = NULL, ARGUMENT, "positions is NULL");
    WITH(queries, c.num_queries = UINT64_MAX, ARGUMENT, "larger than memory");
    WITH(queries, c.num_queries = 0, ARGUMENT, "partials are of 1 queries");
    WITH(queries, c.head_dim = 64, ARGUMENT,
         "queries have 2 heads of 64, the attention has 2 of 32");
    static const uint64_t beyond = UINT64_MAX;
    WITH(queries, c.positions = &beyond, ARGUMENT, "a query at position 18446744073709551615");

    WITH(partials, c.o = NULL, ARGUMENT, "partials.o is NULL");
    WITH(partials, c.v_head_dim = 64, ARGUMENT, "heads of 64, the result has 1, 2 and 32");
    WITH(partials, c.mass = mass, ARGUMENT, "0 values of mass for 4 tokens");
}

static void blocks(void) {
    WITH(block, c.dtype = 0, BLOCK, "block 1: dtype 0 is unknown");
    TRUE(kvfs_last_error_block() == 1);
    WITH(block, c.dtype = 99, BLOCK, "dtype 99 is unknown");
    WITH(block, c.values = 2, BLOCK, "values 2 are unknown");
    WITH(block, c.k.data = NULL, BLOCK, "block 1: k is NULL");
    WITH(block, c.k.bytes = SIZE_MAX, BLOCK, "larger than memory");
    WITH(block, c.v.bytes = 511, BLOCK, "v has 511 bytes, 1 heads and 4 tokens need 512");
    WITH(block, c.tokens = 5, BLOCK, "5 tokens need 640");
    WITH(block, c.tokens = UINT64_MAX, BLOCK, "18446744073709551615 tokens");
    WITH(block, c.k.token_stride = SIZE_MAX, BLOCK, "strides of k overflow");
    WITH(block, c.first_position = UINT64_MAX - 4, BLOCK, "tokens from position");
    WITH(block, c.shift = 7, BLOCK, "shifted by 7, without a rotation");
    WITH(block, c.shift = INT64_MIN, BLOCK, "a shift of");
    TRUE(kvfs_last_error_block() == 1);
    ARGUMENT(kvfs_attention_run(NULL, NULL, NULL, 0, NULL, NULL), "attention is NULL");
    TRUE(kvfs_last_error_block() == SIZE_MAX);
}

/* NaN and infinities are data, and blocks without tokens are blocks. */
static void unusual_values(void) {
    static const float unusual[] = {0.0f / 0.0f, 1.0f / 0.0f, -1.0f / 0.0f};
    for (int i = 0; i < 3; i++) {
        rows[DIM + 5] = unusual[i];
        OK(run_options(options()));
        TRUE(o[5] != o[5] || o[5] - o[5] != 0);
        rows[DIM + 5] = 0;
    }
    OK(run_options(options()));
    TRUE(o[5] == 0);
    WITH(block, c.tokens = 0, OK_AND, "");
    TRUE(l[0] == TOKENS);
    WITH(block, c.tokens = 0; c.k.bytes = c.v.bytes = 0; c.k.data = c.v.data = NULL, OK_AND, "");
    TRUE(l[0] == TOKENS);
}

static void wrong_options(void) {
    static const float slopes[1] = {1};
    WITH(options, c.causality = 9, ARGUMENT, "causality 9");
    WITH(options, c.soft_cap = -1, ARGUMENT, "soft cap -1");
    WITH(options, c.alibi_slopes = slopes, ARGUMENT, "0 ALiBi slopes for 2 query heads");
    WITH(options, c.mask = mass, ARGUMENT, "mask_dtype 0 is neither f32 nor f16");
    WITH(options, c.mask = mass; c.mask_dtype = KVFS_DTYPE_F32, ARGUMENT,
         "mask has 0 values for 1 queries and 4 tokens");
    const char *misaligned = (const char *)mass + 1;
    WITH(options, c.mask = misaligned; c.mask_dtype = KVFS_DTYPE_F16; c.mask_count = 4, ARGUMENT,
         "aligned to 2 bytes");
    kvfs_token_range beyond = {3, 5}, backwards = {3, 2};
    WITH(options, c.selection = &beyond; c.selection_count = 1, ARGUMENT,
         "selection of tokens 3 to 5, the blocks have 4");
    WITH(options, c.selection = &backwards; c.selection_count = 1, ARGUMENT, "tokens 3 to 2");
    kvfs_options nothing = {.size = sizeof nothing, .selection = &beyond};
    OK(run_options(nothing));
    TRUE(l[0] == 0);

    kvfs_rotation *rotation = NULL;
    ARGUMENT(kvfs_rotation_from_json("{", 1, DIM, 0, 0, &rotation), "rope: EOF");
    ARGUMENT(kvfs_rotation_from_json("{\"theta\":0}", 11, DIM, 0, 0, &rotation), "theta 0");
    ARGUMENT(kvfs_rotation_from_json("{\"theta\":9}", 11, DIM, 2, 0, &rotation), "pairing 2");
    ARGUMENT(kvfs_rotation_from_json("{\"theta\":9}", 11, DIM, 0, 99, &rotation),
         "from element 99");
    static const char dynamic[] = "{\"theta\":9,\"scaling\":{\"type\":\"dynamic\"}}";
    UNSUPPORTED(kvfs_rotation_from_json(dynamic, sizeof dynamic - 1, DIM, 0, 0, &rotation),
                "rope scaling");
    TRUE(rotation == NULL);
    OK(kvfs_rotation_from_json("{\"theta\":9}", 11, DIM, 0, 8, &rotation));
    WITH(options, c.rotation = rotation, ARGUMENT, "rotation of 40 elements for a head_dim of 32");
    kvfs_rotation_free(rotation);
    kvfs_rotation_free(NULL);
}

static void merging(void) {
    float values[2 * HEADS * DIM];
    kvfs_partials p = partials(), other = partials();
    OK(kvfs_partials_clear(&p));
    other.num_qo_heads = 1;
    ARGUMENT(kvfs_partials_merge(&p, &other), "do not merge");
    other = partials();
    other.num_queries = UINT64_MAX / 2;
    ARGUMENT(kvfs_partials_merge(&p, &other), "larger than memory");
    ARGUMENT(kvfs_partials_clear(&other), "larger than memory");
    other.num_queries = 1;
    other.v_head_dim = 0;
    ARGUMENT(kvfs_partials_clear(&other), "head_dim is 0");
    ARGUMENT(kvfs_partials_merge(&p, NULL), "kvfs_partials is NULL");
    ARGUMENT(kvfs_partials_finish(&p, NULL, 0, values, 2), "out has 2 values, the result 64");
    ARGUMENT(kvfs_partials_finish(&p, NULL, 0, NULL, HEADS * DIM), "out is NULL");
    ARGUMENT(kvfs_partials_finish(&p, values, 1, values, HEADS * DIM), "1 sinks for 2 query heads");
    OK(kvfs_partials_merge(&p, &p));
    OK(kvfs_partials_finish(&p, NULL, 0, p.o, HEADS * DIM));
}

static void files(void) {
    static const char json[] =
        "{\"schema_version\":1,\"model_id\":\"m\",\"dtype\":\"f16\",\"num_layers\":2,"
        "\"num_kv_heads\":1,\"head_dim\":32,\"page_tokens\":16,"
        "\"layers\":[{\"sliding\":{\"window\":5}},\"recurrent\"]}";
    static const char newer[] = "{\"schema_version\":2}";
    static char file[8192];
    kvfs_manifest *manifest = NULL;
    expect(__LINE__, kvfs_manifest_create("{}", 2, &manifest), KVFS_STATUS_MANIFEST,
         "schema_version");
    expect(__LINE__, kvfs_manifest_create(newer, sizeof newer - 1, &manifest), KVFS_STATUS_NEWER,
         "upgrade");
    ARGUMENT(kvfs_manifest_create(NULL, 9, &manifest), "json is NULL");
    OK(kvfs_manifest_create(json, sizeof json - 1, &manifest));

    kvfs_geometry geometry = {.size = 1};
    ARGUMENT(kvfs_manifest_geometry(manifest, &geometry), "kvfs_geometry.size is 1");
    geometry.size = offsetof(kvfs_geometry, num_layers);
    geometry.num_layers = 1234;
    OK(kvfs_manifest_geometry(manifest, &geometry));
    TRUE(geometry.dtype == KVFS_DTYPE_F16 && geometry.num_layers == 1234);
    kvfs_layer layer = {.size = sizeof layer};
    OK(kvfs_manifest_layer(manifest, 0, &layer));
    TRUE(layer.kind == KVFS_LAYER_KIND_SLIDING && layer.window == 5);
    ARGUMENT(kvfs_manifest_layer(manifest, 2, &layer), "layer 2 of 2");
    kvfs_rotation *rotation = NULL;
    ARGUMENT(kvfs_rotation_from_manifest(manifest, 0, 0, &rotation), "no rope");

    kvfs_block b = {.size = sizeof b};
    PAGE(kvfs_page_block(manifest, 0, 0, file, sizeof file, &b), "");
    PAGE(kvfs_page_block(manifest, 0, 0, file, 3, &b), "");
    PAGE(kvfs_page_verify(manifest, 0, 0, file, sizeof file), "");
    ARGUMENT(kvfs_page_block(manifest, 1, 0, file, sizeof file, &b), "layer 1 is recurrent");
    ARGUMENT(kvfs_page_block(manifest, 0, 5, file, sizeof file, &b), "no page starts at token 5");
    ARGUMENT(kvfs_page_block(manifest, 0, 0, NULL, sizeof file, &b), "file is NULL");
    ARGUMENT(kvfs_page_block(NULL, 0, 0, file, sizeof file, &b), "manifest is NULL");
    OK(kvfs_tail_block(manifest, 3, file, 3 * 128 + 5, &b));
    TRUE(b.tokens == 3 && b.first_position == 3 && (const char *)b.v.data == file + 64);
    OK(kvfs_tail_block(manifest, 0, NULL, 0, &b));
    TRUE(b.tokens == 0);
    kvfs_manifest_free(manifest);
    kvfs_manifest_free(NULL);
}

/* A child process has no threads of its parent: refused, where it would wait for ever. */
static void forking(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        ARGUMENT(run_options(options()), "threads do not survive a fork");
        kvfs_attention_free(attention);
        kvfs_attention_config c = attention_config();
        OK(kvfs_attention_create(&c, &attention));
        OK(run_options(options()));
        kvfs_attention_free(attention);
        fflush(stdout);
        _exit(failures);
    }
    int status = 0;
    TRUE(waitpid(child, &status, 0) == child && status == 0);
    OK(run_options(options()));
}

int main(void) {
    kvfs_attention_config c = attention_config();
    TRUE(strcmp(kvfs_last_error(), "") == 0 && kvfs_last_error_block() == SIZE_MAX);
    TRUE(kvfs_version()[0] != '\0');
    OK(kvfs_attention_create(&c, &attention));
    OK(run_options(options()));
    creating();
    sizes();
    running();
    blocks();
    unusual_values();
    wrong_options();
    merging();
    files();
    forking();
    kvfs_attention_free(attention);
    return failures != 0;
}
