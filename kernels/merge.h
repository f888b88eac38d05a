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

// Elements of o that a lane adds up: as many as the widest rows have.
constexpr u32 MERGE_STEPS = 8;
constexpr u32 MERGE_ELEMENTS = MERGE_STEPS * WARP_LANES;

// What the warps have added up, for all threads of the block to see.
struct MergeSums {
    float o[WARPS][MERGE_ELEMENTS];
    float l[WARPS];
};

// In every lane.
__device__ __forceinline__ float largest_m(const MergeArguments& a, u32 row) {
    float top = EMPTY_M;
    for (u32 part = threadIdx.x % WARP_LANES; part < a.parts; part += WARP_LANES) {
        top = fmaxf(top, a.m[static_cast<u64>(part) * a.rows + row]);
    }
#pragma unroll
    for (u32 distance = 1; distance < WARP_LANES; distance *= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, distance));
    }
    return top;
}

// The weighted sums over the parts of o and l. The warps take the parts in turns, since a long chain of
// loads would take longer than the bytes: a layer on the device has some 66 parts.
__device__ __forceinline__ void add_parts(const MergeArguments& a, u32 row, float top,
                                          MergeSums& sums) {
    const u32 warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    float o[MERGE_STEPS] = {}, l = 0.0f;
    for (u32 part = warp; part < a.parts; part += WARPS) {
        const u64 at = static_cast<u64>(part) * a.rows + row;
        const float weight = natural_exp(a.m[at] - top);
        l = fmaf(weight, a.l[at], l);
#pragma unroll
        for (u32 s = 0; s < MERGE_STEPS; ++s) {
            const u32 element = s * WARP_LANES + lane;
            if (element < a.v_head_dim) o[s] = fmaf(weight, a.o[at * a.v_head_dim + element], o[s]);
        }
    }
#pragma unroll
    for (u32 s = 0; s < MERGE_STEPS; ++s) sums.o[warp][s * WARP_LANES + lane] = o[s];
    if (lane == 0) sums.l[warp] = l;
}

__device__ __forceinline__ float sum_of_warps(const MergeSums& sums, u32 element) {
    float sum = 0.0f;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; ++warp) sum += sums.o[warp][element];
    return sum;
}

__device__ __forceinline__ float sum_of_warps(const MergeSums& sums) {
    float sum = 0.0f;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; ++warp) sum += sums.l[warp];
    return sum;
}

// Writes the merged o, times what `factor` makes of the merged l, which it returns.
template <class Factor>
__device__ __forceinline__ float merge_row(const MergeArguments& a, u32 row, float top,
                                           Factor factor) {
    KVFS_SHARED(MergeSums, sums);
    add_parts(a, row, top, sums);
    __syncthreads();
    const float l = sum_of_warps(sums);
    for (u32 element = threadIdx.x; element < a.v_head_dim; element += BLOCK_THREADS) {
        a.merged_o[static_cast<u64>(row) * a.v_head_dim + element] =
            sum_of_warps(sums, element) * factor(l);
    }
    return l;
}

__device__ __forceinline__ void merge_partials(const MergeArguments& a) {
    const u32 row = blockIdx.x;
    const float top = largest_m(a, row);
    const float l = merge_row(a, row, top, [](float) { return 1.0f; });
    if (threadIdx.x == 0) {
        a.merged_m[row] = top;
        a.merged_l[row] = l;
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
    merge_row(a, row, top, [sink](float merged) {
        const float l = merged + sink;
        return l == 0.0f ? 0.0f : 1.0f / l;
    });
}

}  // namespace kvfs
