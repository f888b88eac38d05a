//! The host side of attention on a GPU, without one: the program as it is, on a driver that runs the
//! kernels on the CPU, takes random times for everything, and fails where it is told to.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
use common::skips;

mod bench;
mod bugs;
mod calls;
mod engine;
mod fake;
mod faults;
mod fixture;
mod mapped;
mod numerics;
mod overlap;
mod scans;
mod selections;
mod write_back;
