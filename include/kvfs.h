/* kvfs: attention over the key-value cache of language models, in pages as they lie in memory.
 *
 * Made from crates/clib/src/c/ by cbindgen; do not edit.
 *
 * A program creates a kvfs_attention for the heads of its model once, describes K and V of some
 * tokens as kvfs_block (kvfs_page_block does it for a page file of a mount), and calls
 * kvfs_attention_run. The result is partial: what was attended to elsewhere is merged with
 * kvfs_partials_merge, and kvfs_partials_finish gives the output. examples/c/attend_page.c is a
 * whole program. An engine that computes on an NVIDIA GPU calls kvfs_cuda_run instead, with a stream
 * and device memory of its own, or kvfs_cuda_scan_begin, which brings the pages of a sequence layer by
 * layer. kvfs_seq_rm and its like change the sequences of a model in a mount; kvfs_have_many and
 * kvfs_read_many ask for many of its files at once; kvfs_give_hint says what will not be needed any more.
 *
 * Linking: -lkvfs, or libkvfs.a with -lpthread -ldl -lm (mount-scripts/build-c-library.sh builds
 * both).
 *
 * Structures start with their size, which the caller sets to sizeof: fields may be added at the
 * end. What an older program does not have is zero, which is the default of every such field; a
 * field that the library does not know yet must be zero. So initialise all of a structure:
 *     kvfs_options options = {.size = sizeof options, .window = 4096};
 *
 * Shapes are in C order, the last dimension is contiguous. Choices such as dtype are uint32_t with
 * the values of an enum. Nothing is retained: what a caller passes belongs to the caller, and only
 * a kvfs_block or kvfs_side points into other memory of it. Handles are created and freed by the library.
 *
 * Errors: a function that can fail returns a kvfs_status, one value for each thing that a caller
 * can do about it; kvfs_last_error() is the reason in words. NULL, misaligned pointers, sizes that
 * are none and lengths that contradict each other are refused with KVFS_STATUS_ARGUMENT. Nothing
 * is thrown and no signal is changed; only lack of memory ends the process.
 *
 * What a caller promises, because no library can check it: a pointer points to memory of the length
 * that goes with it; memory that is read does not change during the call, memory that is written
 * is nobody else's meanwhile; a handle is used between its creation and its freeing, and freed before
 * the library is unloaded. A page file that is mapped and becomes shorter raises SIGBUS, as any
 * mapping does: sealed pages of a mount never do.
 *
 * Every function may be called from any thread. */


#ifndef KVFS_H
#define KVFS_H

#include <stddef.h>
#include <stdint.h>

/**
 * Version of this interface, to be compared with `kvfs_abi_version()`.
 */
#define KVFS_ABI_VERSION 1

/**
 * How a call ended: one value for each thing that a caller can do about it. A call that does not
 * end with `KVFS_STATUS_OK` has changed nothing, except that a handle to be created is NULL.
 */
enum kvfs_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Done.
     */
    KVFS_STATUS_OK = 0,
    /**
     * Arguments that contradict each other or the shape: correct the call.
     */
    KVFS_STATUS_ARGUMENT = 1,
    /**
     * A block that does not hold what it says: leave it out, or read it again.
     * `kvfs_last_error_block()` is its index.
     */
    KVFS_STATUS_BLOCK = 2,
    /**
     * Bytes that are no page of this cache at this place, or damaged: compute the tokens anew.
     */
    KVFS_STATUS_PAGE = 3,
    /**
     * Bytes that are no manifest: this cache cannot be used.
     */
    KVFS_STATUS_MANIFEST = 4,
    /**
     * A manifest that a newer kvfs wrote: upgrade.
     */
    KVFS_STATUS_NEWER = 5,
    /**
     * Right, but not something that this processor or this version of the library can do: use
     * another backend, or leave the new field out.
     */
    KVFS_STATUS_UNSUPPORTED = 6,
    /**
     * A defect of the library, to be reported with what it wrote to standard error. Its handles can
     * still be used and freed.
     */
    KVFS_STATUS_INTERNAL = 7,
    /**
     * Less memory than is needed, of the device or pinned: free some, or use another backend.
     */
    KVFS_STATUS_MEMORY = 8,
    /**
     * The device refused or failed: free the handle, and use another backend.
     */
    KVFS_STATUS_DEVICE = 9,
    /**
     * What the call names is not there, such as a sequence: there is nothing to reuse.
     */
    KVFS_STATUS_MISSING = 10,
    /**
     * There is something of that name already: choose another one, or clear it.
     */
    KVFS_STATUS_EXISTS = 11,
    /**
     * A file that cannot be read or written; the text has the error of the system call.
     */
    KVFS_STATUS_FILE = 12,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvfs_status kvfs_status;
#else
typedef uint32_t kvfs_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How elements are stored, little endian.
 */
typedef enum kvfs_dtype {
    /**
     * IEEE half precision.
     */
    KVFS_DTYPE_F16 = 1,
    /**
     * The upper half of an f32.
     */
    KVFS_DTYPE_BF16 = 2,
    /**
     * IEEE single precision.
     */
    KVFS_DTYPE_F32 = 3,
    /**
     * 8 bits, 4 of exponent and 3 of mantissa, without infinities.
     */
    KVFS_DTYPE_F8E4M3 = 4,
    /**
     * ggml blocks of 32 elements: an f16 scale, 32 i8.
     */
    KVFS_DTYPE_Q8_0 = 5,
    /**
     * ggml blocks of 32 elements: an f16 scale, 16 bytes of nibbles.
     */
    KVFS_DTYPE_Q4_0 = 6,
} kvfs_dtype;

/**
 * Where the values of a block are.
 */
typedef enum kvfs_values {
    /**
     * In the tensor `v`.
     */
    KVFS_VALUES_ROWS = 0,
    /**
     * In the first `v_head_dim` elements of the rows of `k` (multi-head latent attention); `v` is
     * not looked at.
     */
    KVFS_VALUES_LATENT = 1,
} kvfs_values;

/**
 * Which positions a query sees.
 */
typedef enum kvfs_causality {
    /**
     * None after its own.
     */
    KVFS_CAUSALITY_CAUSAL = 0,
    /**
     * All.
     */
    KVFS_CAUSALITY_BIDIRECTIONAL = 1,
} kvfs_causality;

/**
 * Vector instructions.
 */
typedef enum kvfs_instructions {
    /**
     * The fastest that the processor has.
     */
    KVFS_INSTRUCTIONS_FASTEST = 0,
    /**
     * None: works everywhere.
     */
    KVFS_INSTRUCTIONS_SCALAR = 1,
    /**
     * AVX2 with FMA and F16C.
     */
    KVFS_INSTRUCTIONS_AVX2 = 2,
    /**
     * AVX-512 F, BW, DQ and VL.
     */
    KVFS_INSTRUCTIONS_AVX512 = 3,
    /**
     * The same with VNNI and VBMI.
     */
    KVFS_INSTRUCTIONS_AVX512_VNNI = 4,
} kvfs_instructions;

/**
 * Which two elements of a row turn together.
 */
typedef enum kvfs_pairing {
    /**
     * `i` and `i + dims / 2` (GPT-NeoX, Llama in Hugging Face's order).
     */
    KVFS_PAIRING_HALVES = 0,
    /**
     * `2i` and `2i + 1` (GPT-J, Llama's original order).
     */
    KVFS_PAIRING_INTERLEAVED = 1,
} kvfs_pairing;

/**
 * Order of the dimensions of a page's tensors.
 */
typedef enum kvfs_layout {
    /**
     * `[num_kv_heads, tokens, head_dim]`
     */
    KVFS_LAYOUT_HND = 0,
    /**
     * `[tokens, num_kv_heads, head_dim]`
     */
    KVFS_LAYOUT_NHD = 1,
} kvfs_layout;

/**
 * What a layer keeps.
 */
typedef enum kvfs_layer_kind {
    /**
     * K and V of every token.
     */
    KVFS_LAYER_KIND_ATTENTION = 0,
    /**
     * The same, and only the last `window` tokens are looked at.
     */
    KVFS_LAYER_KIND_SLIDING = 1,
    /**
     * State snapshots instead of pages.
     */
    KVFS_LAYER_KIND_RECURRENT = 2,
    /**
     * K and V of an encoder's output, which do not grow with the tokens.
     */
    KVFS_LAYER_KIND_CROSS = 3,
} kvfs_layer_kind;

/**
 * What will become of a file, a sequence, a directory or a prefix.
 */
typedef enum kvfs_hint {
    /**
     * Its user waits for something else, such as a tool, and will go on.
     */
    KVFS_HINT_WAITING = 0,
    /**
     * Nobody will go on with it: what only it has leaves memory before everything else.
     */
    KVFS_HINT_FINISHED = 1,
} kvfs_hint;

/**
 * Attention for one shape, with its threads. Several threads may use one at the same time; with
 * more than one thread of its own, it serves one call after the other.
 */
typedef struct kvfs_attention kvfs_attention;

/**
 * Attention on a GPU for one shape. Several threads may use one; it takes one call after the other, and
 * one scan at a time.
 */
typedef struct kvfs_cuda kvfs_cuda;

/**
 * A scan of all layers of a sequence.
 */
typedef struct kvfs_cuda_scan kvfs_cuda_scan;

/**
 * The smallest and largest K of some blocks, in device memory.
 */
typedef struct kvfs_cuda_summaries kvfs_cuda_summaries;

/**
 * A manifest without contradictions. It never changes, so any number of threads may use one.
 */
typedef struct kvfs_manifest kvfs_manifest;

/**
 * A rotary position encoding. It never changes, so any number of threads may use one.
 */
typedef struct kvfs_rotation kvfs_rotation;

/**
 * The pages and tails of a sequence of a mount, or of a copy of one, to be attended to.
 */
typedef struct kvfs_sequence kvfs_sequence;

/**
 * The sequences of a model in a mount, or in a copy of one.
 */
typedef struct kvfs_sequences kvfs_sequences;

/**
 * Appends rows to a sequence while the next token is computed. Several threads may use one.
 */
typedef struct kvfs_write_back kvfs_write_back;

/**
 * The heads of a layer, and who attends.
 */
typedef struct kvfs_attention_config {
    /**
     * `sizeof(kvfs_attention_config)`
     */
    size_t size;
    /**
     * Query heads, a multiple of `num_kv_heads`. Query head `h` reads KV head
     * `h / (num_qo_heads / num_kv_heads)`.
     */
    uint32_t num_qo_heads;
    /**
     * KV heads, at most 1024.
     */
    uint32_t num_kv_heads;
    /**
     * Elements of a K row and of a query, at most 4096.
     */
    uint32_t head_dim;
    /**
     * Elements of a V row and of an output, at most 4096; 0: `head_dim`.
     */
    uint32_t v_head_dim;
    /**
     * Threads, of which the one that calls is one, at most 256; 0: one for each processor that
     * the process may use.
     */
    uint32_t threads;
    /**
     * One of `kvfs_instructions`.
     */
    uint32_t instructions;
} kvfs_attention_config;

/**
 * Queries of one layer. They belong to the caller and are only read.
 */
typedef struct kvfs_queries {
    /**
     * `sizeof(kvfs_queries)`
     */
    size_t size;
    /**
     * `[num_queries, num_qo_heads, head_dim]`, already rotated for their positions.
     */
    const float *q;
    /**
     * `[num_queries]`, below 2^63, in any order.
     */
    const uint64_t *positions;
    /**
     * How many; 0 is fine.
     */
    uint64_t num_queries;
    /**
     * Must be that of the attention.
     */
    uint32_t num_qo_heads;
    /**
     * Must be that of the attention.
     */
    uint32_t head_dim;
} kvfs_queries;

/**
 * Rows of all KV heads of some tokens: that of (head, token) starts at byte
 * `head * head_stride + token * token_stride`. This structure does not grow.
 */
typedef struct kvfs_tensor {
    /**
     * Of any alignment. It belongs to the caller and is only read.
     */
    const void *data;
    /**
     * Bytes that may be read from `data` on.
     */
    size_t bytes;
    /**
     * From a head to the next, in bytes.
     */
    size_t head_stride;
    /**
     * From a token to the next, in bytes.
     */
    size_t token_stride;
} kvfs_tensor;

/**
 * Consecutive tokens of one layer. It owns nothing.
 */
typedef struct kvfs_block {
    /**
     * `sizeof(kvfs_block)`, the same in all elements of an array, whose stride it is.
     */
    size_t size;
    /**
     * One of `kvfs_dtype`, of K and V.
     */
    uint32_t dtype;
    /**
     * One of `kvfs_values`.
     */
    uint32_t values;
    /**
     * How many, below 2^32; 0 is fine.
     */
    uint64_t tokens;
    /**
     * Rows of `head_dim` elements.
     */
    struct kvfs_tensor k;
    /**
     * Rows of `v_head_dim` elements.
     */
    struct kvfs_tensor v;
    /**
     * Position of the first token in the sequence that the queries belong to.
     */
    uint64_t first_position;
    /**
     * That position less the one for which K was rotated. Other than 0 it needs
     * `kvfs_options.rotation`.
     */
    int64_t shift;
} kvfs_block;

/**
 * Tokens from `first` to `end - 1`, counted over all blocks in order. This structure does not
 * grow.
 */
typedef struct kvfs_token_range {
    /**
     * The first one.
     */
    uint64_t first;
    /**
     * The one after the last one.
     */
    uint64_t end;
} kvfs_token_range;

/**
 * How the logits come about, in this order: `q . k * sm_scale`, soft cap, `ALiBi`, mask. Zeros
 * are the defaults. Sink logits are given to `kvfs_partials_finish`, because they count once for
 * all parts.
 */
typedef struct kvfs_options {
    /**
     * `sizeof(kvfs_options)`
     */
    size_t size;
    /**
     * 0: `1 / sqrt(head_dim)`.
     */
    float sm_scale;
    /**
     * Logits become `soft_cap * tanh(logit / soft_cap)`; 0: they do not.
     */
    float soft_cap;
    /**
     * A query sees its own position and those less than `window` before it; 0: no limit.
     */
    uint64_t window;
    /**
     * One of `kvfs_causality`.
     */
    uint32_t causality;
    /**
     * `KVFS_DTYPE_F32` or `KVFS_DTYPE_F16`; not looked at without a mask.
     */
    uint32_t mask_dtype;
    /**
     * `[num_queries, tokens of all blocks in order]`, added to the logits; NULL: nothing is. Where
     * one is -infinity the query does not see the token, and if no query sees it, its K and V are
     * never touched.
     */
    const void *mask;
    /**
     * Values of `mask`.
     */
    size_t mask_count;
    /**
     * `[num_qo_heads]`: `slope * (position of the token - position of the query)` is added; NULL:
     * nothing is.
     */
    const float *alibi_slopes;
    /**
     * Values of `alibi_slopes`.
     */
    size_t alibi_slopes_count;
    /**
     * Only these tokens are seen, the others never touched; NULL: all are seen.
     */
    const struct kvfs_token_range *selection;
    /**
     * Ranges of `selection`; with 0 of them and no NULL, nothing is seen.
     */
    size_t selection_count;
    /**
     * The position encoding in K, for blocks with a shift; NULL: none.
     */
    const struct kvfs_rotation *rotation;
} kvfs_options;

/**
 * Attention of some queries over some tokens, not normalised: what another thread, machine or
 * GPU computed over other tokens merges with it.
 *
 * The memory belongs to the caller. The structure itself is only read, what its pointers point to
 * is written.
 */
typedef struct kvfs_partials {
    /**
     * `sizeof(kvfs_partials)`
     */
    size_t size;
    /**
     * `[num_queries, num_qo_heads, v_head_dim]`: the sum of V, each token weighted by
     * `exp(logit - m)`.
     */
    float *o;
    /**
     * `[num_queries, num_qo_heads]`: the largest logit, natural; -1e30 without tokens.
     */
    float *m;
    /**
     * `[num_queries, num_qo_heads]`: the sum of `exp(logit - m)`; 0 without tokens. The
     * log-sum-exp is `m + log(l)`.
     */
    float *l;
    /**
     * How many; 0 is fine.
     */
    uint64_t num_queries;
    /**
     * At most 65536.
     */
    uint32_t num_qo_heads;
    /**
     * At most 4096.
     */
    uint32_t v_head_dim;
    /**
     * `[tokens of all blocks]`, or NULL: `kvfs_attention_run` adds the attention that each token
     * got, the sum over queries and heads of its weight in the softmax over these blocks. Others
     * do not look at it. It costs 4 bytes of memory for each query, query head and token, which
     * the attention keeps.
     */
    float *mass;
    /**
     * Values of `mass`.
     */
    size_t mass_count;
} kvfs_partials;

/**
 * The heads of a layer, and what a GPU may use.
 */
typedef struct kvfs_cuda_config {
    /**
     * `sizeof(kvfs_cuda_config)`
     */
    size_t size;
    /**
     * As in `kvfs_attention_config`.
     */
    uint32_t num_qo_heads;
    /**
     * As in `kvfs_attention_config`.
     */
    uint32_t num_kv_heads;
    /**
     * Elements of a K row and of a query, at most 256.
     */
    uint32_t head_dim;
    /**
     * Elements of a V row and of an output, at most 256; 0: `head_dim`.
     */
    uint32_t v_head_dim;
    /**
     * Bytes of each of the four pinned buffers that K and V go through, and of the device memory
     * behind it; 0: 8 MiB.
     */
    size_t slot_bytes;
    /**
     * Threads that copy into them, of which the one that calls is one, at most 256; 0: 2.
     */
    uint32_t copy_threads;
    /**
     * Which of the GPUs that the driver shows (`CUDA_VISIBLE_DEVICES` chooses them), from 0 on.
     */
    uint32_t device;
    /**
     * Bytes of device memory in which the last pages of each layer of a sequence stay between scans, or
     * as many as there is memory for; 0: none stay.
     */
    uint64_t hot_bytes;
    /**
     * Bytes of a sequence's mapped pages that the device may read where they are, if the system allows
     * it; 0: 256 GiB.
     */
    uint64_t registered_bytes;
} kvfs_cuda_config;

/**
 * Queries and results in device memory, all of f32, and the stream that they belong to. An address is
 * a `CUdeviceptr`, or a pointer of the runtime API as a number.
 */
typedef struct kvfs_cuda_call {
    /**
     * `sizeof(kvfs_cuda_call)`
     */
    size_t size;
    /**
     * A `CUstream` or `cudaStream_t` of the device, NULL for the default stream. The call comes
     * after what is in it, and before what is put there later.
     */
    void *stream;
    /**
     * `[num_queries, num_qo_heads, head_dim]`, already rotated for their positions.
     */
    uint64_t q;
    /**
     * `[num_queries]` in host memory, below 2^63, in any order: they decide what is read.
     */
    const uint64_t *positions;
    /**
     * How many, at most 4096; 0 is fine.
     */
    uint64_t num_queries;
    /**
     * `[num_queries, num_qo_heads, v_head_dim]`: the result, 0 without tokens; 0: partials are
     * written instead.
     */
    uint64_t out;
    /**
     * `[num_qo_heads]`: logits that take part in the softmax of `out`, without values; 0: none.
     */
    uint64_t sinks;
    /**
     * `[num_queries, num_qo_heads, v_head_dim]`, as in `kvfs_partials`; not looked at if there is
     * an `out`.
     */
    uint64_t o;
    /**
     * `[num_queries, num_qo_heads]`, as in `kvfs_partials`.
     */
    uint64_t m;
    /**
     * `[num_queries, num_qo_heads]`, as in `kvfs_partials`.
     */
    uint64_t l;
} kvfs_cuda_call;

/**
 * The shape of a cache's pages.
 */
typedef struct kvfs_geometry {
    /**
     * `sizeof(kvfs_geometry)`, set before the call.
     */
    size_t size;
    /**
     * One of `kvfs_dtype`.
     */
    uint32_t dtype;
    /**
     * One of `kvfs_layout`.
     */
    uint32_t layout;
    /**
     * Layers of the model.
     */
    uint32_t num_layers;
    /**
     * KV heads of one layer (of this shard).
     */
    uint32_t num_kv_heads;
    /**
     * Elements of a K row.
     */
    uint32_t head_dim;
    /**
     * Elements of a V row; 0 where pages have no V (latent attention): the attention's
     * `v_head_dim` is then the model's.
     */
    uint32_t v_head_dim;
    /**
     * Tokens of a full page.
     */
    uint32_t page_tokens;
    /**
     * Whether there is a `rope` for `kvfs_rotation_from_manifest`: 0 or 1.
     */
    uint32_t has_rope;
    /**
     * Bytes of a full page's file; the most of any layer, where some keep side rows (`kvfs_layer`).
     */
    uint64_t page_file_bytes;
    /**
     * Bytes of a token in a tail; the most of any layer as well.
     */
    uint64_t tail_row_bytes;
} kvfs_geometry;

/**
 * A layer.
 */
typedef struct kvfs_layer {
    /**
     * `sizeof(kvfs_layer)`, set before the call.
     */
    size_t size;
    /**
     * One of `kvfs_layer_kind`.
     */
    uint32_t kind;
    /**
     * For `kvfs_options.window`, in tokens; 0 where there is none.
     */
    uint32_t window;
    /**
     * Bytes of a full page's file; 0 where the layer keeps no pages.
     */
    uint64_t page_file_bytes;
    /**
     * Bytes of a token in a tail, side row included; 0 where the layer keeps no pages.
     */
    uint64_t tail_row_bytes;
    /**
     * Bytes of a token beside K and V, behind them in a tail; 0 where the layer keeps none.
     */
    uint64_t side_row_bytes;
} kvfs_layer;

/**
 * Side rows of consecutive tokens of one layer: that of a token starts at byte `token * stride`. It owns nothing.
 */
typedef struct kvfs_side {
    /**
     * `sizeof(kvfs_side)`, set before the call.
     */
    size_t size;
    /**
     * How many; 0 is fine.
     */
    uint64_t tokens;
    /**
     * The first row. Of any alignment; it is only read.
     */
    const void *data;
    /**
     * Bytes that may be read from `data` on.
     */
    size_t bytes;
    /**
     * Bytes of a row.
     */
    size_t row_bytes;
    /**
     * From a row to the next, in bytes: `row_bytes` in a page.
     */
    size_t stride;
} kvfs_side;

/**
 * Where a sequence begins and ends.
 */
typedef struct kvfs_sequence_ends {
    /**
     * `sizeof(kvfs_sequence_ends)`, set before the call.
     */
    size_t size;
    /**
     * Rows in its files, holes included; the next token that is appended has this row.
     */
    uint64_t rows;
    /**
     * Position of the first token; 0 if there is none.
     */
    uint64_t first;
    /**
     * The position behind the last token; 0 if there is none.
     */
    uint64_t end;
} kvfs_sequence_ends;

/**
 * Consecutive rows at consecutive positions. Rows in no run are holes.
 */
typedef struct kvfs_run {
    /**
     * The first row: its number in the pages and the tail.
     */
    uint64_t row;
    /**
     * How many.
     */
    uint64_t tokens;
    /**
     * Position of the first row, for `kvfs_block.first_position`.
     */
    uint64_t position;
    /**
     * That position less the one that its K was rotated for, for `kvfs_block.shift`.
     */
    int64_t shift;
} kvfs_run;

/**
 * How many pages are read.
 */
typedef struct kvfs_page_budget {
    /**
     * `sizeof(kvfs_page_budget)`
     */
    size_t size;
    /**
     * In all, at least the ones below.
     */
    uint64_t pages;
    /**
     * First ones that are always read.
     */
    uint64_t sinks;
    /**
     * Last ones that are always read.
     */
    uint64_t recent;
} kvfs_page_budget;

/**
 * What pages are chosen among, and for what.
 */
typedef struct kvfs_page_selection {
    /**
     * `sizeof(kvfs_page_selection)`
     */
    size_t size;
    /**
     * How many pages.
     */
    const struct kvfs_page_budget *budget;
    /**
     * The queries, in host memory.
     */
    const struct kvfs_queries *queries;
    /**
     * `[num_blocks]`: the blocks that were summarised.
     */
    const struct kvfs_block *blocks;
    /**
     * How many.
     */
    size_t num_blocks;
    /**
     * As they will be attended to; NULL: the defaults.
     */
    const struct kvfs_options *options;
} kvfs_page_selection;

/**
 * One of many names, and what came of it.
 */
typedef struct kvfs_named {
    /**
     * `sizeof(kvfs_named)`, the same in all elements of an array, whose stride it is.
     */
    size_t size;
    /**
     * In the directory: ends with NUL, has no slash, is not empty.
     */
    const char *name;
    /**
     * Where `kvfs_read_many` puts the bytes of the file. `kvfs_have_many` does not look at it.
     */
    uint8_t *data;
    /**
     * Bytes that may be written there.
     */
    size_t capacity;
    /**
     * Set by the call: bytes of the file; 0 where there is none.
     */
    uint64_t length;
    /**
     * Set by the call: 1 if something has this name, else 0.
     */
    uint32_t found;
    /**
     * Set by the call: 0, or the errno with which the file cannot be read; `ERANGE` if it has more bytes than there is
     * room, of which none is written then.
     */
    uint32_t error;
} kvfs_named;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the interface that the library has. A program checks once that it equals
 * `KVFS_ABI_VERSION` of the header that it was compiled with. New functions, new fields at the
 * end of structures and new values do not change it.
 */
uint32_t kvfs_abi_version(void);

/**
 * The version of the library, such as `"0.1.0"`. It is valid for ever.
 */
const char *kvfs_version(void);

/**
 * Why the last call that failed on this thread did: one line of UTF-8 that says what, where and
 * what to do; `""` if none failed. It is valid until the next call that fails on this thread, or
 * the thread ends.
 */
const char *kvfs_last_error(void);

/**
 * The index of the block that the last call that failed on this thread was about, if it ended
 * with `KVFS_STATUS_BLOCK`, else `SIZE_MAX`.
 */
size_t kvfs_last_error_block(void);

/**
 * Creates `*attention`, to be freed with `kvfs_attention_free`. Its threads start now and sleep
 * between calls. It belongs to this process: after a fork the child creates its own.
 *
 * `KVFS_STATUS_ARGUMENT` for a shape that cannot be, `KVFS_STATUS_UNSUPPORTED` if the processor
 * lacks the instructions or the threads do not start.
 */
kvfs_status kvfs_attention_create(const struct kvfs_attention_config *config,
                                  struct kvfs_attention **attention);

/**
 * Frees what `kvfs_attention_create` gave, when no call uses it any more. NULL is fine.
 */
void kvfs_attention_free(struct kvfs_attention *attention);

/**
 * Attends to `num_blocks` blocks (none is fine) and writes `partials`. The order of the blocks
 * does not matter, except for mask, selection and mass, which count tokens in it. `options` may
 * be NULL for all defaults: plain causal attention.
 *
 * NaN and infinities in K and V are data: they propagate into the heads that see them and into no
 * other query. K and V that no query sees are never touched. What is read of K and V must not
 * change and not shrink during the call; sealed pages of a mount do neither.
 *
 * `KVFS_STATUS_ARGUMENT` for queries, options or partials that do not fit the shape or each other,
 * `KVFS_STATUS_BLOCK` for a block that does not fit the shape or its own bytes.
 */
kvfs_status kvfs_attention_run(const struct kvfs_attention *attention,
                               const struct kvfs_queries *queries,
                               const struct kvfs_block *blocks,
                               size_t num_blocks,
                               const struct kvfs_options *options,
                               struct kvfs_partials *partials);

/**
 * Makes partials those of no tokens, to merge others into.
 */
kvfs_status kvfs_partials_clear(struct kvfs_partials *partials);

/**
 * Adds the tokens of `other`, which must not be in `partials` yet. The order of merging changes
 * the result by rounding alone.
 *
 * `KVFS_STATUS_ARGUMENT` if the two are of different shapes.
 */
kvfs_status kvfs_partials_merge(struct kvfs_partials *partials, const struct kvfs_partials *other);

/**
 * Writes the result to `out`, `[num_queries, num_qo_heads, v_head_dim]`: `o / l`, 0 without
 * tokens. `out_count` is the number of its values; it may be `partials->o`.
 *
 * `sinks`, `[num_qo_heads]`, are logits that take part in the softmax without a value, as in
 * gpt-oss; NULL for none. `sinks_count` is the number of them.
 */
kvfs_status kvfs_partials_finish(const struct kvfs_partials *partials,
                                 const float *sinks,
                                 size_t sinks_count,
                                 float *out,
                                 size_t out_count);

/**
 * Creates `*cuda` on a GPU, to be freed with `kvfs_cuda_free`. It works in the primary context of that
 * GPU, as the runtime API does; the context that is current in a calling thread stays so.
 *
 * `KVFS_STATUS_ARGUMENT` for a shape that cannot be, `KVFS_STATUS_UNSUPPORTED` without a driver or a
 * GPU, or for a shape that there are no kernels for, `KVFS_STATUS_MEMORY` if there is none for the
 * buffers, `KVFS_STATUS_DEVICE` for anything else that the driver refuses.
 */
kvfs_status kvfs_cuda_create(const struct kvfs_cuda_config *config,
                             struct kvfs_cuda **cuda);

/**
 * Frees what `kvfs_cuda_create` gave, after the device has done what it was asked for; what a scan still
 * has is freed with it. NULL is fine.
 */
void kvfs_cuda_free(struct kvfs_cuda *cuda);

/**
 * Attends to `num_blocks` blocks in host memory, in the order of the caller's stream. What no query
 * sees is not brought to the device. `options` may be NULL, as in `kvfs_attention_run`; masks of
 * values and `ALiBi` are `KVFS_STATUS_UNSUPPORTED`.
 *
 * It returns when K and V have been copied or are in buffers, so blocks may change then; the result
 * is there for what comes later in the stream. It waits for the device only where calls before it
 * still use the buffers. A kernel that fails is an error of the stream, and of later calls. A stream
 * that is being captured into a graph is `KVFS_STATUS_UNSUPPORTED`: K and V are brought by the host.
 *
 * `KVFS_STATUS_ARGUMENT` and `KVFS_STATUS_BLOCK` as `kvfs_attention_run`, the others as
 * `kvfs_cuda_create`; after `KVFS_STATUS_DEVICE` the handle can only be freed.
 */
kvfs_status kvfs_cuda_run(const struct kvfs_cuda *cuda,
                          const struct kvfs_cuda_call *call,
                          const struct kvfs_block *blocks,
                          size_t num_blocks,
                          const struct kvfs_options *options);

/**
 * Creates `*rotation` for the `rope` of a manifest, to be freed with `kvfs_rotation_free`.
 * `pairing` is one of `kvfs_pairing`, which the manifest does not tell; `first` is the first
 * rotated element of a row, other than 0 in latent attention.
 *
 * `KVFS_STATUS_ARGUMENT` if the manifest has no `rope`, `KVFS_STATUS_UNSUPPORTED` for a scaling
 * whose frequencies depend on the length of the sequence.
 */
kvfs_status kvfs_rotation_from_manifest(const struct kvfs_manifest *manifest,
                                        uint32_t pairing,
                                        uint32_t first,
                                        struct kvfs_rotation **rotation);

/**
 * The same for a `rope` object as manifests have it, `{"theta", "scaling", "dims"}`, as UTF-8 of
 * `json_bytes` bytes, and rows of `head_dim` elements.
 *
 * `KVFS_STATUS_ARGUMENT` if it is none.
 */
kvfs_status kvfs_rotation_from_json(const char *json,
                                    size_t json_bytes,
                                    uint32_t head_dim,
                                    uint32_t pairing,
                                    uint32_t first,
                                    struct kvfs_rotation **rotation);

/**
 * Frees a rotation that no call uses any more. NULL is fine.
 */
void kvfs_rotation_free(struct kvfs_rotation *rotation);

/**
 * Creates `*manifest` from the `json_bytes` bytes of a `manifest.json`, to be freed with
 * `kvfs_manifest_free`. The bytes are not needed afterwards.
 *
 * `KVFS_STATUS_MANIFEST` or `KVFS_STATUS_NEWER` if they cannot be used.
 */
kvfs_status kvfs_manifest_create(const char *json,
                                 size_t json_bytes,
                                 struct kvfs_manifest **manifest);

/**
 * Frees a manifest that no call uses any more. NULL is fine.
 */
void kvfs_manifest_free(struct kvfs_manifest *manifest);

/**
 * Fills `*geometry`, whose `size` the caller has set.
 */
kvfs_status kvfs_manifest_geometry(const struct kvfs_manifest *manifest,
                                   struct kvfs_geometry *geometry);

/**
 * Fills `*out`, whose `size` the caller has set, with what layer `layer`, from 0, keeps.
 */
kvfs_status kvfs_manifest_layer(const struct kvfs_manifest *manifest,
                                uint32_t layer,
                                struct kvfs_layer *out);

/**
 * Fills `*block`, whose `size` the caller has set, with K and V of the page of layer `layer` that
 * starts at token `start`, at the positions that it was written for. `file` is the whole page
 * file in memory, `[file_bytes]`; the block points into it.
 *
 * Reads the first 4096 bytes and checks shape and place. What a mount shows as a page was
 * verified; for any other file there is `kvfs_page_verify`.
 *
 * `KVFS_STATUS_ARGUMENT` if the cache has no page there, `KVFS_STATUS_PAGE` if the file is not
 * that page.
 */
kvfs_status kvfs_page_block(const struct kvfs_manifest *manifest,
                            uint32_t layer,
                            uint64_t start,
                            const void *file,
                            size_t file_bytes,
                            struct kvfs_block *block);

/**
 * Checks all bytes of a page file, which is given as to `kvfs_page_block`, against the checksum
 * that it declares. A page that declares none passes if its header is right.
 *
 * `KVFS_STATUS_PAGE` if it is damaged, or not that page.
 */
kvfs_status kvfs_page_verify(const struct kvfs_manifest *manifest,
                             uint32_t layer,
                             uint64_t start,
                             const void *file,
                             size_t file_bytes);

/**
 * Fills `*side`, whose `size` the caller has set, with the side rows of the page that `kvfs_page_block` of the same
 * arguments gives K and V of. It points into `file`.
 *
 * `KVFS_STATUS_ARGUMENT` if the layer keeps none, otherwise as `kvfs_page_block`.
 */
kvfs_status kvfs_page_side(const struct kvfs_manifest *manifest,
                           uint32_t layer,
                           uint64_t start,
                           const void *file,
                           size_t file_bytes,
                           struct kvfs_side *side);

/**
 * Fills `*block`, whose `size` the caller has set, with K and V of a tail of layer `layer`: `rows_bytes` bytes of
 * rows, of each token `K[num_kv_heads, head_dim]`, then `V[num_kv_heads, v_head_dim]`, then its side row, where
 * the layer keeps such, the first of them at position `start`. A last row that is not whole is left out; where
 * there are side rows, all of them are then. The block points into `rows`; what is appended to the file
 * afterwards does not change it.
 *
 * `KVFS_STATUS_ARGUMENT` if the layer has no tails.
 */
kvfs_status kvfs_layer_tail_block(const struct kvfs_manifest *manifest,
                                  uint32_t layer,
                                  uint64_t start,
                                  const void *rows,
                                  size_t rows_bytes,
                                  struct kvfs_block *block);

/**
 * Fills `*side`, whose `size` the caller has set, with the side rows of the tail that `kvfs_layer_tail_block` of
 * the same arguments gives K and V of. It points into `rows`.
 *
 * `KVFS_STATUS_ARGUMENT` if the layer keeps none.
 */
kvfs_status kvfs_tail_side(const struct kvfs_manifest *manifest,
                           uint32_t layer,
                           const void *rows,
                           size_t rows_bytes,
                           struct kvfs_side *side);

/**
 * `kvfs_layer_tail_block` of a model of which all layers have the same rows.
 *
 * `KVFS_STATUS_ARGUMENT` if some keep side rows: nobody can tell then where a row ends.
 */
kvfs_status kvfs_tail_block(const struct kvfs_manifest *manifest,
                            uint64_t start,
                            const void *rows,
                            size_t rows_bytes,
                            struct kvfs_block *block);

/**
 * Creates `*sequences` of the model in directory `model`, `MOUNT/models/NAME`, to be freed with
 * `kvfs_sequences_free`. Names are UTF-8 that ends with NUL, positions go from `start` to before
 * `end`, `UINT64_MAX` for all that come. When an operation returns it is durable; it has happened as
 * a whole or not at all. Nobody may append to a sequence meanwhile.
 *
 * `KVFS_STATUS_MANIFEST` if there is no model, `KVFS_STATUS_FILE` if it cannot be read.
 */
kvfs_status kvfs_sequences_open(const char *model,
                                struct kvfs_sequences **sequences);

/**
 * Frees what `kvfs_sequences_open` gave, when no call uses it any more. NULL is fine.
 */
void kvfs_sequences_free(struct kvfs_sequences *sequences);

/**
 * Removes the tokens at some positions (`llama_memory_seq_rm`).
 *
 * `KVFS_STATUS_MISSING` if there is no such sequence, or a recurrent layer no snapshot to go back to;
 * `KVFS_STATUS_FILE` for what the kernel answers otherwise.
 */
kvfs_status kvfs_seq_rm(const struct kvfs_sequences *sequences,
                        const char *name,
                        uint64_t start,
                        uint64_t end);

/**
 * Makes `to` of the tokens of `from` at some positions (`llama_memory_seq_cp`); they share their
 * pages.
 *
 * `KVFS_STATUS_EXISTS` if `to` has tokens; the others as `kvfs_seq_rm`.
 */
kvfs_status kvfs_seq_cp(const struct kvfs_sequences *sequences,
                        const char *from,
                        const char *to,
                        uint64_t start,
                        uint64_t end);

/**
 * Removes all other sequences (`llama_memory_seq_keep`).
 *
 * As `kvfs_seq_rm`.
 */
kvfs_status kvfs_seq_keep(const struct kvfs_sequences *sequences, const char *name);

/**
 * Moves the tokens at some positions by `delta` (`llama_memory_seq_add`). Those that would stand
 * before 0 are removed. No K is rotated: `kvfs_seq_runs` tells how far each row has moved.
 *
 * `KVFS_STATUS_ARGUMENT` for tokens that would stand too far behind; the others as `kvfs_seq_rm`.
 */
kvfs_status kvfs_seq_add(const struct kvfs_sequences *sequences,
                         const char *name,
                         uint64_t start,
                         uint64_t end,
                         int64_t delta);

/**
 * Divides the positions of some tokens, rounding down (`llama_memory_seq_div`).
 *
 * `KVFS_STATUS_ARGUMENT` for a divisor of 0 and for more than a million tokens; the others as
 * `kvfs_seq_rm`.
 */
kvfs_status kvfs_seq_div(const struct kvfs_sequences *sequences,
                         const char *name,
                         uint64_t start,
                         uint64_t end,
                         uint64_t divisor);

/**
 * Removes the tokens at some positions and moves those behind them up, and the sequence as it was
 * becomes `snapshot`: what an engine does when its context is full. It takes as long as a few files
 * do; an engine that does not want to wait calls it on another thread and keeps new rows meanwhile.
 *
 * As `kvfs_seq_cp`.
 */
kvfs_status kvfs_seq_shift(const struct kvfs_sequences *sequences,
                           const char *name,
                           uint64_t start,
                           uint64_t end,
                           const char *snapshot);

/**
 * Removes all tokens of a sequence (`llama_memory_clear` for one).
 *
 * As `kvfs_seq_rm`.
 */
kvfs_status kvfs_seq_clear(const struct kvfs_sequences *sequences, const char *name);

/**
 * Fills `*ends`, whose `size` the caller has set (`llama_memory_seq_pos_min` and `_max`).
 *
 * As `kvfs_seq_rm`.
 */
kvfs_status kvfs_seq_ends(const struct kvfs_sequences *sequences,
                          const char *name,
                          struct kvfs_sequence_ends *ends);

/**
 * Writes where the rows of a sequence stand to `runs`, `[capacity]`, in the order of rows, and how
 * many runs there are to `*count`. Where there are more than `capacity` the first ones are written.
 *
 * As `kvfs_seq_rm`.
 */
kvfs_status kvfs_seq_runs(const struct kvfs_sequences *sequences,
                          const char *name,
                          struct kvfs_run *runs,
                          size_t capacity,
                          uint64_t *count);

/**
 * Creates `*sequence` of the directory of a sequence, `MOUNT/models/NAME/sequences/NAME`, to be freed
 * with `kvfs_sequence_free`. It is listed now, and whenever `kvfs_sequence_refresh` is called.
 *
 * `KVFS_STATUS_MANIFEST` if it is none of a model, `KVFS_STATUS_FILE` if it cannot be read.
 */
kvfs_status kvfs_sequence_open(const char *directory,
                               struct kvfs_sequence **sequence);

/**
 * Frees what `kvfs_sequence_open` gave; a scan of it goes on. NULL is fine.
 */
void kvfs_sequence_free(struct kvfs_sequence *sequence);

/**
 * Lists the sequence anew, after pages were sealed or replaced. Rows that are appended to tails need no
 * refresh.
 *
 * `KVFS_STATUS_ARGUMENT` while a scan of it is not freed, `KVFS_STATUS_FILE` and `KVFS_STATUS_PAGE` as
 * the kernel answers.
 */
kvfs_status kvfs_sequence_refresh(const struct kvfs_sequence *sequence);

/**
 * Writes to `*tokens` of how many tokens every layer has rows, and `tokens` ids if there is such a
 * file.
 *
 * `KVFS_STATUS_FILE` if it cannot be read.
 */
kvfs_status kvfs_sequence_tokens(const struct kvfs_sequence *sequence, uint64_t *tokens);

/**
 * Creates `*scan` of all layers of a sequence, from token `start` to before `end`, to be freed with
 * `kvfs_cuda_scan_free`. Until then `cuda` takes no other call and `sequence` no refresh; both may be
 * freed.
 *
 * Pages of the hot window are attended to where they are on the device. The others go through the
 * pinned buffers, or from where they are mapped, ahead of the layer that is attended to.
 *
 * `KVFS_STATUS_ARGUMENT` if another scan has `cuda`; `KVFS_STATUS_MISSING` if a layer has no page or tail
 * for some of the tokens (rows of a tail are read when their turn comes); `KVFS_STATUS_UNSUPPORTED` for a sequence whose tokens were removed or moved;
 * `KVFS_STATUS_MEMORY` and `KVFS_STATUS_DEVICE` as `kvfs_cuda_create`. A hot window that finds less
 * memory than it was given is smaller, and no error.
 */
kvfs_status kvfs_cuda_scan_begin(const struct kvfs_cuda *cuda,
                                 const struct kvfs_sequence *sequence,
                                 uint64_t start,
                                 uint64_t end,
                                 struct kvfs_cuda_scan **scan);

/**
 * Frees what `kvfs_cuda_scan_begin` gave; what was asked for is still done. NULL is fine.
 */
void kvfs_cuda_scan_free(struct kvfs_cuda_scan *scan);

/**
 * Writes to `*layer` the number of the layer that is attended to next.
 *
 * `KVFS_STATUS_MISSING` after the last one.
 */
kvfs_status kvfs_cuda_scan_layer(const struct kvfs_cuda_scan *scan, uint32_t *layer);

/**
 * Attends to the next layer, in the order of the stream of `call`, as `kvfs_cuda_run` does; ranges of
 * a selection count from the first token of the scan. It returns when all of the layer is in buffers or on
 * its way, and meanwhile has begun to bring the layers behind it: the host is one layer ahead of the
 * device at most.
 *
 * `KVFS_STATUS_MISSING` after the last layer, `KVFS_STATUS_PAGE` and `KVFS_STATUS_FILE` for a page that
 * cannot be read, which ends the scan; the others as `kvfs_cuda_run`.
 */
kvfs_status kvfs_cuda_scan_attend(const struct kvfs_cuda_scan *scan,
                                  const struct kvfs_cuda_call *call,
                                  const struct kvfs_options *options);

/**
 * Creates `*summaries` of no block, to be freed with `kvfs_cuda_summaries_free`. They are for `cuda`, and
 * for another one with the same heads on the same device.
 *
 * `KVFS_STATUS_MEMORY` and `KVFS_STATUS_DEVICE` as `kvfs_cuda_create`.
 */
kvfs_status kvfs_cuda_summaries_create(const struct kvfs_cuda *cuda,
                                       struct kvfs_cuda_summaries **summaries);

/**
 * Frees what `kvfs_cuda_summaries_create` gave. NULL is fine.
 */
void kvfs_cuda_summaries_free(struct kvfs_cuda_summaries *summaries);

/**
 * Makes summaries those of `num_blocks` blocks in host memory, of which K is read from block `first` on:
 * what is known of sealed pages stays, while tokens come behind them. It returns when they are there.
 *
 * `KVFS_STATUS_ARGUMENT` if fewer than `first` are known, `KVFS_STATUS_UNSUPPORTED` for a block whose K is
 * more than a pinned buffer; the others as `kvfs_cuda_run`. After an error only the first ones are left.
 */
kvfs_status kvfs_cuda_summarise(const struct kvfs_cuda *cuda,
                                const struct kvfs_cuda_summaries *summaries,
                                const struct kvfs_block *blocks,
                                size_t num_blocks,
                                size_t first);

/**
 * Writes to `ranges`, `[capacity]`, the tokens of the blocks that can matter most to queries in host
 * memory (Quest), ascending and as `kvfs_options.selection` takes them, and to `*count` how many ranges
 * there are. `num_blocks / 2 + 1` are enough; where there are more than `capacity` the first ones are
 * written. There is one summary for each block; K and V are not read. `options` may be NULL; a selection
 * in it is not looked at.
 *
 * As `kvfs_cuda_run`. It waits for the device.
 */
kvfs_status kvfs_cuda_select_pages(const struct kvfs_cuda *cuda,
                                   const struct kvfs_cuda_summaries *summaries,
                                   const struct kvfs_page_selection *selection,
                                   struct kvfs_token_range *ranges,
                                   size_t capacity,
                                   uint64_t *count);

/**
 * Creates `*write_back` to the sequence in `directory`, which holds `tokens` tokens and has the
 * directories of its layers, to be freed with `kvfs_write_back_free`. It takes 4 MiB of pinned memory, or
 * 64 rows. What cannot be written is `KVFS_STATUS_FILE` of this and all later calls: rows have no gaps,
 * and what is on the mount stays as it is.
 *
 * `KVFS_STATUS_MEMORY` and `KVFS_STATUS_DEVICE` as `kvfs_cuda_create`.
 */
kvfs_status kvfs_write_back_create(const struct kvfs_cuda *cuda,
                                   const char *directory,
                                   const struct kvfs_manifest *manifest,
                                   uint64_t tokens,
                                   struct kvfs_write_back **write_back);

/**
 * Frees what `kvfs_write_back_create` gave, after what it was given is written. NULL is fine.
 */
void kvfs_write_back_free(struct kvfs_write_back *write_back);

/**
 * Takes the next rows of a layer, `bytes` bytes at `rows` in device memory: of each token K of all heads,
 * then V, then its side row, where the layer keeps such (`kvfs_layer.tail_row_bytes`). They are copied when everything that is in `stream` now has been done, and nobody waits; until
 * then nobody may free or change them (`kvfs_write_back_hold`).
 *
 * `KVFS_STATUS_FILE` also for bytes that are no whole rows and for no layer of the manifest.
 */
kvfs_status kvfs_write_back_rows(const struct kvfs_write_back *write_back,
                                 uint32_t layer,
                                 uint64_t rows,
                                 size_t bytes,
                                 void *stream);

/**
 * What comes later in a stream waits, on the device, until all rows that were given have been copied:
 * before their memory is used again.
 *
 * `KVFS_STATUS_DEVICE` if the device has failed.
 */
kvfs_status kvfs_write_back_hold(const struct kvfs_write_back *write_back,
                                 void *stream);

/**
 * All layers have been given the rows of these tokens, `[count]`: their ids come after them.
 */
kvfs_status kvfs_write_back_tokens(const struct kvfs_write_back *write_back,
                                   const uint32_t *tokens,
                                   size_t count);

/**
 * Waits until everything that was given is in the files.
 */
kvfs_status kvfs_write_back_flush(const struct kvfs_write_back *write_back);

/**
 * The same, and it survives a crash.
 */
kvfs_status kvfs_write_back_sync(const struct kvfs_write_back *write_back);

/**
 * Tells which of `count` names in `directory` (`MOUNT/files/...` or `MOUNT/models/...`) are there, and how many bytes
 * their files have: `found` and `length` of each. The mount is asked about all of them at once; in a directory of
 * something else each costs a system call.
 *
 * `KVFS_STATUS_FILE` if the directory may not be entered or the mount is gone, `KVFS_STATUS_ARGUMENT` if a name is none.
 */
kvfs_status kvfs_have_many(const char *directory,
                           struct kvfs_named *names,
                           size_t count);

/**
 * Reads `count` files of `directory`, each as a whole into its `data`: `found`, `length` and `error` of each. Small files
 * of a mount come many at once, large ones are opened. What is wrong with one of them is no failure of the call.
 *
 * `KVFS_STATUS_FILE` if the mount is gone, `KVFS_STATUS_ARGUMENT` if a name is none.
 */
kvfs_status kvfs_read_many(const char *directory,
                           struct kvfs_named *names,
                           size_t count);

/**
 * Tells the mount of `path` what will become of it: `hint` is one of `kvfs_hint`. It is about the pages that are there
 * now, and an open takes it back. Nothing is deleted.
 *
 * `KVFS_STATUS_MISSING` if there is no such path, `KVFS_STATUS_UNSUPPORTED` where hints are not known,
 * `KVFS_STATUS_FILE` if it is somebody else's, or too many hints are being carried out: try that again in a moment.
 */
kvfs_status kvfs_give_hint(const char *path,
                           uint32_t hint);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVFS_H */
