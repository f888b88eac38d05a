//! The inner loop, for the instructions that this processor has.
//!
//! One generic kernel ([`tile`]) over the instruction sets ([`simd`]) and the dtypes
//! ([`element`]). This module chooses among its instances at run time.

#![allow(clippy::inline_always, reason = "vectors must not travel through memory")]
#![allow(clippy::needless_range_loop, reason = "loops over registers: indices are unrolled")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
#[cfg(target_arch = "x86_64")]
mod integer;
mod kept;
mod scalar;
mod simd;
mod stream;
mod tile;

use element::{Bf16, Element, F8E4m3, F16, F32, Q4_0, Q8_0};
use kept::{add_weighted, keep};
use scalar::Scalar;
use simd::Simd;
use tile::{ROWS_MAX, attend};

pub(super) use kept::KeptWeights;
pub(super) use stream::sum_words;
pub(super) use tile::{Logits, Rows, SUM_LANES, Scratch, TILE_TOKENS, Tile, Work};

use crate::page::Dtype;

/// Which vector instructions to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InstructionSet {
    /// AVX-512 as below with VNNI and VBMI: `q8_0` and `q4_0` are multiplied as bytes.
    Avx512Vnni,
    /// AVX-512 F, BW, DQ and VL: 16 values at a time.
    Avx512,
    /// AVX2 with FMA and F16C: 8 values at a time.
    Avx2,
    /// None: one value at a time, on every processor.
    Scalar,
}

impl InstructionSet {
    /// All of them, the fastest first.
    pub const ALL: [Self; 4] = [Self::Avx512Vnni, Self::Avx512, Self::Avx2, Self::Scalar];

    /// The fastest of this processor.
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|set| set.is_supported()).unwrap_or(Self::Scalar)
    }

    /// Whether this processor has it.
    pub fn is_supported(self) -> bool {
        Kernel::of(self).is_some()
    }

    /// Values in a vector.
    pub fn lanes(self) -> usize {
        match self {
            Self::Avx512Vnni | Self::Avx512 => 16,
            Self::Avx2 => 8,
            Self::Scalar => 1,
        }
    }
}

/// An instruction set that the processor has been found to have.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(integer::Avx512Vnni),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    Scalar(Scalar),
}

impl Kernel {
    /// The widest vectors, up to those of `set`, that divide both head dimensions; `None` where
    /// the processor lacks `set`.
    pub(super) fn new(set: InstructionSet, head_dim: usize, v_head_dim: usize) -> Option<Self> {
        Self::of(set)?;
        let divides = |set: &InstructionSet| {
            head_dim.is_multiple_of(set.lanes()) && v_head_dim.is_multiple_of(set.lanes())
        };
        let not_above = InstructionSet::ALL.into_iter().skip_while(|other| *other != set);
        not_above.filter(divides).find_map(Self::of)
    }

    #[cfg(target_arch = "x86_64")]
    fn of(set: InstructionSet) -> Option<Self> {
        match set {
            InstructionSet::Avx512Vnni => integer::Avx512Vnni::detect().map(Self::Avx512Vnni),
            InstructionSet::Avx512 => avx512::Avx512::detect().map(Self::Avx512),
            InstructionSet::Avx2 => avx2::Avx2::detect().map(Self::Avx2),
            InstructionSet::Scalar => Some(Self::Scalar(Scalar)),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(set: InstructionSet) -> Option<Self> {
        (set == InstructionSet::Scalar).then_some(Self::Scalar(Scalar))
    }

    /// Most rows of one pass.
    pub(super) fn rows_max(self) -> usize {
        match self {
            Self::Scalar(_) => 1,
            #[cfg(target_arch = "x86_64")]
            _ => ROWS_MAX,
        }
    }

    /// Adds a tile to at most [`rows_max`](Self::rows_max) rows; their weights stay in `scratch`.
    ///
    /// # Panics
    /// If a row of K, V, q or o does not lie within its slice.
    pub(super) fn attend(
        self, dtype: Dtype, work: &Work<'_>, rows: Rows<'_>, scratch: &mut Scratch,
    ) {
        match dtype {
            Dtype::F16 => self.attend_as::<F16>(work, rows, scratch),
            Dtype::Bf16 => self.attend_as::<Bf16>(work, rows, scratch),
            Dtype::F32 => self.attend_as::<F32>(work, rows, scratch),
            Dtype::F8E4m3 => self.attend_as::<F8E4m3>(work, rows, scratch),
            Dtype::Q8_0 => self.attend_packed::<Q8_0>(work, rows, scratch),
            Dtype::Q4_0 => self.attend_packed::<Q4_0>(work, rows, scratch),
        }
    }

    /// Makes weights of some rows for one tile ones to be kept.
    pub(super) fn keep(self, weights: &[[f32; TILE_TOKENS]], kept: &mut [KeptWeights]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(integer::Avx512Vnni(simd)) | Self::Avx512(simd) => {
                // SAFETY: the token stands for the instructions.
                unsafe { keep_avx512(simd, weights, kept) }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => {
                // SAFETY: the token stands for the instructions.
                unsafe { keep_avx2(simd, weights, kept) }
            }
            Self::Scalar(simd) => keep(simd, weights, kept),
        }
    }

    /// Adds the kept weights of some rows for one tile, each row times a factor, to `sums`.
    pub(super) fn add_weighted(
        self, weights: &[KeptWeights], factors: &[f32], sums: &mut [f32; TILE_TOKENS],
    ) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(integer::Avx512Vnni(simd)) | Self::Avx512(simd) => {
                // SAFETY: the token stands for the instructions.
                unsafe { add_weighted_avx512(simd, weights, factors, sums) }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => {
                // SAFETY: the token stands for the instructions.
                unsafe { add_weighted_avx2(simd, weights, factors, sums) }
            }
            Self::Scalar(simd) => add_weighted(simd, weights, factors, sums),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn attend_packed<E: integer::Packed>(
        self, work: &Work<'_>, rows: Rows<'_>, scratch: &mut Scratch,
    ) {
        let Self::Avx512Vnni(simd) = self else {
            return self.attend_as::<E>(work, rows, scratch);
        };
        self.assert_rows::<E>(work);
        // SAFETY: the assertions, and the token stands for the instructions.
        unsafe { integer::by_rows::<E>(simd, work, rows, scratch) }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn attend_packed<E: Element>(self, work: &Work<'_>, rows: Rows<'_>, scratch: &mut Scratch) {
        self.attend_as::<E>(work, rows, scratch);
    }

    fn assert_rows<E: Element>(self, work: &Work<'_>) {
        assert!(self.divides(work.head_dim) && self.divides(work.v_head_dim));
        let block = E::DTYPE.block_elements() as usize;
        assert!(work.head_dim.is_multiple_of(block) && work.v_head_dim.is_multiple_of(block));
        let k_row_bytes = element::row_bytes::<E>(work.head_dim);
        work.tile.assert_bounds(k_row_bytes, element::row_bytes::<E>(work.v_head_dim));
    }

    fn attend_as<E: Element>(self, work: &Work<'_>, rows: Rows<'_>, scratch: &mut Scratch) {
        self.assert_rows::<E>(work);
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(integer::Avx512Vnni(simd)) | Self::Avx512(simd) => {
                // SAFETY: the assertions above, and the token stands for the instructions.
                unsafe { avx512::<E>(simd, work, rows, scratch) }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => {
                // SAFETY: the assertions above, and the token stands for the instructions.
                unsafe { avx2::<E>(simd, work, rows, scratch) }
            }
            Self::Scalar(simd) => {
                // SAFETY: the assertions above.
                unsafe { by_rows::<Scalar, E, 1>(simd, work, rows, scratch) }
            }
        }
    }

    fn divides(self, dim: usize) -> bool {
        dim.is_multiple_of(match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) | Self::Avx512(_) => avx512::Avx512::LANES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => avx2::Avx2::LANES,
            Self::Scalar(_) => Scalar::LANES,
        })
    }
}

/// # Safety
/// As [`attend`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn avx512<E: Element>(
    simd: avx512::Avx512, work: &Work<'_>, rows: Rows<'_>, scratch: &mut Scratch,
) {
    // SAFETY: the caller's.
    unsafe { by_rows::<_, E, 4>(simd, work, rows, scratch) }
}

/// # Safety
/// As [`attend`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<E: Element>(
    simd: avx2::Avx2, work: &Work<'_>, rows: Rows<'_>, scratch: &mut Scratch,
) {
    // SAFETY: the caller's.
    unsafe { by_rows::<_, E, 2>(simd, work, rows, scratch) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn keep_avx512(simd: avx512::Avx512, weights: &[[f32; TILE_TOKENS]], kept: &mut [KeptWeights]) {
    keep(simd, weights, kept);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn keep_avx2(simd: avx2::Avx2, weights: &[[f32; TILE_TOKENS]], kept: &mut [KeptWeights]) {
    keep(simd, weights, kept);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add_weighted_avx512(
    simd: avx512::Avx512, weights: &[KeptWeights], factors: &[f32], sums: &mut [f32; TILE_TOKENS],
) {
    add_weighted(simd, weights, factors, sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_weighted_avx2(
    simd: avx2::Avx2, weights: &[KeptWeights], factors: &[f32], sums: &mut [f32; TILE_TOKENS],
) {
    add_weighted(simd, weights, factors, sums);
}

/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn by_rows<S: Simd, E: Element, const W: usize>(
    simd: S, work: &Work<'_>, mut rows: Rows<'_>, scratch: &mut Scratch,
) {
    match rows.m.len() {
        0 => {}
        // SAFETY: the caller's.
        1 => unsafe { attend::<S, E, 1, W>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        2 => unsafe { attend::<S, E, 2, W>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        3 => unsafe { attend::<S, E, 3, W>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        4 => unsafe { attend::<S, E, 4, W>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        5 => unsafe { attend::<S, E, 5, W>(simd, work, &mut rows, scratch) },
        // SAFETY: the caller's.
        6 => unsafe { attend::<S, E, 6, W>(simd, work, &mut rows, scratch) },
        count => unreachable!("{count} rows, {ROWS_MAX} at most"),
    }
}
