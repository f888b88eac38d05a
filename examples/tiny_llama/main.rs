//! Runs a small Llama model on the CPU: prefill of a prompt, then greedy continuation.
//!
//! ```text
//! cargo run --release --example tiny_llama -- --model tests/fixtures/tiny-llama \
//!     --prompt tests/fixtures/tiny-llama/prompt.txt --prompt-tokens 1024 --tokens 200
//! ```
//!
//! The model lies in `tests/fixtures/tiny-llama`, whose tokens are bytes. The KV cache is outside
//! of the model, behind [`model::KeyValueCache`]. With `--cache` it lies in a mount, and a second
//! run with the same prompt, or a longer one, starts where the first one stopped:
//!
//! ```text
//! kvfs mount STORE /mnt/kv
//! kvfs create /mnt/kv/models/tiny-llama --layers 4 --kv-heads 2 --head-dim 64 --page-tokens 256
//! cargo run --release --example tiny_llama -- --model tests/fixtures/tiny-llama \
//!     --prompt tests/fixtures/tiny-llama/prompt.txt --prompt-tokens 1024 --tokens 200 \
//!     --cache /mnt/kv/models/tiny-llama/sequences/ruth
//! ```
//!
//! Pages that were imported from a slot of llama.cpp have K in another order, which their manifest tells
//! (`kvfs create --rope-theta 10000 --rope-pairing interleaved`).
//!
//! With `--compare ROUNDS` nothing is continued: it tells how long restoring the prompt from the
//! cache takes, and computing it. Such a prompt may be longer than what the model was trained for
//! (the text is repeated): the values make no sense then, and take as long.
//!
//! With `--context N` the model sees no more than N tokens: when they are there, the oldest half is
//! dropped. In a mount what was dropped stays in a snapshot, and the run ends with how long restoring
//! it takes, and computing it. A later run whose prompt begins like it starts from there:
//!
//! ```text
//! ... --cache /mnt/kv/models/tiny-llama/sequences/ruth --context 1024 --tokens 600
//! ```
//!
//! With `--backend cuda` a GPU attends, if there is one.
//!
//! With `--follow SECONDS` the prompt is computed by another process (the same command with
//! `--tokens 0` and without `--follow`), whose pages are read layer by layer while it writes them:
//!
//! ```text
//! ... --cache /mnt/kv/models/tiny-llama/sequences/ruth --tokens 200 --follow 60 &
//! ... --cache /mnt/kv/models/tiny-llama/sequences/ruth --tokens 0
//! ```

use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvfs::attention::InstructionSet;
use kvfs::page::names;
use kvfs::reader::{Backend, Rates, ReadError, Sequence};

use crate::memory_cache::MemoryCache;
use crate::model::Model;
use crate::mount_cache::MountCache;
use crate::shift::Shifting;
use crate::weights::Weights;

mod attention;
#[cfg(test)]
mod cold_copies;
mod compare;
#[cfg(test)]
#[path = "../../tests/cuda/engine.rs"]
mod engine;
#[cfg(test)]
#[allow(dead_code, reason = "tests/cuda uses the rest")]
#[path = "../../tests/cuda/fake.rs"]
mod fake;
mod follow;
mod generate;
#[cfg(test)]
mod gpu;
mod matrix;
mod memory_cache;
mod model;
mod mount_cache;
#[cfg(test)]
mod perplexity;
#[cfg(test)]
mod reference;
mod sample;
#[cfg(test)]
mod selected_cache;
mod shift;
#[cfg(test)]
#[path = "../../tests/common/skips.rs"]
mod skips;
#[cfg(test)]
mod tests;
mod weights;

/// The result of anything here that can fail; the message is for people.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Tokens per page of a cache in memory, as in the sequences of the demo.
const PAGE_TOKENS: usize = 256;

/// How often what was dropped is restored and computed.
const COMPARED_ROUNDS: usize = 3;

const USAGE: &str = "usage: tiny_llama --model DIR --prompt FILE|TEXT [--prompt-tokens N] --tokens N \
     [--cache MOUNT/models/NAME/sequences/SEQUENCE [--compare ROUNDS | --follow SECONDS]] [--context N] [--backend cpu|cuda]";

struct Options {
    model: PathBuf,
    prompt: Vec<u8>,
    tokens: usize,
    cache: Option<PathBuf>,
    compare: Option<usize>,
    follow: Option<Duration>,
    context: Option<usize>,
    wants_gpu: bool,
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("tiny_llama: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tiny_llama: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    let (mut model, mut prompt, mut prompt_tokens, mut tokens) = (None, None, None, None);
    let (mut cache, mut compare, mut follow, mut wants_gpu) = (None, None, None, false);
    let mut context = None;
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--model" => model = Some(PathBuf::from(value)),
            "--prompt" => prompt = Some(read_prompt(value)?),
            "--prompt-tokens" => prompt_tokens = Some(value.parse()?),
            "--tokens" => tokens = Some(value.parse()?),
            "--cache" => cache = Some(PathBuf::from(value)),
            "--compare" => compare = Some(value.parse()?),
            "--follow" => follow = Some(Duration::from_secs(value.parse()?)),
            "--context" => context = Some(value.parse()?),
            "--backend" => wants_gpu = matches(&value, "cuda", "cpu")?,
            _ => return Err(format!("unknown option {name}").into()),
        }
    }
    let mut prompt = prompt.ok_or("--prompt is missing")?;
    let length = prompt_tokens.unwrap_or(prompt.len());
    if compare.is_some() {
        prompt = prompt.iter().copied().cycle().take(length).collect();
    }
    prompt.truncate(length);
    if (compare.is_some() || follow.is_some()) && cache.is_none() {
        return Err("--compare and --follow need a --cache".into());
    }
    Ok(Options {
        model: model.ok_or("--model is missing")?,
        prompt,
        tokens: tokens.or(compare.map(|_| 0)).ok_or("--tokens is missing")?,
        cache,
        compare,
        follow,
        context,
        wants_gpu,
    })
}

/// Whether a value is the first of two that there are.
fn matches(value: &str, yes: &str, no: &str) -> Result<bool> {
    match value {
        _ if value == yes => Ok(true),
        _ if value == no => Ok(false),
        _ => Err(format!("{value}: must be {yes} or {no}").into()),
    }
}

/// The content of the file `value` names, or else `value` itself.
fn read_prompt(value: String) -> Result<Vec<u8>> {
    if Path::new(&value).is_file() {
        return Ok(fs::read(value)?);
    }
    Ok(value.into_bytes())
}

fn run(options: &Options) -> Result<()> {
    let mut weights = Weights::load(&options.model)?;
    let prompt: Vec<u32> = options.prompt.iter().copied().map(u32::from).collect();
    if let (Some(rounds), Some(sequence)) = (options.compare, &options.cache) {
        let positions = &mut weights.config.max_position_embeddings;
        *positions = prompt.len().max(*positions);
        return print_comparison(&Model::new(weights), sequence, &prompt, rounds);
    }
    let model = Model::new(weights);
    let config = model.config();

    let started = Instant::now();
    let Some(sequence) = &options.cache else {
        let mut cache = MemoryCache::new(config.shape()?, config.num_hidden_layers, PAGE_TOKENS)?;
        if options.wants_gpu {
            eprintln!("backend: {}", cache.use_gpu()?);
        }
        let logits = generate::prefill(&model, &mut cache, 0, &prompt)?;
        report("prefill", prompt.len(), started);
        return decode(&model, &mut cache, (&prompt, logits), options);
    };
    if let Some(longest) = options.follow {
        report_followed(&follow::follow(sequence, prompt.len() as u64, longest)?);
    }
    if options.follow.is_none()
        && let Some(restored) = shift::restore(sequence, &prompt)?
    {
        eprintln!("restored {} tokens from {}", restored.tokens, restored.from);
    }
    let mut cache = MountCache::open(sequence, config)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let instructions = InstructionSet::detect();
    let mut backend = Backend::Cpu { instructions, threads, why: None };
    if options.wants_gpu {
        backend = cache.use_gpu()?;
    }
    print_plan(sequence, backend)?;
    let before = cache.tokens().len();
    let (logits, resumed) = mount_cache::read(&model, &mut cache, &prompt)?;
    let counts = cache.counts();
    eprintln!(
        "cache: {before} tokens held; {} of {} prompt tokens came from it, {} were computed",
        resumed.usable(),
        prompt.len(),
        counts.refilled + counts.added
    );
    eprintln!("first token after {:.3} s", started.elapsed().as_secs_f64());
    decode(&model, &mut cache, (&prompt, logits), options)?;
    cache.durable()?;
    report_shifts(&model, &cache, sequence)
}

/// The first tokens that were dropped are those that a prompt can ask for again: the others were
/// computed behind a gap.
fn report_shifts(model: &Model, cache: &MountCache, sequence: &Path) -> Result<()> {
    for shifted in cache.shifts() {
        let (snapshot, Range { start, end }) = (&shifted.snapshot, shifted.dropped.clone());
        let beside = shifted.beside;
        eprintln!("dropped tokens {start} to {end}, kept in {snapshot}, beside {beside} new ones");
    }
    let Some(first) = cache.shifts().first() else { return Ok(()) };
    let tokens = fs::read(sequence.with_file_name(&first.snapshot).join(names::TOKENS))?;
    let prompt: Vec<u32> =
        tokens.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)).collect();
    let compared = shift::compare(model, sequence, &prompt, COMPARED_ROUNDS)?;
    eprintln!("what was dropped: {}", describe(prompt.len(), compared));
    Ok(())
}

fn report_followed(followed: &follow::Followed) {
    eprintln!(
        "followed {} pages while they were written: lag {:.2} ms median, {:.2} ms 99th percentile",
        followed.lags.len(),
        followed.lag(0.5).as_secs_f64() * 1e3,
        followed.lag(0.99).as_secs_f64() * 1e3
    );
}

fn print_comparison(model: &Model, sequence: &Path, prompt: &[u32], rounds: usize) -> Result<()> {
    let compared = compare::compare_sequence(model, sequence, prompt, rounds)?;
    writeln!(io::stdout().lock(), "{}", describe(prompt.len(), compared))?;
    Ok(())
}

fn describe(tokens: usize, compared: compare::Compared) -> String {
    let compare::Compared { restored, computed } = compared;
    format!(
        "{tokens} tokens: restored in {:.1} ms, computed in {:.1} ms, {:.0} times",
        restored.as_secs_f64() * 1e3,
        computed.as_secs_f64() * 1e3,
        computed.as_secs_f64() / restored.as_secs_f64()
    )
}

/// What each step will read of the sequence as it is.
fn print_plan(sequence: &Path, backend: Backend) -> Result<()> {
    let sequence = Sequence::open(sequence)?;
    let tokens = sequence.valid_tokens()?;
    if tokens == 0 {
        return Ok(());
    }
    match sequence.plan(0..tokens, backend, &Rates::default()) {
        Ok(plan) => eprintln!("{plan}"),
        // It is computed again.
        Err(missing @ ReadError::Missing { .. }) => eprintln!("{missing}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

fn decode(
    model: &Model, cache: &mut dyn Shifting, (prompt, logits): (&[u32], Vec<f32>),
    options: &Options,
) -> Result<()> {
    let mut out = io::stdout().lock();
    let (started, count) = (Instant::now(), options.tokens);
    let mut emit = |token| {
        out.write_all(&[u8::try_from(token)?])?;
        Ok(out.flush()?)
    };
    if let Some(context) = options.context {
        let place = (prompt.len(), context);
        shift::continue_greedily(model, cache, place, logits, count, &mut emit)?;
    } else {
        let mut emit = |token, _: &[f32]| emit(token);
        generate::continue_greedily(model, cache, prompt.len(), logits, count, &mut emit)?;
    }
    out.write_all(b"\n")?;
    report("decode", count, started);
    Ok(())
}

fn report(what: &str, tokens: usize, started: Instant) {
    let seconds = started.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "a count of tokens in a message")]
    let rate = tokens as f64 / seconds;
    eprintln!("{what}: {tokens} tokens in {seconds:.2} s, {rate:.0} tokens/s");
}
