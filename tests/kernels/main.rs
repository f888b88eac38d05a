//! The CUDA kernels without a GPU: run on the CPU under a shim, with and without sanitizers, against
//! f64 and against the runtime for the CPU; what planted bugs do; whether the PTX that is checked in
//! is theirs.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
use common::skips;

mod agreement;
mod bugs;
mod library;
mod numerics;
mod product;
mod shim;
