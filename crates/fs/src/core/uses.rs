//! When files were last used.
//!
//! An open notes the time in memory alone: a record for each would make every reader a writer. It is put into the
//! file's access time now and then, and by a walk over a limited directory once that lags far enough behind.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvfs_storage::store::record::{InodeId, Time};

/// Files that a generation remembers, 32 bytes each. There are two of them: where one is full, the older
/// one goes, and the access time on record has to do for what only that one knew.
const FILES_MAX: usize = 1 << 18;
/// How far the access time on record may lag behind: so much is forgotten in a crash.
const LAG_SECONDS: i64 = 600;
/// Uses that are remembered one by one: enough to tell who is busy, and looked up in no time.
const LATEST_MAX: usize = 256;

/// Uses since the access times on record.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    recent: BTreeMap<InodeId, Time>,
    older: BTreeMap<InodeId, Time>,
    /// Of the last uses, a file for each. Once it is full, the place of the oldest one is taken.
    latest: Vec<InodeId>,
    oldest: usize,
}

/// The uses of a mount, for a moment.
pub(crate) fn held(uses: &Mutex<Uses>) -> MutexGuard<'_, Uses> {
    uses.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uses {
    /// A file is used now.
    pub(crate) fn note(&mut self, id: InodeId, now: Time) {
        if self.recent.len() >= FILES_MAX && !self.recent.contains_key(&id) {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(id, now);
        if self.latest.len() < LATEST_MAX {
            self.latest.push(id);
        } else {
            self.latest[self.oldest] = id;
            self.oldest = (self.oldest + 1) % LATEST_MAX;
        }
    }

    /// What the last uses were of, in no order.
    pub(crate) fn latest(&self) -> &[InodeId] {
        &self.latest
    }

    /// The last use that is not on record.
    pub(crate) fn of(&self, id: InodeId) -> Option<Time> {
        self.recent.get(&id).or_else(|| self.older.get(&id)).copied()
    }

    /// What is known of a file is on record.
    pub(crate) fn forget(&mut self, id: InodeId) {
        self.recent.remove(&id);
        self.older.remove(&id);
    }

    /// The time to put on record, if what is there lags behind.
    pub(crate) fn overdue(&mut self, id: InodeId, recorded: Time) -> Option<Time> {
        let last = self.of(id)?;
        let lags = last.seconds.saturating_sub(recorded.seconds) >= LAG_SECONDS;
        if lags {
            self.forget(id);
        }
        lags.then_some(last)
    }

    /// Takes some of them, the older ones first, to put them on record: in one round of calls, whose mark begins as false,
    /// all that were noted before it. Nobody who notes a use waits for more than these.
    pub(crate) fn take_some(&mut self, most: usize, has_turned: &mut bool) -> Vec<(InodeId, Time)> {
        if self.older.is_empty() && !std::mem::replace(has_turned, true) {
            self.older = std::mem::take(&mut self.recent);
        }
        std::iter::from_fn(|| self.older.pop_first()).take(most).collect()
    }

    /// Keeps what could not be put on record.
    pub(crate) fn put_back(&mut self, some: &[(InodeId, Time)]) {
        self.older.extend(some.iter().copied().filter(|(id, _)| !self.recent.contains_key(id)));
    }

    /// Takes all of them, to put them on record.
    pub(crate) fn take(&mut self) -> Vec<(InodeId, Time)> {
        let mut all = std::mem::take(&mut self.older);
        all.extend(std::mem::take(&mut self.recent));
        all.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_is_recorded_once_the_record_lags_behind() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let (mut uses, id) = (Uses::default(), InodeId(9));
        uses.note(id, at(10_000));
        assert_eq!(uses.overdue(id, at(9_500)), None);
        assert_eq!(uses.of(id), Some(at(10_000)));
        assert_eq!(uses.overdue(id, at(9_000)), Some(at(10_000)));
        assert_eq!(uses.of(id), None);
    }

    #[test]
    fn what_could_not_be_recorded_is_taken_again_unless_it_was_used_since() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let mut uses = Uses::default();
        (1..4).for_each(|id| uses.note(InodeId(id), at(10)));
        let some = uses.take_some(3, &mut false);
        uses.note(InodeId(2), at(20));
        uses.put_back(&some[1..]);
        assert_eq!(uses.take_some(9, &mut false), [(InodeId(3), at(10))]);
        assert_eq!(uses.of(InodeId(2)), Some(at(20)));
    }

    #[test]
    fn each_of_the_last_uses_counts() {
        let mut uses = Uses::default();
        for id in (0..LATEST_MAX as u64).chain([3, 3, 3]) {
            uses.note(InodeId(id), Time { seconds: 1, nanoseconds: 0 });
        }
        let count = |wanted| uses.latest().iter().filter(|id| **id == InodeId(wanted)).count();
        // The three oldest ones went.
        assert_eq!([0, 1, 2, 3, 4].map(count), [0, 0, 0, 4, 1]);
        assert_eq!(uses.latest().len(), LATEST_MAX);
    }

    #[test]
    fn what_was_used_last_is_remembered_longest() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let mut uses = Uses::default();
        for id in 0..3 * FILES_MAX as u64 {
            uses.note(InodeId(id), at(1));
        }
        assert_eq!(uses.of(InodeId(0)), None);
        assert_eq!(uses.of(InodeId(2 * FILES_MAX as u64)), Some(at(1)));
        assert!(uses.recent.len() + uses.older.len() <= 2 * FILES_MAX);
        assert_eq!(uses.take().len(), 2 * FILES_MAX);
    }

    #[test]
    fn a_round_takes_what_was_noted_before_it() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let mut uses = Uses { older: [(InodeId(9), at(1))].into(), ..Uses::default() };
        for id in [3, 1, 2, 9] {
            uses.note(InodeId(id), at(2));
        }
        let mut has_turned = false;
        let mut take = |uses: &mut Uses| {
            let some = uses.take_some(2, &mut has_turned).into_iter();
            some.map(|(id, time)| (id.0, time.seconds)).collect::<Vec<_>>()
        };
        assert_eq!(take(&mut uses), [(9, 1)]);
        assert_eq!(take(&mut uses), [(1, 2), (2, 2)]);
        uses.note(InodeId(1), at(3));
        assert_eq!(take(&mut uses), [(3, 2), (9, 2)]);
        assert_eq!(take(&mut uses), [], "the next round has it");
        assert_eq!(uses.of(InodeId(1)), Some(at(3)));
    }

    #[test]
    fn who_is_known_takes_no_place() {
        let mut uses = Uses::default();
        for id in 0..FILES_MAX as u64 {
            uses.note(InodeId(id), Time::default());
        }
        uses.note(InodeId(0), Time { seconds: 1, nanoseconds: 0 });
        assert_eq!((uses.recent.len(), uses.older.len()), (FILES_MAX, 0));
    }
}
