//! Vectors of whole numbers and their bytes.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _mm_loadu_si128, _mm256_loadu_si256, _mm512_add_epi32,
    _mm512_and_si512, _mm512_castsi128_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps,
    _mm512_inserti32x4, _mm512_loadu_ps, _mm512_permutexvar_epi8, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_setr_epi32, _mm512_slli_epi32, _mm512_srli_epi16,
    _mm512_storeu_epi32, _mm512_storeu_ps, _mm512_xor_si512,
};

use super::{BYTES, GROUP, Packed};

/// The bytes of 16 whole numbers, each a signed digit: the lowest of all first, then the middle ones,
/// then the highest. Adding 128 to each byte, with its carry, leaves the digit plus 128.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn split(whole: __m512i) -> __m512i {
    let offset = _mm512_set1_epi32(0x80_8080);
    let digits = _mm512_xor_si512(_mm512_add_epi32(whole, offset), offset);
    let order = |byte: i32, quad: i32| 0x0c08_0400 + 0x0101_0101 * (16 * quad + byte);
    let order = _mm512_setr_epi32(
        order(0, 0),
        order(0, 1),
        order(0, 2),
        order(0, 3),
        order(1, 0),
        order(1, 1),
        order(1, 2),
        order(1, 3),
        order(2, 0),
        order(2, 1),
        order(2, 2),
        order(2, 3),
        0,
        0,
        0,
        0,
    );
    _mm512_permutexvar_epi8(order, digits)
}

/// The whole sum of the sums of each byte's products.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn join([low, middle, high]: [__m512i; BYTES]) -> __m512 {
    let high = _mm512_slli_epi32::<16>(high);
    let sum = _mm512_add_epi32(_mm512_add_epi32(low, high), _mm512_slli_epi32::<8>(middle));
    _mm512_cvtepi32_ps(sum)
}

/// The elements plus [`Packed::OFFSET`], of one half of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn unsigned<E: Packed>(bytes: __m512i, half: usize) -> __m512i {
    if !E::NIBBLES {
        return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
    }
    let bytes = if half == 1 { _mm512_srli_epi16::<4>(bytes) } else { bytes };
    _mm512_and_si512(bytes, _mm512_set1_epi8(15))
}

/// Sixteen bytes from each of four offsets.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn load_four(start: *const u8, [a, b, c, d]: [usize; 4]) -> __m512i {
    let bytes = |offset: usize| -> __m128i {
        // SAFETY: the caller promises the bytes; any alignment will do.
        unsafe { _mm_loadu_si128(start.wrapping_add(offset).cast()) }
    };
    let vector = _mm512_castsi128_si512(bytes(a));
    let vector = _mm512_inserti32x4::<1>(vector, bytes(b));
    let vector = _mm512_inserti32x4::<2>(vector, bytes(c));
    _mm512_inserti32x4::<3>(vector, bytes(d))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn load(from: &[f32]) -> __m512 {
    let from: &[f32; GROUP] = from.first_chunk().expect("a vector of values");
    // SAFETY: the array holds a vector; any alignment will do.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn load_f16(from: &[u16]) -> __m512 {
    let from: &[u16; GROUP] = from.first_chunk().expect("a vector of scales");
    // SAFETY: the array holds a vector; any alignment will do.
    let halves: __m256i = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
    _mm512_cvtph_ps(halves)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn store(to: &mut [f32], vector: __m512) {
    let to: &mut [f32; GROUP] = to.first_chunk_mut().expect("room for a vector");
    // SAFETY: the array holds a vector; any alignment will do.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn store_whole(to: &mut [i32; GROUP], vector: __m512i) {
    // SAFETY: the array holds a vector; any alignment will do.
    unsafe { _mm512_storeu_epi32(to.as_mut_ptr(), vector) }
}
