//! Changes that wait for a commit: how many there may be.
//!
//! Memory bounds them, and so does whoever syncs a file: a commit is of all of them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::core::state::State;
use crossbeam_channel::Sender;
use kvfs_storage::store::Store;

/// Uncommitted records that may wait in memory, some 250 bytes each: 12 MiB, and as much again
/// while they are being written out.
pub(super) const CHANGES_MAX: usize = 50_000;
/// Their bytes, for those that are larger: an attribute may have 64 KiB. As much again while they are
/// being written out.
pub(super) const BYTES_MAX: usize = 32 << 20;
/// Room on the disk for each of them. It may copy a page of the database, and the next commit another one before the
/// first is free again; and a commit that adds may use up what the one that removes needs.
const ROOM_PER_CHANGE_BYTES: u64 = 16 << 10;
/// The same for the bytes of their records: pages that are half full, in two commits.
const ROOM_PER_BYTE: u64 = 4;
/// As many may wait however full the disk is: a commit for each would be slower than any disk.
pub(super) const CHANGES_MIN: usize = 256;
pub(super) const BYTES_MIN: usize = 256 << 10;
/// Changes that may still come between a look at what waits and the change itself.
pub(super) const CHANGES_MARGIN: usize = 2048;
pub(super) const BYTES_MARGIN: usize = 4 << 20;

/// How a commit is asked for.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    pub(super) wanted: OnceLock<Sender<()>>,
    limits: Mutex<Limits>,
    /// At so many changes the room of the disk is looked at again.
    pub(super) next_look: AtomicUsize,
    /// Changes wait as if hardly any might: see [`Backlog::keep_low`].
    is_kept_low: AtomicBool,
}

/// Keeps a backlog low until it is dropped.
#[derive(Debug)]
pub struct KeptLow<'a>(&'a Backlog);

impl Drop for KeptLow<'_> {
    fn drop(&mut self) {
        self.0.is_kept_low.store(false, Ordering::Relaxed);
    }
}

/// What may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) changes: usize,
    pub(super) bytes: usize,
}

impl Limits {
    /// No more than the disk can take of it once it is full otherwise: what removes files could not be committed, and
    /// would keep it full.
    pub(super) fn of_room(room_bytes: u64) -> Limits {
        let fit = |part: u64| usize::try_from(room_bytes / part).unwrap_or(usize::MAX);
        Limits {
            changes: fit(ROOM_PER_CHANGE_BYTES).clamp(CHANGES_MIN, CHANGES_MAX),
            bytes: fit(ROOM_PER_BYTE).clamp(BYTES_MIN, BYTES_MAX),
        }
    }

    /// Whether there is no room for one more.
    pub(super) fn are_reached(self, state: &State) -> bool {
        changes(state) >= self.changes || state.metadata.uncommitted_bytes() >= self.bytes
    }

    /// How much of what may wait does, in thousandths, as seen by those who are about to change something.
    pub(super) fn fill_thousandths(self, state: &State) -> usize {
        let changes = self.changes - CHANGES_MARGIN.min(self.changes / 4);
        let bytes = self.bytes - BYTES_MARGIN.min(self.bytes / 4);
        let waiting_bytes = state.metadata.uncommitted_bytes();
        (self::changes(state) * 1000 / changes).max(waiting_bytes * 1000 / bytes)
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { changes: CHANGES_MAX, bytes: BYTES_MAX }
    }
}

impl Backlog {
    /// Looks how much room the disk has for what waits.
    pub(super) fn look_for_room(&self, store: &Store) {
        self.next_look.store(CHANGES_MIN, Ordering::Relaxed);
        match store.room_for_changes_bytes() {
            Ok(bytes) => *self.locked() = Limits::of_room(bytes),
            Err(error) => log::debug!("the disk does not tell its room: {error}"),
        }
    }

    /// The same when so many changes have come since the last look that they might not fit any more: others fill the disk,
    /// too.
    pub(super) fn look_again(&self, changes: usize, store: &Store) -> bool {
        let is_due = changes >= self.next_look.load(Ordering::Relaxed);
        if is_due {
            self.look_for_room(store);
            self.next_look.store(changes + CHANGES_MIN, Ordering::Relaxed);
        }
        is_due
    }

    /// Slows changes down so that the next commit has few of them, for whoever is about to wait for it while others wait
    /// for him. There is as much room as before, so none waits longer than [`super::pacing`] says for this. One at a time keeps
    /// it low.
    pub(crate) fn keep_low(&self) -> KeptLow<'_> {
        self.is_kept_low.store(true, Ordering::Relaxed);
        KeptLow(self)
    }

    /// Whether changes wait as if hardly any might.
    pub(super) fn is_kept_low(&self) -> bool {
        self.is_kept_low.load(Ordering::Relaxed)
    }

    /// How full it is for the next change.
    pub(super) fn fill_thousandths(&self, state: &State) -> usize {
        let fill = self.limits().fill_thousandths(state);
        if !self.is_kept_low() {
            return fill;
        }
        fill.max(Limits::of_room(0).fill_thousandths(state))
    }

    pub(super) fn locked(&self) -> MutexGuard<'_, Limits> {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limits(&self) -> Limits {
        *self.locked()
    }
}

/// Changes that wait for a commit, and files that it would have to remove.
pub(super) fn changes(state: &State) -> usize {
    state.metadata.uncommitted() + state.metadata.discarded.len()
}

/// Whether the disk had no room for the last commit.
pub(super) fn lacks_room(state: &State) -> bool {
    state.commit_failure.as_ref().is_some_and(|failure| failure.lacks_room)
}
