//! Weights of a tile that are kept for counting attention mass.

use super::simd::Simd;
use super::tile::{TILE_TOKENS, prefetch};

/// Weights of rows for one tile to be kept: times [`KEPT_SCALE`], in f16.
pub(in crate::attention) type KeptWeights = [u16; TILE_TOKENS];

/// What kept weights were multiplied by, which are 1 at most: as far as f16 reaches, so that those
/// down to 2^-29 have all of its eleven bits.
const KEPT_SCALE: f32 = 32768.0;

/// Makes weights ones to be kept. Fetches the memory behind them, where the next tile's will go:
/// stores to what no cache holds wait longer than the tile takes.
#[inline(always)]
pub(super) fn keep<S: Simd>(simd: S, weights: &[[f32; TILE_TOKENS]], kept: &mut [KeptWeights]) {
    let rows = weights.len();
    for (weights, kept) in weights.iter().zip(kept) {
        let ahead = kept.as_ptr().wrapping_add(rows * TILE_TOKENS);
        prefetch(simd, ahead.cast(), size_of::<KeptWeights>());
        let vectors = weights.chunks_exact(S::LANES).zip(kept.chunks_exact_mut(S::LANES));
        for (weights, kept) in vectors {
            let scaled = simd.mul(simd.load(weights), simd.splat(KEPT_SCALE));
            simd.store_f16(kept, scaled);
        }
    }
}

/// `sums[t] += sum over r of factors[r] * weights[r][t]`
#[inline(always)]
pub(super) fn add_weighted<S: Simd>(
    simd: S, weights: &[KeptWeights], factors: &[f32], sums: &mut [f32; TILE_TOKENS],
) {
    for (lane, sums) in sums.chunks_exact_mut(S::LANES).enumerate() {
        let mut sum = simd.load(sums);
        for (weights, factor) in weights.iter().zip(factors) {
            let weights = &weights[lane * S::LANES..][..S::LANES];
            // SAFETY: the slice has as many elements as a vector.
            let weight = unsafe { simd.load_f16(weights.as_ptr().cast()) };
            sum = simd.mul_add(weight, simd.splat(factor / KEPT_SCALE), sum);
        }
        simd.store(sums, sum);
    }
}
