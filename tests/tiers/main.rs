//! Objects move between memory, the disk and a remote, on real mounts: what leaves, what comes
//! back, and what is there whatever happens in between.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod answers;
#[path = "../files_semantics/asking.rs"]
#[allow(dead_code, reason = "the tests of files use the rest")]
mod asking;
mod collection;
mod comparing;
mod dying_disk;
mod encoded;
mod encoded_moves;
mod explained;
mod faults;
mod forecast;
mod forged;
mod forgotten;
mod fsck;
mod hanging;
mod hints;
mod history;
mod in_place;
mod inspecting;
mod kills;
mod lossy;
mod lying;
mod movement;
mod place;
mod plan;
mod power;
mod prefetch;
mod rebuild;
mod remote;
mod rounding;
mod s3;
mod sealed;
mod share;
mod side_rows;
mod sight;
mod spared;
mod statements;
mod states;
mod steps;
mod use_told;
mod what_if;
#[path = "../prefixes/writer.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod writer;
