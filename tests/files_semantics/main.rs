//! The contract of `files/` on real mounts, one rule a test, in both modes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod asking;
mod batches;
mod engines;
mod fallbacks;
mod floods;
mod mappings;
mod names;
mod reopened;
mod rights;
mod rings;
mod sizes;
mod standstill;
mod storm;
mod times;
mod versions;
mod writing;
