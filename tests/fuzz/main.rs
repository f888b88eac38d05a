//! Bytes that somebody forged, thrown at everything that reads bytes.
//!
//! A target takes any bytes and must not panic, hang, ask for much memory, or break what it promises;
//! most also compare with an independent reference. [`engine`] makes the bytes: it changes inputs that
//! it has, and keeps what made the target do something new. `cargo test` runs each target for
//! `KVFS_FUZZ_SECONDS` (2); `mount-scripts/fuzz.sh` runs them long, with the code instrumented.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "how much was tried is part of the result")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../files_model/library/mod.rs"]
mod library;
#[path = "../files_model/model.rs"]
mod model;

mod batch;
mod blob;
mod corpus;
mod coverage;
mod damaged_store;
mod edits;
mod engine;
mod forged_names;
mod header;
mod manifest;
mod memory;
mod mutate;
mod operations;
mod page;
mod records;
mod rows;
mod state;
mod text;
mod tree;

use engine::fuzz;

#[test]
fn pages() {
    fuzz(page::target());
}

#[test]
fn states() {
    fuzz(state::target());
}

#[test]
fn manifests() {
    fuzz(manifest::target());
}

#[test]
fn names_of_files() {
    fuzz(text::target());
}

#[test]
fn questions_about_names() {
    fuzz(batch::target());
}

#[test]
fn records_of_the_metadata() {
    fuzz(records::target());
}

#[test]
fn encoded_copies() {
    fuzz(blob::target());
}

#[test]
fn appended_rows() {
    fuzz(rows::target());
}

#[test]
fn sequences_of_operations() {
    fuzz(operations::target());
}

#[test]
fn stores_with_forged_metadata() {
    fuzz(damaged_store::target());
}

#[test]
fn names_from_a_forged_remote() {
    fuzz(forged_names::target());
}
