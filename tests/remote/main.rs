//! The remote tier on what it is made for: a directory, a directory that fails, a real S3 server.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod directory;
mod faults;
mod names;
mod place;
mod s3;
mod shared;
mod suite;
