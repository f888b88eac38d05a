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

/// How long a restoration took, tokens of a page, and the logits.
pub(crate) type Timed = (Duration, usize, Vec<f32>);

/// Takes turns: `restore` begins with what a mount has of the prompt, and ends with the logits.
pub(crate) fn compare(
    model: &Model, prompt: &[u32], rounds: usize, restore: &mut dyn FnMut() -> Result<Timed>,
) -> Result<Compared> {
    let (mut restored, mut computed) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (duration, page_tokens, from_mount) = restore()?;
        restored.push(duration);
        let started = Instant::now();
        let config = model.config();
        // Sums are added up page by page.
        let mut cache = MemoryCache::new(config.shape()?, config.num_hidden_layers, page_tokens)?;
        let logits = generate::prefill(model, &mut cache, 0, prompt)?;
        computed.push(started.elapsed());
        if bits(&logits) != bits(&from_mount) {
            return Err("the restored cache gives other logits than the computed one".into());
        }
    }
    Ok(Compared { restored: median(restored)?, computed: median(computed)? })
}

/// Restores a sequence that has the prompt. What it lacks is added before.
pub(crate) fn compare_sequence(
    model: &Model, sequence: &Path, prompt: &[u32], rounds: usize,
) -> Result<Compared> {
    restore(model, sequence, prompt)?;
    compare(model, prompt, rounds, &mut || {
        let started = Instant::now();
        let (page_tokens, logits) = restore(model, sequence, prompt)?;
        Ok((started.elapsed(), page_tokens, logits))
    })
}

/// Tokens of a page, and the logits.
pub(crate) fn restore(model: &Model, sequence: &Path, prompt: &[u32]) -> Result<(usize, Vec<f32>)> {
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
