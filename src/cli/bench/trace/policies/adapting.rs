//! The policy of the tiers itself.

use super::{Policy, Use};
use crate::store::record::ObjectId;
use crate::tier::replacement::{Access, Replacement};

/// What a block counts as: all have one size.
const BLOCK_BYTES: u64 = 1 << 20;

/// A tier's books.
pub(super) struct Adapting(Replacement);

impl Adapting {
    pub(super) fn new(room: usize) -> Adapting {
        Adapting(Replacement::new((room as u64).saturating_mul(BLOCK_BYTES)))
    }
}

impl Policy for Adapting {
    fn holds(&self, block: u32) -> bool {
        self.0.is_resident(ObjectId(block.into()))
    }

    fn note(&mut self, used: Use) {
        let object = ObjectId(used.block.into());
        let comes_in = used.is_new || self.0.access(object, BLOCK_BYTES) == Access::Admit;
        if comes_in {
            for victim in self.0.victims(BLOCK_BYTES, |_| false) {
                self.0.evicted(victim.object);
            }
            self.0.insert(object, BLOCK_BYTES);
        }
    }
}
