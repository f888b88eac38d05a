//! Files at rest that the remote does not have, verified and named: which, how much, and since when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use super::record::InodeId;

/// A file that came to rest.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    bytes: u64,
    since: SystemTime,
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

/// Files that the remote will not get as they are: trying again does not help.
#[derive(Debug, Default)]
pub struct GivenUp {
    files: BTreeMap<InodeId, u64>,
    bytes: u64,
    /// Why, of the last one.
    why: String,
}

impl GivenUp {
    fn insert(&mut self, id: InodeId, bytes: u64, why: String) {
        self.remove(id);
        self.files.insert(id, bytes);
        self.bytes += bytes;
        self.why = why;
    }

    fn remove(&mut self, id: InodeId) {
        self.bytes -= self.files.remove(&id).unwrap_or(0);
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
    /// A file came to rest. One that is under way begins anew, but waits since then.
    pub(crate) fn insert(&mut self, id: InodeId, bytes: u64) {
        let since = self.remove(id).unwrap_or_else(SystemTime::now);
        self.waiting.insert(id, Arrival { bytes, since });
        self.by_time.insert((since, id));
        self.bytes += bytes;
    }

    /// One that came to rest before this mount.
    pub fn insert_since(&mut self, id: InodeId, bytes: u64, since: SystemTime) {
        self.remove(id);
        self.waiting.insert(id, Arrival { bytes, since });
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
            self.waiting.insert(id, arrival);
        }
    }

    /// One that is under way will not arrive, unless it begins anew.
    pub fn give_up(&mut self, id: InodeId, why: String) {
        let Some(bytes) = self.taken.get(&id).map(|arrival| arrival.bytes) else { return };
        self.remove(id);
        self.given_up.insert(id, bytes, why);
    }

    /// Those that were given up.
    pub fn given_up(&self) -> &GivenUp {
        &self.given_up
    }

    /// Of those under way only these still are.
    pub fn keep_taken(&mut self, is_under_way: impl Fn(InodeId) -> bool) {
        let done: Vec<InodeId> =
            self.taken.keys().copied().filter(|id| !is_under_way(*id)).collect();
        for id in done {
            self.remove(id);
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
        arrivals.give_up(InodeId(7), "nobody tried".to_owned());
        assert_eq!((arrivals.len(), arrivals.given_up().len()), (1, 0));
        arrivals.take();
        arrivals.give_up(InodeId(7), "refused".to_owned());
        let given_up = arrivals.given_up();
        assert_eq!((arrivals.len(), given_up.len(), given_up.bytes()), (0, 1, 100));
        assert_eq!(given_up.why(), Some("refused"));
        // It changed, or went.
        arrivals.insert(InodeId(7), 50);
        assert_eq!((arrivals.len(), arrivals.bytes()), (1, 50));
        assert_eq!((arrivals.given_up().bytes(), arrivals.given_up().why()), (0, None));
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
}
