//! Which objects deserve a tier: rules that compete, over runs of uses.
//!
//! No fixed rule is good everywhere. Engines read a sequence from front to back for every token; when
//! it is longer than the budget, LRU drops each page just before it is needed again. LIRS (Jiang and
//! Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy", SIGMETRICS 2002)
//! ranks objects by the distance between their last two uses and keeps what fits of such a loop, but
//! leaves so little room to what is new that conversations lose a fifth of all hits. So several
//! rules are tried on a sample of the objects (`shadows`), and the tier follows the one that misses
//! least: LIRS (`lirs`), recency, or recency with a worth of each use (`frequency`).
//!
//! Common to all of them:
//!
//! - What a prefix begins with outlives what follows: uses form `runs`, and the end of a run leaves
//!   before its beginning. A chain without its beginning is worth nothing.
//! - An object that is not resident need not come in: the disk serves it just as well, and a copy
//!   that would be the next to leave is wasted. It is bypassed.
//! - Objects that left are remembered with the number of their uses. Where uses lie further apart
//!   than the memory reaches, LIRS admits every 32nd of them without proof (as in BIP: Qureshi et al.,
//!   "Adaptive Insertion Policies for High Performance Caching", ISCA 2007). Otherwise hot objects
//!   that nobody uses any more would stay forever.
//! - What somebody has said to be finished leaves before everything else, until it is used again. That is
//!   no rule's affair: it is the order of leaving alone that changes.
//!
//! Every operation takes constant time: trimming the history is paid for by what was added to it, and
//! `names` grow without a pause. `tests/` measures hits against each rule, against plain LRU and
//! against what no policy can beat; `docs/policy.md` has what real traffic makes of it. This module
//! knows nothing of files: the caller moves bytes and reports what it did.

mod cache;
mod frequency;
mod lirs;
mod list;
mod names;
mod runs;
mod shadows;

use std::collections::BTreeSet;

use self::cache::{Cache, PINNED_SKIPPED_MAX, Rule, Use};
use self::runs::Runs;
use self::shadows::Shadows;
use crate::store::record::ObjectId;

/// Absent objects that are remembered. At 64 bytes each this is 16 MiB; with pages of 4 MiB it
/// reaches back 1 TiB.
const ABSENT_MAX: usize = 1 << 18;

/// What to do about an object that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is resident.
    Hit,
    /// Bring it in: make room, move the bytes, then call [`Replacement::insert`].
    Admit,
    /// Serve it from where it is.
    Bypass,
}

/// An object that should leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Which.
    pub object: ObjectId,
    /// What its leaving frees.
    pub bytes: u64,
}

/// What would leave before an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Before {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// There are more: so many were looked at.
    pub has_more: bool,
}

/// Objects that one question for what leaves before another looks at, a few ten nanoseconds each with the tier locked.
const LOOKED_AT_MAX: u64 = 1 << 12;

/// What is resident in a tier, and what should be.
#[derive(Debug)]
pub struct Replacement {
    cache: Cache,
    shadows: Shadows,
    runs: Runs,
    /// Resident objects that nobody will go on with, as somebody has said.
    finished: BTreeSet<ObjectId>,
}

impl Replacement {
    /// An empty tier of `budget_bytes`.
    pub fn new(budget_bytes: u64) -> Replacement {
        Replacement::with_memory(budget_bytes, ABSENT_MAX)
    }

    /// One that remembers at most `absent_max` absent objects.
    fn with_memory(budget_bytes: u64, absent_max: usize) -> Replacement {
        Replacement {
            cache: Cache::new(budget_bytes, absent_max),
            shadows: Shadows::new(budget_bytes),
            runs: Runs::new(budget_bytes),
            finished: BTreeSet::new(),
        }
    }

    /// The budget changes; the next search for victims says what does not fit any more.
    pub fn set_budget(&mut self, budget_bytes: u64) {
        self.cache.set_budget(budget_bytes);
        self.shadows.set_budget(budget_bytes);
        self.runs.set_budget(budget_bytes);
    }

    /// Bytes of all resident objects.
    pub fn resident_bytes(&self) -> u64 {
        self.cache.resident_bytes()
    }

    /// Whether an object is resident.
    pub fn is_resident(&self, object: ObjectId) -> bool {
        self.cache.is_resident(object)
    }

    /// Whether an object was resident, as far as that is remembered, and is not any more.
    pub fn has_left(&self, object: ObjectId) -> bool {
        let names = &self.cache.names;
        names.find(object).is_some_and(|index| !names[index].state.is_resident())
    }

    /// How often an object was used, its coming in included, as far as that is remembered.
    pub fn uses(&self, object: ObjectId) -> Option<u64> {
        let names = &self.cache.names;
        names.find(object).map(|index| u64::from(names[index].uses))
    }

    /// An object of `bytes` is used.
    ///
    /// The answer [`Access::Admit`] reserves nothing; a caller that cannot follow it may ignore it.
    pub fn access(&mut self, object: ObjectId, bytes: u64) -> Access {
        self.finished.remove(&object);
        let used = self.runs.note(&self.cache.names, object, bytes);
        self.shadows.note(used, false, self.cache.resident());
        let answer = self.cache.access(self.rule(), used);
        self.runs.noted(&mut self.cache.names, object);
        answer
    }

    /// An object has come in: a new page was written, or bytes were moved here.
    ///
    /// The budget is the caller's affair: see [`victims`](Self::victims).
    pub fn insert(&mut self, object: ObjectId, bytes: u64) {
        self.finished.remove(&object);
        let names = &self.cache.names;
        let asked =
            names.find(object).map(|index| &names[index]).filter(|node| node.state.is_asked());
        if let Some(node) = asked {
            let used = Use { object, bytes, uses: node.uses, run: node.run };
            self.cache.insert(used);
        } else {
            let used = self.runs.note(names, object, bytes);
            self.shadows.note(used, true, self.cache.resident());
            self.cache.insert(used);
        }
        self.runs.noted(&mut self.cache.names, object);
    }

    /// An object was there when this began: those that are to leave first come first.
    pub fn insert_in_order(&mut self, object: ObjectId, bytes: u64) {
        // Of what belongs together the end leaves first, which the order says already.
        self.runs.end();
        self.insert(object, bytes);
    }

    /// An object is gone for good: deleted, or changed.
    pub fn remove(&mut self, object: ObjectId) {
        self.finished.remove(&object);
        self.cache.remove(object);
        self.shadows.remove(object);
    }

    /// An object was evicted; it is remembered.
    pub fn evicted(&mut self, object: ObjectId) {
        self.finished.remove(&object);
        self.cache.evicted(object);
    }

    /// Nobody will go on with an object: if it is resident, it is among the first to leave until it is used.
    /// With `is_finished` false that is taken back.
    pub fn finish(&mut self, object: ObjectId, is_finished: bool) {
        if !is_finished {
            self.finished.remove(&object);
        } else if self.is_resident(object) {
            self.finished.insert(object);
        }
    }

    /// Whether somebody has said so of an object, which was not used since.
    pub fn is_finished(&self, object: ObjectId) -> bool {
        self.finished.contains(&object)
    }

    /// The objects that should leave so that `bytes` more fit into the budget, in this order.
    ///
    /// They stay resident until [`evicted`](Self::evicted) is called. Those for which `is_pinned`
    /// says so are passed over and count as used now, so that the next search does not begin with
    /// them. The answer frees too little when too many are: serve the object from elsewhere.
    pub fn victims(&mut self, bytes: u64, is_pinned: impl FnMut(ObjectId) -> bool) -> Vec<Victim> {
        self.first_to_leave(self.cache.excess_bytes(bytes), usize::MAX, is_pinned)
    }

    /// The objects that should leave first, `wanted` bytes together but `most` at a time; as
    /// [`victims`](Self::victims).
    pub fn first_to_leave(
        &mut self, wanted: u64, most: usize, mut is_pinned: impl FnMut(ObjectId) -> bool,
    ) -> Vec<Victim> {
        self.first_to_leave_while(wanted, most, |object| Some(is_pinned(object)))
    }

    /// The same for who asks somebody else and cannot ask without end: where `is_pinned` does not say, the search ends.
    /// Only those that are known to be pinned count as used now.
    pub fn first_to_leave_while(
        &mut self, wanted: u64, most: usize, mut is_pinned: impl FnMut(ObjectId) -> Option<bool>,
    ) -> Vec<Victim> {
        let (mut victims, mut freed) = (Vec::new(), 0);
        let (mut looked_at, mut pinned) = (BTreeSet::new(), Vec::new());
        // The youngest first: that is the end of a sequence.
        for object in self.finished.iter().rev().copied() {
            if freed >= wanted || victims.len() >= most || pinned.len() >= PINNED_SKIPPED_MAX {
                break;
            }
            looked_at.insert(object);
            match is_pinned(object) {
                None => return victims,
                Some(true) => pinned.push(object),
                Some(false) => {
                    let bytes = self.cache.bytes_of(object);
                    freed += bytes;
                    victims.push(Victim { object, bytes });
                }
            }
        }
        // Somebody goes on with it after all.
        for object in pinned {
            self.finished.remove(&object);
        }
        let left = (wanted.saturating_sub(freed), most - victims.len());
        if left.0 > 0 && left.1 > 0 {
            let rule = self.rule();
            victims.extend(self.cache.first_to_leave(rule, left, &looked_at, is_pinned));
        }
        victims
    }

    /// What would leave before a resident object if room were needed now and nobody used any of it.
    pub fn before(&self, object: ObjectId) -> Option<Before> {
        if !self.is_resident(object) {
            return None;
        }
        let finished =
            self.finished.iter().rev().map(|object| (*object, self.cache.bytes_of(*object)));
        let others = self.cache.in_order(self.rule());
        let others = others.filter(|(object, _)| !self.finished.contains(object));
        let mut before = Before::default();
        for (_, bytes) in finished.chain(others).take_while(|(first, _)| *first != object) {
            if before.objects == LOOKED_AT_MAX {
                return Some(Before { has_more: true, ..before });
            }
            before.objects += 1;
            before.bytes += bytes;
        }
        Some(before)
    }

    /// Resident objects, those first that would leave first if nobody used any of them.
    pub fn in_order(&self) -> impl Iterator<Item = ObjectId> {
        self.cache.in_order(self.rule()).map(|(object, _)| object)
    }

    fn rule(&self) -> Rule {
        self.shadows.rule()
    }
}

#[cfg(test)]
mod tests;
