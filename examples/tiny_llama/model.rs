//! The Llama forward pass, with the KV cache outside of the model.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::Result;
use crate::attention::{kv_width, query_width};
use crate::matrix::for_each_row;
use crate::weights::{Config, Layer, Weights};

/// Where the keys and values of every layer are kept: in memory, or in the page files of a mount.
///
/// The model reads keys and values back through the cache even for the tokens it has just
/// computed, so they are always the f16 values that a later run finds there.
pub(crate) trait KeyValueCache {
    /// Takes the keys (after rotary embedding) and values of consecutive tokens, the first of them
    /// at `position`; both are `[tokens, kv_heads, head_dim]`.
    ///
    /// Positions the cache already holds keep their rows: the model computes the same bits again
    /// when it repeats a token, which is how a run resumes from a cache that has every token of
    /// its prompt. A gap is an error.
    fn append(&mut self, layer: usize, position: usize, keys: &[f16], values: &[f16])
    -> Result<()>;

    /// Attends from consecutive tokens, the first of them at `position`, to all positions up to
    /// and including their own; `queries` and `out` are `[tokens, query_heads, head_dim]`.
    fn attend(
        &mut self, layer: usize, position: usize, queries: &[f32], out: &mut [f32],
    ) -> Result<()>;

    /// Hears that every layer has the rows of these consecutive tokens, the first of them at
    /// `position`.
    fn complete(&mut self, _position: usize, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }
}

/// A Llama model.
#[derive(Debug)]
pub(crate) struct Model {
    weights: Weights,
    /// Radians per position for each pair of values that rotary embedding turns.
    frequencies: Vec<f64>,
}

impl Model {
    /// The model with these weights.
    pub(crate) fn new(weights: Weights) -> Self {
        let half = weights.config.head_dim / 2;
        let theta = weights.config.rope_theta;
        #[expect(clippy::cast_precision_loss, reason = "head dimensions are small")]
        let frequencies = (0..half).map(|pair| theta.powf(-(pair as f64) / half as f64)).collect();
        Self { weights, frequencies }
    }

    /// The configuration the model was loaded with.
    pub(crate) fn config(&self) -> &Config {
        &self.weights.config
    }

    /// Runs consecutive tokens, the first of them at `position`, through all layers. Returns the
    /// logits after the last one.
    pub(crate) fn forward(
        &self, tokens: &[u32], position: usize, cache: &mut dyn KeyValueCache,
    ) -> Result<Vec<f32>> {
        let mut hidden = self.embed(tokens)?;
        for layer in 0..self.weights.layers.len() {
            self.layer(layer, position, &mut hidden, cache)?;
        }
        cache.complete(position, tokens)?;
        self.logits(&hidden)
    }

    /// The embeddings of `tokens`, `[tokens, hidden_size]`.
    pub(crate) fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut hidden = Vec::with_capacity(tokens.len() * self.config().hidden_size);
        for &token in tokens {
            let row =
                usize::try_from(token).ok().and_then(|token| self.weights.embedding.row(token));
            hidden.extend_from_slice(
                row.ok_or_else(|| format!("token {token} is not in the vocabulary"))?,
            );
        }
        Ok(hidden)
    }

    /// Runs `hidden`, `[tokens, hidden_size]`, through one layer in place.
    pub(crate) fn layer(
        &self, index: usize, position: usize, hidden: &mut [f32], cache: &mut dyn KeyValueCache,
    ) -> Result<()> {
        let config = self.config();
        let tokens = hidden.len() / config.hidden_size;
        if position + tokens > config.max_position_embeddings {
            return Err(
                format!("the model ends at position {}", config.max_position_embeddings).into()
            );
        }
        let layer = self.weights.layers.get(index).ok_or("no such layer")?;
        let normed = rms_norm(hidden, &layer.attention_norm, config.rms_norm_eps);
        let mut queries = layer.query.apply(&normed);
        let mut keys = layer.key.apply(&normed);
        let values = layer.value.apply(&normed);
        let shape = config.shape()?;
        #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^52")]
        let at = |token: usize| (position + token) as f64;
        self.rotate(&mut queries, query_width(shape), at);
        self.rotate(&mut keys, kv_width(shape), at);
        cache.append(index, position, &to_f16(&keys), &to_f16(&values))?;
        let mut attended = vec![0.0; queries.len()];
        cache.attend(index, position, &queries, &mut attended)?;
        add(hidden, &layer.output.apply(&attended));
        let normed = rms_norm(hidden, &layer.mlp_norm, config.rms_norm_eps);
        add(hidden, &mlp(layer, &normed));
        Ok(())
    }

    /// Rotates keys, `[tokens, kv_heads, head_dim]`, for positions that are `delta` behind theirs.
    #[allow(dead_code, reason = "examples/demo has these files too, and drops no tokens")]
    pub(crate) fn move_keys(&self, keys: &mut [f16], delta: i64) {
        let config = self.config();
        let width = config.num_key_value_heads * config.head_dim;
        let mut floats = vec![0.0; keys.len()];
        keys.convert_to_f32_slice(&mut floats);
        #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^52")]
        self.rotate(&mut floats, width, |_| delta as f64);
        keys.convert_from_f32_slice(&floats);
    }

    /// The logits after the last token of `hidden`, `[tokens, hidden_size]` after all layers.
    pub(crate) fn logits(&self, hidden: &[f32]) -> Result<Vec<f32>> {
        let config = self.config();
        let last = hidden.rchunks_exact(config.hidden_size).next().ok_or("no tokens")?;
        Ok(self.weights.head.apply(&rms_norm(last, &self.weights.norm, config.rms_norm_eps)))
    }

    /// Rotary embedding in the `rotate_half` convention: value `i` of a head turns with value
    /// `i + head_dim / 2`. `rows` are `[tokens, width]`; `position` tells that of each.
    fn rotate(&self, rows: &mut [f32], width: usize, position: impl Fn(usize) -> f64 + Sync) {
        let half = self.frequencies.len();
        for_each_row(rows, width, |token, row| {
            let position = position(token);
            for (pair, frequency) in self.frequencies.iter().enumerate() {
                let (sin, cos) = (position * frequency).sin_cos();
                #[expect(clippy::cast_possible_truncation, reason = "f32 arithmetic from here on")]
                let (sin, cos) = (sin as f32, cos as f32);
                for head in row.chunks_exact_mut(2 * half) {
                    let (low, high) = (head[pair], head[pair + half]);
                    head[pair] = low * cos - high * sin;
                    head[pair + half] = high * cos + low * sin;
                }
            }
        });
    }
}

/// The gated feed-forward part of a layer.
fn mlp(layer: &Layer, normed: &[f32]) -> Vec<f32> {
    let mut inner = layer.gate.apply(normed);
    for (gate, up) in inner.iter_mut().zip(layer.up.apply(normed)) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
    layer.down.apply(&inner)
}

/// Scales each `weight.len()` long row to a mean square of 1, then by `weight`.
fn rms_norm(rows: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let width = weight.len();
    let mut out = vec![0.0; rows.len()];
    for (out, row) in out.chunks_exact_mut(width).zip(rows.chunks_exact(width)) {
        #[expect(clippy::cast_precision_loss, reason = "hidden sizes are small")]
        let mean = crate::matrix::dot(row, row) / width as f32;
        let scale = 1.0 / (mean + epsilon).sqrt();
        for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
            *out = value * scale * weight;
        }
    }
    out
}

fn add(hidden: &mut [f32], update: &[f32]) {
    for (hidden, update) in hidden.iter_mut().zip(update) {
        *hidden += update;
    }
}

fn to_f16(values: &[f32]) -> Vec<f16> {
    let mut halves = vec![f16::ZERO; values.len()];
    halves.convert_from_f32_slice(values);
    halves
}
