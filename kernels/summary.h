// What a page's keys can be at most (Quest, Tang et al. 2024): the smallest and largest K of a
// page, made once when it is sealed, and from them the bound of q . k that pages are ranked by.
#pragma once
#include "scores.h"

namespace kvfs {

struct SummaryArguments {
    const Page* pages;
    // [pages, num_kv_heads, 2, head_dim]: smallest, then largest. (infinity, -infinity) without
    // tokens; a NaN makes both infinite, so that selection does not hide it.
    float* bounds;
    u32 num_kv_heads;
    u32 head_dim;
};

template <u32 WIDTH>
struct BlockBounds {
    // [warp, smallest or largest, element]
    float of[WARPS][2][WIDTH];
};

// Makes room for the numbers from `from` to `to`.
__device__ __forceinline__ void widen(float from, float to, float& lower, float& upper) {
    lower = fminf(lower, from);
    upper = fmaxf(upper, to);
}

// The bounds of the tokens of one warp, in all of its groups of lanes.
template <class Element, u32 WIDTH>
__device__ __forceinline__ void warp_bounds(const SummaryArguments& a, const Page& page,
                                            const Lane<WIDTH>& lane, u32 kv_head,
                                            float (&lower)[LANE_ELEMENTS],
                                            float (&upper)[LANE_ELEMENTS]) {
    constexpr u32 STEPS = 4, TOKENS = Lane<WIDTH>::TOKENS;
    const u8* rows = page.k + static_cast<u64>(kv_head) * page.k_head_stride;
    for (u32 token = lane.warp * TOKENS * STEPS + lane.slot; token < page.tokens;
         token += WARPS * TOKENS * STEPS) {
        typename Element::Raw raw[STEPS];
        load_rows<Element, WIDTH, STEPS>(lane, rows, page.k_token_stride, a.head_dim, token,
                                         page.tokens, raw);
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            if (token + s * TOKENS >= page.tokens) continue;
            float values[LANE_ELEMENTS];
            Element::values(raw[s], values);
#pragma unroll
            for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
                const bool number = values[i] == values[i];
                widen(number ? values[i] : -infinity(), number ? values[i] : infinity(), lower[i],
                      upper[i]);
            }
        }
    }
#pragma unroll
    for (u32 distance = Lane<WIDTH>::LANES; distance < WARP_LANES; distance *= 2) {
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
            widen(__shfl_xor_sync(ALL_LANES, lower[i], distance),
                  __shfl_xor_sync(ALL_LANES, upper[i], distance), lower[i], upper[i]);
        }
    }
}

// Blocks: x = page, y = KV head; BLOCK_THREADS threads.
template <class Element, u32 WIDTH>
__device__ __forceinline__ void summarise(const SummaryArguments& a) {
    typedef BlockBounds<WIDTH> Shared;
    KVFS_SHARED(Shared, block);
    const Lane<WIDTH> lane;
    float lower[LANE_ELEMENTS], upper[LANE_ELEMENTS];
#pragma unroll
    for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
        lower[i] = infinity();
        upper[i] = -infinity();
    }
    warp_bounds<Element, WIDTH>(a, a.pages[blockIdx.x], lane, blockIdx.y, lower, upper);
    if (lane.slot == 0 && lane.within(a.head_dim)) {
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
            const u32 element = Element::index(lane.part, i, a.head_dim);
            block.of[lane.warp][0][element] = lower[i];
            block.of[lane.warp][1][element] = upper[i];
        }
    }
    __syncthreads();
    const u64 of_head = static_cast<u64>(blockIdx.x) * a.num_kv_heads + blockIdx.y;
    float* bounds = a.bounds + of_head * 2 * a.head_dim;
    for (u32 element = threadIdx.x; element < a.head_dim; element += BLOCK_THREADS) {
        float lower = infinity(), upper = -infinity();
        for (u32 warp = 0; warp < WARPS; ++warp) {
            widen(block.of[warp][0][element], block.of[warp][1][element], lower, upper);
        }
        bounds[element] = lower;
        bounds[a.head_dim + element] = upper;
    }
}

struct BoundArguments {
    Heads heads;
    // Makes natural logits of the scaled q: ln(2), or the soft cap.
    float factor;
    // As in Attention.
    const float* q;
    const Page* pages;
    // As in SummaryArguments.
    const float* bounds;
    u32 num_pages;
    // [num_queries, num_qo_heads, pages]: the most that a logit (before the soft cap) can be;
    // -infinity without tokens.
    float* most;
};

// The sum over elements of max(q * smallest, q * largest). One warp takes one row.
//
// Blocks: x = page, y = KV head; BLOCK_THREADS threads.
__device__ __forceinline__ void bound_logits(const BoundArguments& a) {
    const u32 lane = threadIdx.x % WARP_LANES, dim = a.heads.head_dim, kv_head = blockIdx.y;
    const u32 rows = a.heads.rows();
    const Page& page = a.pages[blockIdx.x];
    const u64 of_head = static_cast<u64>(blockIdx.x) * a.heads.num_kv_heads + kv_head;
    const float* bounds = a.bounds + of_head * 2 * dim;
    const u64 of_copy = static_cast<u64>(page.queries) * a.heads.num_kv_heads + kv_head;
    for (u32 row = threadIdx.x / WARP_LANES; row < rows; row += WARPS) {
        const float* q = a.q + (of_copy * rows + row) * dim;
        float sum = 0.0f;
        for (u32 element = lane; element < dim; element += WARP_LANES) {
            const float most = fmaxf(q[element] * bounds[element],
                                     q[element] * bounds[dim + element]);
            // 0 * infinity: such an element has no say.
            if (most == most) sum += most;
        }
        sum = sum_of_lanes<WARP_LANES>(sum);
        if (lane == 0) {
            a.most[static_cast<u64>(a.heads.output(kv_head, row)) * a.num_pages + blockIdx.x] =
                page.tokens == 0 ? -infinity() : sum * a.factor;
        }
    }
}

}  // namespace kvfs
