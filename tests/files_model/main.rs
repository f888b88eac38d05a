//! Random operations on `files/` against a model of it.
//!
//! `library` drives [`kvfs::fs::FileSystem`] without a kernel, thousands of operations a second,
//! with crashes: what comes back is the model at some moment since the last commit. `twin` does
//! the same to a real mount and to a directory beside it, and compares results and trees.
//!
//! `KVFS_SEED=n` replays one seed; a failure prints it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod library;
mod model;

mod twin;

#[test]
fn random_operations_and_crashes_follow_the_model() {
    for seed in common::random::seeds(10) {
        eprintln!("seed {seed}");
        library::follow(common::random::Random::of(seed), common::mount::scratch_directory());
    }
}
