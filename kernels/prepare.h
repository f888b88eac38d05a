// Queries as the other kernels want them: in the order of KV heads, scaled, and rotated once for
// each distance by which pages have moved.
//
// With rotary embedding q . R(d) k = R(-d) q . k, so tokens that stand d positions after the ones
// they were rotated for are attended to with q rotated by -d, and sealed pages stay as they are.
//
// Blocks: x = query * num_qo_heads + head, y = copy; BLOCK_THREADS threads.
#pragma once
#include "arguments.h"

namespace kvfs {

struct PrepareArguments {
    Heads heads;
    // The scale of the logits times log2(e), or divided by the soft cap where there is one.
    float scale;
    // [num_queries, num_qo_heads, head_dim]
    const float* q;
    // [copies, pairs] of (cos, sin) of the angles, -d times the frequency of the pair.
    const float2* turns;
    // Elements that turn: 2 * pairs from `first` on.
    u32 pairs;
    u32 first;
    // Whether elements 2i and 2i + 1 turn together, or i and i + pairs.
    u32 interleaved;
    // [copies, num_kv_heads, rows, head_dim]
    float* prepared;
};

__device__ __forceinline__ void prepare_queries(const PrepareArguments& a) {
    const u32 heads = a.heads.num_qo_heads(), dim = a.heads.head_dim;
    const u32 query = blockIdx.x / heads, head = blockIdx.x % heads;
    const u32 kv_head = head / a.heads.group, row = query * a.heads.group + head % a.heads.group;
    const float* q = a.q + static_cast<u64>(blockIdx.x) * dim;
    const u64 of_head = static_cast<u64>(blockIdx.y) * a.heads.num_kv_heads + kv_head;
    float* prepared = a.prepared + (of_head * a.heads.rows() + row) * dim;
    const float2* turns = a.turns + static_cast<u64>(blockIdx.y) * a.pairs;
    for (u32 element = threadIdx.x; element < dim; element += BLOCK_THREADS) {
        float value = q[element];
        if (element >= a.first && element < a.first + 2 * a.pairs) {
            const u32 at = element - a.first;
            const u32 pair = a.interleaved ? at / 2 : at % a.pairs;
            const bool second = a.interleaved ? at % 2 == 1 : at >= a.pairs;
            const u32 distance = a.interleaved ? 1 : a.pairs;
            const float other = q[second ? element - distance : element + distance];
            const float2 turn = turns[pair];
            value = value * turn.x + (second ? other : -other) * turn.y;
        }
        prepared[element] = value * a.scale;
    }
}

}  // namespace kvfs
