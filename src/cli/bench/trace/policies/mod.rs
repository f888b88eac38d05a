//! The policy of the tiers, and those that it is measured against.

mod adapting;
mod arc;
mod lirs;
mod ranked;
mod recency;
mod s3_fifo;
mod tiny_lfu;

use super::hints::{Hint, Hints};
use super::read::Trace;

/// A use of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) block: u32,
    /// Number of the request, from 0.
    pub(super) request: u32,
    /// Number of the block in the request, from 0.
    pub(super) place: u32,
    /// It was just made.
    pub(super) is_new: bool,
}

/// A tier with room for some blocks.
pub(super) trait Policy {
    fn holds(&self, block: u32) -> bool;

    /// A block is used: what it may push out, and whether it stays, is the policy's.
    fn note(&mut self, used: Use);

    /// A client says something about what it will do.
    fn hear(&mut self, _hint: &Hint) {}
}

/// The name of the policy of the tiers.
pub(super) const KVFS: &str = "kvfs";
/// The name of that policy with hints as clients can give them.
pub(super) const HINTED: &str = "finished";
/// The name of the one that knows the future.
pub(super) const OPTIMUM: &str = "Belady";

/// All of them, with their names: that of the tiers first, the optimum last.
pub(super) fn all(trace: &Trace, room: usize) -> Vec<(&'static str, Box<dyn Policy>)> {
    let blocks = trace.distinct;
    vec![
        (KVFS, Box::new(adapting::Adapting::new(room))),
        ("LIRS", Box::new(lirs::Lirs::new(blocks, room))),
        ("LRU", Box::new(recency::Recency::new(blocks, room, false))),
        ("LRU, end first", Box::new(recency::Recency::new(blocks, room, true))),
        ("decayed", Box::new(ranked::Decayed::new(blocks, room))),
        ("ARC", Box::new(arc::Arc::new(blocks, room))),
        ("S3-FIFO", Box::new(s3_fifo::S3Fifo::new(blocks, room))),
        ("W-TinyLFU", Box::new(tiny_lfu::TinyLfu::new(blocks, room))),
        (OPTIMUM, Box::new(ranked::Belady::new(trace.blocks(), blocks, room))),
    ]
}

/// A policy with its name, and what it hears.
type Hinted = ((&'static str, Box<dyn Policy>), Hints);

/// The policy of the tiers without hints and with them, and the optimum last.
pub(super) fn hinted(trace: &Trace, room: usize) -> Vec<Hinted> {
    let tier = |name, hints| {
        let policy: Box<dyn Policy> = Box::new(adapting::Adapting::new(room));
        ((name, policy), hints)
    };
    let optimum = ranked::Belady::new(trace.blocks(), trace.distinct, room);
    vec![
        tier(KVFS, Hints::none()),
        tier(HINTED, Hints::of_sessions(trace, true, false)),
        tier("waiting", Hints::of_sessions(trace, false, true)),
        tier("both", Hints::of_sessions(trace, true, true)),
        tier("never again", Hints::of_the_future(trace)),
        ((OPTIMUM, Box::new(optimum)), Hints::none()),
    ]
}

#[cfg(test)]
mod tests;
