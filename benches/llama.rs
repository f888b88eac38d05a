//! The ggml backend in unmodified llama.cpp, against the same engine without it.
//!
//! ```text
//! mount-scripts/fetch-llama.sh target/test-tools/llama.cpp-0.5.0
//! cargo bench --bench llama [-- ROUNDS]
//! ```
//!
//! Both run in turns, each with flash attention as the engine decides and with threads that wait
//! for work as those of `llama-server` do. A figure is the median of the rounds' ratios; a round's
//! time of a step is the median of its steps. Every run counts its attention operations. It takes
//! some minutes, most of them for the long prompt.

#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]
#![allow(clippy::print_stdout, reason = "it prints figures")]

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

use std::path::Path;
use std::time::Duration;

use common::mount::scratch_directory;
use common::{Mode, Mount};
use engine::{Ran, ran};
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
fn attention_dominated(path: &Path) {
    let model = Model {
        heads: 8,
        kv_heads: 2,
        head_dim: 128,
        feed_forward: 512,
        context: 1 << 18,
        ..Model::tiny()
    };
    model.write_random(7, path);
}

fn main() {
    require!(fuse, llama, cc);
    let rounds = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(ROUNDS);
    let directory = scratch_directory();
    let mode = if nix::unistd::geteuid().is_root() { Mode::Passthrough } else { Mode::Served };
    let mount = Mount::new(mode);
    let [tiny, large] = ["tiny.gguf", "large.gguf"].map(|name| directory.path().join(name));
    Model::write_tiny(&tiny);
    attention_dominated(&large);
    println!("{:<44}{:>10}{:>10}{:>8}{:>8}", "ms", "kvfs", "stock", "ratio", "target");

    let comparison = Comparison { model: &tiny, mount: &mount, rounds };
    let short = "--prompt-tokens 64 --predict 256 --context 512";
    comparison.compare("decode, tiny model, 64 to 320 tokens", short, 0.98, decode);
    let long = "--prompt-tokens 1500 --predict 0 --context 2048";
    comparison.compare("prefill, tiny model, 1500 tokens", long, 0.95, prefill);

    let comparison = Comparison { model: &large, mount: &mount, rounds };
    let prompt = "--prompt-tokens 2048 --predict 0 --context 2304";
    comparison.compare("prefill, mostly attention, 2048 tokens", prompt, 0.95, prefill);
    for (tokens, target) in [(4096, 2.5), (16384, 3.5)] {
        // The prompt is computed once.
        let slot = directory.path().join("slot");
        let context = tokens + 256;
        let sizes = format!("--context {context} --prompt-tokens {tokens}");
        let save = format!("{ENGINE} {sizes} --predict 0 --save {}", slot.display());
        ran(&large, &save, Some(mount.path()));
        let load = format!("{sizes} --predict 32 --load {}", slot.display());
        let name = format!("decode, mostly attention, {tokens} tokens");
        comparison.compare(&name, &load, target, decode);
    }
}
