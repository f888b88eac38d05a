//! K and V where they lie: pages, tails, or any other memory with regular strides.

use std::ops::Range;

use super::Shape;
use crate::page::{Dtype, Geometry, PageView, Positions, Strides};

/// Rows of all KV heads of some tokens: the row of (head, token) starts at
/// `head * strides.head + token * strides.token`.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Little endian.
    pub bytes: &'a [u8],
    /// In bytes, of any alignment.
    pub strides: Strides,
}

/// Where the values are.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Rows of `v_head_dim` elements.
    Rows(Tensor<'a>),
    /// The first `v_head_dim` elements of the K rows (multi-head latent attention).
    Latent,
}

/// Consecutive tokens of one layer.
#[derive(Debug, Clone, Copy)]
pub struct KvBlock<'a> {
    /// Rows of `head_dim` elements.
    pub k: Tensor<'a>,
    /// Rows of `v_head_dim` elements.
    pub v: Values<'a>,
    /// Of K and V.
    pub dtype: Dtype,
    /// How many; 0 is fine.
    pub tokens: usize,
    /// Position of the first token in the sequence that the queries belong to.
    pub first_position: u64,
    /// That position less the one for which K was rotated. Other than 0 it needs
    /// [`Options::rotation`](super::Options::rotation).
    pub shift: i64,
}

impl<'a> KvBlock<'a> {
    /// A page, at the position it was written for.
    pub fn page(page: &PageView<'a>, first_position: u64) -> Self {
        let values = Tensor { bytes: page.v(), strides: page.v_strides() };
        let has_values = page.geometry().v_head_dim() > 0;
        Self {
            k: Tensor { bytes: page.k(), strides: page.k_strides() },
            v: if has_values { Values::Rows(values) } else { Values::Latent },
            dtype: page.dtype(),
            tokens: page.tokens() as usize,
            first_position,
            shift: 0,
        }
    }

    /// So many tokens whose K and V are elsewhere: for choosing among blocks, not for attention,
    /// which refuses it.
    pub(crate) fn outline(tokens: usize, first_position: u64) -> Self {
        let k = Tensor { bytes: &[], strides: Strides { head: 0, token: 0 } };
        let v = Values::Latent;
        Self { k, v, dtype: Dtype::F32, tokens, first_position, shift: 0 }
    }

    /// The rows of a tail, of each token `K[num_kv_heads, head_dim]`, then
    /// `V[num_kv_heads, v_head_dim]`. A last row that is not whole is left out.
    pub fn tail(rows: &'a [u8], geometry: &Geometry, first_position: u64) -> Self {
        let bytes = |bytes: u64| usize::try_from(bytes).expect("a row is a few MiB at most");
        let (k_row, v_row) = (bytes(geometry.k_row_bytes()), bytes(geometry.v_row_bytes()));
        let token = bytes(geometry.row_bytes());
        let v_start = (k_row * geometry.num_kv_heads() as usize).min(rows.len());
        let values = Tensor { bytes: &rows[v_start..], strides: Strides { head: v_row, token } };
        Self {
            k: Tensor { bytes: rows, strides: Strides { head: k_row, token } },
            v: if v_row > 0 { Values::Rows(values) } else { Values::Latent },
            dtype: geometry.dtype(),
            tokens: rows.len() / token,
            first_position,
            shift: 0,
        }
    }

    /// The same tokens where they stand `shift` positions after the ones they were rotated for.
    #[must_use]
    pub fn shifted(mut self, shift: i64) -> Self {
        self.first_position = self.first_position.wrapping_add_signed(shift);
        self.shift += shift;
        self
    }

    /// Some of the tokens, at positions from `first_position` on, which are `shift` after those that
    /// they were rotated for. There must be that many.
    pub(crate) fn rows(&self, tokens: Range<usize>, first_position: u64, shift: i64) -> Self {
        let from = |tensor: Tensor<'a>| {
            let start = tokens.start.saturating_mul(tensor.strides.token).min(tensor.bytes.len());
            Tensor { bytes: &tensor.bytes[start..], ..tensor }
        };
        let v = match self.v {
            Values::Rows(tensor) => Values::Rows(from(tensor)),
            Values::Latent => Values::Latent,
        };
        Self { k: from(self.k), v, tokens: tokens.len(), first_position, shift, ..*self }
    }

    /// The rows that are no holes, where they stand; those of this block have numbers from
    /// `first_position` on. With each the number of its first row.
    pub fn placed<'p>(self, positions: &'p Positions) -> impl Iterator<Item = (u64, Self)> + 'p
    where
        'a: 'p,
    {
        let first = self.first_position;
        let row = move |row: u64| usize::try_from(row - first).unwrap_or(usize::MAX);
        positions.within(first..first + self.tokens as u64).map(move |run| {
            let rows = row(run.row)..row(run.rows().end);
            (run.row, self.rows(rows, run.position, run.shift))
        })
    }

    /// The tensor with the values.
    pub(crate) fn values(&self) -> Tensor<'a> {
        match self.v {
            Values::Rows(tensor) => tensor,
            Values::Latent => self.k,
        }
    }

    /// Whether every row lies within its bytes; if not, which does not.
    pub fn check(&self, shape: Shape) -> Result<(), String> {
        if matches!(self.v, Values::Latent) && shape.v_head_dim() > shape.head_dim() {
            return Err(format!(
                "v_head_dim {} is more than the {} elements of K that hold it",
                shape.v_head_dim(),
                shape.head_dim()
            ));
        }
        let last = u64::try_from(self.tokens).ok().and_then(|n| self.first_position.checked_add(n));
        if last.is_none_or(|last| i64::try_from(last).is_err()) {
            return Err(format!("{} tokens from position {}", self.tokens, self.first_position));
        }
        if self.shift == i64::MIN {
            return Err(format!("a shift of {}", self.shift));
        }
        if u32::try_from(self.tokens).is_err() {
            return Err(format!("{} tokens, the limit is {}", self.tokens, u32::MAX));
        }
        self.check_tensor("k", &self.k, shape, shape.head_dim())?;
        self.check_tensor("v", &self.values(), shape, shape.v_head_dim())
    }

    fn check_tensor(
        &self, name: &str, tensor: &Tensor<'_>, shape: Shape, elements: usize,
    ) -> Result<(), String> {
        let block = self.dtype.block_elements() as usize;
        if !elements.is_multiple_of(block) {
            return Err(format!(
                "rows of {name} have {elements} elements, {} needs a multiple of {block}",
                self.dtype
            ));
        }
        let Some(last_token) = self.tokens.checked_sub(1) else { return Ok(()) };
        let row_bytes = elements / block * self.dtype.block_bytes() as usize;
        let end = || {
            let head = (shape.num_kv_heads() - 1).checked_mul(tensor.strides.head)?;
            let token = last_token.checked_mul(tensor.strides.token)?;
            head.checked_add(token)?.checked_add(row_bytes)
        };
        match end() {
            Some(end) if end <= tensor.bytes.len() => Ok(()),
            Some(end) => Err(format!(
                "{name} has {} bytes, {} heads and {} tokens need {end}",
                tensor.bytes.len(),
                shape.num_kv_heads(),
                self.tokens
            )),
            None => Err(format!("strides of {name} overflow")),
        }
    }
}
