// The scores of a few tokens for a few rows, in units of log2: what attending and counting mass
// have in common.
#pragma once
#include "arguments.h"
#include "element.h"

namespace kvfs {

// Where a run of tokens of one page lies for one KV head, and which of them are read.
struct Run {
    const u8* k;
    const u8* v;
    u32 first, end;
};

// Eight elements of ROWS rows of q, for one copy of the queries. Rows beyond the last repeat it.
template <class Element, u32 WIDTH, u32 ROWS>
__device__ __forceinline__ void load_queries(const Attention& a, const Lane<WIDTH>& lane,
                                             u32 kv_head, u32 first_row, u32 copy,
                                             float (&q)[ROWS][LANE_ELEMENTS]) {
    const u32 rows = a.heads.rows(), dim = a.heads.head_dim;
    const float* of_head =
        a.q + (static_cast<u64>(copy) * a.heads.num_kv_heads + kv_head) * rows * dim;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        const float* row = of_head + static_cast<u64>(least(first_row + r, rows - 1)) * dim;
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
            q[r][i] = lane.within(dim) ? __ldg(row + Element::index(lane.part, i, dim)) : 0.0f;
        }
    }
}

// Loads rows of STEPS tokens, each TOKENS after the one before; those beyond the end are 0.
template <class Element, u32 WIDTH, u32 STEPS>
__device__ __forceinline__ void load_rows(const Lane<WIDTH>& lane, const u8* rows, u32 stride,
                                          u32 elements, u32 token, u32 end,
                                          typename Element::Raw (&raw)[STEPS]) {
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s, token += Lane<WIDTH>::TOKENS) {
        raw[s] = token < end && lane.within(elements)
                     ? Element::load(rows + static_cast<u64>(token) * stride, lane.part, elements)
                     : typename Element::Raw{};
    }
}

// q . k, capped, in every lane that has the token.
template <class Element, u32 WIDTH, u32 STEPS, u32 ROWS>
__device__ __forceinline__ void score(const typename Element::Raw (&raw)[STEPS],
                                      const float (&q)[ROWS][LANE_ELEMENTS], float soft_cap,
                                      float (&scores)[STEPS][ROWS]) {
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
        float k[LANE_ELEMENTS];
        Element::values(raw[s], k);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < LANE_ELEMENTS; ++i) sum = fmaf(q[r][i], k[i], sum);
            scores[s][r] = sum;
        }
    }
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            scores[s][r] = sum_of_lanes<Lane<WIDTH>::LANES>(scores[s][r]);
        }
    }
    if (soft_cap != 0.0f) {
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) scores[s][r] = soft_cap * LOG2_E * tanhf(scores[s][r]);
        }
    }
}

// What rows see of a page. A token is visible if (position of the query) - (its position) is from
// 0 to below the reach: one comparison of unsigned numbers.
template <u32 ROWS, bool MASKED>
struct Visibility {
    // Positions of the queries as tokens of the page, below 0 and up to 2^30.
    int query[ROWS];
    u32 reach;

    __device__ __forceinline__ Visibility(const Attention& a, const Page& page, u32 first_row) {
        constexpr i64 FAR = 1 << 30;
        reach = a.window > 0 ? a.window : 1u << 31;
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u32 row = least(first_row + r, a.heads.rows() - 1);
            const i64 distance = a.positions[row / a.heads.group] - page.position;
            query[r] = static_cast<int>(distance < -1 ? -1 : distance > FAR ? FAR : distance);
        }
    }

    __device__ __forceinline__ bool sees(u32 r, u32 token) const {
        return static_cast<u32>(query[r]) - token < reach;
    }

    // Leaves out tokens at the ends that no row sees.
    __device__ __forceinline__ void trim(Run& run) const {
        int newest = query[0], oldest = query[0];
#pragma unroll
        for (u32 r = 1; r < ROWS; ++r) {
            newest = newest > query[r] ? newest : query[r];
            oldest = oldest < query[r] ? oldest : query[r];
        }
        run.end = least(run.end, static_cast<u32>(newest + 1));
        const i64 first = static_cast<i64>(oldest) + 1 - reach;
        if (first > run.first) run.first = static_cast<u32>(first);
    }
};

// Without a mask all rows see all tokens.
template <u32 ROWS>
struct Visibility<ROWS, false> {
    __device__ __forceinline__ Visibility(const Attention&, const Page&, u32) {}
    __device__ __forceinline__ bool sees(u32, u32) const { return true; }
    __device__ __forceinline__ void trim(Run&) const {}
};

}  // namespace kvfs
