//! Attention of a few query heads over one tile of tokens: scores, softmax, weighted values.
//!
//! Both products work on blocks of registers, so that an element of K or V is loaded and converted
//! once for all `R` query heads that share it: scores on `W` tokens x `R` heads, values on `W`
//! vectors x `R` heads. `R * W` accumulators, `W` elements and one operand fit the 32 registers of
//! AVX-512 with `R <= 6, W = 4`, the 16 of AVX2 with `W = 2`. What bounds a decode step is then the
//! rate of multiply-adds: `R` for each vector of elements.
//!
//! On Zen 4, which begins one 512-bit multiply-add per cycle, five rows and a head dimension of 128
//! take at least 80 cycles per token and KV head. f16 takes 95 with K and V in the first-level cache
//! (scores 48, adding up their lanes 3, softmax 3, values 41), 97 from the second level, 108 streamed
//! from memory with all that a call costs. The conversions are free: twenty multiply-adds take
//! twenty cycles with four conversions, shuffles, shifts or additions among them. What the scores
//! take beyond 40 is half of adding up lanes, which comes in one piece after each four rows of K. To
//! do it beside the products of the next rows took the scores to 94 and more, as the compiler then
//! moves accumulators around. To take the exponentials among the products with V saved 1.5 cycles,
//! queries and scratch on cache lines 1, tiles of 64 tokens or the softmax of all rows in step
//! nothing, and fetching the next rows into the first-level cache cost 4. `q8_0` takes 131 this way,
//! for whole numbers must become f32 and K be scaled; [`integer`](super::integer) multiplies them as
//! they are.
//!
//! Scores are in units of log2, so that the exponential needs no multiplication.

use std::ops::Range;

use super::element::{BLOCK_ELEMENTS, Element, block_of, row_bytes};
use super::simd::{Simd, exp2, tanh};

/// Tokens of a tile. What is done once for each (reading and writing `o`, finding the largest
/// score) costs a fifth of the time with 32, little with 128; K and V of this tile and the next
/// are 128 KiB for f16 and a head dimension of 128, which a second-level cache holds.
pub(in crate::attention) const TILE_TOKENS: usize = 128;
/// Most query heads of one pass.
pub(super) const ROWS_MAX: usize = 6;
/// Values of `l` of one row: one for each lane, added up at the end.
pub(in crate::attention) const SUM_LANES: usize = 16;
/// Tokens whose scores are added up together.
const FOLDED: usize = 4;
/// Most [`Simd::PARTS`].
const PARTS_MAX: usize = 4;

/// Up to [`TILE_TOKENS`] tokens of one KV head. K and V of other tokens are never touched.
#[derive(Clone, Debug)]
pub(in crate::attention) struct Tile<'a> {
    /// From the head's first K row on.
    pub(in crate::attention) k: &'a [u8],
    /// From the head's first V row on.
    pub(in crate::attention) v: &'a [u8],
    /// Bytes from a token to the next.
    pub(in crate::attention) k_stride: usize,
    pub(in crate::attention) v_stride: usize,
    /// Rows, ascending; the first `len` count.
    pub(in crate::attention) tokens: [u32; TILE_TOKENS],
    pub(in crate::attention) len: usize,
}

impl Tile<'_> {
    /// Without tokens.
    pub(in crate::attention) fn empty() -> Self {
        Self { k: &[], v: &[], k_stride: 0, v_stride: 0, tokens: [0; TILE_TOKENS], len: 0 }
    }

    pub(in crate::attention) fn tokens(&self) -> &[u32] {
        &self.tokens[..self.len]
    }

    /// # Panics
    /// If a row does not lie within its bytes: the kernel reads without looking.
    pub(super) fn assert_bounds(&self, k_row_bytes: usize, v_row_bytes: usize) {
        assert!(self.len <= TILE_TOKENS);
        let Some(last) = self.tokens().iter().max() else { return };
        let end = |stride: usize, row| (*last as usize).checked_mul(stride)?.checked_add(row);
        assert!(end(self.k_stride, k_row_bytes).is_some_and(|end| end <= self.k.len()));
        assert!(end(self.v_stride, v_row_bytes).is_some_and(|end| end <= self.v.len()));
    }

    #[inline(always)]
    pub(super) fn k_row(&self, index: usize) -> *const u8 {
        self.k.as_ptr().wrapping_add(self.tokens[index] as usize * self.k_stride)
    }

    #[inline(always)]
    pub(super) fn v_row(&self, index: usize) -> *const u8 {
        self.v.as_ptr().wrapping_add(self.tokens[index] as usize * self.v_stride)
    }
}

/// Query heads that share a KV head, and what they have gathered so far.
#[derive(Debug)]
pub(in crate::attention) struct Rows<'a> {
    /// `[rows, head_dim]`, times the scale and log2(e)
    pub(in crate::attention) q: &'a [f32],
    /// `[rows, v_head_dim]`, not normalised
    pub(in crate::attention) o: &'a mut [f32],
    /// `[rows]`, in log2
    pub(in crate::attention) m: &'a mut [f32],
    /// `[rows]`
    pub(in crate::attention) l: &'a mut [[f32; SUM_LANES]],
    /// `[rows]` `ALiBi` slopes times log2(e); empty for none.
    pub(in crate::attention) slopes: &'a [f32],
}

/// What is done to the scores of a tile before the softmax.
#[derive(Clone, Debug)]
pub(in crate::attention) struct Logits {
    /// Scores become `cap * tanh(score)`; the cap is times log2(e).
    pub(in crate::attention) soft_cap: Option<f32>,
    /// Position of each token less that of the query, for rows with slopes.
    pub(in crate::attention) distances: [f32; TILE_TOKENS],
    /// Whether there is a bias.
    pub(in crate::attention) biased: bool,
    /// Added to each token's scores, times log2(e).
    pub(in crate::attention) bias: [f32; TILE_TOKENS],
}

impl Logits {
    pub(in crate::attention) fn new() -> Self {
        Self {
            soft_cap: None,
            distances: [0.0; TILE_TOKENS],
            biased: false,
            bias: [0.0; TILE_TOKENS],
        }
    }
}

/// Memory that every tile uses again.
#[derive(Debug)]
pub(in crate::attention) struct Scratch {
    /// What the scores are the sums of: `[rows, tokens / 4, parts, 4]`.
    parts: [[f32; TILE_TOKENS * PARTS_MAX]; ROWS_MAX],
    /// Scores, then weights: `[rows, tokens]`.
    pub(in crate::attention) weights: [[f32; TILE_TOKENS]; ROWS_MAX],
    /// Scales of V's blocks in f16: `[blocks, tokens]`.
    pub(super) scales: Vec<[u16; TILE_TOKENS]>,
    /// Weights times the scales of two blocks of V: `[blocks, rows, tokens]`.
    scaled: [[[f32; TILE_TOKENS]; ROWS_MAX]; 2],
    #[cfg(target_arch = "x86_64")]
    pub(super) integer: super::integer::IntegerScratch,
}

impl Scratch {
    pub(in crate::attention) fn new(v_head_dim: usize) -> Self {
        let blocks = v_head_dim.div_ceil(BLOCK_ELEMENTS);
        Self {
            parts: [[0.0; TILE_TOKENS * PARTS_MAX]; ROWS_MAX],
            weights: [[0.0; TILE_TOKENS]; ROWS_MAX],
            scales: vec![[0; TILE_TOKENS]; blocks],
            scaled: [[[0.0; TILE_TOKENS]; ROWS_MAX]; 2],
            #[cfg(target_arch = "x86_64")]
            integer: super::integer::IntegerScratch::new(),
        }
    }
}

/// One tile and its surroundings.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Work<'a> {
    pub(in crate::attention) tile: &'a Tile<'a>,
    /// The tile that comes next, to be fetched meanwhile.
    pub(in crate::attention) next: Option<&'a Tile<'a>>,
    pub(in crate::attention) logits: &'a Logits,
    pub(in crate::attention) head_dim: usize,
    pub(in crate::attention) v_head_dim: usize,
}

impl<'a> Work<'a> {
    /// The tile to fetch and its last index; without one this tile, which costs nothing.
    #[inline(always)]
    pub(super) fn ahead(&self) -> (&'a Tile<'a>, usize) {
        let next = self.next.filter(|next| next.len > 0).unwrap_or(self.tile);
        (next, next.len.saturating_sub(1).min(TILE_TOKENS - 1))
    }
}

/// Adds one tile to `R` rows.
///
/// # Safety
/// [`Tile::assert_bounds`] holds, and vectors divide both head dimensions.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd, E: Element, const R: usize, const W: usize>(
    simd: S, work: &Work<'_>, rows: &mut Rows<'_>, scratch: &mut Scratch,
) {
    // SAFETY: the caller promises the rows.
    unsafe { scores::<S, E, R, W>(simd, work, rows.q, scratch) };
    add_up::<S, R>(simd, work.tile.len.min(TILE_TOKENS), scratch);
    softmax::<S, R>(simd, work, rows, scratch);
    let chunks = work.v_head_dim / S::LANES;
    let whole = chunks - chunks % W;
    for first in (0..whole).step_by(W) {
        // SAFETY: the caller promises the rows, and the chunks are within them.
        unsafe { values::<S, E, R, W>(simd, work, rows.o, scratch, first) };
    }
    for first in whole..chunks {
        // SAFETY: as above.
        unsafe { values::<S, E, R, 1>(simd, work, rows.o, scratch, first) };
    }
}

/// Scales of all blocks of some V rows. They are gathered long before they are used, as a vector that
/// is loaded soon after its parts were stored waits for all of them to leave the store queue; and
/// beside the products with K, which leave time for it.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn v_scales<E: Element>(
    work: &Work<'_>, tokens: Range<usize>, scales: &mut [[u16; TILE_TOKENS]],
) {
    for token in tokens.start..tokens.end.min(work.tile.len).min(TILE_TOKENS) {
        let row = work.tile.v_row(token);
        for (block, scales) in scales.iter_mut().enumerate() {
            // SAFETY: the caller promises the rows, which have as many blocks.
            scales[token] = unsafe { scale_bits::<E>(row, block) };
        }
    }
}

/// # Safety
/// `row` has that block.
#[inline(always)]
pub(super) unsafe fn scale_bits<E: Element>(row: *const u8, block: usize) -> u16 {
    // SAFETY: the caller promises the block.
    let from = unsafe { block_of::<E>(row, block) };
    // SAFETY: a block starts with its scale, an f16 of any alignment.
    let bytes = unsafe { from.cast::<[u8; 2]>().read() };
    u16::from_le_bytes(bytes)
}

/// `scores[r][t] = q[r] . k[t]`, in parts. To add up the lanes of a vector takes a fifth as long as
/// the products; half of it is left to [`softmax`], which does it for four times as many at once.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn scores<S: Simd, E: Element, const R: usize, const W: usize>(
    simd: S, work: &Work<'_>, q: &[f32], scratch: &mut Scratch,
) {
    let (tile, dim) = (work.tile, work.head_dim);
    let q: [&[f32]; R] = std::array::from_fn(|r| &q[r * dim..][..dim]);
    let (next, last) = work.ahead();
    for first in (0..tile.len.min(TILE_TOKENS)).step_by(FOLDED) {
        let mut sums = [[simd.splat(0.0); FOLDED]; R];
        for start in (0..FOLDED).step_by(W) {
            let k = std::array::from_fn(|i| tile.k_row((first + start + i).min(tile.len - 1)));
            // SAFETY: the caller promises the rows, and vectors divide them.
            let products = unsafe { products::<S, E, R, W>(simd, q, k, dim) };
            for r in 0..R {
                sums[r][start..start + W].copy_from_slice(&products[r]);
            }
        }
        if E::SCALED {
            // SAFETY: as above.
            unsafe { v_scales::<E>(work, first..first + FOLDED, &mut scratch.scales) };
        }
        for token in first..first + FOLDED {
            prefetch(simd, next.k_row(token.min(last)), row_bytes::<E>(dim));
        }
        for r in 0..R {
            simd.fold(sums[r], &mut scratch.parts[r][first * S::PARTS..]);
        }
    }
}

/// The products of `R` rows of q with `W` rows of K, to be added up over the lanes.
///
/// # Safety
/// The rows of K have `dim` elements, and vectors divide them.
#[inline(always)]
unsafe fn products<S: Simd, E: Element, const R: usize, const W: usize>(
    simd: S, q: [&[f32]; R], k: [*const u8; W], dim: usize,
) -> [[S::Vector; W]; R] {
    let mut sums = [[simd.splat(0.0); W]; R];
    let blocks = dim / BLOCK_ELEMENTS;
    for block in 0..blocks {
        for lane in 0..BLOCK_ELEMENTS / S::LANES {
            let element = block * BLOCK_ELEMENTS + lane * S::LANES;
            // SAFETY: the caller's.
            unsafe { multiply::<S, E, R, W>(simd, q, k, element, &mut sums) };
        }
    }
    for element in (blocks * BLOCK_ELEMENTS..dim).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe { multiply::<S, E, R, W>(simd, q, k, element, &mut sums) };
    }
    sums
}

/// Adds the products of one vector of elements: `R` rows of q with `W` rows of K.
///
/// # Safety
/// The rows of K have a vector of elements from `element` on.
#[inline(always)]
unsafe fn multiply<S: Simd, E: Element, const R: usize, const W: usize>(
    simd: S, q: [&[f32]; R], k: [*const u8; W], element: usize, sums: &mut [[S::Vector; W]; R],
) {
    let mut vectors = [simd.splat(0.0); W];
    for i in 0..W {
        // SAFETY: the caller promises the elements.
        vectors[i] = unsafe { E::load(simd, k[i], element) };
        if E::SCALED {
            // SAFETY: the elements are of this block.
            let block = unsafe { block_of::<E>(k[i], element / BLOCK_ELEMENTS) };
            // SAFETY: a block starts with its scale.
            vectors[i] = simd.mul(vectors[i], unsafe { simd.splat_f16(block) });
        }
    }
    for r in 0..R {
        let q = simd.load(&q[r][element..]);
        for i in 0..W {
            sums[r][i] = simd.mul_add(q, vectors[i], sums[r][i]);
        }
    }
}

/// Fetches the cache lines of so many bytes.
#[inline(always)]
pub(super) fn prefetch<S: Simd>(simd: S, address: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        simd.prefetch(address.wrapping_add(offset));
    }
}

/// What is left to add up of the scores.
#[inline(always)]
fn add_up<S: Simd, const R: usize>(simd: S, len: usize, scratch: &mut Scratch) {
    for r in 0..R {
        for lane in (0..len).step_by(S::LANES) {
            let scores = simd.total(&scratch.parts[r][lane * S::PARTS..]);
            simd.store(&mut scratch.weights[r][lane..], scores);
        }
    }
}

/// Scores become weights `2^(score - m)`; `m`, `l` and `o` follow.
#[inline(always)]
pub(super) fn softmax<S: Simd, const R: usize>(
    simd: S, work: &Work<'_>, rows: &mut Rows<'_>, scratch: &mut Scratch,
) {
    let len = work.tile.len;
    let padded = len.next_multiple_of(S::LANES);
    for r in 0..R {
        let weights = &mut scratch.weights[r];
        adjust(simd, work.logits, rows.slopes.get(r).copied(), &mut weights[..padded]);
        weights[len..padded].fill(f32::NEG_INFINITY);
        let mut largest = simd.load(weights);
        for lane in (S::LANES..len).step_by(S::LANES) {
            largest = simd.max(largest, simd.load(&weights[lane..]));
        }
        let m = rows.m[r];
        if simd.any_greater(largest, simd.splat(m)) {
            rows.m[r] = simd.largest(largest);
            let o = &mut rows.o[r * work.v_head_dim..][..work.v_head_dim];
            rescale(simd, (m - rows.m[r]).exp2(), o, &mut rows.l[r]);
        }
        let m = simd.splat(rows.m[r]);
        let mut sum = simd.load(&rows.l[r]);
        for lane in (0..len).step_by(S::LANES) {
            let (weight, _) = exp2(simd, simd.sub(simd.load(&weights[lane..]), m));
            simd.store(&mut weights[lane..], weight);
            // The weights beyond `len` are 2^-126.
            sum = simd.add(sum, weight);
        }
        simd.store(&mut rows.l[r], sum);
    }
}

/// Soft cap, then what depends on positions.
#[inline(always)]
fn adjust<S: Simd>(simd: S, logits: &Logits, slope: Option<f32>, scores: &mut [f32]) {
    if logits.soft_cap.is_none() && slope.is_none() && !logits.biased {
        return;
    }
    for lane in (0..scores.len()).step_by(S::LANES) {
        let mut score = simd.load(&scores[lane..]);
        if let Some(cap) = logits.soft_cap {
            score = simd.mul(simd.splat(cap), tanh(simd, score));
        }
        if let Some(slope) = slope {
            let distance = simd.load(&logits.distances[lane..]);
            score = simd.mul_add(simd.splat(slope), distance, score);
        }
        if logits.biased {
            score = simd.add(score, simd.load(&logits.bias[lane..]));
        }
        simd.store(&mut scores[lane..], score);
    }
}

/// Makes what was gathered so far relative to a new `m`.
#[inline(always)]
fn rescale<S: Simd>(simd: S, factor: f32, o: &mut [f32], l: &mut [f32; SUM_LANES]) {
    let factor = simd.splat(factor);
    for vector in o.chunks_exact_mut(S::LANES).chain(l.chunks_exact_mut(S::LANES)) {
        let value = simd.mul(simd.load(vector), factor);
        simd.store(vector, value);
    }
}

/// `o[r] += sum over t of weights[r][t] * v[t]`, for `C` vectors of the head dimension from vector
/// `first` on.
///
/// # Safety
/// As [`attend`], and V has these vectors.
#[inline(always)]
unsafe fn values<S: Simd, E: Element, const R: usize, const C: usize>(
    simd: S, work: &Work<'_>, o: &mut [f32], scratch: &mut Scratch, first: usize,
) {
    let (tile, dim) = (work.tile, work.v_head_dim);
    let start = first * S::LANES;
    let padded = tile.len.next_multiple_of(S::LANES);
    let Scratch { weights, scales, scaled, .. } = scratch;
    if E::SCALED {
        // One for each block that C vectors can touch.
        for (half, scaled) in scaled.iter_mut().enumerate() {
            if half * BLOCK_ELEMENTS < C * S::LANES {
                let block = start / BLOCK_ELEMENTS + half;
                let factors = &scales[block][..padded];
                scale_weights::<S, R>(simd, factors, weights, scaled);
            }
        }
    }
    let mut sums = [[simd.splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            sums[r][c] = simd.load(&o[r * dim + start + c * S::LANES..]);
        }
    }
    let (next, last) = work.ahead();
    // Known to the compiler wherever it can be: where an element of a block lies differs among them.
    let in_block =
        if (C * S::LANES).is_multiple_of(BLOCK_ELEMENTS) { 0 } else { start % BLOCK_ELEMENTS };
    for token in 0..tile.len.min(TILE_TOKENS) {
        let row = tile.v_row(token).wrapping_add(row_bytes::<E>(start - in_block));
        let mut v = [simd.splat(0.0); C];
        for c in 0..C {
            // SAFETY: the caller promises the rows and these vectors.
            v[c] = unsafe { E::load(simd, row, in_block + c * S::LANES) };
        }
        let ahead = next.v_row(token.min(last)).wrapping_add(row_bytes::<E>(start));
        prefetch(simd, ahead, row_bytes::<E>(C * S::LANES));
        for r in 0..R {
            for c in 0..C {
                let weight = if E::SCALED {
                    scaled[c * S::LANES / BLOCK_ELEMENTS][r][token]
                } else {
                    weights[r][token]
                };
                sums[r][c] = simd.mul_add(simd.splat(weight), v[c], sums[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            simd.store(&mut o[r * dim + start + c * S::LANES..], sums[r][c]);
        }
    }
}

/// Weights times the scale of one block of V, which saves a multiplication for each vector of V.
#[inline(always)]
fn scale_weights<S: Simd, const R: usize>(
    simd: S, factors: &[u16], weights: &[[f32; TILE_TOKENS]; ROWS_MAX],
    scaled: &mut [[f32; TILE_TOKENS]; ROWS_MAX],
) {
    for lane in (0..factors.len()).step_by(S::LANES) {
        // SAFETY: the lanes are within the slice, whose length is a multiple of them.
        let scale = unsafe { simd.load_f16(factors[lane..].as_ptr().cast()) };
        for r in 0..R {
            let weight = simd.mul(simd.load(&weights[r][lane..]), scale);
            simd.store(&mut scaled[r][lane..], weight);
        }
    }
}
