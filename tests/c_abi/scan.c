/* Attends to a sequence on a GPU, layer by layer, in the order of a stream of its own: nothing waits
 * between layers or between decode steps.
 *
 *     scan SEQUENCE QUERIES RESULTS
 *
 * QUERIES are f32, [STEPS, LAYERS, HEADS, DIM], and RESULTS become the same. All layers are read. */
#define _POSIX_C_SOURCE 200809L
#include "device.h"

enum { STEPS = 4, LAYERS = 3, HEADS = 6, DIM = 64, VALUES = HEADS * DIM };

static kvfs_cuda *cuda;
static kvfs_sequence *sequence;

/* What cannot be while a scan is under way. */
static void refused(uint64_t tokens, const kvfs_cuda_call *call, kvfs_cuda_scan *scan) {
    kvfs_cuda_scan *other;
    need(kvfs_cuda_scan_begin(cuda, sequence, 0, tokens, &other) == KVFS_STATUS_ARGUMENT && !other,
         "two scans");
    need(kvfs_cuda_run(cuda, call, NULL, 0, NULL) == KVFS_STATUS_ARGUMENT, "a run in a scan");
    need(strstr(kvfs_last_error(), "a scan has the kvfs_cuda") != NULL, "the reason");
    need(kvfs_sequence_refresh(sequence) == KVFS_STATUS_ARGUMENT, "a refresh in a scan");
    kvfs_token_range far = {0, tokens + 1};
    kvfs_options options = {.size = sizeof options, .selection = &far, .selection_count = 1};
    need(kvfs_cuda_scan_attend(scan, call, &options) == KVFS_STATUS_ARGUMENT, "a selection");
    setenv("KVFS_FAKE_CAPTURE", "1", 1);
    need(kvfs_cuda_scan_attend(scan, call, NULL) == KVFS_STATUS_UNSUPPORTED, "a capture");
    unsetenv("KVFS_FAKE_CAPTURE");
}

int main(int argc, char **argv) {
    void *context, *stream = open_stream(&context), *current = NULL;
    char elsewhere;
    kvfs_cuda_config config = {.size = sizeof config, .num_qo_heads = HEADS, .num_kv_heads = 2,
                               .head_dim = DIM, .slot_bytes = 36 << 10, .hot_bytes = 200 << 10};
    kvfs_cuda_scan *scan;
    uint64_t tokens = 0;
    uint32_t layer = 0;
    need(argc == 4 && stream != NULL, "arguments and a driver");
    need(kvfs_cuda_create(&config, &cuda) == KVFS_STATUS_OK, "create");
    need(kvfs_sequence_open("/nowhere", &sequence) == KVFS_STATUS_MANIFEST && !sequence, "none");
    need(kvfs_sequence_open(argv[1], &sequence) == KVFS_STATUS_OK, "open");
    need(kvfs_sequence_tokens(sequence, &tokens) == KVFS_STATUS_OK && tokens > 0, "tokens");
    need(kvfs_cuda_scan_begin(cuda, sequence, 0, tokens + 32, &scan) == KVFS_STATUS_MISSING && !scan,
         "tokens that no page can hold");

    float *q = pinned(STEPS * LAYERS * VALUES), *results = pinned(STEPS * LAYERS * VALUES);
    FILE *file = fopen(argv[2], "rb");
    need(file && fread(q, sizeof *q * VALUES, STEPS * LAYERS, file) == STEPS * LAYERS, "queries");
    fclose(file);
    const size_t bytes = VALUES * sizeof *q;
    const uint64_t position = tokens - 1;
    kvfs_cuda_call call = {.size = sizeof call, .stream = stream, .q = device(bytes),
                           .positions = &position, .num_queries = 1, .out = device(bytes)};
    for (int step = 0; step < STEPS; step++) {
        /* In a thread that computes on another device besides. */
        need(make_current(&elsewhere) == 0, "another context");
        need(kvfs_cuda_scan_begin(cuda, sequence, 0, tokens, &scan) == KVFS_STATUS_OK, "begin");
        need(get_current(&current) == 0 && current == &elsewhere, "the current context");
        if (step == 0) refused(tokens, &call, scan);
        for (uint32_t i = 0; i < LAYERS; i++) {
            const size_t at = (step * LAYERS + i) * VALUES;
            need(kvfs_cuda_scan_layer(scan, &layer) == KVFS_STATUS_OK && layer == i, "the layer");
            need(make_current(context) == 0 && upload(call.q, q + at, bytes, stream) == 0, "q");
            need(make_current(&elsewhere) == 0, "another context");
            need(kvfs_cuda_scan_attend(scan, &call, NULL) == KVFS_STATUS_OK, "attend");
            need(get_current(&current) == 0 && current == &elsewhere, "the current context");
            need(make_current(context) == 0, "the context");
            need(download(results + at, call.out, bytes, stream) == 0, "a result");
        }
        need(kvfs_cuda_scan_layer(scan, &layer) == KVFS_STATUS_MISSING, "the layer after the last");
        need(kvfs_cuda_scan_attend(scan, &call, NULL) == KVFS_STATUS_MISSING, "one layer more");
        kvfs_cuda_scan_free(scan);
        need(kvfs_sequence_refresh(sequence) == KVFS_STATUS_OK, "refresh");
    }
    need(wait_for_stream(stream) == 0, "the stream");
    /* A scan needs neither handle. */
    need(kvfs_cuda_scan_begin(cuda, sequence, 0, tokens, &scan) == KVFS_STATUS_OK, "the last scan");
    kvfs_cuda_free(cuda), kvfs_sequence_free(sequence);
    need(kvfs_cuda_scan_attend(scan, &call, NULL) == KVFS_STATUS_OK, "without handles");
    kvfs_cuda_scan_free(scan);
    kvfs_cuda_scan_free(NULL), kvfs_sequence_free(NULL);

    file = fopen(argv[3], "wb");
    need(file && fwrite(results, bytes, STEPS * LAYERS, file) == STEPS * LAYERS, "results");
    return fclose(file);
}
