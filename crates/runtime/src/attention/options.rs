//! What is attended to, and how.

use std::ops::Range;

use half::f16;

use super::rotation::Rotation;
use super::select::TokenSet;
use super::{AttentionError, Shape};

/// Queries of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// `[num_queries, num_qo_heads, head_dim]`, already rotated for their positions.
    pub q: &'a [f32],
    /// `[num_queries]`, in any order.
    pub positions: &'a [u64],
}

impl Queries<'_> {
    pub(crate) fn check(&self, shape: Shape) -> Result<(), AttentionError> {
        let expected = self.positions.len() * shape.num_qo_heads() * shape.head_dim();
        if self.q.len() != expected {
            return Err(AttentionError::Arguments(format!(
                "q has {} values, {} queries of {} heads of {} are {expected}",
                self.q.len(),
                self.positions.len(),
                shape.num_qo_heads(),
                shape.head_dim()
            )));
        }
        if let Some(position) = self.positions.iter().find(|p| i64::try_from(**p).is_err()) {
            return Err(AttentionError::Arguments(format!("a query at position {position}")));
        }
        Ok(())
    }
}

/// Values that are added to the logits: `[num_queries, tokens]`, tokens of all blocks in order.
/// Where one is -infinity the query does not see the token, and if no query sees it, its K and V
/// are never touched.
#[derive(Debug, Clone, Copy)]
pub enum Mask<'a> {
    /// In f32.
    F32(&'a [f32]),
    /// In f16.
    F16(&'a [f16]),
}

impl Mask<'_> {
    pub(super) fn get(&self, index: usize) -> f32 {
        match self {
            Self::F32(values) => values[index],
            Self::F16(values) => values[index].to_f32(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
        }
    }
}

/// How the logits come about. The default is plain causal attention.
///
/// In this order: `q . k * sm_scale`, soft cap, `ALiBi`, mask. Per-head sink logits are given to
/// [`Partials::finish`](super::Partials::finish), because they count once for all parts.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// `1 / sqrt(head_dim)` where absent.
    pub sm_scale: Option<f32>,
    /// A query sees no position after its own.
    pub causal: bool,
    /// A query sees its own position and those less than `window` before it.
    pub window: Option<u64>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
    /// `[num_qo_heads]`: `slope * (position of the token - position of the query)` is added.
    pub alibi_slopes: Option<&'a [f32]>,
    /// Added to the logits.
    pub mask: Option<Mask<'a>>,
    /// Only these tokens are seen.
    pub selection: Option<&'a TokenSet>,
    /// The position encoding in K, for blocks with a shift.
    pub rotation: Option<&'a Rotation>,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            sm_scale: None,
            causal: true,
            window: None,
            soft_cap: None,
            alibi_slopes: None,
            mask: None,
            selection: None,
            rotation: None,
        }
    }
}

impl Options<'_> {
    /// The positions that a query sees, by position alone.
    pub(crate) fn seen_positions(&self, position: u64) -> Range<u64> {
        let end = if self.causal { position + 1 } else { u64::MAX };
        // From `position + 1 - window` on.
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        start..end.max(start)
    }

    /// Whether selection and mask let a query see a token, by its index among all of `tokens`.
    pub(crate) fn admits(&self, query: usize, token: usize, tokens: usize) -> bool {
        self.selection.is_none_or(|selection| selection.contains(token))
            && self.mask.is_none_or(|mask| mask.get(query * tokens + token) != f32::NEG_INFINITY)
    }

    /// Whether queries that see the same tokens of a tile have the same logits for the same `q`.
    pub(super) fn is_plain(&self) -> bool {
        self.alibi_slopes.is_none() && self.mask.is_none()
    }

    pub(crate) fn scale(&self, shape: Shape) -> f32 {
        #[allow(clippy::cast_precision_loss, reason = "at most 4096")]
        self.sm_scale.unwrap_or_else(|| 1.0 / (shape.head_dim() as f32).sqrt())
    }

    pub(crate) fn check(
        &self, shape: Shape, num_queries: usize, tokens: usize,
    ) -> Result<(), AttentionError> {
        let refuse = |why| Err(AttentionError::Arguments(why));
        if let Some(slopes) = self.alibi_slopes
            && slopes.len() != shape.num_qo_heads()
        {
            let (found, heads) = (slopes.len(), shape.num_qo_heads());
            return refuse(format!("{found} ALiBi slopes for {heads} query heads"));
        }
        if let Some(mask) = &self.mask
            && Some(mask.len()) != num_queries.checked_mul(tokens)
        {
            let found = mask.len();
            return refuse(format!(
                "mask has {found} values for {num_queries} queries and {tokens} tokens"
            ));
        }
        if let Some(selection) = self.selection
            && selection.len() != tokens
        {
            let found = selection.len();
            return refuse(format!("selection is of {found} tokens, the blocks have {tokens}"));
        }
        if let Some(rotation) = self.rotation
            && rotation.end() > shape.head_dim()
        {
            let (end, head_dim) = (rotation.end(), shape.head_dim());
            return refuse(format!("rotation of {end} elements for a head_dim of {head_dim}"));
        }
        match self.soft_cap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                refuse(format!("soft cap {cap}: must be finite and above 0"))
            }
            _ => Ok(()),
        }
    }
}
