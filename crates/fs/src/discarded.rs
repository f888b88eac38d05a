//! Removes the files of objects that nothing names any more and no commit has seen: see
//! [`kvfs_storage::store::metadata::discarded`].
//!
//! A thread of its own does so while there are many, for the local filesystem may take half a millisecond for each; a commit
//! removes the rest. Whoever leaves more of them than that thread removes is slowed down. The same thread removes files that
//! commits have [postponed](super::postponed).

use std::sync::OnceLock;

use crossbeam_channel::{Sender, TrySendError};
use parking_lot::{Mutex, MutexGuard};

use super::{FileSystem, postponed};
use kvfs_storage::store::metadata::discarded::Discarded;
use kvfs_storage::store::record::ObjectId;
use kvfs_storage::tier::what_if::Happened;

/// At so many each change waits as long as any does: a commit removes them in some 100 ms before it syncs.
const SLOWEST_FROM: usize = 256;
/// The thread is not woken for less.
const WORTH_WAKING: usize = 16;
/// Files that are removed while whoever else removes some waits: a commit, or an exchange of the daemon.
const AT_A_TIME: usize = 16;

/// Who removes files.
#[derive(Debug, Default)]
pub(super) struct Remover {
    /// Wakes the thread.
    wanted: OnceLock<Sender<()>>,
    /// Held while some are removed: they are in no list any more. Given to who waits, or the thread would have it again
    /// before a commit wakes up.
    removing: Mutex<()>,
}

impl Remover {
    /// Wakes the thread if that is worth it.
    pub(super) fn wake_for(&self, discarded: &Discarded) {
        if discarded.len() >= WORTH_WAKING {
            self.wake();
        }
    }

    /// Wakes the thread. Whether there is one.
    pub(super) fn wake(&self) -> bool {
        // A full queue means that it is told already.
        let outcome = self.wanted.get().map(|wanted| wanted.try_send(()));
        matches!(outcome, Some(Ok(()) | Err(TrySendError::Full(()))))
    }

    /// As long as this is held no file of a discarded object is being removed.
    pub(super) fn hold(&self) -> MutexGuard<'_, ()> {
        self.removing.lock()
    }
}

/// How many there are, in thousandths of those at which each change waits as long as any does.
pub(super) fn fill_thousandths(discarded: &Discarded) -> usize {
    discarded.len() * 1000 / SLOWEST_FROM
}

/// From now on `wanted` is told when [`remove_discarded`] should run.
pub fn remove_through(fs: &FileSystem, wanted: Sender<()>) {
    let _ = fs.remover.wanted.set(wanted);
}

/// Removes files of discarded objects, and those that were postponed, until there are none.
pub fn remove_discarded(fs: &FileSystem) {
    while remove_some(fs, AT_A_TIME) + postponed::remove_some(fs, AT_A_TIME) > 0 {}
}

/// Removes all discarded ones that there are now, or waits until others have. What comes meanwhile may stay: it may come as
/// fast as it is removed.
pub(super) fn remove_present(fs: &FileSystem) {
    let mut present = fs.core.state().metadata.discarded.len();
    // Whoever has taken some before may still be removing them.
    drop(fs.remover.hold());
    while present > 0 {
        let removed = remove_some(fs, present.min(AT_A_TIME));
        if removed == 0 {
            return;
        }
        present -= removed;
    }
}

/// Removes some; how many there were.
fn remove_some(fs: &FileSystem, most: usize) -> usize {
    let removing = fs.remover.hold();
    let some = fs.core.state().metadata.discarded.take(most);
    for object in &some {
        remove_file(fs, *object);
    }
    MutexGuard::unlock_fair(removing);
    some.len()
}

/// Removes the file of an object that nothing names any more.
pub(super) fn remove_file(fs: &FileSystem, object: ObjectId) {
    remove_bytes(fs, object);
    forget(fs, object);
}

/// The same once it is [forgotten](forget).
pub(super) fn remove_bytes(fs: &FileSystem, object: ObjectId) {
    if let Err(error) = fs.core.store.remove_object(object) {
        log::warn!("object {object} could not be removed: {error}");
    }
}

/// What counts objects counts this one no more.
pub(super) fn forget(fs: &FileSystem, object: ObjectId) {
    if let Some(tiers) = &fs.tiers {
        tiers.copies.forget(object);
    }
    fs.core.sample.note(object, Happened::Gone, 0);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Pace;
    use crate::core::state::CommitFailure;
    use crate::unmounted::{FILES, Unmounted};
    use kvfs_storage::store::record::InodeId;

    /// Larger than what is put into packs.
    static BYTES: [u8; 70_000] = [7; 70_000];

    fn object_of(fs: &FileSystem, id: InodeId) -> ObjectId {
        fs.core.state().inode(id).unwrap().file().unwrap().object.unwrap()
    }

    fn is_there(fs: &FileSystem, object: ObjectId) -> bool {
        fs.core.store.stat_object(object).is_ok()
    }

    fn count(fs: &FileSystem) -> usize {
        fs.core.state().metadata.discarded.len()
    }

    /// Writes a file anew; its object.
    fn rewrite(fs: &FileSystem, id: InodeId) -> ObjectId {
        let opened = fs.open_file(id, libc::O_WRONLY | libc::O_TRUNC).unwrap();
        fs.write(opened.handle, 0, &BYTES, false).unwrap();
        fs.flush(opened.handle).unwrap();
        fs.release(opened.handle).unwrap();
        object_of(fs, id)
    }

    #[test]
    fn what_a_rewritten_file_leaves_goes_before_its_commit() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let (wanted, requests) = crossbeam_channel::bounded(1);
        remove_through(fs, wanted);
        let id = unmounted.write(FILES, "file", &BYTES);
        fs.commit().unwrap();
        let committed = object_of(fs, id);
        let mut left = Vec::new();
        while requests.is_empty() {
            assert!(count(fs) < WORTH_WAKING);
            left.push(rewrite(fs, id));
            fs.pacing().pace();
        }
        assert_eq!(count(fs), WORTH_WAKING);
        let last = left.pop().unwrap();
        assert!(left.iter().all(|object| is_there(fs, *object)));
        remove_discarded(fs);
        assert!(!left.iter().any(|object| is_there(fs, *object)) && count(fs) == 0);
        assert!(is_there(fs, committed), "a crash would bring it back");
        let kept = rewrite(fs, id);
        fs.commit().unwrap();
        assert!(!is_there(fs, last) && !is_there(fs, committed) && is_there(fs, kept));
        let seen = rewrite(fs, id);
        let next = rewrite(fs, id);
        fs.commit_and_close().unwrap();
        assert!(!is_there(fs, kept) && !is_there(fs, seen) && is_there(fs, next));
    }

    #[test]
    fn whoever_leaves_more_than_is_removed_is_slowed_down_and_nobody_stopped() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let id = unmounted.write(FILES, "file", b"bytes");
        fs.commit().unwrap();
        let mut longest = Duration::ZERO;
        while count(fs) < 2 * SLOWEST_FROM {
            rewrite(fs, id);
            if let Pace::After(delay) = fs.pacing().pace() {
                assert!(delay >= longest && count(fs) > SLOWEST_FROM / 2, "{delay:?}");
                longest = delay;
            }
            assert!(fs.pacing().has_room());
        }
        assert!(longest > Duration::from_millis(40), "{longest:?}");
        // Where commits fail they are removed all the same.
        let failure = CommitFailure { why: "a test".to_owned(), lacks_room: false };
        fs.core.state().commit_failure = Some(failure);
        assert!(matches!(fs.pacing().pace(), Pace::After(_)), "{:?}", fs.pacing().pace());
        fs.core.state().commit_failure = None;
        remove_present(fs);
        assert!(count(fs) == 0 && fs.pacing().pace() == Pace::AtOnce);
    }

    #[test]
    fn whoever_wants_them_gone_waits_for_those_that_another_is_removing() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let id = unmounted.write(FILES, "file", &BYTES);
        fs.commit().unwrap();
        let (told, heard) = crossbeam_channel::bounded(1);
        std::thread::scope(|scope| {
            let removing = fs.remover.hold();
            scope.spawn(move || {
                remove_present(fs);
                told.send(()).unwrap();
            });
            assert!(heard.recv_timeout(Duration::from_millis(50)).is_err());
            drop(removing);
            assert_eq!(heard.recv_timeout(Duration::from_secs(20)), Ok(()));
        });
        assert!(is_there(fs, object_of(fs, id)));
    }
}
