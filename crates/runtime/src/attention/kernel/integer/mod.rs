//! Attention over `q8_0` and `q4_0` with products of whole numbers.
//!
//! An element of K or V is a whole number of 8 or 4 bits, and AVX-512 VNNI multiplies 64 pairs of
//! bytes per instruction where a multiply-add of f32 has 16 (`vpdpbusd`, at the same rate on Zen 4).
//! So q and the weights become whole numbers of three bytes, and their products with K and V are
//! exact: the error of a score or of a value is that of rounding q or the weights once.
//!
//! The unit of the whole numbers is their sum over 2^23 (of a block of q; of the weights of a tile,
//! each times the scale of its block of V). Then sums of products with bytes fit 32 bits whatever
//! the distribution is, and rounding takes at most 1.1e-6 (q) and 4.4e-6 (weights of 128 tokens that
//! are all alike; less the more they differ) in relative L2. Two bytes would take 40 instead of 60
//! cycles per token and KV head (five query heads, head dimension 128), but are 6e-5 off.
//!
//! Of some 100 cycles scores take 51 (`q4_0`: 48), splitting weights 10, values 31, the softmax 3.
//! Products are 30 of the 51; laying out K and gathering scales come between those of one block and
//! the next. To spread them among the products, a little after each quad, took 82 (`q4_0`: 68); why
//! is open.
//!
//! Elements are made unsigned by adding [`Packed::OFFSET`], as the instruction wants one operand
//! unsigned. What that adds to a sum of products is known before it: sums start at the negative.

mod products;
mod vectors;
mod whole;

use products::{scores, values};
use whole::{QueryBlock, WeightBlock, same_bits, split_queries, split_weights};

use super::avx512::Avx512;
use super::element::{BLOCK_ELEMENTS, Element, Q4_0, Q8_0};
use super::tile::{ROWS_MAX, Rows, Scratch, TILE_TOKENS, Work, softmax};

/// Exists only where the processor has the instructions.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Avx512Vnni(pub(super) Avx512);

impl Avx512Vnni {
    pub(super) fn detect() -> Option<Self> {
        let found =
            is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vbmi");
        Avx512::detect().filter(|_| found).map(Self)
    }
}

/// Tokens whose scores fill a vector.
const GROUP: usize = 16;

/// Bytes that a lane multiplies at once.
const QUAD: usize = 4;

/// Bytes of a whole number: the lowest first.
const BYTES: usize = 3;

/// What the whole numbers that are added up come to, which three signed bytes hold.
const TOTAL: f32 = 8_355_000.0;

/// A dtype whose elements are whole numbers that share a scale.
pub(super) trait Packed: Element {
    /// What makes an element unsigned.
    const OFFSET: i32;
    /// Whether a byte holds two elements: of the first and of the second half of a block.
    const NIBBLES: bool;
}

impl Packed for Q8_0 {
    const OFFSET: i32 = 128;
    const NIBBLES: bool = false;
}

impl Packed for Q4_0 {
    const OFFSET: i32 = 8;
    const NIBBLES: bool = true;
}

/// Memory that every tile uses again.
#[derive(Debug)]
pub(super) struct IntegerScratch {
    /// What [`queries`](Self::queries) was made of.
    q: Vec<f32>,
    /// `[rows, blocks]`
    queries: Vec<QueryBlock>,
    weights: [WeightBlock; ROWS_MAX],
    /// Scales of K's blocks in f16: `[blocks, tokens]`.
    k_scales: Vec<[u16; TILE_TOKENS]>,
    /// Where the rows of K and of V start; those beyond the tile are its last one.
    k_rows: [usize; TILE_TOKENS],
    v_rows: [usize; TILE_TOKENS],
}

impl IntegerScratch {
    pub(super) fn new() -> Self {
        let weights = WeightBlock { bytes: [[0; GROUP]; TILE_TOKENS / GROUP], start: 0, unit: 0.0 };
        Self {
            q: Vec::new(),
            queries: Vec::new(),
            weights: [weights; ROWS_MAX],
            k_scales: Vec::new(),
            k_rows: [0; TILE_TOKENS],
            v_rows: [0; TILE_TOKENS],
        }
    }
}

/// Adds one tile to up to [`ROWS_MAX`] rows.
///
/// # Safety
/// [`Tile::assert_bounds`](super::tile::Tile::assert_bounds) holds, and blocks divide both head dimensions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn by_rows<E: Packed>(
    simd: Avx512Vnni, work: &Work<'_>, mut rows: Rows<'_>, scratch: &mut Scratch,
) {
    if work.tile.len == 0 {
        return;
    }
    match rows.m.len() {
        0 => {}
        // SAFETY: the caller's.
        1 => unsafe { attend::<E, 1>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        2 => unsafe { attend::<E, 2>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        3 => unsafe { attend::<E, 3>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        4 => unsafe { attend::<E, 4>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        5 => unsafe { attend::<E, 5>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        6 => unsafe { attend::<E, 6>(simd, work, &mut rows, scratch) },
        count => unreachable!("{count} rows, {ROWS_MAX} at most"),
    }
}

/// Adds one tile to `R` rows.
///
/// # Safety
/// As [`by_rows`], and the tile has tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn attend<E: Packed, const R: usize>(
    simd: Avx512Vnni, work: &Work<'_>, rows: &mut Rows<'_>, scratch: &mut Scratch,
) {
    let integer = &mut scratch.integer;
    if !same_bits(&integer.q, rows.q) {
        split_queries::<E>(rows.q, integer);
    }
    integer.k_scales.resize(work.head_dim / BLOCK_ELEMENTS, [0; TILE_TOKENS]);
    for index in 0..work.tile.len.next_multiple_of(GROUP).min(TILE_TOKENS) {
        let token = work.tile.tokens[index.min(work.tile.len - 1)] as usize;
        integer.k_rows[index] = token * work.tile.k_stride;
        integer.v_rows[index] = token * work.tile.v_stride;
    }
    // SAFETY: the caller promises the rows.
    unsafe { scores::<E, R>(simd, work, scratch) };
    softmax::<Avx512, R>(simd.0, work, rows, scratch);
    for block in 0..work.v_head_dim / BLOCK_ELEMENTS {
        split_weights::<E, R>(work.tile.len, block, scratch);
        for half in 0..2 {
            // SAFETY: the caller promises the rows, which have that block.
            unsafe { values::<E, R>(simd, work, rows.o, scratch, (block, half)) };
        }
    }
}
