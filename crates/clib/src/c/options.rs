//! What is attended to, and how.

use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr;

use half::f16;

use super::block::DataType;
use super::memory::{Caller, Plain, Structure};
use super::rotation::Rotation;
use super::status::Failure;
use crate::attention::select::TokenSet;
use crate::attention::{self, Mask, Shape};

/// Queries of one layer. They belong to the caller and are only read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Queries {
    /// `sizeof(kvfs_queries)`
    pub size: usize,
    /// `[num_queries, num_qo_heads, head_dim]`, already rotated for their positions.
    pub q: *const f32,
    /// `[num_queries]`, below 2^63, in any order.
    pub positions: *const u64,
    /// How many; 0 is fine.
    pub num_queries: u64,
    /// Must be that of the attention.
    pub num_qo_heads: u32,
    /// Must be that of the attention.
    pub head_dim: u32,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for Queries {
    const NAME: &'static str = "kvfs_queries";
    const REQUIRED_BYTES: usize = size_of::<Self>();
}

/// Which positions a query sees.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Causality {
    /// None after its own.
    Causal = 0,
    /// All.
    Bidirectional = 1,
}

/// Tokens from `first` to `end - 1`, counted over all blocks in order. This structure does not
/// grow.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TokenRange {
    /// The first one.
    pub first: u64,
    /// The one after the last one.
    pub end: u64,
}

// SAFETY: numbers without gaps.
unsafe impl Plain for TokenRange {}

/// How the logits come about, in this order: `q . k * sm_scale`, soft cap, `ALiBi`, mask. Zeros
/// are the defaults. Sink logits are given to `kvfs_partials_finish`, because they count once for
/// all parts.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// `sizeof(kvfs_options)`
    pub size: usize,
    /// 0: `1 / sqrt(head_dim)`.
    pub sm_scale: f32,
    /// Logits become `soft_cap * tanh(logit / soft_cap)`; 0: they do not.
    pub soft_cap: f32,
    /// A query sees its own position and those less than `window` before it; 0: no limit.
    pub window: u64,
    /// One of `kvfs_causality`.
    pub causality: u32,
    /// `KVFS_DTYPE_F32` or `KVFS_DTYPE_F16`; not looked at without a mask.
    pub mask_dtype: u32,
    /// `[num_queries, tokens of all blocks in order]`, added to the logits; NULL: nothing is. Where
    /// one is -infinity the query does not see the token, and if no query sees it, its K and V are
    /// never touched.
    pub mask: *const c_void,
    /// Values of `mask`.
    pub mask_count: usize,
    /// `[num_qo_heads]`: `slope * (position of the token - position of the query)` is added; NULL:
    /// nothing is.
    pub alibi_slopes: *const f32,
    /// Values of `alibi_slopes`.
    pub alibi_slopes_count: usize,
    /// Only these tokens are seen, the others never touched; NULL: all are seen.
    pub selection: *const TokenRange,
    /// Ranges of `selection`; with 0 of them and no NULL, nothing is seen.
    pub selection_count: usize,
    /// The position encoding in K, for blocks with a shift; NULL: none.
    pub rotation: *const Rotation,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for Options {
    const NAME: &'static str = "kvfs_options";
    const REQUIRED_BYTES: usize = offset_of!(Self, sm_scale);
}

impl Default for Options {
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            sm_scale: 0.0,
            soft_cap: 0.0,
            window: 0,
            causality: Causality::Causal as u32,
            mask_dtype: 0,
            mask: ptr::null(),
            mask_count: 0,
            alibi_slopes: ptr::null(),
            alibi_slopes_count: 0,
            selection: ptr::null(),
            selection_count: 0,
            rotation: ptr::null(),
        }
    }
}

impl Queries {
    pub(super) fn borrow<'a>(
        &self, caller: &'a Caller, shape: Shape,
    ) -> Result<attention::Queries<'a>, Failure> {
        let found = (self.num_qo_heads as usize, self.head_dim as usize);
        if found != (shape.num_qo_heads(), shape.head_dim()) {
            return Err(Failure::argument(format!(
                "queries have {} heads of {}, the attention has {} of {}",
                found.0,
                found.1,
                shape.num_qo_heads(),
                shape.head_dim()
            )));
        }
        let num_queries = usize::try_from(self.num_queries).unwrap_or(usize::MAX);
        let values = num_queries.saturating_mul(found.0 * found.1);
        Ok(attention::Queries {
            q: caller.slice(self.q, values, "q")?,
            positions: caller.slice(self.positions, num_queries, "positions")?,
        })
    }
}

impl Options {
    /// The selected ones of so many tokens.
    pub(super) fn selection(
        &self, caller: &Caller, tokens: usize,
    ) -> Result<Option<TokenSet>, Failure> {
        if self.selection.is_null() {
            return Ok(None);
        }
        let mut set = TokenSet::none(tokens);
        for range in caller.slice(self.selection, self.selection_count, "selection")? {
            let (first, end) = (usize::try_from(range.first), usize::try_from(range.end));
            let (Ok(first), Ok(end)) = (first, end) else {
                return Err(Failure::argument(format!("selection of {range:?}")));
            };
            if first > end || end > tokens {
                let why = format!("selection of tokens {first} to {end}, the blocks have {tokens}");
                return Err(Failure::argument(why));
            }
            set.insert(first..end);
        }
        Ok(Some(set))
    }

    pub(super) fn borrow<'a>(
        &self, caller: &'a Caller, selection: Option<&'a TokenSet>,
    ) -> Result<attention::Options<'a>, Failure> {
        let causal = match self.causality {
            0 => true,
            1 => false,
            other => return Err(Failure::argument(format!("causality {other} is unknown"))),
        };
        let (slopes, slopes_count) = (self.alibi_slopes, self.alibi_slopes_count);
        let slopes = if slopes.is_null() {
            None
        } else {
            Some(caller.slice(slopes, slopes_count, "alibi_slopes")?)
        };
        Ok(attention::Options {
            sm_scale: (self.sm_scale != 0.0).then_some(self.sm_scale),
            causal,
            window: (self.window != 0).then_some(self.window),
            soft_cap: (self.soft_cap != 0.0).then_some(self.soft_cap),
            alibi_slopes: slopes,
            mask: self.mask(caller)?,
            selection,
            rotation: caller.optional(self.rotation, "rotation")?.map(Rotation::inner),
        })
    }

    fn mask<'a>(&self, caller: &'a Caller) -> Result<Option<Mask<'a>>, Failure> {
        if self.mask.is_null() {
            return Ok(None);
        }
        Ok(Some(if self.mask_dtype == DataType::F32 as u32 {
            Mask::F32(caller.slice(self.mask.cast::<f32>(), self.mask_count, "mask")?)
        } else if self.mask_dtype == DataType::F16 as u32 {
            Mask::F16(caller.slice(self.mask.cast::<f16>(), self.mask_count, "mask")?)
        } else {
            let dtype = self.mask_dtype;
            return Err(Failure::argument(format!("mask_dtype {dtype} is neither f32 nor f16")));
        }))
    }
}
