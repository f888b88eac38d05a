//! Sequences of a mount through `kvfs::reader`, which maps or streams their pages.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod edited;
mod failures;
mod follow;
mod long_context;
mod mappings;
mod million;
mod prepared;
mod reports;
