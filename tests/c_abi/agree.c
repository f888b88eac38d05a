/* Attends to a seeded cache as the arguments say and writes the partials, the result and the mass
 * to standard output, as they lie in memory. agreement.rs does the same in Rust. */
#include <kvfs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS_MAX = 8, CALLERS_MAX = 16 };

static int num_arguments;
static char **arguments;

/* The value of NAME=VALUE, 0 where there is none. */
static double argument(const char *name) {
    size_t length = strlen(name);
    for (int i = 1; i < num_arguments; i++)
        if (strncmp(arguments[i], name, length) == 0 && arguments[i][length] == '=')
            return strtod(arguments[i] + length + 1, NULL);
    return 0;
}

static uint32_t number(const char *name) {
    return (uint32_t)argument(name);
}

static void check(kvfs_status status) {
    if (status != KVFS_STATUS_OK) {
        fprintf(stderr, "status %u: %s\n", (unsigned)status, kvfs_last_error());
        exit(1);
    }
}

static void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory)
        exit(2);
    return memory;
}

/* splitmix64 */
static uint64_t state = 7;

static uint64_t bits(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

/* From -1 to 1. */
static float uniform(void) {
    return (float)((int32_t)(bits() >> 40) - (1 << 23)) / (1 << 23);
}

/* 16 bits of a number with such a mantissa and one of four exponents from `exponent` on. */
static void store_half(unsigned char *out, unsigned mantissa_bits, unsigned exponent) {
    uint64_t random = bits();
    uint16_t mantissa = (uint16_t)(random & (0x8000u | ((1u << mantissa_bits) - 1)));
    uint16_t half = (uint16_t)(mantissa | ((exponent + (random >> 32) % 4) << mantissa_bits));
    memcpy(out, &half, sizeof half);
}

static unsigned block_bytes(uint32_t dtype) {
    switch (dtype) {
    case KVFS_DTYPE_F32: return 4;
    case KVFS_DTYPE_F8E4M3: return 1;
    case KVFS_DTYPE_Q8_0: return 34;
    case KVFS_DTYPE_Q4_0: return 18;
    default: return 2;
    }
}

static size_t row_bytes(uint32_t dtype, uint32_t elements) {
    int quantised = dtype == KVFS_DTYPE_Q8_0 || dtype == KVFS_DTYPE_Q4_0;
    return (size_t)(quantised ? elements / 32 : elements) * block_bytes(dtype);
}

static void fill(uint32_t dtype, unsigned char *bytes, size_t count) {
    for (size_t at = 0; at < count; at += block_bytes(dtype)) {
        float value;
        switch (dtype) {
        case KVFS_DTYPE_F16: store_half(bytes + at, 10, 12); break;
        case KVFS_DTYPE_BF16: store_half(bytes + at, 7, 124); break;
        case KVFS_DTYPE_F32:
            value = uniform();
            memcpy(bytes + at, &value, sizeof value);
            break;
        case KVFS_DTYPE_F8E4M3: bytes[at] = (unsigned char)(bits() & 0xbf); break;
        default:
            store_half(bytes + at, 10, 6);
            for (size_t i = 2; i < block_bytes(dtype); i++)
                bytes[at + i] = (unsigned char)bits();
        }
    }
}

static float *floats(size_t count) {
    float *values = allocate(count * sizeof(float));
    for (size_t i = 0; i < count; i++)
        values[i] = uniform();
    return values;
}

static kvfs_tensor tensor(uint32_t dtype, uint32_t heads, uint64_t tokens, uint32_t dim) {
    size_t row = row_bytes(dtype, dim), bytes = row * heads * tokens;
    unsigned char *data = allocate(bytes);
    fill(dtype, data, bytes);
    if (number("nhd"))
        return (kvfs_tensor){data, bytes, row, row * heads};
    return (kvfs_tensor){data, bytes, row * tokens, row};
}

static kvfs_attention *attention;
static kvfs_queries queries = {.size = sizeof queries};
static kvfs_block blocks[BLOCKS_MAX];
static kvfs_options options = {.size = sizeof options};
static size_t num_blocks, tokens, out_count, heads_count;
static const float *sinks;

static kvfs_partials new_partials(void) {
    return (kvfs_partials){
        .size = sizeof(kvfs_partials),
        .o = allocate(out_count * sizeof(float)),
        .m = allocate(heads_count * sizeof(float)),
        .l = allocate(heads_count * sizeof(float)),
        .num_queries = queries.num_queries,
        .num_qo_heads = queries.num_qo_heads,
        .v_head_dim = number("v_head_dim"),
    };
}

static void make_attention(void) {
    kvfs_attention_config config = {
        .size = sizeof config,
        .num_qo_heads = number("num_qo_heads"),
        .num_kv_heads = number("num_kv_heads"),
        .head_dim = number("head_dim"),
        .v_head_dim = number("v_head_dim"),
        .threads = number("threads"),
        .instructions = number("instructions"),
    };
    check(kvfs_attention_create(&config, &attention));
}

static void make_queries(void) {
    uint32_t heads = number("num_qo_heads"), dim = number("head_dim");
    uint64_t count = number("queries");
    uint64_t end = num_blocks * (number("tokens") + (uint64_t)number("shift"));
    uint64_t *positions = allocate(count * sizeof *positions);
    for (uint64_t i = 0; i < count; i++)
        positions[i] = end - count + i;
    queries.q = floats(count * heads * dim);
    queries.positions = positions;
    queries.num_queries = count;
    queries.num_qo_heads = heads;
    queries.head_dim = dim;
    heads_count = count * heads;
    out_count = heads_count * number("v_head_dim");
}

static void make_blocks(void) {
    uint32_t dtype = number("dtype"), heads = number("num_kv_heads");
    for (size_t i = 0; i < num_blocks; i++) {
        uint64_t in_block = number("tokens");
        blocks[i].size = sizeof blocks[i];
        blocks[i].dtype = dtype;
        blocks[i].tokens = in_block;
        blocks[i].k = tensor(dtype, heads, in_block, number("head_dim"));
        if (number("latent"))
            blocks[i].values = KVFS_VALUES_LATENT;
        else
            blocks[i].v = tensor(dtype, heads, in_block, number("v_head_dim"));
        blocks[i].shift = (int64_t)(i * number("shift"));
        blocks[i].first_position = i * (in_block + number("shift"));
        tokens += in_block;
    }
}

static void make_mask(void) {
    size_t count = queries.num_queries * tokens;
    options.mask_dtype = number("mask_dtype");
    options.mask_count = count;
    if (options.mask_dtype == KVFS_DTYPE_F16) {
        uint16_t *mask = allocate(count * sizeof *mask), hidden = 0xfc00;
        for (size_t i = 0; i < count; i++) {
            store_half((unsigned char *)&mask[i], 10, 12);
            if (bits() % 3 == 0)
                mask[i] = hidden;
        }
        options.mask = mask;
    } else if (options.mask_dtype == KVFS_DTYPE_F32) {
        uint32_t hidden = 0xff800000;
        float *mask = allocate(count * sizeof *mask);
        for (size_t i = 0; i < count; i++) {
            mask[i] = uniform();
            if (bits() % 3 == 0)
                memcpy(&mask[i], &hidden, sizeof hidden);
        }
        options.mask = mask;
    }
}

static void make_options(void) {
    static kvfs_token_range ranges[2];
    options.sm_scale = (float)argument("sm_scale");
    options.soft_cap = (float)argument("soft_cap");
    options.window = number("window");
    options.causality = number("bidirectional") ? KVFS_CAUSALITY_BIDIRECTIONAL : 0;
    if (number("alibi")) {
        options.alibi_slopes = floats(queries.num_qo_heads);
        options.alibi_slopes_count = queries.num_qo_heads;
    }
    make_mask();
    if (number("sinks"))
        sinks = floats(queries.num_qo_heads);
    if (number("select")) {
        ranges[0] = (kvfs_token_range){0, 3};
        ranges[1] = (kvfs_token_range){tokens / 2, tokens};
        options.selection = ranges;
        options.selection_count = 2;
    }
    if (number("shift")) {
        static const char rope[] = "{\"theta\": 10000.0}";
        kvfs_rotation *rotation = NULL;
        check(kvfs_rotation_from_json(rope, sizeof rope - 1, number("head_dim"),
                                      number("pairing"), 0, &rotation));
        options.rotation = rotation;
    }
}

static void run(kvfs_partials *partials) {
    if (!number("merge")) {
        check(kvfs_attention_run(attention, &queries, blocks, num_blocks, &options, partials));
        return;
    }
    check(kvfs_partials_clear(partials));
    for (size_t i = 0; i < num_blocks; i++) {
        kvfs_partials part = new_partials();
        check(kvfs_attention_run(attention, &queries, &blocks[i], 1, &options, &part));
        check(kvfs_partials_merge(partials, &part));
    }
}

static void *run_again(void *partials) {
    for (int i = 0; i < 20; i++)
        run(partials);
    return NULL;
}

/* Several threads call the same attention at once, and each gets what one gets alone. */
static void compare_callers(const kvfs_partials *expected) {
    pthread_t threads[CALLERS_MAX];
    kvfs_partials partials[CALLERS_MAX];
    size_t callers = number("callers");
    for (size_t i = 0; i < callers; i++) {
        partials[i] = new_partials();
        if (pthread_create(&threads[i], NULL, run_again, &partials[i]) != 0)
            exit(2);
    }
    for (size_t i = 0; i < callers; i++) {
        pthread_join(threads[i], NULL);
        if (memcmp(partials[i].o, expected->o, out_count * sizeof(float)) != 0 ||
            memcmp(partials[i].m, expected->m, heads_count * sizeof(float)) != 0 ||
            memcmp(partials[i].l, expected->l, heads_count * sizeof(float)) != 0) {
            fprintf(stderr, "caller %zu got something else\n", i);
            exit(1);
        }
    }
}

int main(int argc, char **argv) {
    num_arguments = argc;
    arguments = argv;
    num_blocks = number("blocks");
    if (kvfs_abi_version() != KVFS_ABI_VERSION || num_blocks > BLOCKS_MAX)
        return 2;
    make_attention();
    make_queries();
    make_blocks();
    make_options();
    kvfs_partials partials = new_partials();
    if (number("mass")) {
        partials.mass = allocate(tokens * sizeof(float));
        partials.mass_count = tokens;
    }
    run(&partials);
    compare_callers(&partials);
    float *out = allocate(out_count * sizeof(float));
    check(kvfs_partials_finish(&partials, sinks, sinks ? queries.num_qo_heads : 0, out, out_count));
    fwrite(partials.o, sizeof(float), out_count, stdout);
    fwrite(partials.m, sizeof(float), heads_count, stdout);
    fwrite(partials.l, sizeof(float), heads_count, stdout);
    fwrite(out, sizeof(float), out_count, stdout);
    if (partials.mass)
        fwrite(partials.mass, sizeof(float), partials.mass_count, stdout);
    kvfs_attention_free(attention);
    return 0;
}
