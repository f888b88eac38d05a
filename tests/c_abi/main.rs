//! The C interface: the header, programs in C that use the library, and what they get.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod agreement;
mod example;
mod header;
mod held;
mod program;
mod refused;
