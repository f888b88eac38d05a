//! The C interface: the header, programs in C that use the library, and what they get.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
use common::skips;

mod agreement;
mod cuda;
mod example;
mod header;
mod held;
mod hint;
#[allow(dead_code, reason = "the tests of the kernels use the rest")]
#[path = "../kernels/library.rs"]
mod library;
mod many;
mod program;
mod refused;
mod scan;
mod sequences;
mod write_back;
#[allow(dead_code, reason = "the tests of prefixes use the rest")]
#[path = "../prefixes/writer.rs"]
mod writer;
