// What the host passes to the kernels. All sizes are in elements, strides in bytes; everything
// lies in device memory, or in host memory that the device can read.
//
// Heads: query head h reads KV head h / group. A *row* is one query head of one query; the rows of
// a KV head are numbered query * group + (head in its group).
#pragma once
#include "device.h"

namespace kvfs {

// Consecutive tokens of one layer: a page, a tail, or a part of one. The row of (head, token)
// starts at head * head_stride + token * token_stride, so both orders of axes fit. Addresses and
// strides are multiples of 16 (f16, bf16, f32), 8 (f8_e4m3) or 2 (q8_0, q4_0).
struct Page {
    const u8* k;
    // Equal to k where the values are the first elements of K (latent attention).
    const u8* v;
    u32 k_head_stride, k_token_stride;
    u32 v_head_stride, v_token_stride;
    // Position of the first token in the sequence.
    i64 position;
    // Below 2^30; 0 is fine.
    u32 tokens;
    // Of the first token among those of all pages.
    u32 index;
    // Which copy of the queries: pages that moved by the same number of positions share one.
    u32 queries;
    u32 reserved;
};

// A run of tokens that may go through several pages: one block's share. A launch takes 65535 at
// most.
struct Split {
    u32 page;
    // First token in it.
    u32 token;
    // 0 is fine.
    u32 tokens;
};

// Heads and their rows.
struct Heads {
    u32 num_queries;
    u32 num_kv_heads;
    // Query heads for each KV head.
    u32 group;
    u32 head_dim;
    u32 v_head_dim;

    __device__ __forceinline__ u32 rows() const { return num_queries * group; }
    __device__ __forceinline__ u32 num_qo_heads() const { return num_kv_heads * group; }

    // The place of a row in [num_queries, num_qo_heads].
    __device__ __forceinline__ u32 output(u32 kv_head, u32 row) const {
        return row / group * num_qo_heads() + kv_head * group + row % group;
    }
};

// What is attended to, and how.
struct Attention {
    Heads heads;
    // Of sliding window layers: a query sees its own position and those less than `window` before.
    // 0 for none, at most 2^29.
    u32 window;
    // Logits become cap * tanh(logit / cap); 0 for none. q is scaled accordingly (see prepare.h).
    float soft_cap;
    // [copies, num_kv_heads, rows, head_dim], made by prepare_queries.
    const float* q;
    const Page* pages;
    const Split* splits;
    // [num_queries]; only the masked kernels look.
    const i64* positions;
};

}  // namespace kvfs
