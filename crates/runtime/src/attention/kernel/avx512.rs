//! AVX-512 (F, BW, DQ, VL).

#![allow(clippy::inline_always, reason = "vectors must not travel through memory")]

use std::arch::x86_64::{
    __m128i, __m256i, __m512, _mm_loadu_si128, _mm256_and_si256, _mm256_cmpeq_epi16_mask,
    _mm256_cvtepu8_epi16, _mm256_loadu_si256, _mm256_mask_mov_epi16, _mm256_or_si256,
    _mm256_set1_epi16, _mm256_slli_epi16, _mm256_storeu_si256, _mm512_add_ps, _mm512_castpd_ps,
    _mm512_castps_pd, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi8_epi32,
    _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_cvtps_ph, _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_permutexvar_ps, _mm512_reduce_max_ps, _mm512_roundscale_ps, _mm512_scalef_ps,
    _mm512_set1_ps, _mm512_setr_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps,
};

use super::simd::{Simd, implement_simd};

/// Exists only where the processor has the instructions.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(()))
    }
}

/// Two rounds of interleaving leave the four sums side by side in each 128 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fold([a, b, c, d]: [__m512; 4]) -> __m512 {
    let low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
    _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
        _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)),
    )
}

/// The same for quarters instead of values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn total([a, b, c, d]: [__m512; 4]) -> __m512 {
    let low = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let high =
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(low, high), _mm512_shuffle_f32x4::<0xdd>(low, high))
}

/// `S.EEEE.MMM` becomes an f16 that is 2^8 too small, subnormals included.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn f8_e4m3(bytes: __m128i) -> __m512 {
    let wide = _mm256_cvtepu8_epi16(bytes);
    let magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)));
    let nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    let halves = _mm256_or_si256(_mm256_slli_epi16::<7>(magnitude), sign);
    let halves = _mm256_mask_mov_epi16(halves, nan, _mm256_set1_epi16(0x7e00));
    _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn splat_f16(half: i16) -> __m512 {
    _mm512_cvtph_ps(_mm256_set1_epi16(half))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn to_f16(vector: __m512) -> __m256i {
    _mm512_cvtps_ph::<0>(vector)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn bf16(halves: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn i8(bytes: __m128i) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
}

/// A table of the sixteen values; the permutation looks at the low four bits alone.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn nibbles(bytes: __m128i, high: bool) -> __m512 {
    let values = _mm512_setr_ps(
        -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
    );
    let wide = _mm512_cvtepu8_epi32(bytes);
    _mm512_permutexvar_ps(if high { _mm512_srli_epi32::<4>(wide) } else { wide }, values)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn any_greater(a: __m512, b: __m512) -> bool {
    _mm512_cmp_ps_mask::<{ std::arch::x86_64::_CMP_GT_OQ }>(a, b) != 0
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn power_of_two(n: __m512) -> __m512 {
    _mm512_scalef_ps(_mm512_set1_ps(1.0), n)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn round(a: __m512) -> __m512 {
    _mm512_roundscale_ps::<0>(a)
}

implement_simd! {
    Avx512, __m512, 16, 4,
    splat: _mm512_set1_ps,
    add: _mm512_add_ps,
    sub: _mm512_sub_ps,
    mul: _mm512_mul_ps,
    div: _mm512_div_ps,
    mul_add: _mm512_fmadd_ps,
    max: _mm512_max_ps,
    round: round,
    power_of_two: power_of_two,
    any_greater: any_greater,
    largest: _mm512_reduce_max_ps,
    fold: fold,
    total: total,
    splat_f16: splat_f16,
    load: _mm512_loadu_ps,
    store: _mm512_storeu_ps,
    load_words: _mm256_loadu_si256,
    store_words: _mm256_storeu_si256,
    load_bytes: _mm_loadu_si128,
    f16: _mm512_cvtph_ps,
    to_f16: to_f16,
    bf16: bf16,
    f8_e4m3: f8_e4m3,
    i8: i8,
    nibbles: nibbles,
}
