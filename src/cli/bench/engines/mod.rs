//! `kvfs bench engines`: what engines do to a cache directory, in a mount and beside it.
//!
//! The system calls are those that the engines make (`tests/files_semantics/engines.rs`): blocks
//! written to an exclusive temporary name in one piece and renamed, read in one piece; names looked
//! up that are not there; a slot file read as a whole; the longest cached prefix of a prompt; pages
//! that one writes and another reads as they come.

mod blocks;
mod follow;
mod lookups;
mod prefix;
mod slot;

use super::daemon::Daemon;
use super::figure::Figure;
use super::tiers::make_layer;
use super::workplace::Workplace;
use super::{BenchArguments, require_passthrough};

/// How much of everything.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rounds: usize,
    /// Bytes of all blocks of one round; at least one block for each thread.
    block_bytes: u64,
    names: usize,
    slot_bytes: usize,
    /// Tokens of the sequence that a prompt is compared with.
    tokens: u32,
    /// Pages that are followed while they are written.
    followed_pages: usize,
}

const FULL: Sizes = Sizes {
    rounds: 5,
    block_bytes: 256 << 20,
    names: 10_000,
    slot_bytes: 64 << 20,
    tokens: 100_000,
    followed_pages: 512,
};

const QUICK: Sizes = Sizes {
    rounds: 1,
    block_bytes: 16 << 20,
    names: 500,
    slot_bytes: 4 << 20,
    tokens: 2_000,
    followed_pages: 32,
};

/// Measures everything; returns whether the mount had passthrough.
pub(super) fn run(arguments: &BenchArguments, figures: &mut Vec<Figure>) -> Result<String, String> {
    let sizes = if arguments.quick { QUICK } else { FULL };
    let workplace = Workplace::make(arguments.dir.as_deref())?;
    let mut daemon = Daemon::start(&workplace)?;
    make_layer(&workplace, "s")?;
    let passthrough = require_passthrough(arguments, &daemon)?;
    figures.extend(blocks::figures(&workplace, &sizes)?);
    figures.extend(lookups::figures(&workplace, &sizes)?);
    figures.extend(slot::figures(&workplace, &sizes)?);
    figures.extend(prefix::figures(&workplace, &sizes)?);
    figures.extend(follow::figures(&workplace, &sizes)?);
    daemon.stop()?;
    Ok(passthrough)
}
