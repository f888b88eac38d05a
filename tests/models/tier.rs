//! The RAM tier once more, with the locks of `shuttle`. What it is made of is kvfs's own.

use kvfs::tier::{counters, replacement, stay};

#[allow(dead_code, unreachable_pub, unused_imports, reason = "only some of it is needed here")]
#[path = "../../crates/storage/src/tier/ram/mod.rs"]
pub(crate) mod ram;
