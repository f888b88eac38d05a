//! `FLASH_ATTN_EXT`: what the engine asks for, checked.
//!
//! Shapes are ggml's, the contiguous dimension first: `q [head_dim, queries, qo_heads, streams]`,
//! `k` and `v` `[head_dim, cells, kv_heads, streams]`, mask `[cells, queries, 1, streams]` in f16,
//! output `[v_head_dim, qo_heads, queries, streams]` in f32. Each stream is a cache of its own.

use super::abi::types;
use super::tensor::TensorView;
use crate::attention::Shape;
use crate::page::Dtype;

/// An operation whose tensors fit together.
pub(super) struct FlashAttention<'a> {
    pub(super) q: TensorView<'a>,
    pub(super) k: TensorView<'a>,
    pub(super) v: TensorView<'a>,
    pub(super) mask: Option<TensorView<'a>>,
    pub(super) sinks: Option<TensorView<'a>>,
    pub(super) out: TensorView<'a>,
    pub(super) shape: Shape,
    pub(super) dtype: Dtype,
    pub(super) queries: usize,
    pub(super) cells: usize,
    pub(super) streams: usize,
    pub(super) scale: f32,
    pub(super) alibi_bias: f32,
    pub(super) soft_cap: Option<f32>,
}

impl<'a> FlashAttention<'a> {
    /// Nothing, if the runtime cannot do it. Tensors need no memory yet.
    pub(super) fn new(out: TensorView<'a>) -> Option<Self> {
        let (q, k, v) = (out.source(0)?, out.source(1)?, out.source(2)?);
        let [head_dim, queries, qo_heads, streams] = q.shape();
        let [_, cells, kv_heads, _] = k.shape();
        let v_head_dim = v.shape()[0];
        let dtype = k.dtype()?;
        let shape = Shape::new(qo_heads, kv_heads, head_dim, v_head_dim).ok()?;
        let fits = k.shape() == [head_dim, cells, kv_heads, streams]
            && v.shape() == [v_head_dim, cells, kv_heads, streams]
            && out.shape() == [v_head_dim, qo_heads, queries, streams]
            && v.kind() == k.kind()
            && (q.kind(), out.kind()) == (types::F32, types::F32)
            && q.row_bytes().is_some()
            && k.row_bytes().is_some()
            && v.row_bytes().is_some()
            && out.is_packed(3)
            && u32::try_from(cells).is_ok();
        let soft_cap = Some(out.parameter(2)).filter(|cap| *cap != 0.0);
        let (mask, sinks) = (out.source(3), out.source(4));
        let operation = Self {
            q,
            k,
            v,
            mask,
            sinks,
            out,
            shape,
            dtype,
            queries,
            cells,
            streams,
            scale: out.parameter(0),
            alibi_bias: out.parameter(1),
            soft_cap,
        };
        (fits && operation.additions_fit()).then_some(operation)
    }

    fn additions_fit(&self) -> bool {
        let mask_fits = |mask: TensorView<'_>| {
            let [cells, queries, heads, streams] = mask.shape();
            mask.kind() == types::F16
                && mask.is_packed(2)
                && (cells, heads) == (self.cells, 1)
                && queries >= self.queries
                && streams > 0
                && self.streams.is_multiple_of(streams)
        };
        let sinks_fit = |sinks: TensorView<'_>| {
            sinks.kind() == types::F32 && sinks.shape() == [self.shape.num_qo_heads(), 1, 1, 1]
        };
        self.mask.map_or(self.alibi_bias == 0.0, mask_fits) && self.sinks.is_none_or(sinks_fit)
    }
}
