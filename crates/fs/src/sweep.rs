//! Removing the files that a crash left without a record, beside the mount; before that, whether records are missing.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::FileSystem;
use super::health::Refusal;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::metadata::Integrity;
use kvfs_storage::store::recovery::Unswept;

/// Files that the mount before this one may have left.
#[derive(Debug)]
pub(super) struct LeftByCrash(Mutex<Progress>);

#[derive(Debug)]
enum Progress {
    /// There are none: it ended in good order, or all were removed.
    Done,
    /// Nobody has looked yet.
    Unswept(Box<Unswept>),
    /// Somebody is looking, or an error ended that: the next mount looks again.
    NotAllSwept,
}

impl LeftByCrash {
    pub(super) fn new(unswept: Option<Unswept>) -> LeftByCrash {
        LeftByCrash(Mutex::new(
            unswept.map_or(Progress::Done, |unswept| Progress::Unswept(Box::new(unswept))),
        ))
    }

    /// Of a mount that goes on with another daemon: whatever the one before has not swept is for the next mount.
    pub(super) fn of_mount_before(is_swept: bool) -> LeftByCrash {
        LeftByCrash(Mutex::new(if is_swept { Progress::Done } else { Progress::NotAllSwept }))
    }

    /// Whether nothing is left, so this mount can end in good order.
    pub(super) fn is_swept(&self) -> bool {
        matches!(*self.progress(), Progress::Done)
    }

    /// What is to be looked for, for the first who asks.
    fn begin(&self) -> Option<Unswept> {
        let mut progress = self.progress();
        match std::mem::replace(&mut *progress, Progress::NotAllSwept) {
            Progress::Unswept(unswept) => Some(*unswept),
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

/// Removes object files that a crash left without a record; runs beside the mount.
///
/// # Errors
/// [`StoreError::Corrupt`]: records are missing. Nothing was removed, and nothing can be from now on.
pub fn sweep_after_crash(fs: &FileSystem) -> Result<usize, StoreError> {
    check_records(fs)?;
    let Some(unswept) = fs.left_by_crash.begin() else { return Ok(0) };
    let removed = unswept.sweep(&fs.core.store, |look| look(&fs.core.state().metadata))?;
    fs.left_by_crash.end();
    Ok(removed)
}

/// Compares what all records add up to with what was recorded, where opening left that for later. With records missing,
/// files that they tell of would be garbage to everybody, so the mount takes no changes any more.
///
/// # Errors
/// [`StoreError::Corrupt`]: some are missing, or not as they were written.
pub fn check_records(file_system: &FileSystem) -> Result<(), StoreError> {
    let core = &file_system.core;
    let records = {
        let state = core.state();
        if state.metadata.integrity == Integrity::Checked {
            return Ok(());
        }
        state.metadata.snapshot()?
    };
    match records.check() {
        Ok(()) => core.state().metadata.integrity = Integrity::Checked,
        Err(error @ StoreError::Corrupt(_)) => {
            // What was acknowledged until now is kept all the same.
            if let Err(error) = file_system.commit() {
                log::warn!("the last commit before the mount became read-only: {error}");
            }
            core.state().refusal = Some(Refusal::DamagedMetadata);
            core.observer.failed(&format!("the store is read-only from now on: {error}"));
            return Err(error);
        }
        Err(error) => return Err(error),
    }
    Ok(())
}
