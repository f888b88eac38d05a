//! Steps and prompts, with and without the backend.

use std::path::Path;

use crate::common::Mount;
use crate::engine::{Ran, ran};
use crate::figure::{ENGINE, Rounds, is_wanted, milliseconds};
use crate::gguf::Model;
use crate::slot_file;

/// Two engines in turns.
struct Comparison<'a> {
    model: &'a Path,
    mount: &'a Mount,
    rounds: usize,
}

impl Comparison<'_> {
    /// Compares `time`, in milliseconds: how many times faster than stock.
    fn compare(&self, name: &str, arguments: &str, target: f64, time: impl Fn(&Ran) -> f64) {
        let arguments = format!("{ENGINE} {arguments}");
        let mut rounds = Rounds::default();
        for _ in 0..self.rounds {
            let run = ran(self.model, &arguments, Some(self.mount.path()));
            run.assert_attention_was_ours();
            rounds.push(time(&run), time(&ran(self.model, &arguments, None)));
        }
        rounds.print(name, "ms", &format!(">={target:.2}"), |ours, stock| stock / ours);
    }
}

fn decode(run: &Ran) -> f64 {
    milliseconds(&run.decode)
}

fn prefill(run: &Ran) -> f64 {
    milliseconds(&[run.prefill])
}

/// Small matrices, and two layers of attention as models of 8 billion parameters have them (Llama 3):
/// 8 KiB of cache for each token.
fn attention_dominated() -> Model {
    Model {
        layers: 2,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        feed_forward: 512,
        context: 1 << 18,
        ..Model::tiny()
    }
}

/// Four layers with fewer heads, whose rows are narrow: 4 KiB for each token.
pub(crate) fn narrow_rows() -> Model {
    Model { layers: 4, heads: 8, kv_heads: 2, ..attention_dominated() }
}

pub(crate) fn measure(mount: &Mount, directory: &Path, rounds: usize) {
    tiny_model(mount, directory, rounds);
    for (name, model) in [("8 KV heads", attention_dominated()), ("2 KV heads", narrow_rows())] {
        let path = directory.join("model.gguf");
        model.write_random(7, &path);
        let comparison = Comparison { model: &path, mount, rounds };
        let prompt = format!("prefill, mostly attention, {name}, 2048 tokens");
        if is_wanted(&prompt) {
            let arguments = "--prompt-tokens 2048 --predict 0 --context 2304";
            comparison.compare(&prompt, arguments, 0.95, prefill);
        }
        for (tokens, predict, target) in [(4096, 32, 2.5), (16384, 32, 3.5), (131_072, 8, 10.0)] {
            let name = format!("decode, mostly attention, {name}, {tokens} tokens");
            if !is_wanted(&name) {
                continue;
            }
            let slot = directory.join("slot");
            slot_file::write(&slot, &model, tokens);
            let context = tokens + 256;
            let load = format!("--context {context} --predict {predict} --load {}", slot.display());
            comparison.compare(&name, &load, target, decode);
            std::fs::remove_file(&slot).unwrap();
        }
    }
}

/// A model that was trained, whose attention is short.
fn tiny_model(mount: &Mount, directory: &Path, rounds: usize) {
    let path = directory.join("tiny.gguf");
    Model::write_tiny(&path);
    let comparison = Comparison { model: &path, mount, rounds };
    let short = "decode, tiny model, 64 to 320 tokens";
    if is_wanted(short) {
        let arguments = "--prompt-tokens 64 --predict 256 --context 512";
        comparison.compare(short, arguments, 0.98, decode);
    }
    let prompt = "prefill, tiny model, 1500 tokens";
    if is_wanted(prompt) {
        let arguments = "--prompt-tokens 1500 --predict 0 --context 2048";
        comparison.compare(prompt, arguments, 0.95, prefill);
    }
}
