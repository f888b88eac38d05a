//! Which uses belong together: a request reads what it has in common with others from its beginning.
//!
//! A *run* is a row of uses in an order that was seen before, and what is new behind it. An object
//! that follows another one than at its last use begins a run.

use super::cache::Use;
use super::names::{NONE, Names};
use crate::store::record::ObjectId;

/// Share of the budget that may come in new in one run, in per cent. Prompts that begin alike share
/// their beginning, so what is new without end is many sequences, and not the end of one.
const NEW_PERCENT: u64 = 25;

/// The uses so far.
#[derive(Debug)]
pub(super) struct Runs {
    run: u32,
    last: u32,
    new_bytes: u64,
    new_bytes_max: u64,
}

impl Runs {
    pub(super) fn new(budget_bytes: u64) -> Runs {
        let mut runs = Runs { run: 0, last: NONE, new_bytes: 0, new_bytes_max: 0 };
        runs.set_budget(budget_bytes);
        runs
    }

    pub(super) fn set_budget(&mut self, budget_bytes: u64) {
        self.new_bytes_max = budget_bytes / 100 * NEW_PERCENT;
    }

    /// What is used next belongs to nothing before it.
    pub(super) fn end(&mut self) {
        self.run = self.run.wrapping_add(1);
        (self.last, self.new_bytes) = (NONE, 0);
    }

    /// An object is used.
    pub(super) fn note(&mut self, names: &Names, object: ObjectId, bytes: u64) -> Use {
        let known = names.find(object).map(|index| &names[index]);
        let begins = if let Some(node) = known {
            node.follows != self.last
        } else {
            self.new_bytes = self.new_bytes.saturating_add(bytes);
            self.new_bytes > self.new_bytes_max
        };
        if begins {
            self.run = self.run.wrapping_add(1);
            self.new_bytes = 0;
        }
        let uses = known.map_or(0, |node| node.uses).saturating_add(1);
        Use { object, bytes, uses, run: self.run }
    }

    /// The tier has dealt with that use.
    pub(super) fn noted(&mut self, names: &mut Names, object: ObjectId) {
        if let Some(index) = names.find(object)
            && index != self.last
        {
            names[index].follows = self.last;
            self.last = index;
        }
    }
}
