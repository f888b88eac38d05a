//! Objects that nothing names any more and nothing on the disk has ever named.
//!
//! A file that is rewritten again and again leaves one behind each time. Their files need not wait for a commit, and
//! should not: the disk would write their bytes first, and while they are removed more of them come, so that each commit
//! would take longer than the one before.

use std::collections::VecDeque;

use crate::store::record::ObjectId;

/// See the module.
#[derive(Debug)]
pub struct Discarded {
    /// The first number that nothing had when the last layer was frozen: no commit has seen it, nor any after it.
    first_unseen: u64,
    /// The oldest first.
    objects: VecDeque<ObjectId>,
}

impl Discarded {
    /// None yet; no commit has seen any number after `last_number`.
    pub(super) fn after(last_number: u64) -> Discarded {
        Discarded { first_unseen: last_number + 1, objects: VecDeque::new() }
    }

    /// A layer is frozen: its commit sees all numbers up to the last one.
    pub(super) fn note_freeze(&mut self, last_number: u64) {
        self.first_unseen = last_number + 1;
    }

    /// Takes in an object that nothing names any more, if no commit has seen it. Whether it did.
    pub(super) fn take_in(&mut self, object: ObjectId) -> bool {
        let is_unseen = object.0 >= self.first_unseen;
        if is_unseen {
            self.objects.push_back(object);
        }
        is_unseen
    }

    /// Takes in objects of a commit that failed before it told the database of them.
    pub(super) fn take_in_failed(&mut self, objects: impl IntoIterator<Item = ObjectId>) {
        self.objects.extend(objects);
    }

    /// The oldest of them; the caller removes their files. So whoever has as many removed as there are has all of those
    /// removed, whatever comes meanwhile.
    pub fn take(&mut self, most: usize) -> Vec<ObjectId> {
        let most = most.min(self.objects.len());
        self.objects.drain(..most).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_commit_has_seen_is_taken_in_and_taken_once() {
        let mut discarded = Discarded::after(7);
        assert!(!discarded.take_in(ObjectId(7)) && discarded.is_empty());
        assert_eq!([8, 12, 10].map(|number| discarded.take_in(ObjectId(number))), [true; 3]);
        discarded.note_freeze(12);
        assert!(!discarded.take_in(ObjectId(9)) && !discarded.take_in(ObjectId(12)));
        assert!(discarded.take_in(ObjectId(13)));
        discarded.take_in_failed([ObjectId(3)]);
        assert_eq!((discarded.len(), discarded.is_empty()), (5, false));
        assert_eq!(discarded.take(2), [ObjectId(8), ObjectId(12)]);
        assert_eq!(discarded.take(9), [ObjectId(10), ObjectId(13), ObjectId(3)]);
        assert_eq!(discarded.take(9), []);
    }
}
