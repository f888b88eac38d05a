//! Files at rest that the remote does not have, verified and named: which, how much, and since when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use super::record::{InodeId, ObjectId};

/// A file that came to rest.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    bytes: u64,
    since: SystemTime,
    since_taken: SinceTaken,
}

/// What became of a file while it was under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SinceTaken {
    Nothing,
    /// Its record was written again, perhaps for its attributes only: it is looked at again once it is not under way.
    Recorded,
    /// Somebody wrote to it.
    Written,
}

/// What waits for the remote.
#[derive(Debug, Default)]
pub struct Arrivals {
    /// To be looked at.
    waiting: BTreeMap<InodeId, Arrival>,
    /// Taken from there, and not yet known to be named.
    taken: BTreeMap<InodeId, Arrival>,
    /// All of them, those that came first at the beginning.
    by_time: BTreeSet<(SystemTime, InodeId)>,
    bytes: u64,
    given_up: GivenUp,
}

/// Files that the remote does not get as they are: trying again at once does not help.
#[derive(Debug, Default)]
pub struct GivenUp {
    files: BTreeMap<InodeId, (ObjectId, u64)>,
    bytes: u64,
    /// Why, of the last one.
    why: String,
}

impl GivenUp {
    fn insert(&mut self, (id, object): (InodeId, ObjectId), bytes: u64, why: String) {
        self.remove(id);
        self.files.insert(id, (object, bytes));
        self.bytes += bytes;
        self.why = why;
    }

    fn remove(&mut self, id: InodeId) {
        self.bytes -= self.files.remove(&id).map_or(0, |(_, bytes)| bytes);
    }

    /// Whether a file is one of them, as it is.
    pub fn has(&self, id: InodeId, object: ObjectId) -> bool {
        self.files.get(&id).is_some_and(|(known, _)| *known == object)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Their bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Why the last of them was given up, if there is one.
    pub fn why(&self) -> Option<&str> {
        (!self.files.is_empty()).then_some(&self.why)
    }
}

impl Arrivals {
    /// The record of a file at rest was written. One that is under way, or was given up, need not have other bytes:
    /// whoever changes its permissions again and again does not have it begin anew.
    pub(crate) fn note_at_rest(&mut self, id: InodeId, object: ObjectId, bytes: u64) {
        if self.given_up.has(id, object) {
            return;
        }
        match self.taken.get_mut(&id) {
            Some(taken) if taken.since_taken == SinceTaken::Nothing => {
                taken.since_taken = SinceTaken::Recorded;
            }
            Some(_) => {}
            None => self.insert(id, bytes),
        }
    }

    /// Somebody may write to a file.
    pub(crate) fn note_writing(&mut self, id: InodeId) {
        self.given_up.remove(id);
        if let Some(taken) = self.taken.get_mut(&id) {
            taken.since_taken = SinceTaken::Written;
        }
    }

    /// A file is to be looked at. One that is under way begins anew, but waits since then.
    pub(crate) fn insert(&mut self, id: InodeId, bytes: u64) {
        let since = self.remove(id).unwrap_or_else(SystemTime::now);
        self.insert_since(id, bytes, since);
    }

    /// One that came to rest before this mount.
    pub fn insert_since(&mut self, id: InodeId, bytes: u64, since: SystemTime) {
        self.remove(id);
        self.waiting.insert(id, Arrival { bytes, since, since_taken: SinceTaken::Nothing });
        self.by_time.insert((since, id));
        self.bytes += bytes;
    }

    /// The file does not wait any more. Since when it did.
    pub(crate) fn remove(&mut self, id: InodeId) -> Option<SystemTime> {
        self.given_up.remove(id);
        let known = self.waiting.remove(&id).or_else(|| self.taken.remove(&id))?;
        self.by_time.remove(&(known.since, id));
        self.bytes -= known.bytes;
        Some(known.since)
    }

    /// The next one to be looked at, which is under way from now on.
    pub fn take(&mut self) -> Option<InodeId> {
        let (id, arrival) = self.waiting.pop_first()?;
        self.taken.insert(id, arrival);
        Some(id)
    }

    /// It cannot be looked at yet.
    pub fn put_back(&mut self, id: InodeId) {
        if let Some(arrival) = self.taken.remove(&id) {
            self.waiting.insert(id, Arrival { since_taken: SinceTaken::Nothing, ..arrival });
        }
    }

    /// One that is under way will not arrive as it was taken.
    pub fn give_up(&mut self, id: InodeId, object: ObjectId, why: String) {
        let Some(taken) = self.taken.get(&id).copied() else { return };
        if taken.since_taken == SinceTaken::Written {
            return self.put_back(id);
        }
        self.remove(id);
        self.given_up.insert((id, object), taken.bytes, why);
    }

    /// Those that were given up wait again: what refused them may have passed.
    pub fn try_again(&mut self) {
        for (id, (_, bytes)) in std::mem::take(&mut self.given_up).files {
            self.insert(id, bytes);
        }
    }

    /// Those that were given up.
    pub fn given_up(&self) -> &GivenUp {
        &self.given_up
    }

    /// Whether a file waits to be looked at, or is under way.
    pub fn has(&self, id: InodeId) -> bool {
        self.waiting.contains_key(&id) || self.taken.contains_key(&id)
    }

    /// Of those under way only these still are.
    pub fn keep_taken(&mut self, is_under_way: impl Fn(InodeId) -> bool) {
        let mut done: Vec<_> = self.taken.iter().map(|(id, taken)| (*id, *taken)).collect();
        done.retain(|(id, _)| !is_under_way(*id));
        for (id, taken) in done {
            if taken.since_taken == SinceTaken::Nothing {
                self.remove(id);
            } else {
                self.put_back(id);
            }
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_time.len()
    }

    /// Their bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Since when the first of them waits.
    pub fn oldest(&self) -> Option<SystemTime> {
        self.by_time.first().map(|(since, _)| *since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_was_given_up_does_not_wait() {
        let mut arrivals = Arrivals::default();
        arrivals.insert(InodeId(7), 100);
        let object = ObjectId(1);
        arrivals.give_up(InodeId(7), object, "nobody tried".to_owned());
        assert_eq!((arrivals.len(), arrivals.given_up().len()), (1, 0));
        assert!(arrivals.has(InodeId(7)) && !arrivals.has(InodeId(8)));
        arrivals.take();
        assert!(arrivals.has(InodeId(7)));
        arrivals.give_up(InodeId(7), object, "refused".to_owned());
        assert!(!arrivals.has(InodeId(7)));
        let given_up = arrivals.given_up();
        assert_eq!((arrivals.len(), given_up.len(), given_up.bytes()), (0, 1, 100));
        assert_eq!(given_up.why(), Some("refused"));
        // Its permissions changed, and then its bytes.
        arrivals.note_at_rest(InodeId(7), object, 100);
        assert_eq!((arrivals.len(), arrivals.given_up().len()), (0, 1));
        // Later it may be taken.
        arrivals.try_again();
        assert_eq!((arrivals.len(), arrivals.bytes()), (1, 100));
        assert_eq!((arrivals.given_up().len(), arrivals.given_up().bytes()), (0, 0));
        arrivals.take();
        arrivals.give_up(InodeId(7), object, "refused".to_owned());
        arrivals.note_writing(InodeId(7));
        arrivals.note_at_rest(InodeId(7), object, 50);
        assert_eq!((arrivals.len(), arrivals.bytes()), (1, 50));
        assert_eq!((arrivals.given_up().bytes(), arrivals.given_up().why()), (0, None));
    }

    #[test]
    fn what_is_under_way_does_not_begin_anew_for_its_attributes() {
        let (id, object) = (InodeId(7), ObjectId(1));
        let mut arrivals = Arrivals::default();
        arrivals.note_at_rest(id, object, 100);
        assert_eq!(arrivals.take(), Some(id));
        arrivals.note_at_rest(id, object, 100);
        assert_eq!((arrivals.take(), arrivals.len()), (None, 1));
        // Nothing is lost, though: it is looked at once more.
        arrivals.keep_taken(|_| false);
        assert_eq!((arrivals.take(), arrivals.take()), (Some(id), None));
        // Damaged, and only its permissions change.
        arrivals.note_at_rest(id, object, 100);
        arrivals.give_up(id, object, "damaged".to_owned());
        assert_eq!((arrivals.take(), arrivals.given_up().len()), (None, 1));
        // Another object has come.
        arrivals.note_at_rest(id, ObjectId(2), 100);
        assert_eq!((arrivals.take(), arrivals.given_up().len()), (Some(id), 0));
        // Written to while it was under way: what was refused are other bytes.
        arrivals.note_writing(id);
        arrivals.note_at_rest(id, ObjectId(2), 100);
        arrivals.give_up(id, ObjectId(2), "damaged".to_owned());
        assert_eq!((arrivals.take(), arrivals.given_up().len()), (Some(id), 0));
    }

    #[test]
    fn what_is_under_way_still_counts() {
        let mut arrivals = Arrivals::default();
        let early = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
        arrivals.insert_since(InodeId(7), 100, early);
        arrivals.insert(InodeId(8), 10);
        arrivals.insert(InodeId(8), 20);
        assert_eq!((arrivals.len(), arrivals.bytes(), arrivals.oldest()), (2, 120, Some(early)));
        assert_eq!(arrivals.take(), Some(InodeId(7)));
        assert_eq!((arrivals.len(), arrivals.bytes()), (2, 120));
        // It failed, and is tried again.
        arrivals.insert(InodeId(7), 100);
        assert_eq!((arrivals.oldest(), arrivals.take()), (Some(early), Some(InodeId(7))));
        assert_eq!(arrivals.take(), Some(InodeId(8)));
        arrivals.put_back(InodeId(8));
        arrivals.keep_taken(|_| false);
        assert_eq!((arrivals.len(), arrivals.bytes()), (1, 20));
        assert!(arrivals.remove(InodeId(8)).is_some() && arrivals.remove(InodeId(8)).is_none());
        assert_eq!((arrivals.len(), arrivals.bytes(), arrivals.oldest()), (0, 0, None));
    }

    #[test]
    fn what_was_given_up_is_known_by_its_object() {
        let mut arrivals = Arrivals::default();
        let [first, second] = [InodeId(7), InodeId(8)];
        for (id, bytes) in [(first, 100), (second, 20)] {
            arrivals.insert(id, bytes);
            arrivals.take();
            arrivals.give_up(id, ObjectId(id.0), format!("refused {}", id.0));
        }
        let given_up = arrivals.given_up();
        assert_eq!((given_up.len(), given_up.bytes(), given_up.why()), (2, 120, Some("refused 8")));
        assert!(given_up.has(first, ObjectId(7)) && !given_up.has(first, ObjectId(8)));
        assert_eq!((arrivals.len(), arrivals.bytes(), arrivals.oldest()), (0, 0, None));
        // It is removed altogether, and so is one that only waits.
        assert_eq!(arrivals.remove(first), None);
        assert_eq!((arrivals.given_up().len(), arrivals.given_up().bytes()), (1, 20));
    }

    #[test]
    fn what_changed_while_it_was_under_way_is_looked_at_again() {
        let since = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
        let [done, recorded, written, under_way] = [1, 2, 3, 4].map(InodeId);
        let mut arrivals = Arrivals::default();
        for id in [done, recorded, written, under_way] {
            arrivals.insert_since(id, 10, since);
            assert_eq!(arrivals.take(), Some(id));
        }
        arrivals.note_at_rest(recorded, ObjectId(2), 10);
        arrivals.note_writing(written);
        arrivals.note_at_rest(written, ObjectId(3), 10);
        arrivals.keep_taken(|id| id == under_way);
        assert_eq!((arrivals.len(), arrivals.bytes(), arrivals.oldest()), (3, 30, Some(since)));
        assert_eq!([(); 3].map(|()| arrivals.take()), [Some(recorded), Some(written), None]);
        // What happened before it was taken again does not count any more.
        arrivals.keep_taken(|id| id == under_way);
        assert_eq!((arrivals.len(), arrivals.take()), (1, None));
        arrivals.put_back(under_way);
        assert_eq!(arrivals.take(), Some(under_way));
        assert_eq!(arrivals.remove(under_way), Some(since));
        arrivals.put_back(under_way);
        assert_eq!((arrivals.len(), arrivals.take()), (0, None));
    }
}
