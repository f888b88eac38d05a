//! `FLASH_ATTN_EXT` on the attention runtime.
//!
//! Shapes are ggml's, the contiguous dimension first: `q [head_dim, queries, qo_heads, streams]`,
//! `k` and `v` `[head_dim, cells, kv_heads, streams]`, mask `[cells, queries, 1, streams]` in f16,
//! output `[v_head_dim, qo_heads, queries, streams]` in f32. Each stream is a cache of its own.

use std::collections::HashMap;

use half::f16;

use super::abi::types;
use super::tensor::{TensorView, numbers, numbers_mut};
use super::visible::{Visible, visible};
use crate::attention::{
    Attention, AttentionError, KvBlock, Mask, Options, Queries, Shape, Tensor, Values,
};
use crate::page::{Dtype, Strides};

/// Runtimes for the shapes of a model's layers, each with its threads.
#[derive(Debug)]
pub(super) struct Runtimes {
    threads: usize,
    by_shape: HashMap<Shape, Attention>,
}

impl Runtimes {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads: threads.max(1), by_shape: HashMap::new() }
    }

    pub(super) fn set_threads(&mut self, threads: usize) {
        if threads.max(1) != self.threads {
            *self = Self::new(threads);
        }
    }

    fn get(&mut self, shape: Shape) -> Result<&Attention, AttentionError> {
        if !self.by_shape.contains_key(&shape) {
            self.by_shape.insert(shape, Attention::new(shape, self.threads)?);
        }
        Ok(&self.by_shape[&shape])
    }
}

/// An operation whose tensors fit together.
pub(super) struct FlashAttention<'a> {
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    mask: Option<TensorView<'a>>,
    sinks: Option<TensorView<'a>>,
    out: TensorView<'a>,
    shape: Shape,
    dtype: Dtype,
    queries: usize,
    cells: usize,
    streams: usize,
    scale: f32,
    alibi_bias: f32,
    soft_cap: Option<f32>,
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

    /// The tensor with the keys.
    pub(super) fn k(&self) -> TensorView<'a> {
        self.k
    }

    /// Computes it into `out`, the memory of the destination.
    ///
    /// # Errors
    /// A line that says what the engine gave.
    pub(super) fn run(&self, runtimes: &mut Runtimes, out: &mut [u8]) -> Result<(), String> {
        let missing = || format!("attention {}: a tensor has no memory", self.out.name());
        let length = self.queries * self.shape.num_qo_heads() * self.shape.v_head_dim();
        let out: &mut [f32] = numbers_mut(out).ok_or_else(missing)?;
        for stream in 0..self.streams {
            let part = self.stream(stream).ok_or_else(missing)?;
            let start = stream * self.out.strides()[3] / size_of::<f32>();
            let to = out.get_mut(start..start + length).ok_or_else(missing)?;
            part.attend(runtimes, to).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn stream(&self, stream: usize) -> Option<Stream<'a, '_>> {
        let from = |tensor: TensorView<'a>| tensor.bytes()?.get(stream * tensor.strides()[3]..);
        let mask = match self.mask {
            Some(mask) => {
                let offset = stream % mask.shape()[3] * mask.strides()[3];
                Some(numbers(mask.bytes()?, offset, self.queries * self.cells)?)
            }
            None => None,
        };
        let sinks = match self.sinks {
            Some(sinks) => Some(numbers(sinks.bytes()?, 0, self.shape.num_qo_heads())?),
            None => None,
        };
        Some(Stream {
            operation: self,
            q: self.gather_queries(from(self.q)?)?,
            k: from(self.k)?,
            v: from(self.v)?,
            mask,
            sinks,
        })
    }

    /// `[queries, qo_heads, head_dim]`
    fn gather_queries(&self, bytes: &[u8]) -> Option<Vec<f32>> {
        let [_, query_stride, head_stride, _] = self.q.strides();
        let dim = self.shape.head_dim();
        let mut q = Vec::with_capacity(self.queries * self.shape.num_qo_heads() * dim);
        for query in 0..self.queries {
            for head in 0..self.shape.num_qo_heads() {
                let offset = query * query_stride + head * head_stride;
                q.extend_from_slice(numbers::<f32>(bytes, offset, dim)?);
            }
        }
        Some(q)
    }
}

/// One stream of an operation.
struct Stream<'a, 'o> {
    operation: &'o FlashAttention<'a>,
    q: Vec<f32>,
    k: &'a [u8],
    v: &'a [u8],
    mask: Option<&'a [f16]>,
    sinks: Option<&'a [f32]>,
}

impl Stream<'_, '_> {
    fn attend(&self, runtimes: &mut Runtimes, out: &mut [f32]) -> Result<(), AttentionError> {
        let operation = self.operation;
        if operation.alibi_bias > 0.0 {
            return self.attend_by_heads(runtimes, out);
        }
        let sight = self.mask.map(|mask| visible(mask, operation.cells));
        let (first, end, positions, window) = match &sight {
            Some(Visible::Runs { first, last, window }) => {
                let most = last.iter().max().map_or(0, |last| *last as usize + 1);
                (*first, first + most, last.clone(), *window)
            }
            _ => (0, operation.cells, vec![0; operation.queries], None),
        };
        let options = Options {
            sm_scale: Some(operation.scale),
            soft_cap: operation.soft_cap,
            causal: matches!(sight, Some(Visible::Runs { .. })),
            window,
            mask: self.mask.filter(|_| sight == Some(Visible::Masked)).map(Mask::F16),
            ..Options::default()
        };
        let block = self.block(0, first, end);
        let queries = Queries { q: &self.q, positions: &positions };
        let partials = runtimes.get(operation.shape)?.run(&queries, &[block], &options)?;
        out.copy_from_slice(&partials.finish(self.sinks)?);
        Ok(())
    }

    /// With `ALiBi` the mask holds distances, and each head has a slope of its own to multiply them
    /// with. Models with it have as many KV heads as query heads, so nothing is read twice.
    fn attend_by_heads(
        &self, runtimes: &mut Runtimes, out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let operation = self.operation;
        let (shape, mask) = (operation.shape, self.mask.unwrap_or_default());
        let single = Shape::new(1, 1, shape.head_dim(), shape.v_head_dim())?;
        let (heads, dim, v_dim) = (shape.num_qo_heads(), shape.head_dim(), shape.v_head_dim());
        let positions = vec![0; operation.queries];
        for head in 0..heads {
            let slope = alibi_slope(head, heads, operation.alibi_bias);
            let mask: Vec<f32> = mask.iter().map(|value| slope * value.to_f32()).collect();
            let rows = self.q.chunks_exact(dim).skip(head).step_by(heads);
            let q: Vec<f32> = rows.flatten().copied().collect();
            let options = Options {
                sm_scale: Some(operation.scale),
                soft_cap: operation.soft_cap,
                causal: false,
                mask: Some(Mask::F32(&mask)),
                ..Options::default()
            };
            let block = self.block(head / shape.group(), 0, operation.cells);
            let queries = Queries { q: &q, positions: &positions };
            let partials = runtimes.get(single)?.run(&queries, &[block], &options)?;
            let result = partials.finish(self.sinks.map(|sinks| &sinks[head..=head]))?;
            let rows = out.chunks_exact_mut(v_dim).skip(head).step_by(heads);
            for (to, from) in rows.zip(result.chunks_exact(v_dim)) {
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }

    /// Cells `first..end`, from a KV head on.
    fn block(&self, head: usize, first: usize, end: usize) -> KvBlock<'_> {
        let tensor = |view: TensorView<'_>, bytes| {
            let [_, token, head_stride, _] = view.strides();
            // What does not fit is refused by the runtime, as a block without enough bytes.
            let start = first * token + head * head_stride;
            let bytes: &[u8] = bytes;
            Tensor {
                bytes: bytes.get(start..).unwrap_or_default(),
                strides: Strides { head: head_stride, token },
            }
        };
        KvBlock {
            k: tensor(self.operation.k, self.k),
            v: Values::Rows(tensor(self.operation.v, self.v)),
            dtype: self.operation.dtype,
            tokens: end - first,
            first_position: 0,
            shift: 0,
        }
    }
}

/// As in Press et al. 2022, for any number of heads: geometric from `2^(-bias / n)`, with `n` the
/// largest power of two, and the odd powers of its root for the heads beyond.
#[allow(clippy::cast_precision_loss, reason = "numbers of heads are small")]
fn alibi_slope(head: usize, heads: usize, bias: f32) -> f32 {
    let power = 1_usize << heads.ilog2();
    let (base, exponent) = if head < power {
        ((-bias / power as f32).exp2(), head + 1)
    } else {
        ((-bias / 2.0 / power as f32).exp2(), 2 * (head - power) + 1)
    };
    base.powi(i32::try_from(exponent).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes() {
        fn check(head: usize, heads: usize, expected: f32) {
            assert!((alibi_slope(head, heads, 8.0) - expected).abs() < 1e-6, "{head} of {heads}");
        }
        check(0, 8, 0.5);
        check(7, 8, 1.0 / 256.0);
        check(7, 12, 1.0 / 256.0);
        check(8, 12, 0.5_f32.sqrt());
        check(9, 12, 0.5_f32.sqrt().powi(3));
    }
}
