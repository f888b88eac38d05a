//! The policy of the tiers itself.

use std::collections::{HashMap, HashSet};

use super::{Policy, Use};
use crate::cli::bench::trace::hints::Hint;
use crate::store::record::ObjectId;
use crate::tier::replacement::{Access, Replacement};

/// What a block counts as: all have one size.
const BLOCK_BYTES: u64 = 1 << 20;
/// What those that wait may keep of the room: one part of so many.
const WAITING_PART: usize = 2;
/// Searches for a block that may leave, each of which passes over a thousand that wait.
const SEARCHES_MAX: usize = 8;

/// A tier's books.
pub(super) struct Adapting {
    tier: Replacement,
    room: usize,
    /// What sessions that wait keep, and how much that is.
    waiting: HashMap<u32, Vec<u32>>,
    kept: HashSet<u32>,
}

impl Adapting {
    pub(super) fn new(room: usize) -> Adapting {
        let tier = Replacement::new((room as u64).saturating_mul(BLOCK_BYTES));
        Adapting { tier, room, waiting: HashMap::new(), kept: HashSet::new() }
    }

    fn make_room(&mut self) {
        let most = self.room as u64 * BLOCK_BYTES;
        for _ in 0..SEARCHES_MAX {
            if self.tier.resident_bytes() + BLOCK_BYTES <= most {
                break;
            }
            let kept = &self.kept;
            let is_kept =
                |object: ObjectId| u32::try_from(object.0).is_ok_and(|block| kept.contains(&block));
            for victim in self.tier.victims(BLOCK_BYTES, is_kept) {
                self.tier.evicted(victim.object);
            }
        }
    }

    fn end_waiting(&mut self, session: u32) {
        for block in self.waiting.remove(&session).unwrap_or_default() {
            self.kept.remove(&block);
        }
    }

    /// What a session used stays until its next request, as far as there is room for such things.
    fn begin_waiting(&mut self, session: u32, blocks: &[u32]) {
        self.end_waiting(session);
        let mut own = Vec::new();
        for block in blocks {
            let has_room = self.kept.len() < self.room / WAITING_PART;
            if has_room && self.holds(*block) && self.kept.insert(*block) {
                own.push(*block);
            }
        }
        self.waiting.insert(session, own);
    }
}

impl Policy for Adapting {
    fn holds(&self, block: u32) -> bool {
        self.tier.is_resident(ObjectId(block.into()))
    }

    fn note(&mut self, used: Use) {
        let object = ObjectId(used.block.into());
        let comes_in = used.is_new || self.tier.access(object, BLOCK_BYTES) == Access::Admit;
        if comes_in {
            self.make_room();
            self.tier.insert(object, BLOCK_BYTES);
        }
    }

    fn hear(&mut self, hint: &Hint) {
        match hint {
            Hint::Finished(blocks) => {
                for block in blocks {
                    self.tier.finish(ObjectId((*block).into()), true);
                }
            }
            Hint::Waiting { session, blocks } => self.begin_waiting(*session, blocks),
            Hint::Ended { session } => self.end_waiting(*session),
        }
    }
}
