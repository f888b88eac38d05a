//! The ggml backend in unmodified llama.cpp, against the same engine without it.
//!
//! ```text
//! mount-scripts/fetch-llama.sh target/test-tools/llama.cpp-0.5.0
//! cargo bench --bench llama [-- ROUNDS]
//! ```
//!
//! Both run in turns, each with flash attention as the engine decides and with threads that wait
//! for work as those of `llama-server` do. A figure is the median of the rounds' ratios; a round's
//! time of a step is the median of its steps. Every run counts its attention operations. Long
//! conversations are not computed but loaded, from slot files of noise. It takes some minutes.

#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]
#![allow(clippy::print_stdout, reason = "it prints figures")]
#![allow(clippy::cast_precision_loss, reason = "sizes of files are far below 2^52")]

#[path = "../tests/common/mod.rs"]
#[macro_use]
mod common;

#[path = "../tests/c_abi/program.rs"]
#[allow(dead_code, reason = "programs of the C interface are built by its own tests")]
mod program;

#[path = "../tests/ggml/engine.rs"]
#[allow(dead_code, reason = "what a run computed is for the tests")]
mod engine;

#[path = "../tests/ggml/gguf.rs"]
mod gguf;

#[path = "../tests/ggml/slot_file.rs"]
mod slot_file;

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use common::memory_group::MemoryGroup;
use common::mount::scratch_directory;
use common::{Mode, Mount};
use engine::{Ran, ran, ran_in};
use gguf::Model;

const ROUNDS: usize = 5;
/// As `llama-server` has them by default.
const ENGINE: &str = "--threads 2 --poll 50 --flash auto --ubatch 512";

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn milliseconds(durations: &[Duration]) -> f64 {
    median(durations.iter().map(|duration| duration.as_secs_f64() * 1e3).collect())
}

/// Two engines in turns, and what is compared of them: `time` in milliseconds.
struct Comparison<'a> {
    model: &'a Path,
    mount: &'a Mount,
    rounds: usize,
}

impl Comparison<'_> {
    fn compare(&self, name: &str, arguments: &str, target: f64, time: impl Fn(&Ran) -> f64) {
        let arguments = format!("{ENGINE} {arguments}");
        let (mut ours, mut stock) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let run = ran(self.model, &arguments, Some(self.mount.path()));
            run.assert_attention_was_ours();
            ours.push(time(&run));
            stock.push(time(&ran(self.model, &arguments, None)));
        }
        let ratios = ours.iter().zip(&stock).map(|(ours, stock)| stock / ours).collect();
        println!(
            "{name:<44}{:>10.2}{:>10.2}{:>8.2}{target:>8.2}",
            median(ours),
            median(stock),
            median(ratios)
        );
    }
}

fn decode(run: &Ran) -> f64 {
    milliseconds(&run.decode)
}

fn prefill(run: &Ran) -> f64 {
    milliseconds(&[run.prefill])
}

/// Small matrices, and heads as large models have them: 4 KiB of cache for each token.
fn attention_dominated() -> Model {
    Model {
        heads: 8,
        kv_heads: 2,
        head_dim: 128,
        feed_forward: 512,
        context: 1 << 18,
        ..Model::tiny()
    }
}

fn main() {
    require!(fuse, llama, cc);
    let rounds = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(ROUNDS);
    let directory = scratch_directory();
    let mode = if nix::unistd::geteuid().is_root() { Mode::Passthrough } else { Mode::Served };
    let mount = Mount::new(mode);
    let [tiny, large] = ["tiny.gguf", "large.gguf"].map(|name| directory.path().join(name));
    Model::write_tiny(&tiny);
    attention_dominated().write_random(7, &large);
    println!("{:<44}{:>10}{:>10}{:>8}{:>8}", "ms", "kvfs", "stock", "ratio", "target");

    let comparison = Comparison { model: &tiny, mount: &mount, rounds };
    let short = "--prompt-tokens 64 --predict 256 --context 512";
    comparison.compare("decode, tiny model, 64 to 320 tokens", short, 0.98, decode);
    let long = "--prompt-tokens 1500 --predict 0 --context 2048";
    comparison.compare("prefill, tiny model, 1500 tokens", long, 0.95, prefill);

    let comparison = Comparison { model: &large, mount: &mount, rounds };
    let prompt = "--prompt-tokens 2048 --predict 0 --context 2304";
    comparison.compare("prefill, mostly attention, 2048 tokens", prompt, 0.95, prefill);
    for (tokens, predict, target) in [(4096, 32, 2.5), (16384, 32, 3.5), (131_072, 8, 10.0)] {
        let slot = directory.path().join("slot");
        slot_file::write(&slot, &attention_dominated(), tokens);
        let context = tokens + 256;
        let load = format!("--context {context} --predict {predict} --load {}", slot.display());
        let name = format!("decode, mostly attention, {tokens} tokens");
        comparison.compare(&name, &load, target, decode);
    }
    restore(&mount, &large, rounds);
    larger_than_memory(&mount, rounds);
}

/// A slot of 8192 tokens in a new process, against reading its bytes.
fn restore(mount: &Mount, model: &Path, rounds: usize) {
    let slot = mount.files("slot");
    slot_file::write(&slot, &attention_dominated(), 8192);
    let arguments = format!("{ENGINE} --context 8448 --predict 1 --load {}", slot.display());
    let (mut restored, mut read) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let run = ran(model, &arguments, Some(mount.path()));
        run.assert_attention_was_ours();
        restored.push(prefill(&run));
        let start = Instant::now();
        std::hint::black_box(std::fs::read(&slot).unwrap().len());
        read.push(milliseconds(&[start.elapsed()]));
    }
    let (restored, read) = (median(restored), median(read));
    println!("restore of 8192 tokens: {restored:.1} ms, reading the file {read:.1} ms");
}

/// A cache of four times the memory that the engine may have: how fast it is read.
fn larger_than_memory(mount: &Mount, rounds: usize) {
    const MEMORY_BYTES: u64 = 192 << 20;
    const TOKENS: usize = 24576;
    require!(root, cgroup);
    let directory = scratch_directory();
    let [path, slot] = ["model.gguf", "slot"].map(|name| directory.path().join(name));
    let model = Model { heads: 8, kv_heads: 8, head_dim: 256, ..Model::tiny() };
    model.write_random(7, &path);
    slot_file::write(&slot, &model, TOKENS);
    let context = TOKENS + 256;
    let arguments = format!("{ENGINE} --context {context} --predict 12 --load {}", slot.display());
    let bytes = slot.metadata().unwrap().len() as f64;
    let (mut ours, mut disk) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        disk.push(disk_rate(&slot));
        let group = MemoryGroup::new(MEMORY_BYTES).unwrap();
        let run = ran_in(Some(&group), &path, &arguments, Some(mount.path()));
        run.assert_attention_was_ours();
        assert!(run.read_ahead > Some(0), "everything was in memory");
        ours.push(bytes / milliseconds(&run.decode) / 1e6);
    }
    let (ours, disk) = (median(ours), median(disk));
    println!(
        "cache of 4 times the memory: {ours:.2} GB/s, the disk {disk:.2} GB/s, {:.2} of it (0.80)",
        ours / disk
    );
}

/// GB/s of one large file, read past the page cache by threads with buffers of huge pages, as many as
/// are fastest.
fn disk_rate(path: &Path) -> f64 {
    const PIECE_BYTES: usize = 2 << 20;
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let pieces = usize::try_from(file.metadata().unwrap().len()).unwrap() / PIECE_BYTES;
    let rate = |threads: usize| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for first in 0..threads {
                let file = &file;
                scope.spawn(move || {
                    let mut buffer = memmap2::MmapMut::map_anon(PIECE_BYTES).unwrap();
                    let _ = buffer.advise(memmap2::Advice::HugePage);
                    for piece in (first..pieces).step_by(threads) {
                        file.read_exact_at(&mut buffer, (piece * PIECE_BYTES) as u64).unwrap();
                    }
                });
            }
        });
        (pieces * PIECE_BYTES) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    [1, 4, 8].map(rate).into_iter().fold(0.0, f64::max)
}
