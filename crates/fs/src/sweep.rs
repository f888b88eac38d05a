//! Removing the files that a crash left without a record, beside the mount.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::FileSystem;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::recovery::Unswept;

/// Files that the mount before this one may have left.
#[derive(Debug)]
pub(super) struct LeftByCrash(Mutex<Progress>);

#[derive(Debug)]
enum Progress {
    /// There are none: it ended in good order, or all were removed.
    Done,
    /// Nobody has looked yet.
    Unswept(Unswept),
    /// Somebody is looking, or an error ended that: the next mount looks again.
    NotAllSwept,
}

impl LeftByCrash {
    pub(super) fn new(unswept: Option<Unswept>) -> LeftByCrash {
        LeftByCrash(Mutex::new(unswept.map_or(Progress::Done, Progress::Unswept)))
    }

    /// Whether nothing is left, so this mount can end in good order.
    pub(super) fn is_swept(&self) -> bool {
        matches!(*self.progress(), Progress::Done)
    }

    /// What is to be looked for, for the first who asks.
    fn begin(&self) -> Option<Unswept> {
        let mut progress = self.progress();
        match std::mem::replace(&mut *progress, Progress::NotAllSwept) {
            Progress::Unswept(unswept) => Some(unswept),
            other => {
                *progress = other;
                None
            }
        }
    }

    fn end(&self) {
        *self.progress() = Progress::Done;
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileSystem {
    /// Removes object files that a crash left without a record; runs beside the mount.
    pub fn sweep_after_crash(&self) -> Result<usize, StoreError> {
        let Some(unswept) = self.left_by_crash.begin() else { return Ok(0) };
        let removed = unswept.sweep(&self.core.store, |look| look(&self.core.state().metadata))?;
        self.left_by_crash.end();
        Ok(removed)
    }
}
