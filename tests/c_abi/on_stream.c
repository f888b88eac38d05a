/* Attends on a GPU in the order of a stream of its own, with queries and results in device memory, and
 * compares with the CPU. */
#define _POSIX_C_SOURCE 200809L
#include "device.h"

#include <math.h>

enum { HEADS = 6, KV_HEADS = 2, DIM = 64, TOKENS = 300, PAGES = 3, ROUNDS = 4 };

static float uniform(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (float)(state >> 40) / (1 << 23) - 1;
}

static void compare(const char *what, const float *found, const float *expected, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!(fabsf(found[i] - expected[i]) <= 3e-6f * (1 + fabsf(expected[i])))) {
            fprintf(stderr, "%s: off by much: %zu is %g, not %g\n", what, i, found[i], expected[i]);
            exit(1);
        }
}

int main(void) {
    void *context, *stream = open_stream(&context);
    kvfs_cuda_config config = {.size = sizeof config, .num_qo_heads = HEADS,
                               .num_kv_heads = KV_HEADS, .head_dim = DIM, .slot_bytes = 64 << 10};
    kvfs_cuda *cuda = NULL;
    kvfs_status created = kvfs_cuda_create(&config, &cuda);
    if (stream == NULL) {
        need(created == KVFS_STATUS_UNSUPPORTED && cuda == NULL, "without a driver");
        printf("%s\n", kvfs_last_error());
        return 0;
    }
    need(created == KVFS_STATUS_OK, "create");

    static float k[PAGES][KV_HEADS][TOKENS / PAGES][DIM], v[PAGES][KV_HEADS][TOKENS / PAGES][DIM];
    kvfs_block blocks[PAGES];
    memset(blocks, 0, sizeof blocks);
    for (size_t i = 0; i < sizeof k / sizeof(float); i++)
        ((float *)k)[i] = uniform(), ((float *)v)[i] = uniform();
    for (uint64_t page = 0; page < PAGES; page++) {
        size_t row = DIM * sizeof(float), head = TOKENS / PAGES * row;
        blocks[page].size = sizeof *blocks, blocks[page].dtype = KVFS_DTYPE_F32;
        blocks[page].tokens = TOKENS / PAGES, blocks[page].first_position = page * TOKENS / PAGES;
        blocks[page].k = (kvfs_tensor){k[page], sizeof k[page], head, row};
        blocks[page].v = (kvfs_tensor){v[page], sizeof v[page], head, row};
    }
    const size_t rows = HEADS, values = HEADS * DIM;
    float *q = pinned(values), *sinks = pinned(HEADS), *got = pinned(2 * values + 2 * rows);
    const uint64_t position = TOKENS - 1;
    device_address q_there = device(values * 4), sinks_there = device(rows * 4);
    device_address out_there = device(values * 4), o = device(values * 4);
    device_address m = device(rows * 4), l = device(rows * 4);
    kvfs_cuda_call call = {.size = sizeof call, .stream = stream, .q = q_there,
                           .positions = &position, .num_queries = 1};
    kvfs_attention_config on_cpu = {.size = sizeof on_cpu, .num_qo_heads = HEADS,
                                    .num_kv_heads = KV_HEADS, .head_dim = DIM, .threads = 1};
    kvfs_attention *attention;
    need(kvfs_attention_create(&on_cpu, &attention) == KVFS_STATUS_OK, "on the CPU");
    for (int round = 0; round < ROUNDS; round++) {
        kvfs_options options = {.size = sizeof options, .window = round % 2 ? 120 : 0};
        for (size_t i = 0; i < values; i++) q[i] = 2 * uniform();
        for (size_t i = 0; i < rows; i++) sinks[i] = uniform();
        /* Nothing waits between these: the stream keeps the order. */
        need(upload(q_there, q, values * 4, stream) == 0, "q");
        need(upload(sinks_there, sinks, rows * 4, stream) == 0, "sinks");
        call.out = out_there, call.sinks = sinks_there;
        need(kvfs_cuda_run(cuda, &call, blocks, PAGES, &options) == KVFS_STATUS_OK, "out");
        need(download(got, out_there, values * 4, stream) == 0, "out");
        call.out = 0, call.o = o, call.m = m, call.l = l;
        need(kvfs_cuda_run(cuda, &call, blocks, PAGES, &options) == KVFS_STATUS_OK, "partials");
        need(download(got + values, o, values * 4, stream) == 0, "o");
        need(download(got + 2 * values, m, rows * 4, stream) == 0, "m");
        need(download(got + 2 * values + rows, l, rows * 4, stream) == 0, "l");
        need(wait_for_stream(stream) == 0, "the stream");

        float expected_o[HEADS * DIM], expected_m[HEADS], expected_l[HEADS], out[HEADS * DIM];
        kvfs_partials expected = {.size = sizeof expected, .o = expected_o, .m = expected_m,
                                  .l = expected_l, .num_queries = 1, .num_qo_heads = HEADS,
                                  .v_head_dim = DIM};
        kvfs_queries queries = {.size = sizeof queries, .q = q, .positions = &position,
                                .num_queries = 1, .num_qo_heads = HEADS, .head_dim = DIM};
        need(kvfs_attention_run(attention, &queries, blocks, PAGES, &options, &expected) ==
                 KVFS_STATUS_OK, "run on the CPU");
        need(kvfs_partials_finish(&expected, sinks, HEADS, out, values) == KVFS_STATUS_OK,
             "finish");
        compare("out", got, out, values);
        kvfs_partials found = {.size = sizeof found, .o = got + values, .m = got + 2 * values,
                               .l = got + 2 * values + rows, .num_queries = 1,
                               .num_qo_heads = HEADS, .v_head_dim = DIM};
        float finished[HEADS * DIM];
        need(kvfs_partials_finish(&found, sinks, HEADS, finished, values) == KVFS_STATUS_OK,
             "finish what came back");
        compare("partials", finished, out, values);
    }
    /* The page whose K are the queries' own counts most, wherever it lies; its summary may come later. */
    kvfs_cuda_summaries *summaries;
    kvfs_token_range ranges[PAGES];
    uint64_t count = 0;
    for (size_t kv_head = 0; kv_head < KV_HEADS; kv_head++)
        for (size_t i = 0; i < DIM; i++)
            k[1][kv_head][7][i] = 9 * q[kv_head * HEADS / KV_HEADS * DIM + i];
    kvfs_page_budget budget = {.size = sizeof budget, .pages = 1};
    kvfs_queries asked = {.size = sizeof asked, .q = q, .positions = &position, .num_queries = 1,
                          .num_qo_heads = HEADS, .head_dim = DIM};
    kvfs_page_selection among = {.size = sizeof among, .budget = &budget, .queries = &asked,
                                 .blocks = blocks, .num_blocks = PAGES};
    need(kvfs_cuda_summaries_create(cuda, &summaries) == KVFS_STATUS_OK, "summaries");
    need(kvfs_cuda_summarise(cuda, summaries, blocks, 1, 1) == KVFS_STATUS_ARGUMENT, "unknown ones");
    need(kvfs_cuda_summarise(cuda, summaries, blocks, 1, 0) == KVFS_STATUS_OK, "the first page");
    need(kvfs_cuda_select_pages(cuda, summaries, &among, ranges, PAGES, &count) ==
             KVFS_STATUS_ARGUMENT, "pages without summaries");
    need(kvfs_cuda_summarise(cuda, summaries, blocks, PAGES, 1) == KVFS_STATUS_OK, "the others");
    need(kvfs_cuda_select_pages(cuda, summaries, &among, ranges, PAGES, &count) == KVFS_STATUS_OK,
         "select");
    need(count == 1 && ranges[0].first == 100 && ranges[0].end == 200, "the middle page");
    budget.pages = 2, budget.recent = 1;
    need(kvfs_cuda_select_pages(cuda, summaries, &among, ranges, PAGES, &count) == KVFS_STATUS_OK,
         "select two");
    need(count == 1 && ranges[0].first == 100 && ranges[0].end == 300, "the last two pages");
    kvfs_cuda_summaries_free(summaries), kvfs_cuda_summaries_free(NULL);
    /* A context of another device is current: it stays so. */
    char elsewhere;
    void *current = NULL;
    need(make_current(&elsewhere) == 0, "another context");
    need(kvfs_cuda_run(cuda, &call, blocks, PAGES, NULL) == KVFS_STATUS_OK, "from elsewhere");
    need(get_current(&current) == 0 && current == &elsewhere, "the current context");
    need(make_current(context) == 0 && wait_for_stream(stream) == 0, "back");
    /* What cannot be. */
    setenv("KVFS_FAKE_CAPTURE", "1", 1);
    need(kvfs_cuda_run(cuda, &call, blocks, PAGES, NULL) == KVFS_STATUS_UNSUPPORTED, "a capture");
    need(strstr(kvfs_last_error(), "captured into a graph") != NULL, "the reason");
    unsetenv("KVFS_FAKE_CAPTURE");
    need(kvfs_cuda_run(cuda, &call, blocks, PAGES, NULL) == KVFS_STATUS_OK, "after a capture");
    call.o = 0;
    need(kvfs_cuda_run(cuda, &call, blocks, PAGES, NULL) == KVFS_STATUS_ARGUMENT, "no result");
    call.size = 8;
    need(kvfs_cuda_run(cuda, &call, blocks, PAGES, NULL) == KVFS_STATUS_ARGUMENT, "a size");
    kvfs_cuda *other;
    config.device = 1;
    need(kvfs_cuda_create(&config, &other) == KVFS_STATUS_UNSUPPORTED && !other, "a second GPU");
    need(strstr(kvfs_last_error(), "no GPU with number 1") != NULL, "the number");
    config.device = 0, config.head_dim = 576;
    need(kvfs_cuda_create(&config, &other) == KVFS_STATUS_UNSUPPORTED && !other, "wide rows");
    kvfs_attention_free(attention);
    kvfs_cuda_free(cuda);
    kvfs_cuda_free(NULL);
    printf("the GPU gives what the CPU gives\n");
    return 0;
}
