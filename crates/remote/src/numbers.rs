//! The highest number of a manifest that was seen of each store.
//!
//! Whoever can write to a remote can put an old manifest back, which in a sealed one is genuine. It has an old
//! number: a reader that has seen a higher one knows. And whoever collects garbage by a listing knows what it lacks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::name::{Sequence, StoreId};

/// What was seen, some 24 bytes for each store; in a sealed remote, only stores that have the key get in.
#[derive(Debug, Default)]
pub struct Numbers(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    highest: BTreeMap<StoreId, Sequence>,
    fresh: BTreeSet<StoreId>,
}

impl Numbers {
    /// What was noted durably before.
    pub fn know(&self, known: impl IntoIterator<Item = (StoreId, Sequence)>) {
        let mut seen = self.lock();
        for (store, sequence) in known {
            let highest = seen.highest.entry(store).or_default();
            *highest = sequence.max(*highest);
        }
    }

    /// What was seen since the last time that somebody asked, to be noted durably.
    pub fn take_fresh(&self) -> Vec<(StoreId, Sequence)> {
        let mut seen = self.lock();
        let fresh = std::mem::take(&mut seen.fresh);
        fresh.into_iter().filter_map(|store| Some((store, *seen.highest.get(&store)?))).collect()
    }

    /// The highest of a store.
    pub(crate) fn highest(&self, store: StoreId) -> Option<Sequence> {
        self.lock().highest.get(&store).copied()
    }

    /// The highest of all stores.
    pub(crate) fn all(&self) -> Vec<(StoreId, Sequence)> {
        self.lock().highest.iter().map(|(store, sequence)| (*store, *sequence)).collect()
    }

    /// A store is gone for good.
    pub fn forget(&self, store: StoreId) {
        let mut seen = self.lock();
        seen.highest.remove(&store);
        seen.fresh.remove(&store);
    }

    /// A manifest was read and is what its name says, or was published.
    pub(super) fn note(&self, store: StoreId, sequence: Sequence) {
        let mut seen = self.lock();
        let highest = seen.highest.entry(store).or_default();
        if sequence > *highest {
            *highest = sequence;
            seen.fresh.insert(store);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_higher_numbers_are_new() {
        let (numbers, store) = (Numbers::default(), StoreId(1));
        numbers.know([(store, Sequence(5))]);
        numbers.note(store, Sequence(4));
        assert_eq!((numbers.highest(store), numbers.take_fresh()), (Some(Sequence(5)), vec![]));
        numbers.note(store, Sequence(6));
        numbers.know([(store, Sequence(2))]);
        assert_eq!(numbers.take_fresh(), [(store, Sequence(6))]);
        assert_eq!((numbers.take_fresh(), numbers.highest(StoreId(2))), (vec![], None));
        assert_eq!(numbers.all(), [(store, Sequence(6))]);
        numbers.note(store, Sequence(7));
        numbers.forget(store);
        assert_eq!((numbers.take_fresh(), numbers.all()), (vec![], vec![]));
    }
}
