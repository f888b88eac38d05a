//! What kvfs is for, in one command: a language model keeps its KV cache in files, loses the
//! daemon, a page and the whole store, and never reads a text again that it has read before.
//!
//! ```text
//! cargo build --release
//! cargo run --release --example demo
//! ```
//!
//! A small Llama (`examples/tiny_llama`) reads a prompt of several pages through a temporary
//! mount and continues it. It is interrupted in three ways, and what it generates afterwards is
//! compared with a run in memory that nobody interrupted: token for token, and the logits bit for
//! bit. Nothing is left behind, also after a failure or Ctrl-C. `--quick` takes a shorter prompt.

use std::error::Error;
use std::process::ExitCode;

mod engine;
mod interrupt;
mod printer;
mod sandbox;
mod story;

#[path = "../tiny_llama/attention.rs"]
mod attention;
#[path = "../tiny_llama/generate.rs"]
mod generate;
#[path = "../tiny_llama/matrix.rs"]
mod matrix;
#[path = "../tiny_llama/memory_cache.rs"]
mod memory_cache;
#[path = "../tiny_llama/model.rs"]
mod model;
#[path = "../tiny_llama/mount_cache/mod.rs"]
mod mount_cache;
#[path = "../tiny_llama/sample.rs"]
mod sample;
#[path = "../tiny_llama/weights.rs"]
mod weights;

/// The result of anything here that can fail; the message is for people.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const USAGE: &str = "usage: demo [--quick]";

/// How much is read and generated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) prompt_tokens: usize,
    pub(crate) page_tokens: usize,
    /// After how many generated tokens the run is interrupted; the last one is the end.
    pub(crate) stops: [usize; 4],
    /// Repetitions of what is timed.
    pub(crate) runs: usize,
}

/// The first stop is short of a page border, the second beyond it: the rows of that page survive
/// the crash in a tail, and its last row seals it.
const FULL: Size = Size { prompt_tokens: 1250, page_tokens: 256, stops: [24, 40, 52, 64], runs: 5 };

const QUICK: Size = Size { prompt_tokens: 310, page_tokens: 64, stops: [8, 16, 20, 24], runs: 1 };

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let size = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => FULL,
        ["--quick"] => QUICK,
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match story::tell(size) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error}");
            if interrupt::check().is_err() {
                return ExitCode::from(interrupt::EXIT);
            }
            ExitCode::FAILURE
        }
    }
}
