//! The model at work: once in memory without interruption, then through the mount in stages.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::generate::{continue_greedily, prefill};
use crate::memory_cache::MemoryCache;
use crate::model::Model;
use crate::mount_cache::{Counts, MountCache, Resumed, read};
use crate::weights::Weights;
use crate::{Result, Size, interrupt};

/// What an uninterrupted run in memory reads and generates.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) model: Model,
    /// The prompt, then what was generated.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    page_tokens: usize,
    /// The bits of the logits that chose each generated token.
    logits: Vec<Vec<u32>>,
}

/// A run through the mount from what is there to a stop.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) resumed: Resumed,
    /// What ran through the model before the first new token.
    pub(crate) reading: Counts,
    /// Tokens that were generated and compared.
    pub(crate) compared: usize,
    pub(crate) first_token: Duration,
}

impl Reference {
    /// Runs the model in memory.
    pub(crate) fn run(fixtures: &Path, size: Size) -> Result<Self> {
        let model = Model::new(Weights::load(fixtures)?);
        let path = fixtures.join("prompt.txt");
        let text = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut tokens: Vec<u32> = text.into_iter().map(u32::from).collect();
        tokens.truncate(size.prompt_tokens);
        let mut reference = Self {
            model,
            tokens,
            prompt_tokens: size.prompt_tokens,
            page_tokens: size.page_tokens,
            logits: Vec::new(),
        };
        let mut cache = reference.memory()?;
        let prompt = reference.tokens.clone();
        let first = prefill(&reference.model, &mut cache, 0, &prompt)?;
        let (count, position) = (size.stops[size.stops.len() - 1], prompt.len());
        let (tokens, logits) = (&mut reference.tokens, &mut reference.logits);
        let mut keep = |token, chosen: &[f32]| {
            tokens.push(token);
            logits.push(bits(chosen));
            interrupt::check()
        };
        continue_greedily(&reference.model, &mut cache, position, first, count, &mut keep)?;
        Ok(reference)
    }

    /// What was generated, as text.
    pub(crate) fn generated(&self) -> String {
        let bytes = self.tokens[self.prompt_tokens..].iter();
        let bytes: Vec<u8> = bytes.filter_map(|&id| u8::try_from(id).ok()).collect();
        String::from_utf8_lossy(&bytes).replace('\n', " ")
    }

    /// Opens a sequence: its pages are mapped from then on.
    pub(crate) fn open(&self, sequence: &Path) -> Result<MountCache> {
        MountCache::open(sequence, self.model.config())
    }

    /// Continues a sequence until so many tokens are generated, and compares each of them.
    pub(crate) fn run_stage(&self, sequence: &Path, stop: usize) -> Result<Stage> {
        let started = Instant::now();
        let mut cache = self.open(sequence)?;
        let text = self.text_in(&cache)?;
        let (logits, resumed) = read(&self.model, &mut cache, text)?;
        let first_token = started.elapsed();
        let reading = cache.counts();
        let (position, mut index) = (text.len(), text.len() - self.prompt_tokens);
        let count = stop.saturating_sub(index);
        let mut compare = |token, chosen: &[f32]| {
            self.compare(index, token, chosen)?;
            index += 1;
            interrupt::check()
        };
        continue_greedily(&self.model, &mut cache, position, logits, count, &mut compare)?;
        cache.durable()?;
        Ok(Stage { resumed, reading, compared: count, first_token })
    }

    /// The time from opening the sequence to the choice of the next token, and the same without
    /// the cache; medians.
    pub(crate) fn first_token(&self, sequence: &Path, runs: usize) -> Result<[Duration; 2]> {
        let text = self.text_in(&self.open(sequence)?)?;
        let index = text.len() - self.prompt_tokens;
        let with_cache = || {
            let mut cache = self.open(sequence)?;
            Ok(read(&self.model, &mut cache, text)?.0)
        };
        let without = || prefill(&self.model, &mut self.memory()?, 0, text);
        let median = |run: &dyn Fn() -> Result<Vec<f32>>| {
            let mut times = Vec::new();
            for _ in 0..runs {
                interrupt::check()?;
                let started = Instant::now();
                let logits = run()?;
                times.push(started.elapsed());
                self.compare(index, self.tokens[text.len()], &logits)?;
            }
            times.sort();
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(times[runs / 2])
        };
        Ok([median(&with_cache)?, median(&without)?])
    }

    /// What the sequence holds already, at least the prompt.
    fn text_in(&self, cache: &MountCache) -> Result<&[u32]> {
        let text = &self.tokens[..cache.tokens().len().max(self.prompt_tokens)];
        if !text.starts_with(cache.tokens()) {
            return Err("the tokens in the sequence are not those of the uninterrupted run".into());
        }
        Ok(text)
    }

    fn compare(&self, index: usize, token: u32, logits: &[f32]) -> Result<()> {
        let number = index + 1;
        let expected = self.tokens[self.prompt_tokens + index];
        if token != expected {
            return Err(format!(
                "generated token {number} is {token}, without interruption it is {expected}"
            )
            .into());
        }
        if bits(logits) != self.logits[index] {
            return Err(format!(
                "the logits of generated token {number} are not those without interruption"
            )
            .into());
        }
        Ok(())
    }

    fn memory(&self) -> Result<MemoryCache> {
        let config = self.model.config();
        MemoryCache::new(config.shape()?, config.num_hidden_layers, self.page_tokens)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
