//! Products of q with K and of the weights with V.

use std::arch::x86_64::{
    __m512i, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_mul_ps, _mm512_permutexvar_epi8,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::ops::Range;

use super::vectors::{join, load, load_f16, load_four, store, unsigned};
use super::whole::QueryBlock;
use super::{Avx512Vnni, BYTES, GROUP, IntegerScratch, Packed, QUAD};
use crate::attention::kernel::element::{BLOCK_ELEMENTS, row_bytes};
use crate::attention::kernel::tile::{Scratch, TILE_TOKENS, Work, prefetch, scale_bits};

/// Scores of all tokens, one in each lane.
///
/// # Safety
/// As [`attend`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn scores<E: Packed, const R: usize>(
    simd: Avx512Vnni, work: &Work<'_>, scratch: &mut Scratch,
) {
    let blocks = work.head_dim / BLOCK_ELEMENTS;
    let Scratch { scales: v_scales, weights, integer, .. } = scratch;
    let IntegerScratch { queries, k_scales, k_rows, v_rows, .. } = integer;
    let (next, last) = work.ahead();
    let tile = work.tile;
    for block in 0..blocks {
        // SAFETY: the caller promises the rows.
        unsafe { gather_scales::<E>(0, block, (tile.k, k_rows), &mut k_scales[block]) };
    }
    for first in (0..tile.len.min(TILE_TOKENS)).step_by(GROUP) {
        let following = first + GROUP;
        let mut sums = [_mm512_setzero_ps(); R];
        for block in 0..blocks {
            // Scales are gathered long before they are used, as a vector that is loaded soon after
            // its parts were stored waits for all of them to leave the store queue; a few at a time,
            // beside products that leave time for it.
            if following < tile.len.min(TILE_TOKENS) {
                let scales = &mut k_scales[block];
                // SAFETY: the caller promises the rows.
                unsafe { gather_scales::<E>(following, block, (tile.k, k_rows), scales) };
            }
            for block in share(v_scales.len(), block, blocks) {
                let scales = &mut v_scales[block];
                // SAFETY: as above.
                unsafe { gather_scales::<E>(first, block, (tile.v, v_rows), scales) };
            }
            for token in share(GROUP, block, blocks) {
                let ahead = next.k_row((first + token).min(last));
                prefetch(simd.0, ahead, row_bytes::<E>(work.head_dim));
            }
            // SAFETY: the rows have that block.
            let k = unsafe { k_block::<E>(tile.k, &k_rows[first..], block) };
            let scale = load_f16(&k_scales[block][first..]);
            let queries: [&QueryBlock; R] = std::array::from_fn(|r| &queries[r * blocks + block]);
            let mut parts = [[_mm512_setzero_si512(); BYTES]; R];
            for r in 0..R {
                parts[r][0] = _mm512_set1_epi32(queries[r].start);
            }
            for quad in 0..BLOCK_ELEMENTS / QUAD {
                for r in 0..R {
                    for byte in 0..BYTES {
                        let q = _mm512_set1_epi32(queries[r].bytes[byte][quad]);
                        parts[r][byte] = _mm512_dpbusd_epi32(parts[r][byte], k[quad], q);
                    }
                }
            }
            for r in 0..R {
                let scale = _mm512_mul_ps(scale, _mm512_set1_ps(queries[r].unit));
                sums[r] = _mm512_fmadd_ps(join(parts[r]), scale, sums[r]);
            }
        }
        for r in 0..R {
            store(&mut weights[r][first..], sums[r]);
        }
    }
}

/// One of so many parts of `0..len`.
#[inline(always)]
fn share(len: usize, part: usize, parts: usize) -> Range<usize> {
    len * part / parts..len * (part + 1) / parts
}

/// The scales of one block of a group's rows.
///
/// # Safety
/// The rows have that block.
#[inline(always)]
unsafe fn gather_scales<E: Packed>(
    first: usize, block: usize, (bytes, rows): (&[u8], &[usize; TILE_TOKENS]),
    scales: &mut [u16; TILE_TOKENS],
) {
    let rows: &[usize; GROUP] = rows[first..].first_chunk().expect("a group of rows");
    let scales: &mut [u16; GROUP] = scales[first..].first_chunk_mut().expect("a group");
    for i in 0..GROUP {
        // SAFETY: the caller promises the rows, which have that block.
        scales[i] = unsafe { scale_bits::<E>(bytes.as_ptr().wrapping_add(rows[i]), block) };
    }
}

/// A block of K of 16 tokens: lane `t` of vector `i` has quad `i` of token `t`.
///
/// # Safety
/// The rows have that block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn k_block<E: Packed>(
    k: &[u8], rows: &[usize], block: usize,
) -> [__m512i; BLOCK_ELEMENTS / QUAD] {
    let rows: &[usize; GROUP] = rows.first_chunk().expect("a group of rows");
    let start = k.as_ptr().wrapping_add(row_bytes::<E>(block * BLOCK_ELEMENTS) + 2);
    let mut quads = [_mm512_setzero_si512(); BLOCK_ELEMENTS / QUAD];
    for half in 0..2 {
        if half == 1 && E::NIBBLES {
            break;
        }
        let mut tokens = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            // SAFETY: the caller promises the block.
            tokens[i] = unsafe {
                load_four(
                    start.wrapping_add(16 * half),
                    [rows[i], rows[i + 4], rows[i + 8], rows[i + 12]],
                )
            };
        }
        let [first, second, third, fourth] = tokens;
        let low = [_mm512_unpacklo_epi32(first, second), _mm512_unpacklo_epi32(third, fourth)];
        let high = [_mm512_unpackhi_epi32(first, second), _mm512_unpackhi_epi32(third, fourth)];
        quads[4 * half] = _mm512_unpacklo_epi64(low[0], low[1]);
        quads[4 * half + 1] = _mm512_unpackhi_epi64(low[0], low[1]);
        quads[4 * half + 2] = _mm512_unpacklo_epi64(high[0], high[1]);
        quads[4 * half + 3] = _mm512_unpackhi_epi64(high[0], high[1]);
    }
    for quad in (0..BLOCK_ELEMENTS / QUAD).rev() {
        let bytes = if E::NIBBLES { quads[quad % 4] } else { quads[quad] };
        quads[quad] = unsigned::<E>(bytes, quad / 4);
    }
    quads
}

/// `o[r] += sum over t of weights[r][t] * v[t]` for half a block of V.
///
/// # Safety
/// As [`attend`], and V has that block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn values<E: Packed, const R: usize>(
    simd: Avx512Vnni, work: &Work<'_>, o: &mut [f32], scratch: &Scratch,
    (block, half): (usize, usize),
) {
    let IntegerScratch { weights, v_rows, .. } = &scratch.integer;
    let tile = work.tile;
    let (next, last) = work.ahead();
    let start = row_bytes::<E>(block * BLOCK_ELEMENTS);
    let in_block = if E::NIBBLES { 2 } else { 2 + 16 * half };
    // Lane `d` gets byte `d` of each of the four tokens.
    let order = |d: i32| 0x3020_1000 + 0x0101_0101 * d;
    let order = _mm512_setr_epi32(
        order(0),
        order(1),
        order(2),
        order(3),
        order(4),
        order(5),
        order(6),
        order(7),
        order(8),
        order(9),
        order(10),
        order(11),
        order(12),
        order(13),
        order(14),
        order(15),
    );
    let mut sums = [[_mm512_setzero_si512(); BYTES]; R];
    for r in 0..R {
        sums[r][0] = _mm512_set1_epi32(weights[r].start);
    }
    for first in (0..tile.len.min(TILE_TOKENS)).step_by(GROUP) {
        for quad in 0..GROUP / QUAD {
            let token = first + quad * QUAD;
            let from = tile.v.as_ptr().wrapping_add(start + in_block);
            let rows = [v_rows[token], v_rows[token + 1], v_rows[token + 2], v_rows[token + 3]];
            // SAFETY: the caller promises the rows and the block.
            let v = unsafe { load_four(from, rows) };
            let v = unsigned::<E>(_mm512_permutexvar_epi8(order, v), half);
            if half == 0 {
                for i in 0..QUAD {
                    let ahead = next.v_row((token + i).min(last)).wrapping_add(start);
                    prefetch(simd.0, ahead, row_bytes::<E>(BLOCK_ELEMENTS));
                }
            }
            for r in 0..R {
                let bytes = &weights[r].bytes[first / GROUP];
                for byte in 0..BYTES {
                    let weight = _mm512_set1_epi32(bytes[byte * QUAD + quad]);
                    sums[r][byte] = _mm512_dpbusd_epi32(sums[r][byte], v, weight);
                }
            }
        }
    }
    for r in 0..R {
        let o = &mut o[r * work.v_head_dim + block * BLOCK_ELEMENTS + half * GROUP..][..GROUP];
        store(o, _mm512_fmadd_ps(join(sums[r]), _mm512_set1_ps(weights[r].unit), load(o)));
    }
}
