//! Files of objects that a commit has taken off the record are removed after whoever syncs has heard of the commit, by
//! the thread that removes files ([`super::discarded`]): thousands of them take seconds.
//!
//! But whoever removes files and syncs has to find room. So only as many are postponed as the disk has room for what
//! others may write in the time that their removal takes, and every commit looks whether that is still so.

use std::collections::VecDeque;

use parking_lot::{Mutex, MutexGuard};

use super::FileSystem;
use super::discarded::{forget, remove_bytes, remove_file};
use crate::core::orphan::{note_short, was_room_short};
use kvfs_storage::store::disk::Space;
use kvfs_storage::store::layer::Layer;
use kvfs_storage::store::record::ObjectId;

/// As many may wait: as many as changes that wait for a commit, which may all be removals.
const POSTPONED_MAX: usize = super::backlog::CHANGES_MAX;
/// From half of that on changes are slowed down, so that those who remove faster than the disk does for long leave it no more:
/// an unmount, and an exchange of the daemon, wait until they are gone.
const SLOWEST_FROM: usize = 8192;
/// So few are removed before anybody hears of their commit.
const FEW: usize = 16;
/// What others may write into the page cache, at 8 GB/s, in the half millisecond that the removal of a small file takes
/// (ext4, beside others).
const WRITTEN_PER_FILE_BYTES: u64 = 4 << 20;
/// And for each byte of a large one: those go at 1 GB/s.
const WRITTEN_PER_BYTE: u64 = 8;
/// Inodes for each of them: files are made no faster than they are removed.
const MADE_PER_FILE: u64 = 2;

/// Files that are about to be removed.
#[derive(Debug, Default)]
pub(super) struct Postponed {
    files: Mutex<Files>,
    /// Held while one is removed: it waits in no list any more. No commit waits for this where there is room.
    removing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Files {
    /// Objects, with what their files take of the disk; the oldest first.
    waiting: VecDeque<(ObjectId, u64)>,
    /// All that waits, and what is being removed.
    amount: Amount,
    /// Bytes of the file that is being removed.
    in_hand: Option<u64>,
}

/// Files, and what they take of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

impl Amount {
    fn with(self, bytes: u64) -> Amount {
        Amount { files: self.files + 1, bytes: self.bytes.saturating_add(bytes) }
    }

    fn without(self, bytes: u64) -> Amount {
        Amount { files: self.files - 1, bytes: self.bytes.saturating_sub(bytes) }
    }

    /// What a disk has when they are gone.
    pub(super) fn added_to(self, space: Space) -> Space {
        let free_bytes = space.free_bytes.saturating_add(self.bytes).min(space.total_bytes);
        Space {
            free_bytes,
            available_bytes: space.available_bytes.saturating_add(self.bytes).min(free_bytes),
            inodes_free: space.inodes_free.saturating_add(self.files).min(space.inodes_total),
            ..space
        }
    }

    /// Whether a disk has room for what others may write while they go, before it is nearly full.
    fn fits(self, space: &Space) -> bool {
        let room_bytes = space.available_bytes.saturating_sub(space.nearly_full_bytes());
        let written_bytes = self.bytes.saturating_mul(WRITTEN_PER_BYTE);
        let written_bytes = written_bytes.saturating_add(self.files * WRITTEN_PER_FILE_BYTES);
        // A filesystem that makes inodes as it needs them has none to count.
        let has_inodes = space.inodes_total == 0 || self.files * MADE_PER_FILE <= space.inodes_free;
        written_bytes <= room_bytes && has_inodes
    }
}

impl Postponed {
    /// All that waits, and what is being removed.
    pub(super) fn amount(&self) -> Amount {
        self.files.lock().amount
    }

    /// What only waits.
    pub(super) fn waiting(&self) -> Amount {
        let files = self.files.lock();
        files.in_hand.map_or(files.amount, |bytes| files.amount.without(bytes))
    }

    /// How many wait, in thousandths of those at which each change waits as long as any does.
    pub(super) fn fill_thousandths(&self) -> usize {
        self.files.lock().waiting.len() * 1000 / SLOWEST_FROM
    }

    /// As long as this is held none is being removed.
    pub(super) fn hold(&self) -> MutexGuard<'_, ()> {
        self.removing.lock()
    }

    /// Takes one in if it may wait.
    fn take_in(&self, object: ObjectId, bytes: u64, space: &Space) -> bool {
        let mut files = self.files.lock();
        let amount = files.amount.with(bytes);
        let may_wait = files.waiting.len() < POSTPONED_MAX && amount.fits(space);
        if may_wait {
            files.amount = amount;
            files.waiting.push_back((object, bytes));
        }
        may_wait
    }
}

/// A file in hand; when this ends it is gone, or nobody will remove it any more.
struct InHand<'a>(&'a Postponed, u64);

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        let mut files = self.0.files.lock();
        files.amount = files.amount.without(self.1);
        files.in_hand = None;
    }
}

/// Removes up to so many of the oldest; how many there were.
pub(super) fn remove_some(fs: &FileSystem, most: usize) -> usize {
    (0..most).take_while(|_| remove_one(fs)).count()
}

/// Removes the oldest that waits; whether there was one. Waits until others have removed theirs.
pub(super) fn remove_one(fs: &FileSystem) -> bool {
    let removing = fs.postponed.hold();
    let oldest = {
        let mut files = fs.postponed.files.lock();
        let oldest = files.waiting.pop_front();
        files.in_hand = oldest.map(|(_, bytes)| bytes);
        oldest
    };
    if let Some((object, bytes)) = oldest {
        let _in_hand = InHand(&fs.postponed, bytes);
        remove_bytes(fs, object);
    }
    MutexGuard::unlock_fair(removing);
    oldest.is_some()
}

/// Removes all that wait now.
pub(super) fn remove_all(fs: &FileSystem) {
    for _ in 0..fs.postponed.amount().files {
        remove_one(fs);
    }
}

/// Removes the oldest until the disk has room for what others may write while the others go: whoever syncs is about to hear that
/// what was removed has made room.
pub(super) fn keep_room(fs: &FileSystem) {
    while fs.postponed.amount().files > 0 && !has_room(fs) && remove_one(fs) {}
}

/// Whether those that wait may go on waiting.
fn has_room(fs: &FileSystem) -> bool {
    room_to_wait(fs).is_some_and(|space| fs.postponed.amount().fits(&space))
}

/// What the disk has, unless it is nearly full, or was a moment ago.
fn room_to_wait(fs: &FileSystem) -> Option<Space> {
    let space = fs.core.store.disk.space().ok()?;
    let mut state = fs.core.state();
    if space.is_nearly_full() {
        note_short(&mut state);
    }
    (!was_room_short(&state)).then_some(space)
}

/// A layer is durable: the files of what it takes off the record are removed, or postponed.
pub(super) fn remove_files_of(fs: &FileSystem, layer: &Layer) {
    let space = if layer.removals.len() > FEW { room_to_postpone(fs) } else { None };
    for &object in &layer.removals {
        // What has no file of its own goes in microseconds.
        let postponed = space.as_ref().zip(fs.core.store.file_bytes(object));
        match postponed {
            Some((space, bytes)) if fs.postponed.take_in(object, bytes, space) => {
                forget(fs, object);
            }
            _ => remove_file(fs, object),
        }
    }
    if fs.postponed.amount().files > 0 {
        fs.remover.wake();
    }
}

/// What the disk has, if anything may be postponed there.
fn room_to_postpone(fs: &FileSystem) -> Option<Space> {
    // Without the thread nobody would remove them, and whoever keeps changes few waits for it.
    if !fs.remover.wake() || fs.backlog.is_kept_low() {
        return None;
    }
    room_to_wait(fs)
}

/// Does what needs room, once more where there is more after what was postponed has gone. `lacks_room` tells whether an error is
/// that there is none.
///
/// # Errors
/// Those of `act`.
pub(super) fn with_room<T, E>(
    fs: &FileSystem, lacks_room: impl Fn(&E) -> bool, act: impl Fn() -> Result<T, E>,
) -> Result<T, E> {
    let had_any = fs.postponed.amount().files > 0;
    match act() {
        Err(error) if had_any && lacks_room(&error) => {
            remove_all(fs);
            act()
        }
        outcome => outcome,
    }
}

/// The same for what the daemon itself needs: where there is none, none is postponed for a while. (A client can ask for more room
/// than any disk has.)
///
/// # Errors
/// Those of `act`.
pub(super) fn with_room_noted<T, E>(
    fs: &FileSystem, lacks_room: impl Fn(&E) -> bool, act: impl Fn() -> Result<T, E>,
) -> Result<T, E> {
    let noted = |error: &E| {
        if lacks_room(error) {
            note_short(&mut fs.core.state());
        }
    };
    with_room(fs, &lacks_room, || act().inspect_err(noted))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::Pace;
    use crate::discarded::{remove_discarded, remove_through};
    use crate::takeover::{Unable, hand_over, prepare};
    use crate::unmounted::{FILES, Unmounted, place};
    use crossbeam_channel::Receiver;
    use kvfs_storage::store::commit::is_full;

    /// Larger than what is put into packs.
    static BYTES: [u8; 70_000] = [7; 70_000];

    fn are_there(fs: &FileSystem, objects: &[ObjectId]) -> bool {
        let there = objects.iter().filter(|object| fs.core.store.stat_object(**object).is_ok());
        let count = there.count();
        assert!(count == 0 || count == objects.len(), "{count} of {}", objects.len());
        count > 0
    }

    /// With a thread, as far as it can tell.
    fn with_thread() -> (Unmounted, Receiver<()>) {
        let unmounted = Unmounted::new();
        let (wanted, requests) = crossbeam_channel::bounded(1);
        remove_through(&unmounted.fs, wanted);
        (unmounted, requests)
    }

    /// Makes files durable and removes them; their objects.
    fn write_and_remove(unmounted: &Unmounted, count: usize) -> Vec<ObjectId> {
        let fs = &unmounted.fs;
        let write = |number: usize| {
            let id = unmounted.write(FILES, &format!("file{number}"), &BYTES);
            fs.core.state().inode(id).unwrap().file().unwrap().object.unwrap()
        };
        let objects: Vec<ObjectId> = (0..count).map(write).collect();
        fs.commit().unwrap();
        for number in 0..count {
            fs.unlink(&place(FILES, &format!("file{number}"))).unwrap();
        }
        crate::core::orphan::let_unused_go(&fs.core).unwrap();
        objects
    }

    #[test]
    fn many_files_are_removed_after_whoever_syncs_has_heard_of_it() {
        let (unmounted, requests) = with_thread();
        let fs = &unmounted.fs;
        let few = write_and_remove(&unmounted, FEW);
        fs.commit().unwrap();
        assert!(!are_there(fs, &few) && requests.is_empty());
        let many = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(are_there(fs, &many));
        assert_eq!(requests.try_recv(), Ok(()));
        let amount = fs.postponed.amount();
        assert_eq!(amount.files, many.len() as u64);
        assert!(amount.bytes >= (BYTES.len() * many.len()) as u64, "{amount:?}");
        // The next few do not wait behind them.
        let few = write_and_remove(&unmounted, FEW);
        fs.commit().unwrap();
        assert!(!are_there(fs, &few) && are_there(fs, &many));
        assert_eq!(requests.try_recv(), Ok(()), "woken again");
        remove_discarded(fs);
        assert!(!are_there(fs, &many) && fs.postponed.amount() == Amount::default());
        let rest = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(are_there(fs, &rest));
        fs.commit_and_close().unwrap();
        assert!(!are_there(fs, &rest));
    }

    #[test]
    fn another_daemon_is_left_none() {
        let (unmounted, _requests) = with_thread();
        let fs = &unmounted.fs;
        let many = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(matches!(hand_over(fs, |_| ()), Err(Unable::Yet(_))));
        prepare(fs).unwrap();
        assert!(!are_there(fs, &many) && hand_over(fs, |_| ()).is_ok());
    }

    #[test]
    fn no_commit_waits_for_a_file_that_goes_slowly() {
        let (unmounted, _requests) = with_thread();
        let fs = &unmounted.fs;
        let many = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        let removing = fs.postponed.hold();
        let (told, heard) = crossbeam_channel::bounded(1);
        std::thread::scope(|scope| {
            let unmounted = &unmounted;
            scope.spawn(move || {
                unmounted.write(FILES, "synced", b"bytes");
                told.send(fs.commit().is_ok()).unwrap();
            });
            let outcome = heard.recv_timeout(Duration::from_secs(20));
            drop(removing);
            assert_eq!(outcome, Ok(true));
        });
        assert!(are_there(fs, &many));
    }

    #[test]
    fn where_room_is_short_or_nobody_removes_they_are_gone_before() {
        let (unmounted, requests) = with_thread();
        let fs = &unmounted.fs;
        let many = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(are_there(fs, &many));
        fs.core.state().short_since = Some(Instant::now());
        // Nothing has changed since.
        fs.commit().unwrap();
        assert!(!are_there(fs, &many));
        let more = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(!are_there(fs, &more));
        fs.core.state().short_since = None;
        drop(requests);
        let rest = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(!are_there(fs, &rest));
    }

    #[test]
    fn whoever_keeps_changes_few_waits_for_none() {
        let (unmounted, _requests) = with_thread();
        let fs = &unmounted.fs;
        let many = write_and_remove(&unmounted, FEW + 1);
        let kept_low = fs.backlog.keep_low();
        fs.commit().unwrap();
        assert!(!are_there(fs, &many));
        drop(kept_low);
        let many = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(are_there(fs, &many));
    }

    #[test]
    fn what_finds_no_room_is_tried_again_when_they_have_gone() {
        let (unmounted, _requests) = with_thread();
        let fs = &unmounted.fs;
        let full = || io::Error::from_raw_os_error(libc::EDQUOT);
        let tries = Cell::new(0);
        let act = || {
            tries.set(tries.get() + 1);
            if tries.get() == 1 { Err(full()) } else { Ok(tries.get()) }
        };
        assert!(is_full(&with_room(fs, is_full, act).unwrap_err()), "nothing was postponed");
        let many = write_and_remove(&unmounted, FEW + 1);
        fs.commit().unwrap();
        assert!(are_there(fs, &many));
        let act_in_vain = || Err::<(), _>(io::Error::from_raw_os_error(libc::EIO));
        let failed = with_room_noted(fs, is_full, act_in_vain);
        assert!(!is_full(&failed.unwrap_err()) && are_there(fs, &many));
        tries.set(0);
        assert_eq!(with_room(fs, is_full, act).unwrap(), 2);
        assert!(!are_there(fs, &many));
        assert!(fs.core.state().short_since.is_none(), "a client may ask for too much");
        tries.set(0);
        assert!(is_full(&with_room_noted(fs, is_full, act).unwrap_err()));
        assert!(fs.core.state().short_since.is_some());
    }

    #[test]
    fn as_many_are_postponed_as_others_leave_room_for() {
        let space = |available_bytes, inodes_free| Space {
            total_bytes: 1 << 40,
            free_bytes: available_bytes,
            available_bytes,
            inodes_total: 1000,
            inodes_free,
        };
        let nearly_full_bytes = space(0, 0).nearly_full_bytes();
        let room = |bytes: u64, inodes| space(nearly_full_bytes + bytes, inodes);
        let file = Amount::default().with(1 << 20);
        assert!(file.fits(&room(12 << 20, 2)));
        assert!(!file.fits(&room((12 << 20) - 1, 2)) && !file.fits(&room(12 << 20, 1)));
        assert!(file.fits(&Space { inodes_total: 0, ..room(12 << 20, 0) }));
        let gone = file.added_to(space(5, 7));
        assert_eq!(gone, Space { free_bytes: 5 + (1 << 20), ..space(5 + (1 << 20), 8) });
        let all = Amount { files: 5000, bytes: u64::MAX }.added_to(space(5, 7));
        assert_eq!(all, Space { free_bytes: 1 << 40, ..space(1 << 40, 1000) });
        let postponed = Postponed::default();
        let take_in = |number, space| postponed.take_in(ObjectId(number), 1 << 20, &space);
        assert!(!take_in(1, room(11 << 20, 9)) && take_in(2, room(12 << 20, 9)));
        assert!(!take_in(3, room(23 << 20, 9)) && take_in(4, room(24 << 20, 9)));
        assert_eq!(postponed.amount(), Amount { files: 2, bytes: 2 << 20 });
        let oldest: Vec<_> = postponed.files.lock().waiting.iter().copied().collect();
        assert_eq!(oldest, [(ObjectId(2), 1 << 20), (ObjectId(4), 1 << 20)]);
        for number in 2..POSTPONED_MAX as u64 {
            assert!(postponed.take_in(ObjectId(number), 0, &room(1 << 50, 1 << 40)));
        }
        assert_eq!(postponed.fill_thousandths(), POSTPONED_MAX * 1000 / SLOWEST_FROM);
        assert!(!postponed.take_in(ObjectId(0), 0, &room(1 << 50, 1 << 40)), "too many");
    }

    #[test]
    fn whoever_leaves_more_than_goes_is_slowed_down() {
        let (unmounted, _requests) = with_thread();
        let fs = &unmounted.fs;
        let space = fs.core.store.disk.space().unwrap();
        let endless = Space { available_bytes: u64::MAX, inodes_free: 1 << 40, ..space };
        for number in 0..SLOWEST_FROM as u64 / 2 + 100 {
            assert!(fs.postponed.take_in(ObjectId(1 << 40 | number), 0, &endless));
        }
        assert!(
            matches!(fs.pacing().pace(), Pace::After(delay) if delay < Duration::from_millis(1))
        );
        remove_all(fs);
        assert_eq!((fs.pacing().pace(), fs.postponed.amount()), (Pace::AtOnce, Amount::default()));
    }
}
