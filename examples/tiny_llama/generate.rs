//! Prefill and greedy continuation over any KV cache.

use crate::Result;
use crate::model::{KeyValueCache, Model};
use crate::sample::greedy;

/// Tokens that run through a layer together: large enough to keep all CPUs busy, small enough for
/// their activations to stay in the CPUs' caches. It has no influence on any result.
const CHUNK_TOKENS: usize = 256;

/// Runs `tokens`, the first of them at `position`, and returns the logits after the last one.
///
/// To resume from a cache that holds `n` tokens, pass the tokens from `n` on; where that leaves
/// none, pass the last one again, since the cache does not keep logits.
pub(crate) fn prefill(
    model: &Model, cache: &mut dyn KeyValueCache, position: usize, tokens: &[u32],
) -> Result<Vec<f32>> {
    let mut logits = Vec::new();
    for (index, chunk) in tokens.chunks(CHUNK_TOKENS).enumerate() {
        logits = model.forward(chunk, position + index * CHUNK_TOKENS, cache)?;
    }
    Ok(logits)
}

/// Continues greedily after `logits` with `count` tokens, the first of them at `position`, and
/// hands each to `emit`, with the logits that chose it, before it runs through the model.
///
/// Afterwards the cache holds every emitted token but the last.
pub(crate) fn continue_greedily(
    model: &Model, cache: &mut dyn KeyValueCache, position: usize, mut logits: Vec<f32>,
    count: usize, emit: &mut dyn FnMut(u32, &[f32]) -> Result<()>,
) -> Result<()> {
    for index in 0..count {
        let token = greedy(&logits).ok_or("no prompt to continue")?;
        emit(token, &logits)?;
        if index + 1 < count {
            logits = model.forward(&[token], position + index, cache)?;
        }
    }
    Ok(())
}
