//! The budget of the RAM tier while it is used.
//!
//! A larger one holds at once. A smaller one holds for what comes, which goes to the disk until the rest fits;
//! what is there too much leaves in small steps, beside the requests: they take the same lock.

use std::io;
use std::sync::atomic::Ordering;

use super::{RamTier, Wanted, place};

/// What leaves in one step: unlinking 32 MiB takes about a millisecond.
const STEP_BYTES: u64 = 32 << 20;
/// Copies that leave in one step, where they are small.
const STEP_COPIES: usize = 64;

/// What one step of [shrinking](RamTier::shrink) did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shrunk {
    /// All copies fit into the budget.
    Fits,
    /// Some left, others are still too much.
    Freed,
    /// None could leave: they are dirty, open, mapped or pinned.
    Held,
}

impl RamTier {
    /// Who is told that the tier holds too much, as one may that another daemon has left.
    pub fn on_too_large(&self, wanted: Wanted) {
        let _ = self.too_large.set(wanted);
        self.tell_if_too_large();
    }

    fn tell_if_too_large(&self) {
        let is_too_large = self.held().place_bytes > self.budget_bytes();
        if is_too_large && let Some(Wanted(wanted)) = self.too_large.get() {
            wanted();
        }
    }

    /// Changes the budget.
    ///
    /// # Errors
    /// If its tmpfs cannot become larger; nothing has changed then.
    pub fn set_budget(&self, budget_bytes: u64) -> io::Result<()> {
        {
            let mut held = self.held();
            if budget_bytes > held.place_bytes {
                place::resize(&self.disk, &self.place, budget_bytes)?;
                held.place_bytes = budget_bytes;
            }
            held.replacement.set_budget(budget_bytes);
            self.budget_bytes.store(budget_bytes, Ordering::Relaxed);
        }
        self.tell_if_too_large();
        Ok(())
    }

    /// Bytes that stay whatever the budget is, since their files are pinned.
    pub fn kept_bytes(&self) -> u64 {
        let held = self.held();
        let is_kept = |inode| held.kept.contains(&inode);
        let copies = held.copies.values().filter(|copy| copy.inode.is_some_and(is_kept));
        copies.map(|copy| copy.bytes).sum()
    }

    /// One step towards a budget that was made smaller.
    pub fn shrink(&self) -> Shrunk {
        let mut held = self.held();
        let budget_bytes = self.budget_bytes();
        let mut left = 0;
        if held.used_bytes() > budget_bytes {
            let excess = held.used_bytes() - budget_bytes;
            left = self.evict(&mut held, excess.min(STEP_BYTES), STEP_COPIES);
        }
        if held.used_bytes() > budget_bytes {
            return if left > 0 { Shrunk::Freed } else { Shrunk::Held };
        }
        if held.place_bytes > budget_bytes {
            match place::resize(&self.disk, &self.place, budget_bytes) {
                Ok(()) => held.place_bytes = budget_bytes,
                // Somebody still has what was removed.
                Err(error) => {
                    log::debug!("the tmpfs of the RAM tier stays as large as it was: {error}");
                    return Shrunk::Held;
                }
            }
        }
        Shrunk::Fits
    }
}
