// The header as C++ sees it.
#include <kvfs.h>
#include <cstring>

int main() {
    kvfs_options options = {};
    options.size = sizeof options;
    options.causality = KVFS_CAUSALITY_BIDIRECTIONAL;
    kvfs_attention_config config = {};
    kvfs_attention *attention = nullptr;
    const kvfs_status status = kvfs_attention_create(&config, &attention);
    const bool explained = std::strstr(kvfs_last_error(), "kvfs_attention_config.size is 0");
    return status == KVFS_STATUS_ARGUMENT && explained && !attention &&
                   kvfs_abi_version() == KVFS_ABI_VERSION
               ? 0
               : 1;
}
