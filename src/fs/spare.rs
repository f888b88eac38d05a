//! Files made ahead of need. Making a file costs the local filesystem some 100 us, a fifth of what
//! publishing a page may cost; renaming one that is there already costs a tenth of that.
//!
//! A mount starts without spares; the first file that is made asks for them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use crossbeam_channel::Sender;

use super::FileSystem;
use crate::store::disk::DiskPath;
use crate::store::record::ObjectId;

/// Enough for the files that are made while one more spare is.
const SPARES_MAX: usize = 8;

/// The files that are ready.
#[derive(Debug, Default)]
pub(super) struct Spares {
    ready: Mutex<Vec<u64>>,
    next: AtomicU64,
    /// Wakes the thread that makes more.
    wanted: OnceLock<Sender<()>>,
}

impl FileSystem {
    /// From now on `wanted` is told when [`FileSystem::make_spares`] should run.
    pub fn keep_spares(&self, wanted: Sender<()>) {
        let _ = self.spares.wanted.set(wanted);
    }

    /// Makes as many files as are kept. On a full disk there are none, and who makes a file hears
    /// of it.
    pub fn make_spares(&self) {
        while self.spares.ready().len() < SPARES_MAX {
            let number = self.spares.next.fetch_add(1, Ordering::Relaxed);
            if self.store.disk.create(&DiskPath::Spare(number)).is_err() {
                return;
            }
            self.spares.ready().push(number);
        }
    }

    /// Makes the file of a new object of a spare, if there is one.
    pub(super) fn take_spare(&self, object: ObjectId) -> bool {
        let Some(wanted) = self.spares.wanted.get() else {
            return false;
        };
        let spare = self.spares.ready().pop();
        // A full queue means that the thread is told already.
        let _ = wanted.try_send(());
        spare.is_some_and(|number| {
            let (from, to) = (DiskPath::Spare(number), DiskPath::Staging(object));
            self.store.disk.rename(&from, &to).is_ok()
        })
    }

    /// Removes what was not needed.
    pub(super) fn drop_spares(&self) {
        for number in self.spares.ready().drain(..) {
            if let Err(error) = self.store.disk.remove(&DiskPath::Spare(number)) {
                log::debug!("spare file {number}: {error}");
            }
        }
    }
}

impl Spares {
    fn ready(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
