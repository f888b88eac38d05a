//! Finding cached prefixes: by hash, by prompt, and pages of equal bytes that are stored once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod blocks;
mod by_hash;
mod by_prompt;
mod command;
mod lost_states;
mod machines;
mod open_slots;
mod private;
mod random;
mod revision;
mod saved;
mod shared;
mod sizes;
mod states;
mod writer;
