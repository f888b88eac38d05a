//! Files made ahead of need: the file of a new object, with its number and open for reading. Making
//! one costs the local filesystem some 100 us, a fifth of what publishing a page may cost.
//!
//! A mount starts without spares; the first file that is made asks for them. While there is none, a file is made
//! beside the threads that take requests ([`Spares::has_one`]): the local filesystem may wait for its journal.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::core::Core;
use crossbeam_channel::Sender;
use kvfs_storage::store::disk::{Access, DiskFile};
use kvfs_storage::store::record::{ObjectId, Time};

/// Enough for the files that are made while one more spare is.
const SPARES_MAX: usize = 8;

/// The file of a new object.
#[derive(Debug)]
pub(crate) struct NewFile {
    pub(crate) object: ObjectId,
    pub(crate) file: Arc<dyn DiskFile>,
    /// When it became a new one.
    pub(crate) made: Time,
    /// The modification time that its file has had since before that, as long as nobody changes it.
    pub(crate) made_ahead: Option<Time>,
}

/// A file that is ready.
#[derive(Debug)]
struct Spare {
    object: ObjectId,
    file: Arc<dyn DiskFile>,
    /// What the daemon's descriptor of it may do.
    access: Access,
    modified: Time,
}

/// The files that are ready.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    ready: Mutex<Vec<Spare>>,
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
        // The first open of a mount decides who serves files.
        for spare in self.spares.take_all_but(self.writer_access()) {
            discard(self, spare.object);
        }
        while self.spares.ready().len() < SPARES_MAX {
            let (object, access) = (self.state().metadata.new_object(), self.writer_access());
            let made = self.make_object_file(object, access).and_then(|file| {
                let modified = file.stat()?.mtime;
                Ok(Spare { object, file, access, modified })
            });
            match made {
                Ok(spare) => self.spares.ready().push(spare),
                Err(_) => return discard(self, object),
            }
        }
    }

    /// Makes the file of a new object.
    pub(crate) fn make_file(&self, object: ObjectId, access: Access) -> io::Result<NewFile> {
        let file = self.make_object_file(object, access)?;
        let made = file.stat()?.mtime;
        Ok(NewFile { object, file, made, made_ahead: None })
    }

    /// The descriptor that the daemon keeps of a file that a client writes. With passthrough the kernel opens the
    /// backing file anew with the writer's own flags, so a reading one is enough and never counts as a writer.
    pub(crate) fn writer_access(&self) -> Access {
        if self.is_passthrough() { Access::Read } else { Access::ReadWrite }
    }

    /// Where the kernel opens a file anew, the daemon keeps only a
    /// reading descriptor: one for writing, still open while a reply is on its way, would make
    /// the page of a fast writer look unfinished.
    fn make_object_file(&self, object: ObjectId, access: Access) -> io::Result<Arc<dyn DiskFile>> {
        let made = self.store.create_object(object)?;
        if access == Access::ReadWrite {
            return Ok(Arc::from(made));
        }
        Ok(Arc::from(self.store.open_written(object, access)?))
    }

    /// Removes what was not needed.
    pub(crate) fn drop_spares(&self) {
        let spares = std::mem::take(&mut *self.spares.ready());
        for spare in spares {
            discard(self, spare.object);
        }
    }
}

/// Removes the file of an object that nothing has come to refer to.
pub(crate) fn discard(core: &Core, object: ObjectId) {
    core.state().metadata.staged.remove(&object);
    if let Err(error) = core.store.remove_object(object) {
        log::debug!("object {object}, which was not needed: {error}");
    }
}

impl Spares {
    /// Whether a new file need not be made first.
    pub(crate) fn has_one(&self) -> bool {
        !self.ready().is_empty()
    }

    /// A file made earlier, for a descriptor of this kind. Its date stays as it is on the disk: to change it may
    /// take the local filesystem's journal.
    pub(crate) fn take(&self, access: Access) -> Option<NewFile> {
        let spare = self.ready().pop_if(|spare| spare.access == access);
        self.ask_for_more();
        spare.map(|Spare { object, file, modified, .. }| NewFile {
            object,
            file,
            made: Time::now(),
            made_ahead: Some(modified),
        })
    }

    fn take_all_but(&self, access: Access) -> Vec<Spare> {
        self.ready().extract_if(.., |spare| spare.access != access).collect()
    }

    fn ask_for_more(&self) {
        if let Some(wanted) = self.wanted.get() {
            // A full queue means that the thread is told already.
            let _ = wanted.try_send(());
        }
    }

    fn ready(&self) -> MutexGuard<'_, Vec<Spare>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
