//! AVX2 with FMA and F16C.

#![allow(clippy::inline_always, reason = "vectors must not travel through memory")]

use std::arch::x86_64::{
    __m128i, __m256, _CMP_GT_OQ, _mm_and_si128, _mm_blendv_epi8, _mm_cmpeq_epi16,
    _mm_cvtepu8_epi16, _mm_loadl_epi64, _mm_loadu_si128, _mm_or_si128, _mm_set1_epi16,
    _mm_slli_epi16, _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256,
    _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32,
    _mm256_cvtps_ph, _mm256_div_ps, _mm256_fmadd_ps, _mm256_hadd_ps, _mm256_loadu_ps,
    _mm256_max_ps, _mm256_movemask_ps, _mm256_mul_ps, _mm256_permute2f128_ps, _mm256_round_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_storeu_ps,
    _mm256_sub_epi32, _mm256_sub_ps,
};

use super::simd::{Simd, implement_simd};

/// Exists only where the processor has the instructions.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Two rounds of interleaving leave the four sums side by side in each 128 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fold([a, b, c, d]: [__m256; 4]) -> __m256 {
    _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn total([a, b]: [__m256; 2]) -> __m256 {
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(a: __m256) -> f32 {
    let mut lanes = [0.0_f32; 8];
    // SAFETY: the array holds eight values.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), a) };
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// `S.EEEE.MMM` becomes an f16 that is 2^8 too small, subnormals included.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn f8_e4m3(bytes: __m128i) -> __m256 {
    let wide = _mm_cvtepu8_epi16(bytes);
    let magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    let sign = _mm_slli_epi16::<8>(_mm_and_si128(wide, _mm_set1_epi16(0x80)));
    let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    let halves = _mm_or_si128(_mm_slli_epi16::<7>(magnitude), sign);
    let halves = _mm_blendv_epi8(halves, _mm_set1_epi16(0x7e00), nan);
    _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn splat_f16(half: i16) -> __m256 {
    _mm256_cvtph_ps(_mm_set1_epi16(half))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn to_f16(vector: __m256) -> __m128i {
    _mm256_cvtps_ph::<0>(vector)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bf16(halves: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn i8(bytes: __m128i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibbles(bytes: __m128i, high: bool) -> __m256 {
    let wide = _mm256_cvtepu8_epi32(bytes);
    let nibbles = if high {
        _mm256_srli_epi32::<4>(wide)
    } else {
        _mm256_and_si256(wide, _mm256_set1_epi32(15))
    };
    _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn any_greater(a: __m256, b: __m256) -> bool {
    _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) != 0
}

/// `n` in the exponent's place.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn power_of_two(n: __m256) -> __m256 {
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn round(a: __m256) -> __m256 {
    _mm256_round_ps::<0>(a)
}

implement_simd! {
    Avx2, __m256, 8, 2,
    splat: _mm256_set1_ps,
    add: _mm256_add_ps,
    sub: _mm256_sub_ps,
    mul: _mm256_mul_ps,
    div: _mm256_div_ps,
    mul_add: _mm256_fmadd_ps,
    max: _mm256_max_ps,
    round: round,
    power_of_two: power_of_two,
    any_greater: any_greater,
    largest: largest,
    fold: fold,
    total: total,
    splat_f16: splat_f16,
    load: _mm256_loadu_ps,
    store: _mm256_storeu_ps,
    load_words: _mm_loadu_si128,
    store_words: _mm_storeu_si128,
    load_bytes: _mm_loadl_epi64,
    f16: _mm256_cvtph_ps,
    to_f16: to_f16,
    bf16: bf16,
    f8_e4m3: f8_e4m3,
    i8: i8,
    nibbles: nibbles,
}
