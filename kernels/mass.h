// How much attention each token got: heavy hitters (H2O, Zhang et al. 2023).
//
// A weight is known relative to the largest logit so far; what it is worth is known when all
// tokens have been seen. So this runs after the merge and reads K once more. One block adds up all
// heads of its tokens, so nobody else writes to them and the result does not depend on timing.
//
// Blocks: x = split; BLOCK_THREADS threads.
#pragma once
#include "scores.h"

namespace kvfs {

struct MassArguments {
    Attention attention;
    // [num_queries, num_qo_heads], merged
    const float* m;
    const float* l;
    // [tokens of all pages]; each weight in the softmax is added.
    float* mass;
};

// The weights of some rows for STEPS tokens, added to `sums`.
template <u32 STEPS, u32 ROWS, class Sees>
__device__ __forceinline__ void add_weights(const MassArguments& arguments, u32 kv_head,
                                            u32 first_row, const float (&scores)[STEPS][ROWS],
                                            Sees sees, float (&sums)[STEPS]) {
    const Heads& heads = arguments.attention.heads;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        if (first_row + r >= heads.rows()) continue;
        const u32 row = heads.output(kv_head, first_row + r);
        const float m = arguments.m[row] * LOG2_E, l = arguments.l[row];
        const float factor = l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            if (sees(s, r)) sums[s] = fmaf(exp2f(scores[s][r] - m), factor, sums[s]);
        }
    }
}

// All heads of the tokens of a run.
template <class Element, u32 WIDTH, u32 ROWS>
__device__ __forceinline__ void mass_of_run(const MassArguments& arguments, const Page& page,
                                            u32 first, u32 end) {
    constexpr u32 STEPS = 2, TOKENS = Lane<WIDTH>::TOKENS;
    const Attention& a = arguments.attention;
    const Lane<WIDTH> lane;
    for (u32 base = first + lane.warp * TOKENS * STEPS; base < end;
         base += WARPS * TOKENS * STEPS) {
        const u32 token = base + lane.slot;
        float sums[STEPS] = {};
        for (u32 kv_head = 0; kv_head < a.heads.num_kv_heads; ++kv_head) {
            typename Element::Raw k[STEPS];
            load_rows<Element, WIDTH, STEPS>(
                lane, page.k + static_cast<u64>(kv_head) * page.k_head_stride, page.k_token_stride,
                a.heads.head_dim, token, end, k);
            for (u32 row = 0; row < a.heads.rows(); row += ROWS) {
                float q[ROWS][LANE_ELEMENTS], scores[STEPS][ROWS];
                load_queries<Element, WIDTH, ROWS>(a, lane, kv_head, row, page.queries, q);
                score<Element, WIDTH, STEPS, ROWS>(k, q, a.soft_cap, scores);
                const Visibility<ROWS, true> visibility(a, page, row);
                const auto sees = [&](u32 s, u32 r) {
                    return visibility.sees(r, token + s * TOKENS);
                };
                add_weights<STEPS, ROWS>(arguments, kv_head, row, scores, sees, sums);
            }
        }
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            const u32 of = token + s * TOKENS;
            if (lane.part == 0 && of < end) arguments.mass[page.index + of] += sums[s];
        }
    }
}

template <class Element, u32 WIDTH, u32 ROWS>
__device__ __forceinline__ void add_mass(const MassArguments& arguments) {
    const Attention& a = arguments.attention;
    const Split split = a.splits[blockIdx.x];
    u32 left = split.tokens, first = split.token;
    for (u32 index = split.page; left > 0; ++index, first = 0) {
        const Page page = a.pages[index];
        const u32 end = least(page.tokens, first + left);
        left -= end - first;
        mass_of_run<Element, WIDTH, ROWS>(arguments, page, first, end);
    }
}

}  // namespace kvfs
