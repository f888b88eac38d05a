//! Attention by its definition, in f64, to compare with.

use half::f16;
use kvfs::attention::{KvBlock, Shape, Values};
use kvfs::page::row_f32;

use crate::attention::kv_width;

/// Keys and values, each `[tokens, kv_heads, head_dim]`.
pub(crate) struct Rows {
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
}

impl Rows {
    /// The rows of a tail: for each token its keys, then its values.
    pub(crate) fn of_tail(shape: Shape, tail: impl IntoIterator<Item = f32>) -> Self {
        let width = kv_width(shape);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (index, value) in tail.into_iter().enumerate() {
            let is_key = index % (2 * width) < width;
            if is_key { &mut keys } else { &mut values }.push(value);
        }
        Self { keys, values }
    }

    /// The values that blocks stand for.
    pub(crate) fn of_blocks(shape: Shape, blocks: &[KvBlock<'_>]) -> Self {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for block in blocks {
            let Values::Rows(v) = block.v else { panic!("a Llama has values") };
            for (tensor, out) in [(block.k, &mut keys), (v, &mut values)] {
                for token in 0..block.tokens {
                    for head in 0..shape.num_kv_heads() {
                        let start = head * tensor.strides.head + token * tensor.strides.token;
                        let blocks = shape.head_dim() / block.dtype.block_elements() as usize;
                        let bytes = blocks * block.dtype.block_bytes() as usize;
                        let mut row = vec![0.0; shape.head_dim()];
                        row_f32(block.dtype, &tensor.bytes[start..][..bytes], &mut row);
                        out.extend(row);
                    }
                }
            }
        }
        Self { keys, values }
    }

    pub(crate) fn of_halves(keys: &[f16], values: &[f16]) -> Self {
        let [keys, values] = [keys, values].map(|halves| halves.iter().map(|h| h.to_f32()));
        Self { keys: keys.collect(), values: values.collect() }
    }
}

/// Attention of one token, `[query_heads, head_dim]`, over the `visible` tokens.
pub(crate) fn attend(
    shape: Shape, query: &[f32], rows: &Rows, visible: &dyn Fn(usize) -> bool,
) -> Vec<f64> {
    let (width, dim) = (kv_width(shape), shape.head_dim());
    #[expect(clippy::cast_precision_loss, reason = "head dimensions are small")]
    let scale = 1.0 / (dim as f64).sqrt();
    let seen: Vec<usize> = (0..rows.keys.len() / width).filter(|token| visible(*token)).collect();
    let mut out = Vec::with_capacity(query.len());
    for (head, query) in query.chunks_exact(dim).enumerate() {
        let start = head / shape.group() * dim;
        let score = |token: &usize| {
            let key = &rows.keys[token * width + start..][..dim];
            let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
            products.sum::<f64>() * scale
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
        let total: f64 = weights.iter().sum();
        out.extend((start..start + dim).map(|column| {
            let values = seen.iter().map(|token| f64::from(rows.values[token * width + column]));
            weights.iter().zip(values).map(|(w, value)| w * value).sum::<f64>() / total
        }));
    }
    out
}

/// Panics where the values differ by more than 1e-5, which is some roundings of f32.
pub(crate) fn assert_close(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} is not {expected}");
    }
}
