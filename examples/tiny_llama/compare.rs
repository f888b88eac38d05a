//! Restoring a prompt from a mount against computing it again: both end with the logits after its
//! last token, the same to the bit.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::memory_cache::MemoryCache;
use crate::model::Model;
use crate::mount_cache::{self, MountCache};
use crate::{Result, generate};

/// Medians of some rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compared {
    /// From opening the sequence to the logits.
    pub(crate) restored: Duration,
    /// With the cache in memory.
    pub(crate) computed: Duration,
}

/// Takes turns. What the sequence does not hold of the prompt is added before.
pub(crate) fn compare(
    model: &Model, sequence: &Path, prompt: &[u32], rounds: usize,
) -> Result<Compared> {
    // Sums are added up page by page.
    let (page_tokens, _) = restore(model, sequence, prompt)?;
    let (mut restored, mut computed) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let started = Instant::now();
        let (_, from_mount) = restore(model, sequence, prompt)?;
        restored.push(started.elapsed());
        let started = Instant::now();
        let config = model.config();
        let mut cache = MemoryCache::new(config.shape()?, config.num_hidden_layers, page_tokens)?;
        let logits = generate::prefill(model, &mut cache, 0, prompt)?;
        computed.push(started.elapsed());
        if bits(&logits) != bits(&from_mount) {
            return Err("the restored cache gives other logits than the computed one".into());
        }
    }
    Ok(Compared { restored: median(restored)?, computed: median(computed)? })
}

/// Tokens of a page, and the logits.
fn restore(model: &Model, sequence: &Path, prompt: &[u32]) -> Result<(usize, Vec<f32>)> {
    let mut cache = MountCache::open(sequence, model.config())?;
    let (logits, _) = mount_cache::read(model, &mut cache, prompt)?;
    Ok((cache.page_tokens(), logits))
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn median(mut times: Vec<Duration>) -> Result<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied().ok_or_else(|| "no rounds".into())
}
