//! Files made ahead of need: the file of a new object, with its number and open for reading. Making
//! one costs the local filesystem some 100 us, a fifth of what publishing a page may cost.
//!
//! A mount starts without spares; the first file that is made asks for them.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::core::Core;
use crossbeam_channel::Sender;
use kvfs_storage::store::disk::{Access, DiskFile};
use kvfs_storage::store::record::{ObjectId, Time};

/// Enough for the files that are made while one more spare is.
const SPARES_MAX: usize = 8;

/// The file of a new object.
pub(crate) type NewFile = (ObjectId, Arc<dyn DiskFile>);

/// The files that are ready.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    ready: Mutex<Vec<NewFile>>,
    /// Wakes the thread that makes more.
    wanted: OnceLock<Sender<()>>,
}

impl Core {
    /// From now on `wanted` is told when [`Core::make_spares`] should run.
    pub fn keep_spares(&self, wanted: Sender<()>) {
        let _ = self.spares.wanted.set(wanted);
    }

    /// Makes as many files as are kept. On a full disk there are none, and who makes a file hears
    /// of it.
    pub fn make_spares(&self) {
        while self.spares.ready().len() < SPARES_MAX {
            let object = self.state().metadata.new_object();
            match self.make_object_file(object, Access::Read) {
                Ok(file) => self.spares.ready().push((object, file)),
                Err(_) => return self.drop_spare(object),
            }
        }
    }

    /// A file made earlier, as if it were made now. Only for who needs no descriptor for writing.
    pub(crate) fn take_spare(&self, access: Access) -> io::Result<Option<NewFile>> {
        let Some(wanted) = self.spares.wanted.get().filter(|_| access == Access::Read) else {
            return Ok(None);
        };
        let spare = self.spares.ready().pop();
        // A full queue means that the thread is told already.
        let _ = wanted.try_send(());
        if let Some((_, file)) = &spare {
            file.set_modified(Time::now())?;
        }
        Ok(spare)
    }

    /// Makes the file of a new object. Where the kernel opens it anew, the daemon keeps only a
    /// reading descriptor: one for writing, still open while a reply is on its way, would make
    /// the page of a fast writer look unfinished.
    pub(crate) fn make_object_file(
        &self, object: ObjectId, access: Access,
    ) -> io::Result<Arc<dyn DiskFile>> {
        let made = self.store.create_object(object)?;
        if access == Access::ReadWrite {
            return Ok(Arc::from(made));
        }
        Ok(Arc::from(self.store.open_object(object, access)?))
    }

    /// Removes what was not needed.
    pub(crate) fn drop_spares(&self) {
        let spares = std::mem::take(&mut *self.spares.ready());
        for (object, _) in spares {
            self.drop_spare(object);
        }
    }

    fn drop_spare(&self, object: ObjectId) {
        self.state().metadata.staged.remove(&object);
        if let Err(error) = self.store.remove_object(object) {
            log::debug!("spare object {object}: {error}");
        }
    }
}

impl Spares {
    fn ready(&self) -> MutexGuard<'_, Vec<NewFile>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
