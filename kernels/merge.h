// Merging of partial results by log-sum-exp: of splits, of pages in VRAM and streamed ones, and of
// what the CPU attended to.
//
// Blocks: x = query * num_qo_heads + head; BLOCK_THREADS threads.
#pragma once
#include "device.h"

namespace kvfs {

struct MergeArguments {
    // [parts, rows, v_head_dim]
    const float* o;
    // [parts, rows], natural
    const float* m;
    // [parts, rows]
    const float* l;
    // [num_qo_heads] logits that take part in the softmax without a value; null for none. Only
    // finish_partials looks.
    const float* sinks;
    // [rows, v_head_dim]: partial results, or final ones.
    float* merged_o;
    // [rows]; finish_partials leaves them alone.
    float* merged_m;
    float* merged_l;
    u32 parts;
    // num_queries * num_qo_heads
    u32 rows;
    u32 num_qo_heads;
    u32 v_head_dim;
};

__device__ __forceinline__ float natural_exp(float x) { return exp2f(x * LOG2_E); }

__device__ __forceinline__ float largest_m(const MergeArguments& a, u32 row) {
    float top = EMPTY_M;
    for (u32 part = 0; part < a.parts; ++part) {
        top = fmaxf(top, a.m[static_cast<u64>(part) * a.rows + row]);
    }
    return top;
}

// The weighted sum over the parts of l, or of one element of o.
__device__ __forceinline__ float merged(const MergeArguments& a, u32 row, float top,
                                        const float* values, u64 stride) {
    float sum = 0.0f;
    for (u32 part = 0; part < a.parts; ++part) {
        const u64 at = static_cast<u64>(part) * a.rows + row;
        sum = fmaf(natural_exp(a.m[at] - top), values[at * stride], sum);
    }
    return sum;
}

__device__ __forceinline__ void merge_partials(const MergeArguments& a) {
    const u32 row = blockIdx.x;
    const float top = largest_m(a, row);
    for (u32 element = threadIdx.x; element < a.v_head_dim; element += BLOCK_THREADS) {
        a.merged_o[static_cast<u64>(row) * a.v_head_dim + element] =
            merged(a, row, top, a.o + element, a.v_head_dim);
    }
    if (threadIdx.x == 0) {
        a.merged_m[row] = top;
        a.merged_l[row] = merged(a, row, top, a.l, 1);
    }
}

// Merges and normalises: o / l, 0 without tokens.
__device__ __forceinline__ void finish_partials(const MergeArguments& a) {
    const u32 row = blockIdx.x;
    float top = largest_m(a, row), sink = 0.0f;
    if (a.sinks != nullptr) {
        sink = a.sinks[row % a.num_qo_heads];
        top = fmaxf(top, sink);
        sink = natural_exp(sink - top);
    }
    const float l = merged(a, row, top, a.l, 1) + sink;
    const float factor = l == 0.0f ? 0.0f : 1.0f / l;
    for (u32 element = threadIdx.x; element < a.v_head_dim; element += BLOCK_THREADS) {
        a.merged_o[static_cast<u64>(row) * a.v_head_dim + element] =
            merged(a, row, top, a.o + element, a.v_head_dim) * factor;
    }
}

}  // namespace kvfs
