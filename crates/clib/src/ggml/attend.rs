//! An attention operation on the attention runtime, chunk by chunk of its queries.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::OnceLock;

use half::f16;

use super::operation::FlashAttention;
use super::tensor::{TensorView, numbers};
use super::visible::{Visible, visible};
use crate::attention::{
    Attention, AttentionError, KvBlock, Mask, Options, Partials, Queries, Shape, Tensor, Values,
};
use crate::page::Strides;

/// Consecutive queries of one stream.
#[derive(Debug)]
pub(super) struct Chunk {
    stream: usize,
    queries: Range<usize>,
    /// Found once for all stretches of cells.
    sight: OnceLock<Option<Visible>>,
}

impl Chunk {
    pub(super) fn new(stream: usize, queries: Range<usize>) -> Self {
        Self { stream, queries, sight: OnceLock::new() }
    }

    pub(super) fn stream(&self) -> usize {
        self.stream
    }
}

/// One of `count` shares of what a chunk sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub(super) index: usize,
    pub(super) count: usize,
}

/// A chunk with its memory.
struct Part<'p, 'a> {
    operation: &'p FlashAttention<'a>,
    /// `[queries, qo_heads, head_dim]`
    q: Vec<f32>,
    /// What is attended to.
    cells: Range<usize>,
    /// Rows of these.
    k: &'p [u8],
    v: &'p [u8],
    /// `[queries, all cells]`
    mask: Option<&'p [f16]>,
    sight: Option<&'p Visible>,
    queries: usize,
}

impl<'a> FlashAttention<'a> {
    /// The runtime for this operation, without threads of its own.
    pub(super) fn attention(&self) -> Result<Attention, AttentionError> {
        let shape = self.shape;
        let single = || Shape::new(1, 1, shape.head_dim(), shape.v_head_dim());
        Attention::new(if self.alibi_bias > 0.0 { single()? } else { shape }, 1)
    }

    /// Attends to one share of what a chunk sees.
    ///
    /// # Errors
    /// A line that says what the engine gave.
    pub(super) fn attend(
        &self, attention: &Attention, chunk: &Chunk, share: Share,
    ) -> Result<Partials, String> {
        let part = self.part(chunk, 0..self.cells, None).ok_or_else(|| self.without_memory())?;
        part.attend_share(attention, share).map_err(|error| error.to_string())
    }

    /// Attends to some cells, whose rows of K and V may have been read elsewhere.
    ///
    /// # Errors
    /// A line that says what the engine gave.
    pub(super) fn attend_cells(
        &self, attention: &Attention, chunk: &Chunk, cells: Range<usize>,
        rows: Option<(&[u8], &[u8])>,
    ) -> Result<Partials, String> {
        let part = self.part(chunk, cells, rows).ok_or_else(|| self.without_memory())?;
        let all = Share { index: 0, count: 1 };
        part.attend_share(attention, all).map_err(|error| error.to_string())
    }

    /// Writes the result of a chunk.
    ///
    /// # Safety
    /// Nobody else writes that of these queries meanwhile.
    ///
    /// # Errors
    /// A line that says what the engine gave.
    pub(super) unsafe fn store(&self, chunk: &Chunk, partials: Partials) -> Result<(), String> {
        let sinks = match self.sinks {
            Some(sinks) => {
                let heads = self.shape.num_qo_heads();
                let sinks = sinks.bytes().and_then(|bytes| numbers(bytes, 0, heads));
                Some(sinks.ok_or_else(|| self.without_memory())?)
            }
            None => None,
        };
        let result = partials.finish(sinks).map_err(|error| error.to_string())?;
        let [_, _, query_stride, stream_stride] = self.out.strides();
        let offset = chunk.stream * stream_stride + chunk.queries.start * query_stride;
        // SAFETY: the engine gives results memory of their own; the rest is the caller's.
        let to = unsafe { self.out.numbers_mut(offset, result.len()) };
        to.ok_or_else(|| self.without_memory())?.copy_from_slice(&result);
        Ok(())
    }

    fn without_memory(&self) -> String {
        format!("attention {}: a tensor has not the memory that it says", self.out.name())
    }

    fn part<'p>(
        &'p self, chunk: &'p Chunk, cells: Range<usize>, rows: Option<(&'p [u8], &'p [u8])>,
    ) -> Option<Part<'p, 'a>> {
        let of_stream =
            |tensor: TensorView<'a>| tensor.bytes()?.get(chunk.stream * tensor.strides()[3]..);
        let of_cells =
            |tensor: TensorView<'a>| of_stream(tensor)?.get(cells.start * tensor.strides()[1]..);
        let (k, v) = match rows {
            Some(rows) => rows,
            None => (of_cells(self.k)?, of_cells(self.v)?),
        };
        let mask = match self.mask {
            Some(mask) => {
                let [_, query_stride, _, stream_stride] = mask.strides();
                let stream = chunk.stream % mask.shape()[3];
                let offset = stream * stream_stride + chunk.queries.start * query_stride;
                Some(numbers(mask.bytes()?, offset, chunk.queries.len() * self.cells)?)
            }
            None => None,
        };
        let sight = chunk.sight.get_or_init(|| mask.map(|mask| visible(mask, self.cells)));
        Some(Part {
            operation: self,
            q: self.gather_queries(of_stream(self.q)?, chunk.queries.clone())?,
            cells,
            k,
            v,
            mask,
            sight: sight.as_ref(),
            queries: chunk.queries.len(),
        })
    }

    /// `[queries, qo_heads, head_dim]`
    fn gather_queries(&self, bytes: &[u8], queries: Range<usize>) -> Option<Vec<f32>> {
        let [_, query_stride, head_stride, _] = self.q.strides();
        let dim = self.shape.head_dim();
        let mut q = Vec::with_capacity(queries.len() * self.shape.num_qo_heads() * dim);
        for query in queries {
            for head in 0..self.shape.num_qo_heads() {
                let offset = query * query_stride + head * head_stride;
                q.extend_from_slice(numbers::<f32>(bytes, offset, dim)?);
            }
        }
        Some(q)
    }
}

impl Part<'_, '_> {
    fn attend_share(
        &self, attention: &Attention, share: Share,
    ) -> Result<Partials, AttentionError> {
        if self.operation.alibi_bias > 0.0 {
            self.attend_by_heads(attention, share)
        } else {
            self.attend(attention, share)
        }
    }

    /// The mask of the cells that are attended to, `[queries, cells]`.
    fn mask(&self) -> Cow<'_, [f16]> {
        let mask = self.mask.unwrap_or_default();
        if self.cells == (0..self.operation.cells) {
            return Cow::Borrowed(mask);
        }
        let rows = mask.chunks_exact(self.operation.cells);
        rows.flat_map(|row| &row[self.cells.clone()]).copied().collect()
    }

    fn attend(&self, attention: &Attention, share: Share) -> Result<Partials, AttentionError> {
        let operation = self.operation;
        let (run, positions, window) = match self.sight {
            Some(Visible::Runs { first, last, window }) => {
                let most = last.iter().max().map_or(0, |last| *last as usize + 1);
                (*first..first + most, last.clone(), *window)
            }
            _ => (0..operation.cells, vec![0; self.queries], None),
        };
        let mask = (self.sight == Some(&Visible::Masked)).then(|| self.mask());
        let options = Options {
            sm_scale: Some(operation.scale),
            soft_cap: operation.soft_cap,
            causal: matches!(self.sight, Some(Visible::Runs { .. })),
            window,
            mask: mask.as_deref().map(Mask::F16),
            ..Options::default()
        };
        let queries = Queries { q: &self.q, positions: &positions };
        let end = self.cells.end.min(run.end);
        let first = self.cells.start.max(run.start).min(end);
        let mut block = self.block(0, first..end);
        block.first_position = first.saturating_sub(run.start) as u64;
        attention.run_share(&queries, &[block], &options, share.index, share.count)
    }

    /// With `ALiBi` the mask holds distances, and each head has a slope of its own to multiply them
    /// with: the runtime gets one head after the other, each with a mask of its own.
    fn attend_by_heads(
        &self, attention: &Attention, share: Share,
    ) -> Result<Partials, AttentionError> {
        let operation = self.operation;
        let heads = operation.shape.num_qo_heads();
        let mask = self.mask();
        let (dim, v_dim) = (operation.shape.head_dim(), operation.shape.v_head_dim());
        let positions = vec![0; self.queries];
        let rows = self.queries * heads;
        let (mut o, mut m, mut l) = (vec![0.0; rows * v_dim], vec![0.0; rows], vec![0.0; rows]);
        for head in 0..heads {
            let slope = alibi_slope(head, heads, operation.alibi_bias);
            let mask: Vec<f32> = mask.iter().map(|value| slope * value.to_f32()).collect();
            let q = self.q.chunks_exact(dim).skip(head).step_by(heads);
            let q: Vec<f32> = q.flatten().copied().collect();
            let options = Options {
                sm_scale: Some(operation.scale),
                soft_cap: operation.soft_cap,
                causal: false,
                mask: Some(Mask::F32(&mask)),
                ..Options::default()
            };
            let queries = Queries { q: &q, positions: &positions };
            let block = self.block(head / operation.shape.group(), self.cells.clone());
            let one =
                attention.run_share(&queries, &[block], &options, share.index, share.count)?;
            for query in 0..self.queries {
                let row = query * heads + head;
                (m[row], l[row]) = (one.m()[query], one.l()[query]);
                o[row * v_dim..][..v_dim].copy_from_slice(&one.o()[query * v_dim..][..v_dim]);
            }
        }
        Partials::from_parts(operation.shape, o, m, l)
    }

    /// Cells of this part, from a KV head on.
    fn block(&self, head: usize, cells: Range<usize>) -> KvBlock<'_> {
        // None at all may stand before the first.
        let before = cells.start.saturating_sub(self.cells.start);
        let tensor = |view: TensorView<'_>, bytes| {
            let [_, token, head_stride, _] = view.strides();
            // What does not fit is refused by the runtime, as a block without enough bytes.
            let start = before * token + head * head_stride;
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
            tokens: cells.len(),
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
