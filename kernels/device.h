// What the kernels take from CUDA, in one place: the tests compile the same sources as C++ and put
// a shim in its stead (tests/kernels/shim.h). No CUDA header is needed.
#pragma once

#ifdef KVFS_SHIM
#include "shim.h"
#else
// Memory that the threads of a block share.
#define KVFS_SHARED(type, name) __shared__ type name
#endif

namespace kvfs {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Warps of a block.
constexpr u32 WARPS = 4;
constexpr u32 WARP_LANES = 32;
constexpr u32 BLOCK_THREADS = WARPS * WARP_LANES;
constexpr u32 ALL_LANES = 0xffffffffu;

// Elements of a row that one lane holds: 16 bytes of f16.
constexpr u32 LANE_ELEMENTS = 8;

// m of a part without tokens, as in crates/runtime/src/attention/state.rs: finite, so no difference of two is NaN.
constexpr float EMPTY_M = -1e30f;
// log2(e), and what rounding took from it.
constexpr float LOG2_E = 1.44269504f;
constexpr float LOG2_E_REST = 1.92596303e-8f;
constexpr float LN_2 = 0.693147181f;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }

// An IEEE half.
__device__ __forceinline__ float half_value(u32 bits) {
#ifdef KVFS_SHIM
    return shim::half_value(static_cast<u16>(bits));
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
    return value;
#endif
}

// The sum over groups of LANES neighbouring lanes, in each of them.
template <u32 LANES>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

// Where a thread stands: WIDTH / 8 lanes share a token, the other lanes of the warp have the next.
template <u32 WIDTH>
struct Lane {
    static constexpr u32 LANES = WIDTH / LANE_ELEMENTS;
    // Tokens that a warp reads at once.
    static constexpr u32 TOKENS = WARP_LANES / LANES;

    u32 warp = threadIdx.x / WARP_LANES;
    // Which tokens.
    u32 slot = threadIdx.x % WARP_LANES / LANES;
    // Which elements.
    u32 part = threadIdx.x % LANES;

    // Whether a row of so many elements has some for this lane.
    __device__ __forceinline__ bool within(u32 elements) const {
        return part * LANE_ELEMENTS < elements;
    }
};

}  // namespace kvfs
