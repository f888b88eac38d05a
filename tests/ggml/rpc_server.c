/* Offers the processor as a device to engines that connect.
 *
 *   rpc_server BACKENDS RPC_LIBRARY ADDRESS */
#include <stdio.h>

#include "ggml-backend.h"

int main(int count, char **words) {
    if (count != 4) return 2;
    ggml_backend_load_all_from_path(words[1]);
    ggml_backend_reg_t library = ggml_backend_load(words[2]);
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!library || !device) return 1;
    void (*serve)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *) =
        (void (*)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *))
            ggml_backend_reg_get_proc_address(library, "ggml_backend_rpc_start_server");
    if (!serve) return 1;
    serve(words[3], NULL, 1, 1, &device);
    return 0;
}
