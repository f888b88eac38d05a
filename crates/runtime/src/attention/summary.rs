//! What a page's keys can be at most: the bounds that Quest ranks pages by.

use super::{AttentionError, KvBlock, Shape};
use crate::page::row_f32;

/// Smallest and largest K of a page, for each KV head and dimension (Tang et al. 2024).
#[derive(Debug, Clone, PartialEq)]
pub struct PageSummary {
    head_dim: usize,
    /// `[num_kv_heads, head_dim]` smallest and largest.
    bounds: Vec<(f32, f32)>,
}

impl PageSummary {
    /// Reads the keys of a block. NaN in a dimension makes its bounds infinite, so that selection
    /// does not hide it.
    ///
    /// # Errors
    /// [`AttentionError::Block`] (index 0) if the block does not hold what it says.
    pub fn new(shape: Shape, block: &KvBlock<'_>) -> Result<Self, AttentionError> {
        block.check(shape).map_err(|why| AttentionError::Block { index: 0, why })?;
        let dim = shape.head_dim();
        let row_bytes =
            dim / block.dtype.block_elements() as usize * block.dtype.block_bytes() as usize;
        let mut bounds = vec![(f32::INFINITY, f32::NEG_INFINITY); shape.num_kv_heads() * dim];
        let mut values = vec![0.0; dim];
        for (head, bounds) in bounds.chunks_exact_mut(dim).enumerate() {
            for token in 0..block.tokens {
                let start = head * block.k.strides.head + token * block.k.strides.token;
                row_f32(block.dtype, &block.k.bytes[start..][..row_bytes], &mut values);
                for ((least, most), value) in bounds.iter_mut().zip(&values) {
                    if value.is_nan() {
                        (*least, *most) = (f32::NEG_INFINITY, f32::INFINITY);
                    }
                    (*least, *most) = (least.min(*value), most.max(*value));
                }
            }
        }
        Ok(Self { head_dim: dim, bounds })
    }

    /// The most that `q . k` can be for a token of the page; -infinity for a page without tokens,
    /// infinity where a product may be NaN, so that selection does not hide it.
    ///
    /// `q` is `[head_dim]`, not scaled.
    ///
    /// # Panics
    /// If there is no such KV head.
    pub fn upper_bound(&self, kv_head: usize, q: &[f32]) -> f32 {
        let bounds = &self.bounds[kv_head * self.head_dim..][..self.head_dim];
        if bounds.first().is_some_and(|(least, most)| least > most) {
            return f32::NEG_INFINITY;
        }
        // NaN if 0 meets two infinite bounds, or infinities of both signs are added.
        let bound: f32 =
            q.iter().zip(bounds).map(|(q, (least, most))| (q * least).max(q * most)).sum();
        if bound.is_nan() { f32::INFINITY } else { bound }
    }
}
