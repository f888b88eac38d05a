//! Real mounts whose disk loses its power, fails, is full or turns read-only, and whose daemon is
//! killed, while programs write: whatever was acknowledged is there afterwards, and nothing by halves.
//!
//! | variable | |
//! |---|---|
//! | `KVFS_POWER_CUTS` | power cuts of each filesystem (100; a night takes 10,000) |
//! | `KVFS_KILLS` | kills at random moments (100), and as many at system calls |
//! | `KVFS_HALVES` | up to which call of a kind an operation of several steps is killed (3) or fails (1) |
//! | `KVFS_SEED` | what the random moments begin with |

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "how much was tested")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod cuts;
mod errors;
mod full;
mod halves;
mod import;
mod index_room;
mod kills;
mod ledger;
mod misplaced;
mod peers;
mod read_only;
#[path = "../tiers/rounding.rs"]
#[allow(dead_code, reason = "what other tests need is not used here")]
mod rounding;
mod scrub;
mod supervision;
mod verification;
#[path = "../prefixes/writer.rs"]
#[allow(dead_code, reason = "what other tests need is not used here")]
mod writer;
mod writers;

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}
