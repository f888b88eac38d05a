// How stored K and V become f32 in registers: eight elements of a row for each lane.
//
// `load` issues the loads and nothing else, so that many are under way at once; `values` converts.
// `index` tells which elements of the row a lane holds: any eight will do as long as q and o
// follow.
#pragma once
#include "device.h"

namespace kvfs {

template <class T>
__device__ __forceinline__ T read(const u8* address) {
    return __ldg(reinterpret_cast<const T*>(address));
}

struct F16 {
    struct Raw {
        uint4 words;
    };
    static constexpr u32 RAW_WORDS = 4;

    __device__ __forceinline__ static u32 index(u32 part, u32 i, u32) {
        return part * LANE_ELEMENTS + i;
    }
    __device__ __forceinline__ static Raw load(const u8* row, u32 part, u32) {
        return {read<uint4>(row + part * 16)};
    }
    __device__ __forceinline__ static void values(const Raw& raw, float (&out)[LANE_ELEMENTS]) {
        const u32 words[4] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
            out[i] = half_value(words[i / 2] >> (i % 2 * 16) & 0xffff);
        }
    }
};

// The upper half of an f32.
struct Bf16 : F16 {
    __device__ __forceinline__ static void values(const Raw& raw, float (&out)[LANE_ELEMENTS]) {
        const u32 words[4] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; i += 2) {
            out[i] = __uint_as_float(words[i / 2] << 16);
            out[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000u);
        }
    }
};

// Four elements of each half of the row, so that neighbouring lanes read neighbouring bytes.
struct F32 {
    struct Raw {
        uint4 words[2];
    };
    static constexpr u32 RAW_WORDS = 8;

    __device__ __forceinline__ static u32 index(u32 part, u32 i, u32 elements) {
        return i / 4 * (elements / 2) + part * 4 + i % 4;
    }
    __device__ __forceinline__ static Raw load(const u8* row, u32 part, u32 elements) {
        return {{read<uint4>(row + part * 16), read<uint4>(row + elements * 2 + part * 16)}};
    }
    __device__ __forceinline__ static void values(const Raw& raw, float (&out)[LANE_ELEMENTS]) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            out[half * 4] = __uint_as_float(raw.words[half].x);
            out[half * 4 + 1] = __uint_as_float(raw.words[half].y);
            out[half * 4 + 2] = __uint_as_float(raw.words[half].z);
            out[half * 4 + 3] = __uint_as_float(raw.words[half].w);
        }
    }
};

// S.EEEE.MMM without infinities. In an f32's place exponent and mantissa are 2^120 too small,
// subnormals included.
struct F8E4m3 {
    struct Raw {
        uint2 words;
    };
    static constexpr u32 RAW_WORDS = 2;

    __device__ __forceinline__ static u32 index(u32 part, u32 i, u32) {
        return part * LANE_ELEMENTS + i;
    }
    __device__ __forceinline__ static Raw load(const u8* row, u32 part, u32) {
        return {read<uint2>(row + part * 8)};
    }
    __device__ __forceinline__ static void values(const Raw& raw, float (&out)[LANE_ELEMENTS]) {
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
            const u32 byte = (i < 4 ? raw.words.x : raw.words.y) >> (i % 4 * 8) & 0xff;
            const u32 magnitude = byte & 0x7f;
            // 0x7f is NaN.
            const u32 bits = magnitude == 0x7f ? 0x7fc00000u : magnitude << 20;
            out[i] = __uint_as_float(bits | (byte & 0x80) << 24) * 0x1p120f;
        }
    }
};

// ggml's blocks of 32 elements with an f16 scale. Rows are aligned to two bytes only.
constexpr u32 BLOCK_ELEMENTS = 32;
// Lanes of a block.
constexpr u32 BLOCK_LANES = BLOCK_ELEMENTS / LANE_ELEMENTS;

__device__ __forceinline__ u32 read_word(const u8* address) {
    return read<u16>(address) | static_cast<u32>(read<u16>(address + 2)) << 16;
}

// A scale, then 32 signed bytes.
struct Q8_0 {
    struct Raw {
        u32 words[2];
        u32 scale;
    };
    static constexpr u32 RAW_WORDS = 3;
    static constexpr u32 BLOCK_BYTES = 34;

    __device__ __forceinline__ static u32 index(u32 part, u32 i, u32) {
        return part * LANE_ELEMENTS + i;
    }
    __device__ __forceinline__ static Raw load(const u8* row, u32 part, u32) {
        const u8* block = row + part / BLOCK_LANES * BLOCK_BYTES;
        const u8* bytes = block + 2 + part % BLOCK_LANES * LANE_ELEMENTS;
        return {{read_word(bytes), read_word(bytes + 4)}, read<u16>(block)};
    }
    __device__ __forceinline__ static void values(const Raw& raw, float (&out)[LANE_ELEMENTS]) {
        const float scale = half_value(raw.scale);
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
            const u32 byte = raw.words[i / 4] >> (i % 4 * 8) & 0xff;
            out[i] = scale * static_cast<float>(static_cast<signed char>(byte));
        }
    }
};

// A scale, then 16 bytes: low nibbles are the first half of the block, high ones the second. A
// lane takes both nibbles of its four bytes.
struct Q4_0 {
    struct Raw {
        u32 word;
        u32 scale;
    };
    static constexpr u32 RAW_WORDS = 2;
    static constexpr u32 BLOCK_BYTES = 18;

    __device__ __forceinline__ static u32 index(u32 part, u32 i, u32) {
        return part / BLOCK_LANES * BLOCK_ELEMENTS + part % BLOCK_LANES * 4 + i / 4 * 16 + i % 4;
    }
    __device__ __forceinline__ static Raw load(const u8* row, u32 part, u32) {
        const u8* block = row + part / BLOCK_LANES * BLOCK_BYTES;
        return {read_word(block + 2 + part % BLOCK_LANES * 4), read<u16>(block)};
    }
    __device__ __forceinline__ static void values(const Raw& raw, float (&out)[LANE_ELEMENTS]) {
        const float scale = half_value(raw.scale);
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; ++i) {
            const u32 nibble = raw.word >> (i % 4 * 8 + i / 4 * 4) & 15;
            out[i] = scale * (static_cast<float>(nibble) - 8.0f);
        }
    }
};

}  // namespace kvfs
