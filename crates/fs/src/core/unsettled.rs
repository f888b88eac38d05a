//! Files that somebody may have written to since they were last at rest.
//!
//! They are found by inode, and their objects are known as well: a commit asks about each object that it
//! made durable whether it changes again, while it holds the state.

use std::collections::BTreeMap;
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use kvfs_storage::store::record::{InodeId, ObjectId, Time};

/// The object that each of them changes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Unsettled {
    objects: BTreeMap<InodeId, ObjectId>,
    /// How many files change an object.
    files: BTreeMap<ObjectId, usize>,
    /// Objects whose file was made ahead of need, with its date on the disk, and when they became new ones.
    made_ahead: BTreeMap<ObjectId, (Time, Time)>,
}

impl Unsettled {
    pub(crate) fn insert(&mut self, id: InodeId, object: ObjectId) -> Option<ObjectId> {
        *self.files.entry(object).or_default() += 1;
        let old = self.objects.insert(id, object);
        self.release(old)
    }

    pub(crate) fn remove(&mut self, id: InodeId) -> Option<ObjectId> {
        let old = self.objects.remove(&id);
        self.release(old)
    }

    fn release(&mut self, object: Option<ObjectId>) -> Option<ObjectId> {
        if let Some(object) = object
            && let Some(count) = self.files.get_mut(&object)
        {
            *count -= 1;
            if *count == 0 {
                self.files.remove(&object);
                self.made_ahead.remove(&object);
            }
        }
        object
    }

    /// Notes when an object that is among these was made, if its file has another date on the disk.
    pub(crate) fn note_made(&mut self, object: ObjectId, made: Time, made_ahead: Option<Time>) {
        if let Some(dated) = made_ahead {
            self.made_ahead.insert(object, (dated, made));
        }
    }

    /// From now on an object is as old as its file on the disk.
    pub(crate) fn forget_made(&mut self, object: ObjectId) {
        self.made_ahead.remove(&object);
    }

    /// When an object became a new one, if its file was made ahead and may still have the date of then.
    pub(crate) fn made_after_its_file(&self, object: ObjectId) -> Option<Time> {
        self.made_ahead.get(&object).map(|(_, made)| *made)
    }

    /// When an object was modified, if its file has this date on the disk.
    pub(crate) fn modified(&self, object: ObjectId, dated: Time) -> Time {
        match self.made_ahead.get(&object) {
            Some((untouched, made)) if *untouched == dated => *made,
            _ => dated,
        }
    }

    pub(crate) fn get(&self, id: InodeId) -> Option<&ObjectId> {
        self.objects.get(&id)
    }

    pub(crate) fn contains_key(&self, id: InodeId) -> bool {
        self.objects.contains_key(&id)
    }

    /// The files, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &InodeId> {
        self.objects.keys()
    }

    /// The files behind one, in order.
    pub(crate) fn behind(&self, last: Option<InodeId>) -> impl Iterator<Item = InodeId> {
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        self.objects.range((from, Bound::Unbounded)).map(|(id, _)| *id)
    }

    /// Their objects.
    pub(crate) fn values(&self) -> impl Iterator<Item = &ObjectId> {
        self.objects.values()
    }

    /// Whether a file changes an object.
    pub(crate) fn is_changing(&self, object: ObjectId) -> bool {
        self.files.contains_key(&object)
    }

    /// How many files there are.
    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }
}

impl Extend<(InodeId, ObjectId)> for Unsettled {
    fn extend<T: IntoIterator<Item = (InodeId, ObjectId)>>(&mut self, files: T) {
        for (id, object) in files {
            self.insert(id, object);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_changes_until_its_last_file_is_at_rest() {
        let (one, other) = (InodeId(1), InodeId(2));
        let (object, next) = (ObjectId(7), ObjectId(8));
        let mut unsettled = Unsettled::default();
        unsettled.extend([(one, object), (other, object)]);
        assert_eq!(unsettled.insert(one, next), Some(object));
        assert!(unsettled.is_changing(object) && unsettled.is_changing(next));
        assert_eq!(unsettled.remove(other), Some(object));
        assert!(!unsettled.is_changing(object));
        assert_eq!(unsettled.insert(one, next), Some(next));
        assert!(unsettled.is_changing(next));
        assert_eq!((unsettled.remove(one), unsettled.remove(one)), (Some(next), None));
        assert!(!unsettled.is_changing(next) && unsettled.len() == 0);
    }

    #[test]
    fn an_untouched_file_is_as_old_as_its_object() {
        let (id, object) = (InodeId(1), ObjectId(7));
        let at = |seconds| Time { seconds, ..Time::default() };
        let mut unsettled = Unsettled::default();
        unsettled.insert(id, object);
        unsettled.note_made(object, at(20), Some(at(10)));
        assert_eq!(unsettled.modified(object, at(10)), at(20));
        // Written to, or dated by somebody.
        assert_eq!(unsettled.modified(object, at(21)), at(21));
        assert_eq!(unsettled.modified(object, at(3)), at(3));
        unsettled.forget_made(object);
        assert_eq!(unsettled.modified(object, at(10)), at(10));
        unsettled.note_made(object, at(20), Some(at(10)));
        assert_eq!(unsettled.made_after_its_file(object), Some(at(20)));
        unsettled.remove(id);
        assert_eq!(unsettled.modified(object, at(10)), at(10));
        assert_eq!(unsettled.made_after_its_file(object), None);
    }

    #[test]
    fn files_are_found_in_their_order() {
        let mut unsettled = Unsettled::default();
        let ids = [3, 1, 2].map(InodeId);
        unsettled.extend(ids.map(|id| (id, ObjectId(id.0 + 10))));
        let in_order = [1, 2, 3].map(InodeId);
        assert_eq!(unsettled.keys().copied().collect::<Vec<_>>(), in_order);
        assert_eq!(unsettled.behind(None).collect::<Vec<_>>(), in_order);
        assert_eq!(unsettled.behind(Some(InodeId(1))).collect::<Vec<_>>(), in_order[1..]);
        let objects = [11, 12, 13].map(ObjectId);
        assert_eq!(unsettled.values().copied().collect::<Vec<_>>(), objects);
        assert_eq!(unsettled.get(InodeId(2)), Some(&ObjectId(12)));
        assert!(unsettled.contains_key(InodeId(3)) && !unsettled.contains_key(InodeId(4)));
        assert_eq!(unsettled.len(), 3);
    }
}
