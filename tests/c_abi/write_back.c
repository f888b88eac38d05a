/* Gives rows that a stream "computes" in one buffer on a GPU to a sequence, and waits for nothing between
 * layers and steps.
 *
 *     write_back DIRECTORY MANIFEST
 *
 * Byte i of the rows of a step and layer is 7 step + 13 layer + 3 i. */
#include "device.h"

enum { LAYERS = 3, STEPS = 3, TOKENS = 20, ROW_BYTES = 512, BYTES = TOKENS * ROW_BYTES };

int main(int argc, char **argv) {
    void *context, *stream = open_stream(&context);
    kvfs_cuda_config config = {.size = sizeof config, .num_qo_heads = 2, .num_kv_heads = 2,
                               .head_dim = 64, .slot_bytes = 64 << 10};
    static char json[1 << 16];
    kvfs_cuda *cuda;
    kvfs_manifest *manifest;
    kvfs_write_back *rows, *none;
    need(argc == 3 && stream != NULL, "arguments and a driver");
    FILE *file = fopen(argv[2], "rb");
    need(file != NULL, "the manifest");
    size_t length = fread(json, 1, sizeof json, file);
    fclose(file);
    need(kvfs_manifest_create(json, length, &manifest) == KVFS_STATUS_OK, "the manifest");
    need(kvfs_cuda_create(&config, &cuda) == KVFS_STATUS_OK, "create");
    need(kvfs_write_back_create(cuda, argv[1], NULL, 0, &none) == KVFS_STATUS_ARGUMENT && !none,
         "no manifest");
    need(kvfs_write_back_create(cuda, argv[1], manifest, 0, &rows) == KVFS_STATUS_OK, "create");
    kvfs_manifest_free(manifest), kvfs_cuda_free(cuda);

    unsigned char *made = (unsigned char *)pinned(STEPS * LAYERS * BYTES / sizeof(float));
    device_address buffer = device(BYTES);
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t ids[TOKENS];
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            unsigned char *bytes = made + (step * LAYERS + layer) * BYTES;
            for (uint32_t i = 0; i < BYTES; i++)
                bytes[i] = (unsigned char)(7 * step + 13 * layer + 3 * i);
            need(kvfs_write_back_hold(rows, stream) == KVFS_STATUS_OK, "hold");
            need(upload(buffer, bytes, BYTES, stream) == 0, "rows");
            need(kvfs_write_back_rows(rows, layer, buffer, BYTES, stream) == KVFS_STATUS_OK,
                 "write back");
        }
        for (uint32_t i = 0; i < TOKENS; i++) ids[i] = step * TOKENS + i;
        need(kvfs_write_back_tokens(rows, ids, TOKENS) == KVFS_STATUS_OK, "tokens");
        if (step == 0) need(kvfs_write_back_flush(rows) == KVFS_STATUS_OK, "flush");
    }
    need(kvfs_write_back_sync(rows) == KVFS_STATUS_OK, "sync");
    need(kvfs_write_back_rows(rows, LAYERS, buffer, BYTES, stream) == KVFS_STATUS_FILE, "no layer");
    need(kvfs_write_back_rows(rows, 0, buffer, 511, stream) == KVFS_STATUS_FILE, "no rows");
    kvfs_write_back_free(rows), kvfs_write_back_free(NULL);
    return 0;
}
