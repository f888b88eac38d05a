//! Three users and root on one mount: none of them sees, changes or learns more than a path would let them.
//!
//! Seeded operations, one after the other, each by a thread that has the credentials of its user ([`user`]).
//! [`plain`] does each one in `files/` and in a directory of the disk, and wants the same answers and the same
//! trees. [`doors`] takes what has no twin: pages that are found by their content, slots, blocks, attributes and
//! links are tried by users while owners and modes change, and each success is held against what the same user
//! gets by path. [`batches`] does so with what is told of many names. [`limits`] looks at what limits delete while nobody asks, and [`machines`] at what another machine
//! shows that shares the remote.
//!
//! A failure names the seed, the number of the operation and the last ones before it; `KVFS_SEED` repeats
//! it. `KVFS_USER_OPERATIONS` (5,000) says how many operations each of the tests does. A million of them:
//! `KVFS_USER_OPERATIONS=250000 cargo test --locked --test users -- --nocapture --test-threads=1`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "what was done is part of the result")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

#[path = "../files_semantics/asking.rs"]
#[allow(dead_code, reason = "the tests of files use the rest")]
mod asking;
mod batches;
mod doors;
mod limits;
mod machines;
mod operation;
mod plain;
mod rights;
mod tree;
mod tries;
mod user;
#[path = "../prefixes/writer.rs"]
#[allow(dead_code, reason = "the tests of prefixes do more with sequences")]
mod writer;

use std::collections::VecDeque;

use crate::common::random::seeds;

/// Operations that a failure tells.
const TOLD: usize = 25;

/// What was done last, for who reads of a failure.
#[derive(Debug)]
pub(crate) struct History {
    seed: u64,
    number: usize,
    last: VecDeque<String>,
}

impl History {
    pub(crate) fn of(seed: u64) -> History {
        History { seed, number: 0, last: VecDeque::new() }
    }

    pub(crate) fn note(&mut self, line: &str) {
        self.number += 1;
        if self.last.len() == TOLD {
            self.last.pop_front();
        }
        self.last.push_back(format!("{}: {line}", self.number));
    }

    /// Fails the test unless this holds.
    #[track_caller]
    pub(crate) fn assert(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            let lines: Vec<&str> = self.last.iter().map(String::as_str).collect();
            let (seed, lines) = (self.seed, lines.join("\n"));
            panic!("KVFS_SEED={seed}, operation {}: {}\n{lines}", self.number, what());
        }
    }
}

/// Operations of each test.
pub(crate) fn operations() -> usize {
    std::env::var("KVFS_USER_OPERATIONS").map_or(5_000, |text| text.parse().unwrap())
}

/// The seed of a test.
pub(crate) fn seed() -> u64 {
    seeds(1)[0]
}
