//! Pages that only memory has, and that the disk is not to get: the remote does.
//!
//! Until then their records are volatile, as those of files that are still being written are: a crash forgets them, with their
//! names. They are bounded by memory, of which they may have a part.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::record::{InodeId, ObjectId};

/// A page that is held back.
#[derive(Clone, Copy, Debug)]
struct Page {
    object: ObjectId,
    bytes: u64,
    since: Instant,
}

/// All of them.
#[derive(Debug, Default)]
pub struct HeldBack {
    pages: BTreeMap<InodeId, Page>,
    bytes: u64,
}

impl HeldBack {
    pub(super) fn insert(&mut self, id: InodeId, object: ObjectId, bytes: u64) {
        self.remove(id);
        self.pages.insert(id, Page { object, bytes, since: Instant::now() });
        self.bytes += bytes;
    }

    pub(super) fn remove(&mut self, id: InodeId) -> Option<ObjectId> {
        let page = self.pages.remove(&id)?;
        self.bytes -= page.bytes;
        Some(page.object)
    }

    /// Whether a file is one of them.
    pub fn contains(&self, id: InodeId) -> bool {
        self.pages.contains_key(&id)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Their bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Those that have been held back for so long, `most` of them.
    pub fn older_than(&self, age: Duration, most: usize) -> Vec<InodeId> {
        let old = self.pages.iter().filter(|(_, page)| page.since.elapsed() >= age);
        old.map(|(id, _)| *id).take(most).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_pages_that_are_there() {
        let mut held = HeldBack::default();
        held.insert(InodeId(1), ObjectId(11), 100);
        held.insert(InodeId(2), ObjectId(12), 50);
        held.insert(InodeId(1), ObjectId(13), 70);
        assert_eq!((held.len(), held.bytes()), (2, 120));
        assert_eq!(held.older_than(Duration::ZERO, 1), [InodeId(1)]);
        assert!(held.older_than(Duration::from_secs(3600), 9).is_empty());
        assert_eq!(held.remove(InodeId(1)), Some(ObjectId(13)));
        assert_eq!(held.remove(InodeId(1)), None);
        assert!(held.contains(InodeId(2)) && !held.contains(InodeId(1)));
        held.remove(InodeId(2));
        assert!(held.is_empty() && held.bytes() == 0);
    }
}
