//! The ggml backend in unmodified llama.cpp, against the same engine without it.
//!
//! ```text
//! mount-scripts/fetch-llama.sh target/test-tools/llama.cpp-0.5.0
//! cargo bench --bench llama [-- ROUNDS [WORD...]]
//! ```
//!
//! Both run in turns, each with flash attention as the engine decides and with threads that wait
//! for work as those of `llama-server` do. A result is the median of the rounds, which stand behind it:
//! how many times faster than stock; how many milliseconds beyond reading the same bytes; which share of
//! the disk's rate. A round's time of a step is the median of its steps. Every run counts its attention
//! operations. Long conversations are not computed but loaded, from slot files of noise. All of it
//! takes some minutes; words choose figures whose names contain one of them (`prefill`, `16384`,
//! `restored`, `memory`).

#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]
#![allow(clippy::print_stdout, reason = "it prints figures")]
#![allow(clippy::cast_precision_loss, reason = "sizes of files are far below 2^52")]

#[path = "../../tests/common/mod.rs"]
#[macro_use]
mod common;

#[path = "../../tests/c_abi/program.rs"]
#[allow(dead_code, reason = "programs of the C interface are built by its own tests")]
mod program;

#[path = "../../tests/ggml/engine.rs"]
#[allow(dead_code, reason = "what a run computed is for the tests")]
mod engine;

#[path = "../../tests/ggml/gguf.rs"]
mod gguf;

#[path = "../../tests/ggml/slot_file.rs"]
mod slot_file;

mod beyond_memory;
mod figure;
mod restore;
mod speed;

use common::mount::scratch_directory;
use common::{Mode, Mount};
use figure::{ROUNDS, words};

fn main() {
    require!(fuse, llama, cc);
    let rounds = words().next().map_or(ROUNDS, |word| word.parse().expect("a number of rounds"));
    let directory = scratch_directory();
    let mode = if nix::unistd::geteuid().is_root() { Mode::Passthrough } else { Mode::Served };
    let mount = Mount::new(mode);
    figure::print_header();
    speed::measure(&mount, directory.path(), rounds);
    restore::measure(&mount, directory.path(), rounds);
    beyond_memory::measure(&mount, directory.path(), rounds);
}
