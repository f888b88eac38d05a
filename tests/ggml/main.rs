//! The ggml backend in unmodified llama.cpp: what it computes, and where the cache is.
//!
//! The engine is the build of a package (`mount-scripts/fetch-llama.sh` fetches it), the reference the
//! same build without the backend and without flash attention. Every run counts its attention
//! operations: a run that fell back to stock would agree with it, and prove nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

#[path = "../c_abi/program.rs"]
#[allow(dead_code, reason = "programs of the C interface are built by its own tests")]
mod program;

mod cells;
mod conversation;
mod doctor;
#[allow(dead_code, reason = "how long a run took is for the benchmark")]
mod engine;
mod failures;
mod forms;
mod gguf;
mod killed;
mod kinds;
mod larger_than_memory;
mod models;
mod other_device;
mod pages;
mod planted;
mod references;
mod releases;
mod saved;
mod slot_file;
mod slots;
