/* Runs a model in unmodified llama.cpp and says what came out.
 *
 *   engine MODEL [OPTION VALUE]...
 *
 * Tokens of the prompt are the bytes of a file, each sequence starts 7 bytes later. What comes next is
 * the likeliest token, or those of a file (--follow). Writes a line for each token and figure, and the
 * logits of each step to a file. */
#define _POSIX_C_SOURCE 199309L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

static struct {
    const char *model, *backends, *prompt, *logits, *flash, *type, *save, *load, *follow, *rpc, *server;
    int prompt_tokens, predict, context, ubatch, threads, sequences, unified, layers, poll;
    int remove_from, remove_to, shift, copy, session, swa_full;
} options = {
    .flash = "off", .type = "f16", .prompt_tokens = 64, .predict = 16, .context = 512,
    .ubatch = 512, .threads = 2, .sequences = 1, .poll = -1, .swa_full = 1,
};

static void fail(const char *what) {
    fprintf(stderr, "engine: %s\n", what);
    exit(1);
}

static void parse(int count, char **words) {
    struct { const char *name; const char **text; int *number; } all[] = {
        {"--backends", &options.backends, NULL},     {"--prompt", &options.prompt, NULL},
        {"--logits", &options.logits, NULL},         {"--flash", &options.flash, NULL},
        {"--type", &options.type, NULL},             {"--prompt-tokens", NULL, &options.prompt_tokens},
        {"--predict", NULL, &options.predict},       {"--context", NULL, &options.context},
        {"--ubatch", NULL, &options.ubatch},         {"--threads", NULL, &options.threads},
        {"--sequences", NULL, &options.sequences},   {"--unified", NULL, &options.unified},
        {"--remove-from", NULL, &options.remove_from}, {"--remove-to", NULL, &options.remove_to},
        {"--shift", NULL, &options.shift},           {"--copy", NULL, &options.copy},
        {"--poll", NULL, &options.poll},             {"--save", &options.save, NULL},
        {"--load", &options.load, NULL},             {"--follow", &options.follow, NULL},
        {"--rpc", &options.rpc, NULL},               {"--server", &options.server, NULL},
        {"--session", NULL, &options.session},       {"--swa-full", NULL, &options.swa_full},
    };
    if (count < 2 || count % 2 != 0) fail("usage: engine MODEL [OPTION VALUE]...");
    options.model = words[1];
    for (int i = 2; i + 1 < count; i += 2) {
        size_t k = 0;
        while (k < sizeof all / sizeof *all && strcmp(all[k].name, words[i]) != 0) k++;
        if (k == sizeof all / sizeof *all) fail(words[i]);
        if (all[k].text) *all[k].text = words[i + 1];
        else *all[k].number = atoi(words[i + 1]);
    }
}

static enum ggml_type type_of(const char *name) {
    static const enum ggml_type types[] = {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(ggml_type_name(types[i]), name) == 0) return types[i];
    fail("unknown type");
    return GGML_TYPE_COUNT;
}

static struct llama_context *create(struct llama_model *model) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = options.context;
    params.n_batch = options.ubatch;
    params.n_ubatch = options.ubatch;
    params.n_seq_max = options.sequences;
    params.n_threads = params.n_threads_batch = options.threads;
    params.flash_attn_type = strcmp(options.flash, "on") == 0    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                             : strcmp(options.flash, "auto") == 0 ? LLAMA_FLASH_ATTN_TYPE_AUTO
                                                                  : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = type_of(options.type);
    params.type_v = params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED ? GGML_TYPE_F16 : params.type_k;
    params.kv_unified = options.unified != 0;
    params.swa_full = options.swa_full != 0;
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) fail("no context");
    return context;
}

/* As the programs of llama.cpp do it: threads that stay, and look for work for a while. */
static void attach_threads(struct llama_context *context) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    struct ggml_threadpool *(*create_pool)(struct ggml_threadpool_params *) =
        (struct ggml_threadpool *(*)(struct ggml_threadpool_params *))ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu), "ggml_threadpool_new");
    struct ggml_threadpool_params params = ggml_threadpool_params_default(options.threads);
    params.poll = options.poll;
    struct ggml_threadpool *pool = create_pool(&params);
    llama_attach_threadpool(context, pool, pool);
    /* Until its first graph a pool looks for work for a tenth of a second, on processors that others
     * want: a server has that behind it when the first request comes. */
    struct timespec idle = {.tv_nsec = 300 * 1000 * 1000};
    nanosleep(&idle, NULL);
}

static uint8_t *text;
static size_t text_length;

static void read_prompt(void) {
    FILE *file = fopen(options.prompt, "rb");
    if (!file) fail(options.prompt);
    fseek(file, 0, SEEK_END);
    text_length = ftell(file);
    rewind(file);
    text = malloc(text_length);
    if (fread(text, 1, text_length, file) != text_length) fail("short read");
    fclose(file);
}

static void add(struct llama_batch *batch, llama_token token, int position, int sequence, int logits) {
    int i = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = position;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = sequence;
    batch->logits[i] = logits;
}

static void decode(struct llama_context *context, struct llama_batch batch) {
    if (llama_decode(context, batch) != 0) fail("decode failed");
    llama_synchronize(context);
}

static int greedy(const float *logits, int count) {
    int best = 0;
    for (int i = 1; i < count; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* A slot file as the server writes it: the tokens of the prompt, here with the one that comes next. Or a
 * session. */
static void save(struct llama_context *context, int length, llama_token next) {
    llama_token *all = malloc((length + 1) * sizeof *all);
    for (int i = 0; i < length; i++) all[i] = text[i % text_length];
    all[length] = next;
    bool saved = options.session ? llama_state_save_file(context, options.save, all, length + 1)
                                 : llama_state_seq_save_file(context, options.save, 0, all, length + 1) != 0;
    if (!saved) fail("not saved");
    free(all);
}

static int load(struct llama_context *context, int *next) {
    llama_token *all = malloc(options.context * sizeof *all);
    size_t length = 0;
    bool loaded = options.session
        ? llama_state_load_file(context, options.load, all, options.context, &length)
        : llama_state_seq_load_file(context, options.load, 0, all, options.context, &length) != 0;
    if (!loaded) fail("not loaded");
    *next = all[length - 1];
    free(all);
    return (int)length - 1;
}

/* Another device, behind a socket in the place of a bus: the library --rpc, the address --server. All
 * weights go there, the KV cache to the backend if there is one, as
 * `-dev KVFS0,RPC0 -ts 1,0 -ot '.*=RPC0'` does it. */
static void use_server(struct llama_model_params *params) {
    static ggml_backend_dev_t devices[3];
    static float split[16] = {1};
    static struct llama_model_tensor_buft_override overrides[2];
    ggml_backend_reg_t library = ggml_backend_load(options.rpc);
    if (!library) fail("no RPC backend");
    ggml_backend_reg_t (*add_server)(const char *) = (ggml_backend_reg_t(*)(const char *))
        ggml_backend_reg_get_proc_address(library, "ggml_backend_rpc_add_server");
    ggml_backend_reg_t server = add_server(options.server);
    if (!server || ggml_backend_reg_dev_count(server) == 0) fail("no RPC server");
    ggml_backend_register(server);
    ggml_backend_dev_t device = ggml_backend_reg_dev_get(server, 0);
    ggml_backend_reg_t plugin = ggml_backend_reg_by_name("KVFS");
    int i = 0;
    if (plugin) devices[i++] = ggml_backend_reg_dev_get(plugin, 0);
    devices[i] = device;
    overrides[0].pattern = ".*";
    overrides[0].buft = ggml_backend_dev_buffer_type(device);
    params->devices = devices;
    params->tensor_split = split;
    params->tensor_buft_overrides = overrides;
    params->n_gpu_layers = 999;
}

int main(int count, char **words) {
    parse(count, words);
    read_prompt();
    ggml_backend_load_all_from_path(options.backends);
    struct llama_model_params model_params = llama_model_default_params();
    if (options.server) use_server(&model_params);
    struct llama_model *model = llama_model_load_from_file(options.model, model_params);
    if (!model) fail("no model");
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_context *context = create(model);
    if (options.poll >= 0) attach_threads(context);
    struct llama_batch batch = llama_batch_init(options.ubatch > 8 ? options.ubatch : 8, 0, 1);
    FILE *file = options.logits ? fopen(options.logits, "wb") : NULL;
    FILE *follow = options.follow ? fopen(options.follow, "rb") : NULL;
    if (options.follow && !follow) fail(options.follow);
    int positions[64] = {0}, tokens[64] = {0}, prompts = options.copy ? 1 : options.sequences;
    long steps = 0, start = ggml_time_us();

    if (options.load) positions[0] = load(context, tokens);
    for (int s = 0; s < (options.load ? 0 : prompts); s++)
        for (int i = 0; i < options.prompt_tokens;) {
            batch.n_tokens = 0;
            for (; i < options.prompt_tokens && batch.n_tokens < options.ubatch; i++)
                add(&batch, text[(s * 7 + i) % text_length] % vocabulary, i, s, i == options.prompt_tokens - 1);
            decode(context, batch);
            steps++;
            positions[s] = i;
            if (i == options.prompt_tokens) {
                const float *logits = llama_get_logits_ith(context, -1);
                if (file) fwrite(logits, sizeof *logits, vocabulary, file);
                tokens[s] = greedy(logits, vocabulary);
            }
        }
    printf("prefill_us %ld\n", (long)(ggml_time_us() - start));
    if (options.save) save(context, positions[0], tokens[0]);
    llama_memory_t memory = llama_get_memory(context);
    for (int s = prompts; s < options.sequences; s++) {
        llama_memory_seq_cp(memory, 0, s, -1, -1);
        positions[s] = positions[0];
        tokens[s] = (tokens[0] + s) % vocabulary;
    }
    if (options.remove_to > 0) {
        llama_memory_seq_rm(memory, 0, options.remove_from, options.remove_to);
        if (options.shift) {
            int by = options.remove_to - options.remove_from;
            llama_memory_seq_add(memory, 0, options.remove_to, -1, -by);
            positions[0] -= by;
        }
    }
    for (int i = 0; i < options.predict; i++) {
        batch.n_tokens = 0;
        for (int s = 0; s < options.sequences; s++) {
            if (follow && fread(&tokens[s], sizeof *tokens, 1, follow) != 1) fail("nothing left to follow");
            printf("token %d\n", tokens[s]);
            add(&batch, tokens[s], positions[s]++, s, 1);
        }
        start = ggml_time_us();
        decode(context, batch);
        printf("step_us %ld\n", (long)(ggml_time_us() - start));
        steps++;
        for (int s = 0; s < options.sequences; s++) {
            const float *logits = llama_get_logits_ith(context, s);
            if (file) fwrite(logits, sizeof *logits, vocabulary, file);
            tokens[s] = greedy(logits, vocabulary);
        }
    }
    printf("steps %ld\nlayers %d\n", steps, llama_model_n_layer(model));
    ggml_backend_reg_t plugin = ggml_backend_reg_by_name("KVFS");
    if (plugin) {
        uint64_t (*attended)(void) = (uint64_t(*)(void))ggml_backend_reg_get_proc_address(plugin, "kvfs_attention_count");
        printf("attention %llu\n", (unsigned long long)attended());
        uint64_t (*read_ahead)(void) = (uint64_t(*)(void))ggml_backend_reg_get_proc_address(plugin, "kvfs_read_ahead_count");
        printf("read_ahead %llu\n", (unsigned long long)read_ahead());
    }
    if (file) fclose(file);
    if (follow) fclose(follow);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
