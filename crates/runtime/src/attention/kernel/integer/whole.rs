//! q and the weights as whole numbers.

use std::arch::x86_64::{
    _mm512_abs_ps, _mm512_add_epi32, _mm512_add_ps, _mm512_cvtps_epi32, _mm512_mul_ps,
    _mm512_reduce_add_epi32, _mm512_reduce_add_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512,
};

use super::vectors::{load, load_f16, split, store_whole};
use super::{BYTES, GROUP, IntegerScratch, Packed, QUAD, TOTAL};
use crate::attention::kernel::element::BLOCK_ELEMENTS;
use crate::attention::kernel::tile::{Scratch, TILE_TOKENS};

/// One row's block of q.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QueryBlock {
    /// `[bytes, quads]`
    pub(super) bytes: [[i32; BLOCK_ELEMENTS / QUAD]; BYTES],
    /// What a sum of products starts at.
    pub(super) start: i32,
    pub(super) unit: f32,
}

/// One row's weights of a tile, times the scales of one block of V.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightBlock {
    /// `[groups, bytes and one more, quads]`
    pub(super) bytes: [[i32; GROUP]; TILE_TOKENS / GROUP],
    pub(super) start: i32,
    pub(super) unit: f32,
}

/// Without a branch for each value, which comparing slices of f32 has.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    let differ = |(a, b): (&f32, &f32)| a.to_bits() ^ b.to_bits();
    a.len() == b.len() && a.iter().zip(b).map(differ).fold(0, |all, bits| all | bits) == 0
}

/// `[rows, blocks]` of q become whole numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn split_queries<E: Packed>(q: &[f32], integer: &mut IntegerScratch) {
    integer.q.clear();
    integer.q.extend_from_slice(q);
    integer.queries.clear();
    for block in q.chunks_exact(BLOCK_ELEMENTS) {
        let (first, second) = (load(block), load(&block[GROUP..]));
        let sizes = _mm512_add_ps(_mm512_abs_ps(first), _mm512_abs_ps(second));
        let total = _mm512_reduce_add_ps(sizes);
        let factor = _mm512_set1_ps(TOTAL / total);
        let mut query = QueryBlock { unit: total / TOTAL, ..QueryBlock::default() };
        let mut sum = _mm512_setzero_si512();
        for (half, vector) in [first, second].into_iter().enumerate() {
            let whole = _mm512_cvtps_epi32(_mm512_mul_ps(vector, factor));
            sum = _mm512_add_epi32(sum, whole);
            let mut bytes = [0; GROUP];
            store_whole(&mut bytes, split(whole));
            for (byte, quads) in query.bytes.iter_mut().enumerate() {
                quads[half * QUAD..][..QUAD].copy_from_slice(&bytes[byte * QUAD..][..QUAD]);
            }
        }
        query.start = _mm512_reduce_add_epi32(sum).wrapping_mul(-E::OFFSET);
        integer.queries.push(query);
    }
}

/// Weights of `R` rows times the scales of one block of V become whole numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn split_weights<E: Packed, const R: usize>(
    len: usize, block: usize, scratch: &mut Scratch,
) {
    let groups = len.div_ceil(GROUP).min(TILE_TOKENS / GROUP);
    let mut scales = [_mm512_setzero_ps(); TILE_TOKENS / GROUP];
    for group in 0..groups {
        scales[group] = load_f16(&scratch.scales[block][group * GROUP..]);
    }
    let Scratch { weights, integer, .. } = scratch;
    let product =
        |r: usize, group: usize| _mm512_mul_ps(load(&weights[r][group * GROUP..]), scales[group]);
    // The rows in step: each of these sums waits for the one before.
    let mut sizes = [_mm512_setzero_ps(); R];
    for group in 0..groups {
        for r in 0..R {
            sizes[r] = _mm512_add_ps(sizes[r], _mm512_abs_ps(product(r, group)));
        }
    }
    let totals = sizes.map(|sizes| _mm512_reduce_add_ps(sizes));
    for r in 0..R {
        let to = &mut integer.weights[r];
        to.unit = totals[r] / TOTAL;
        let factor = _mm512_set1_ps(TOTAL / totals[r]);
        let mut sum = _mm512_setzero_si512();
        for group in 0..groups {
            let whole = _mm512_cvtps_epi32(_mm512_mul_ps(product(r, group), factor));
            sum = _mm512_add_epi32(sum, whole);
            store_whole(&mut to.bytes[group], split(whole));
        }
        to.start = _mm512_reduce_add_epi32(sum).wrapping_mul(-E::OFFSET);
    }
}
