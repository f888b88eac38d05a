//! Causal attention over pages and tails, in f32.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::Result;
use crate::matrix::{dot, for_each_row};

/// The heads of a layer. Query head `h` reads key-value head `h / (query_heads / kv_heads)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Shape {
    /// Values in the keys (or the values) of one token.
    pub(crate) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Values in the queries (or the outputs) of one token.
    pub(crate) fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }
}

/// The keys and values of some consecutive tokens of one layer, where they lie.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rows<'a> {
    /// A page: keys and values are each `[kv_heads, tokens, head_dim]`.
    Page { keys: &'a [f16], values: &'a [f16] },
    /// A tail: for each token its keys `[kv_heads, head_dim]`, then its values likewise.
    Tail(&'a [f16]),
}

impl Rows<'_> {
    /// How many tokens these rows hold.
    fn tokens(&self, shape: Shape) -> usize {
        match self {
            Rows::Page { keys, .. } => keys.len() / shape.kv_width(),
            Rows::Tail(rows) => rows.len() / (2 * shape.kv_width()),
        }
    }

    /// Appends the first `tokens` keys and values of one head to `keys_out` and `values_out`.
    fn extend(
        &self, shape: Shape, head: usize, tokens: usize, keys_out: &mut Vec<f32>,
        values_out: &mut Vec<f32>,
    ) {
        let dim = shape.head_dim;
        match self {
            Rows::Page { keys, values } => {
                let start = head * self.tokens(shape) * dim;
                extend_f32(keys_out, &keys[start..][..tokens * dim]);
                extend_f32(values_out, &values[start..][..tokens * dim]);
            }
            Rows::Tail(rows) => {
                let width = shape.kv_width();
                for row in rows.chunks_exact(2 * width).take(tokens) {
                    extend_f32(keys_out, &row[head * dim..][..dim]);
                    extend_f32(values_out, &row[width + head * dim..][..dim]);
                }
            }
        }
    }
}

/// Attention of consecutive tokens, the first of them at `first_position`, over everything up to
/// and including themselves.
///
/// `queries` and `out` are `[tokens, query_heads, head_dim]`; `rows` hold the keys (after rotary
/// embedding) and values from position 0 on, in order. The result is the same to the last bit
/// however the positions are divided into pages and tails, and the tokens into calls.
pub(crate) fn attend(
    shape: Shape, rows: &[Rows<'_>], queries: &[f32], first_position: usize, out: &mut [f32],
) -> Result<()> {
    let width = shape.query_width();
    let end = first_position + queries.len() / width;
    let held: usize = rows.iter().map(|rows| rows.tokens(shape)).sum();
    if held < end {
        return Err(format!("attention up to position {end}, but only {held} are cached").into());
    }
    let group = shape.query_heads / shape.kv_heads * shape.head_dim;
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for kv_head in 0..shape.kv_heads {
        gather(shape, rows, kv_head, end, &mut keys, &mut values);
        for_each_row(out, width, |token, out| {
            let visible = (first_position + token + 1) * shape.head_dim;
            let (keys, values) = (&keys[..visible], &values[..visible]);
            let query = &queries[token * width + kv_head * group..][..group];
            let out = &mut out[kv_head * group..][..group];
            for (query, out) in
                query.chunks_exact(shape.head_dim).zip(out.chunks_exact_mut(shape.head_dim))
            {
                attend_head(query, keys, values, out);
            }
        });
    }
    Ok(())
}

/// Collects the keys and values of one head, positions `0..end`, as f32.
fn gather(
    shape: Shape, rows: &[Rows<'_>], head: usize, end: usize, keys: &mut Vec<f32>,
    values: &mut Vec<f32>,
) {
    keys.clear();
    values.clear();
    let mut left = end;
    for rows in rows {
        let tokens = rows.tokens(shape).min(left);
        rows.extend(shape, head, tokens, keys, values);
        left -= tokens;
    }
}

/// One query head of one token: softmax of the scaled scores, then the weighted sum of values.
fn attend_head(query: &[f32], keys: &[f32], values: &[f32], out: &mut [f32]) {
    let dim = query.len();
    #[expect(clippy::cast_precision_loss, reason = "head dimensions are small")]
    let scale = 1.0 / (dim as f32).sqrt();
    let mut weights: Vec<f32> = keys.chunks_exact(dim).map(|key| dot(query, key) * scale).collect();
    let highest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    for weight in &mut weights {
        *weight = (*weight - highest).exp();
        total += *weight;
    }
    out.fill(0.0);
    for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
        for (out, value) in out.iter_mut().zip(value) {
            *out += weight * value;
        }
    }
    for out in out {
        *out /= total;
    }
}

fn extend_f32(out: &mut Vec<f32>, halves: &[f16]) {
    let start = out.len();
    out.resize(start + halves.len(), 0.0);
    halves.convert_to_f32_slice(&mut out[start..]);
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::{Rows, Shape, attend};
    use crate::Result;
    use crate::memory_cache::MemoryCache;
    use crate::model::KeyValueCache;
    use crate::tests::{Random, bits};

    const SHAPE: Shape = Shape { query_heads: 4, kv_heads: 2, head_dim: 64 };

    /// A cache of one layer with these rows, `[tokens, kv_heads, head_dim]`, in pages of `page_tokens`.
    fn cache_of(keys: &[f16], values: &[f16], page_tokens: usize) -> Result<MemoryCache> {
        let mut cache = MemoryCache::new(SHAPE, 1, page_tokens);
        cache.append(0, 0, keys, values)?;
        Ok(cache)
    }

    /// Attention of one token over all positions, computed in f64 from its definition.
    fn attention_in_f64(query: &[f32], keys: &[f16], values: &[f16]) -> Vec<f64> {
        let (width, dim) = (SHAPE.kv_width(), SHAPE.head_dim);
        let mut out = Vec::new();
        for (head, query) in query.chunks_exact(dim).enumerate() {
            let start = head / (SHAPE.query_heads / SHAPE.kv_heads) * dim;
            let weight = |key: &[f16]| {
                let score: f64 =
                    query.iter().zip(&key[start..]).map(|(q, k)| f64::from(*q) * k.to_f64()).sum();
                (score / 8.0).exp()
            };
            let weights: Vec<f64> = keys.chunks_exact(width).map(weight).collect();
            let total: f64 = weights.iter().sum();
            for index in start..start + dim {
                let column = values.iter().skip(index).step_by(width);
                out.push(column.zip(&weights).map(|(v, w)| v.to_f64() * w).sum::<f64>() / total);
            }
        }
        out
    }

    #[test]
    fn attention_agrees_with_f64() -> Result<()> {
        let mut random = Random(1);
        let (tokens, first) = (24, 13);
        let end = tokens + first;
        let keys = random.halves(end * SHAPE.kv_width());
        let values = random.halves(end * SHAPE.kv_width());
        let queries = random.floats(tokens * SHAPE.query_width(), 3.0);
        let mut out = vec![0.0; queries.len()];
        cache_of(&keys, &values, 16)?.attend(0, first, &queries, &mut out)?;
        let rows =
            queries.chunks_exact(SHAPE.query_width()).zip(out.chunks_exact(SHAPE.query_width()));
        for (token, (query, out)) in rows.enumerate() {
            let visible = (first + token + 1) * SHAPE.kv_width();
            let expected = attention_in_f64(query, &keys[..visible], &values[..visible]);
            for (got, expected) in out.iter().zip(expected) {
                assert!((f64::from(*got) - expected).abs() < 1e-5, "{got} is not {expected}");
            }
        }
        Ok(())
    }

    #[test]
    fn attention_is_the_same_over_pages_tails_and_both() -> Result<()> {
        let mut random = Random(2);
        let tokens = 48;
        let keys = random.halves(tokens * SHAPE.kv_width());
        let values = random.halves(tokens * SHAPE.kv_width());
        let query = random.floats(SHAPE.query_width(), 2.0);
        let over = |page_tokens| -> Result<Vec<u32>> {
            let mut out = vec![0.0; query.len()];
            cache_of(&keys, &values, page_tokens)?.attend(0, tokens - 1, &query, &mut out)?;
            Ok(bits(&out))
        };
        let tail_only = over(tokens + 1)?;
        assert_eq!(over(tokens)?, tail_only, "one page");
        assert_eq!(over(16)?, tail_only, "three pages");
        assert_eq!(over(20)?, tail_only, "two pages and a tail");
        Ok(())
    }

    #[test]
    fn attention_refuses_positions_that_are_not_cached() {
        let rows = vec![f16::ZERO; 3 * 2 * SHAPE.kv_width()];
        let query = vec![0.0; SHAPE.query_width()];
        let mut out = query.clone();
        assert!(attend(SHAPE, &[Rows::Tail(&rows)], &query, 2, &mut out).is_ok());
        assert!(attend(SHAPE, &[Rows::Tail(&rows)], &query, 3, &mut out).is_err());
    }
}
