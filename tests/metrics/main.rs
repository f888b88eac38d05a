//! What a running mount exports: its series, the address that serves them, and what is made of them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
#[path = "../tiers/place.rs"]
#[allow(dead_code, reason = "the tests of tiers use the rest")]
mod place;
#[path = "../prefixes/writer.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod writer;

mod chromium;
mod documents;
mod endpoint;
mod exported;
mod looks;
mod page;
mod series;
