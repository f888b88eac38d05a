//! What a daemon would lose if it died now: changes that no commit has written.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Life, Metadata};
use crate::store::record::{Inode, InodeId};
use kvfs_os::SharedWords;

/// Files and directories that are told in each of the lists; with more, all of them count.
const TOLD_MAX: usize = 1 << 16;
/// Words of a list: how many there are, and they.
const LIST_WORDS: usize = 1 + TOLD_MAX;
/// Where the list of those stands that a daemon before has lost, behind the two of the layers.
const LOST: usize = 2;
/// Where the two begin of what has got a name in a layer.
const NAMED: usize = 3;
/// Where that stands of what a daemon before has lost.
const NAMED_BEFORE: usize = 5;
const LISTS: usize = 6;
/// What a list has as its number if there were too many.
const TOO_MANY: u64 = u64::MAX;

impl Metadata {
    /// Changes that wait for a commit, files that are to be removed after it included.
    pub fn uncommitted(&self) -> usize {
        self.active.changes() + self.active.removals.len()
    }

    /// Bytes of keys and values of these changes.
    pub fn uncommitted_bytes(&self) -> usize {
        self.active.bytes
    }

    /// Changes that a crash would lose: records, and bytes that they tell of, that no commit has written yet.
    pub fn not_durable(&self) -> usize {
        let committing = self.committing.as_ref();
        self.active.changes() + committing.map_or(0, |layer| layer.changes())
    }

    /// Whether an inode or object was there before this mount: each has numbers of its own.
    pub fn is_older(&self, id: InodeId) -> bool {
        id.0 >> 32 < self.next_number >> 32
    }
}

/// An inode is about to be changed, or removed. What users see of it counts, and not what the daemon notes of it.
pub(super) fn note_inode(metadata: &mut Metadata, life: Life, id: InodeId, new: Option<&Inode>) {
    if life == Life::Volatile || !metadata.touched.is_told() {
        return;
    }
    let old = metadata.inode(id).ok().flatten();
    let looks_the_same = match (old, new) {
        (Some(old), Some(new)) => looks_the_same(old, new.clone()),
        _ => false,
    };
    if !looks_the_same {
        metadata.touched.note(id.0);
    }
}

/// Whether users see the same of an inode, the time of its last use aside. What is read from the file that has the bytes is
/// found there again.
fn looks_the_same(mut old: Inode, mut new: Inode) -> bool {
    new.atime = old.atime;
    if let (Some(old_file), Some(new_file)) = (old.file_mut(), new.file_mut()) {
        let was_unsettled = old_file.unsettled;
        (new_file.unsettled, new_file.blocks) = (old_file.unsettled, old_file.blocks);
        if was_unsettled {
            new_file.size = old_file.size;
            (new.mtime, new.ctime) = (old.mtime, old.ctime);
        }
    }
    old == new
}

/// Which files and directories have changes that are not durable, in memory that outlives this process.
#[derive(Debug, Default)]
pub struct Touched {
    /// `None` if nobody wants to know.
    words: Option<Arc<SharedWords>>,
    /// What stands in the lists of the layers.
    told: [BTreeSet<u64>; 2],
    /// What has got a name there.
    named: [BTreeSet<u64>; 2],
    /// Which of the two is that of the active layer.
    active: usize,
    last: u64,
}

impl Touched {
    /// Memory for it.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn memory() -> io::Result<Arc<SharedWords>> {
        SharedWords::new(LISTS * LIST_WORDS).map(Arc::new)
    }

    /// Tells it there.
    pub fn new(words: Arc<SharedWords>) -> Touched {
        Touched { words: Some(words), ..Touched::default() }
    }

    /// Whether somebody wants to know.
    pub fn is_told(&self) -> bool {
        self.words.is_some()
    }

    /// Changes of a file or directory will be lost with the daemon, and no commit has them yet.
    pub fn note_at_risk(&mut self, id: InodeId) {
        self.note(id.0);
    }

    /// A file or directory was changed.
    pub(super) fn note(&mut self, id: u64) {
        let Some(words) = &self.words else { return };
        if id == self.last || !self.told[self.active].insert(id) {
            return;
        }
        self.last = id;
        put(words, self.active, self.told[self.active].len(), id);
    }

    /// A file or directory has got a name, which it may not have after a crash.
    pub(super) fn note_name(&mut self, id: u64) {
        let Some(words) = &self.words else { return };
        if self.named[self.active].insert(id) {
            put(words, NAMED + self.active, self.named[self.active].len(), id);
        }
    }

    /// The active layer is frozen, and another one is active.
    pub(super) fn note_freeze(&mut self) {
        (self.active, self.last) = (1 - self.active, 0);
    }

    /// The frozen layer is durable.
    pub(super) fn note_durable(&mut self) {
        let frozen = 1 - self.active;
        self.told[frozen].clear();
        self.named[frozen].clear();
        for list in [frozen, NAMED + frozen] {
            self.words.iter().for_each(|words| words.set(list * LIST_WORDS, 0));
        }
    }

    /// The frozen layer went back into the active one.
    pub(super) fn note_failure(&mut self) {
        for id in std::mem::take(&mut self.told[1 - self.active]) {
            self.note(id);
        }
        for id in std::mem::take(&mut self.named[1 - self.active]) {
            self.note_name(id);
        }
        self.note_durable();
    }
}

/// Puts the last one of so many into a list.
fn put(words: &SharedWords, list: usize, count: usize, id: u64) {
    let begin = list * LIST_WORDS;
    if count <= TOLD_MAX {
        words.set(begin + count, id);
        words.set(begin, count as u64);
    } else {
        words.set(begin, TOO_MANY);
    }
}

/// Files and directories whose changes were lost with a daemon, until somebody was told.
#[derive(Debug)]
pub struct Lost {
    ids: BTreeSet<InodeId>,
    /// There were too many: every one that is older than this daemon counts, but for `ids`, which were told of.
    is_all: bool,
    /// What has got a name that is lost; `None` if it may be everything.
    named: Option<BTreeSet<InodeId>>,
    /// Where it stands as well, for the next daemon.
    words: Option<Arc<SharedWords>>,
}

/// What stands in a list; `None` if that were too many.
fn listed(words: &SharedWords, list: usize) -> Option<BTreeSet<InodeId>> {
    let begin = list * LIST_WORDS;
    let count = usize::try_from(words.get(begin)).ok().filter(|count| *count <= TOLD_MAX)?;
    Some((1..=count).map(|index| InodeId(words.get(begin + index))).collect())
}

impl Default for Lost {
    fn default() -> Lost {
        Lost::new(Some(Vec::new()))
    }
}

impl Lost {
    /// Changes of these were lost; `None` if it may be every one.
    pub fn new(ids: Option<Vec<InodeId>>) -> Lost {
        let is_all = ids.is_none();
        let ids = ids.into_iter().flatten().collect();
        Lost { ids, is_all, named: Some(BTreeSet::new()), words: None }
    }

    /// What a daemon that died has left.
    ///
    /// # Errors
    /// It is no memory of that kind.
    pub fn read(memory: OwnedFd) -> io::Result<Lost> {
        let words = SharedWords::left(memory, LISTS * LIST_WORDS)?;
        let both = |first: usize| Some(&listed(&words, first)? | &listed(&words, first + 1)?);
        let all = both(0).and_then(|mut changed| {
            if !changed.is_empty() {
                // Who syncs the mount as a whole is told as well.
                changed.insert(InodeId::ROOT);
            }
            Some(&changed | &listed(&words, LOST)?)
        });
        let is_all = all.is_none();
        let named = both(NAMED).and_then(|named| Some(&named | &listed(&words, NAMED_BEFORE)?));
        let ids = all.unwrap_or_default();
        Ok(Lost { ids, is_all, named, words: None })
    }

    /// What is lost stands there from now on, too.
    pub fn keep_in(&mut self, words: &Arc<SharedWords>) {
        self.words = Some(Arc::clone(words));
        self.tell();
        let named = self.named.iter().flatten();
        named.enumerate().for_each(|(index, id)| put(words, NAMED_BEFORE, index + 1, id.0));
        if self.named.is_none() {
            words.set(NAMED_BEFORE * LIST_WORDS, TOO_MANY);
        }
    }

    fn tell(&self) {
        let Some(words) = &self.words else { return };
        if self.is_all || self.ids.len() > TOLD_MAX {
            return words.set(LOST * LIST_WORDS, TOO_MANY);
        }
        // One that is not told of any more must not be missing meanwhile: a list that is too long for a moment has some twice.
        for (index, id) in self.ids.iter().enumerate() {
            words.set(LOST * LIST_WORDS + 1 + index, id.0);
        }
        words.set(LOST * LIST_WORDS, self.ids.len() as u64);
    }

    /// What has got a name that is lost; `None` if it may be everything.
    pub fn named(&self) -> Option<&BTreeSet<InodeId>> {
        self.named.as_ref()
    }

    /// Nobody goes by these names any more.
    pub fn forget_named(&mut self) {
        self.named = Some(BTreeSet::new());
        self.words.iter().for_each(|words| words.set(NAMED_BEFORE * LIST_WORDS, 0));
    }

    /// Forgets those of which nobody can ask any more.
    pub fn retain(&mut self, is_there: impl Fn(InodeId) -> bool) {
        if !self.is_all {
            self.ids.retain(|id| is_there(*id));
        }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        !self.is_all && self.ids.is_empty()
    }

    /// The files and directories; `None` if it may be every one.
    pub fn ids(&self) -> Option<&BTreeSet<InodeId>> {
        (!self.is_all).then_some(&self.ids)
    }

    /// Whether changes of this one were lost, which is told now; `is_older` says whether it was there before this daemon.
    pub fn take(&mut self, id: InodeId, is_older: bool) -> bool {
        let was_lost =
            if self.is_all { is_older && self.ids.insert(id) } else { self.ids.remove(&id) };
        if was_lost {
            self.tell();
        }
        was_lost
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn found(words: &SharedWords) -> Lost {
        Lost::read(words.as_fd().try_clone_to_owned().unwrap()).unwrap()
    }

    fn ids(lost: &Lost) -> Vec<u64> {
        lost.ids().unwrap().iter().map(|id| id.0).collect()
    }

    #[test]
    fn what_no_commit_has_written_is_found() {
        let words = Touched::memory().unwrap();
        let mut touched = Touched::new(Arc::clone(&words));
        assert!(found(&words).is_empty());
        for id in [7, 7, 9, 7] {
            touched.note(id);
        }
        assert_eq!(ids(&found(&words)), [1, 7, 9]);
        touched.note_name(7);
        touched.note_freeze();
        touched.note(9);
        touched.note(11);
        touched.note_name(8);
        let named = |lost: &Lost| lost.named().unwrap().iter().map(|id| id.0).collect::<Vec<_>>();
        assert_eq!(named(&found(&words)), [7, 8]);
        assert_eq!(ids(&found(&words)), [1, 7, 9, 11]);
        touched.note_durable();
        assert_eq!(ids(&found(&words)), [1, 9, 11]);
        touched.note_freeze();
        touched.note(12);
        touched.note_failure();
        assert_eq!(ids(&found(&words)), [1, 9, 11, 12]);
        assert_eq!(named(&found(&words)), [8]);
        touched.note_freeze();
        touched.note_durable();
        assert!(found(&words).is_empty() && named(&found(&words)).is_empty());
    }

    #[test]
    fn too_many_are_all() {
        let words = Touched::memory().unwrap();
        let mut touched = Touched::new(Arc::clone(&words));
        (2..=TOLD_MAX as u64).for_each(|id| touched.note(id));
        touched.note(1 << 39);
        assert_eq!(ids(&found(&words)).len(), TOLD_MAX + 1);
        touched.note(1 << 40);
        let mut lost = found(&words);
        assert!(lost.ids().is_none() && !lost.is_empty());
        assert!(!lost.take(InodeId(5), false), "it was made since");
        assert!(lost.take(InodeId(5), true) && !lost.take(InodeId(5), true));
        assert!(lost.take(InodeId(1 << 50), true));
    }

    #[test]
    fn what_was_not_told_of_is_found_by_the_daemon_after_the_next() {
        let words = Touched::memory().unwrap();
        let mut touched = Touched::new(Arc::clone(&words));
        (2..=4).for_each(|id| touched.note(id));
        let mut lost = found(&words);
        lost.retain(|id| id.0 != 4);
        let next = Touched::memory().unwrap();
        lost.keep_in(&next);
        assert_eq!(ids(&found(&next)), [1, 2, 3]);
        assert!(lost.take(InodeId(2), true) && !lost.take(InodeId(2), true));
        assert_eq!(ids(&found(&next)), [1, 3]);
        assert!(lost.take(InodeId::ROOT, true));
        assert_eq!(ids(&found(&next)), [3], "it is not told again");
        Touched::new(Arc::clone(&next)).note(4);
        assert_eq!(ids(&found(&next)), [1, 3, 4]);
        assert!(lost.take(InodeId(3), true) && lost.is_empty());
    }
}
