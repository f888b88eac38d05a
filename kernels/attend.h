// Attention over lists of pages: partial results (o, m, l), one for each split of the tokens.
//
// A decode step reads all of K and V once, so what counts is bytes in flight: each lane loads 16
// bytes of K and of V of several tokens before it uses any. One block takes one KV head, one split
// and ROWS rows, so K and V are read once for all query heads of a group. Each group of lanes has
// its own running softmax (Milakov and Gimelshein 2018); they merge at the end, first in the warp,
// then in the block.
//
// Blocks: x = kv_head * ceil(rows / ROWS) + pass, y = split; BLOCK_THREADS threads.
#pragma once
#include "scores.h"

namespace kvfs {

// Partial results of the splits, as crates/runtime/src/attention/state.rs has them.
struct AttendArguments {
    Attention attention;
    // [splits, num_queries, num_qo_heads, v_head_dim], not normalised
    float* o;
    // [splits, num_queries, num_qo_heads], natural
    float* m;
    // [splits, num_queries, num_qo_heads]
    float* l;
};

// What a lane has gathered, in units of log2.
template <u32 ROWS>
struct State {
    float o[ROWS][LANE_ELEMENTS];
    float m[ROWS];
    float l[ROWS];
};

// The same of whole warps.
template <u32 WIDTH, u32 ROWS>
struct BlockState {
    float o[WARPS][ROWS][WIDTH];
    float m[WARPS][ROWS];
    float l[WARPS][ROWS];
};

// Tokens that a lane has in flight. More hide more latency, but every one costs registers, of which
// q and o take 16 for each row.
template <class Element, u32 ROWS>
constexpr u32 steps() {
    return ROWS >= 8 || (ROWS >= 4 && Element::RAW_WORDS >= 8) ? 2 : 4;
}

// Adds tokens to the state: `scores` become weights.
template <u32 STEPS, u32 ROWS, class Sees>
__device__ __forceinline__ void weigh(float (&scores)[STEPS][ROWS], Sees sees, State<ROWS>& state) {
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        float top = state.m[r];
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            if (sees(s, r)) top = fmaxf(top, scores[s][r]);
        }
        const float rest = exp2f(state.m[r] - top);
        state.m[r] = top;
        state.l[r] *= rest;
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) state.o[r][i] *= rest;
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            scores[s][r] = sees(s, r) ? exp2f(scores[s][r] - top) : 0.0f;
            state.l[r] += scores[s][r];
        }
    }
}

// Attends to a run of tokens. All threads of a warp take the same way through the loop.
template <class Element, u32 WIDTH, u32 ROWS, bool MASKED>
__device__ __forceinline__ void attend_run(const Attention& a, const Page& page, const Run& run,
                                           const Lane<WIDTH>& lane,
                                           const Visibility<ROWS, MASKED>& visibility,
                                           const float (&q)[ROWS][LANE_ELEMENTS],
                                           State<ROWS>& state) {
    constexpr u32 STEPS = steps<Element, ROWS>(), TOKENS = Lane<WIDTH>::TOKENS;
    for (u32 base = run.first + lane.warp * TOKENS * STEPS; base < run.end;
         base += WARPS * TOKENS * STEPS) {
        const u32 token = base + lane.slot;
        typename Element::Raw k[STEPS], v[STEPS];
        load_rows<Element, WIDTH, STEPS>(lane, run.k, page.k_token_stride, a.heads.head_dim, token,
                                         run.end, k);
        load_rows<Element, WIDTH, STEPS>(lane, run.v, page.v_token_stride, a.heads.v_head_dim,
                                         token, run.end, v);
        float weights[STEPS][ROWS];
        score<Element, WIDTH, STEPS, ROWS>(k, q, a.soft_cap, weights);
        const auto sees = [&](u32 s, u32 r) {
            const u32 of = token + s * TOKENS;
            return of < run.end && visibility.sees(r, of);
        };
        weigh<STEPS, ROWS>(weights, sees, state);
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            float values[LANE_ELEMENTS];
            Element::values(v[s], values);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                // An infinite value must not reach a query that does not see it, as 0 * infinity.
                if (MASKED && !sees(s, r)) continue;
#pragma unroll
                for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
                    state.o[r][i] = fmaf(weights[s][r], values[i], state.o[r][i]);
                }
            }
        }
    }
}

// Merges the groups of lanes of a warp.
template <u32 WIDTH, u32 ROWS>
__device__ __forceinline__ void merge_lanes(State<ROWS>& state) {
#pragma unroll
    for (u32 distance = Lane<WIDTH>::LANES; distance < WARP_LANES; distance *= 2) {
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const float other = __shfl_xor_sync(ALL_LANES, state.m[r], distance);
            const float top = fmaxf(state.m[r], other);
            const float here = exp2f(state.m[r] - top), there = exp2f(other - top);
            state.m[r] = top;
            state.l[r] =
                state.l[r] * here + __shfl_xor_sync(ALL_LANES, state.l[r], distance) * there;
#pragma unroll
            for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
                const float o = __shfl_xor_sync(ALL_LANES, state.o[r][i], distance);
                state.o[r][i] = state.o[r][i] * here + o * there;
            }
        }
    }
}

// One state for each warp, for all threads to see.
template <class Element, u32 WIDTH, u32 ROWS>
__device__ __forceinline__ void share(const State<ROWS>& state, const Lane<WIDTH>& lane,
                                      u32 v_head_dim, BlockState<WIDTH, ROWS>& block) {
    if (lane.slot != 0) return;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        if (lane.within(v_head_dim)) {
#pragma unroll
            for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
                block.o[lane.warp][r][Element::index(lane.part, i, v_head_dim)] = state.o[r][i];
            }
        }
        if (lane.part == 0) {
            block.m[lane.warp][r] = state.m[r];
            block.l[lane.warp][r] = state.l[r];
        }
    }
}

// Merges the warps and writes the rows.
template <u32 WIDTH, u32 ROWS>
__device__ __forceinline__ void write(const AttendArguments& a,
                                      const BlockState<WIDTH, ROWS>& block, u32 kv_head,
                                      u32 first_row) {
    const Heads& heads = a.attention.heads;
    const u64 of_split = static_cast<u64>(blockIdx.y) * heads.num_queries * heads.num_qo_heads();
    const u32 count = least(ROWS, heads.rows() - first_row), dim = heads.v_head_dim;
    for (u32 at = threadIdx.x; at < count * dim; at += BLOCK_THREADS) {
        const u32 r = at / dim, element = at % dim;
        float top = EMPTY_M, o = 0.0f, l = 0.0f;
        for (u32 warp = 0; warp < WARPS; ++warp) top = fmaxf(top, block.m[warp][r]);
        // To natural units; what rounding takes from m goes to o and l.
        const float m = top == EMPTY_M ? EMPTY_M : top * LN_2;
        const float lost = fmaf(-m, LOG2_E_REST, fmaf(-m, LOG2_E, top));
        const float factor = top == EMPTY_M ? 1.0f : exp2f(lost);
        for (u32 warp = 0; warp < WARPS; ++warp) {
            const float weight = exp2f(block.m[warp][r] - top) * factor;
            o = fmaf(weight, block.o[warp][r][element], o);
            l = fmaf(weight, block.l[warp][r], l);
        }
        const u64 out = of_split + heads.output(kv_head, first_row + r);
        a.o[out * dim + element] = o;
        if (element == 0) {
            a.m[out] = m;
            a.l[out] = l;
        }
    }
}

// MASKED: each row sees what its position and the window allow. Otherwise all rows see all tokens,
// as in a decode step over pages that the host has chosen.
template <class Element, u32 WIDTH, u32 ROWS, bool MASKED>
__device__ __forceinline__ void attend(const AttendArguments& arguments) {
    typedef BlockState<WIDTH, ROWS> Shared;
    KVFS_SHARED(Shared, block);
    const Attention& a = arguments.attention;
    const Lane<WIDTH> lane;
    const u32 passes = (a.heads.rows() + ROWS - 1) / ROWS;
    const u32 kv_head = blockIdx.x / passes, first_row = blockIdx.x % passes * ROWS;
    float q[ROWS][LANE_ELEMENTS];
    State<ROWS> state;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        state.m[r] = EMPTY_M;
        state.l[r] = 0.0f;
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) state.o[r][i] = 0.0f;
    }
    const Split split = a.splits[blockIdx.y];
    u32 copy = ~0u, left = split.tokens, first = split.token;
    for (u32 index = split.page; left > 0; ++index, first = 0) {
        const Page page = a.pages[index];
        if (page.queries != copy) {
            copy = page.queries;
            load_queries<Element, WIDTH, ROWS>(a, lane, kv_head, first_row, copy, q);
        }
        Run run = {page.k + static_cast<u64>(kv_head) * page.k_head_stride,
                   page.v + static_cast<u64>(kv_head) * page.v_head_stride, first,
                   least(page.tokens, first + left)};
        left -= run.end - first;
        const Visibility<ROWS, MASKED> visibility(a, page, first_row);
        visibility.trim(run);
        attend_run<Element, WIDTH, ROWS, MASKED>(a, page, run, lane, visibility, q, state);
    }
    merge_lanes<WIDTH, ROWS>(state);
    share<Element, WIDTH, ROWS>(state, lane, a.heads.v_head_dim, block);
    __syncthreads();
    write<WIDTH, ROWS>(arguments, block, kv_head, first_row);
}

}  // namespace kvfs
