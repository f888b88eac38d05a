//! Files made ahead of need: the file of a new object, with its number and open for reading. Making
//! one costs the local filesystem some 100 us, a fifth of what publishing a page may cost.
//!
//! A mount starts without spares; the first file that is made asks for them. While there is none, a file is made
//! beside the threads that take requests ([`Spares::has_one`]): the local filesystem may wait for its journal.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use crate::core::Core;
use crossbeam_channel::Sender;
use kvfs_storage::store::disk::{Access, DiskFile};
use kvfs_storage::store::record::{ObjectId, Time};

/// Enough for the files that are made while one more spare is.
const SPARES_MAX: usize = 8;

/// Of the files that this process may have open, spares are one in so many.
const DESCRIPTORS_SHARE: u64 = 32;

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

/// Discards the spares, whose files nobody else would know. None is made as long as what this gives is held; `None` if
/// some are being made.
pub(crate) fn do_without(core: &Core) -> Option<MutexGuard<'_, ()>> {
    let making = match core.spares.making.try_lock() {
        Ok(making) => making,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    core.drop_spares();
    Some(making)
}

/// The files that are ready.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    ready: Mutex<Vec<Spare>>,
    /// Held while some are made.
    making: Mutex<()>,
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
        let _making = self.spares.making.lock().unwrap_or_else(PoisonError::into_inner);
        // The first open of a mount decides who serves files.
        for spare in self.spares.take_all_but(self.writer_access()) {
            discard(self, spare.object);
        }
        let wanted = kvfs_os::open_files_max().unwrap_or(0) / DESCRIPTORS_SHARE;
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX).clamp(1, SPARES_MAX);
        while self.spares.ready().len() < wanted {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoMode;
    use crate::unmounted::{FILES, Unmounted};

    fn objects(core: &Core) -> Vec<ObjectId> {
        core.spares.ready().iter().map(|spare| spare.object).collect()
    }

    #[test]
    fn whoever_does_without_leaves_no_files() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        core.make_spares();
        let made = objects(core);
        let without = do_without(core);
        assert!(without.is_some() && do_without(core).is_none() && !core.spares.has_one());
        assert!(made.len() == SPARES_MAX);
        assert!(made.iter().all(|object| core.store.stat_object(*object).is_err()));
        drop(without);
        core.make_spares();
        assert!(core.spares.has_one());
    }

    #[test]
    fn files_are_made_ahead_and_taken_by_those_who_make_one() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let (wanted, requests) = crossbeam_channel::bounded(1);
        core.keep_spares(wanted);
        assert!(!core.spares.has_one() && requests.is_empty());
        assert!(core.spares.take(Access::ReadWrite).is_none());
        assert_eq!(requests.try_recv(), Ok(()), "the first one asks for them");
        core.make_spares();
        assert!(core.spares.has_one());
        assert_eq!(core.spares.ready().len(), SPARES_MAX);
        assert!(core.spares.take(Access::Read).is_none(), "they are open for another use");
        let last = *objects(core).last().unwrap();
        let id = unmounted.write(FILES, "file", b"bytes");
        assert_eq!(core.state().inode(id).unwrap().file().unwrap().object, Some(last));
        assert_eq!(core.spares.ready().len(), SPARES_MAX - 1);
        assert_eq!(requests.try_recv(), Ok(()));
        core.make_spares();
        assert_eq!(core.spares.ready().len(), SPARES_MAX);
    }

    #[test]
    fn what_is_not_needed_any_more_leaves_no_file() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        core.make_spares();
        let before = objects(core);
        let is_there = |object: &ObjectId| core.store.stat_object(*object).is_ok();
        assert!(before.iter().all(is_there));
        // The first open has decided that the kernel serves files.
        unmounted.fs.io_mode(|| IoMode::Passthrough);
        assert_eq!(core.writer_access(), Access::Read);
        core.make_spares();
        assert!(!before.iter().any(is_there));
        let now = objects(core);
        assert!(now.iter().all(is_there) && now.len() == SPARES_MAX);
        assert!(core.spares.ready().iter().all(|spare| spare.access == Access::Read));
        assert!(before.iter().all(|object| !core.state().metadata.staged.contains(object)));
        core.drop_spares();
        assert!(!core.spares.has_one() && !now.iter().any(is_there));
    }

    #[test]
    fn the_daemon_keeps_a_descriptor_for_writing_where_it_serves() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let make = |access| {
            let object = core.state().metadata.new_object();
            core.make_file(object, access).unwrap().file
        };
        assert_eq!(core.writer_access(), Access::ReadWrite);
        assert!(make(Access::ReadWrite).write_all_at(b"bytes", 0).is_ok());
        assert!(make(Access::Read).write_all_at(b"bytes", 0).is_err());
    }
}
