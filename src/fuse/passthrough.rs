//! Backing files registered with the kernel.
//!
//! The kernel allows one backing file per inode while any open of the inode lives (a second one,
//! or a cached open beside it, gives EIO), so opens of an inode share an id until the last closes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fuser::BackingId;

use crate::fs::IoMode;
use crate::store::Store;
use crate::store::disk::{Access, DiskPath};
use crate::store::record::InodeId;

/// Backing files of sealed files that stay registered after the last close: a page that is opened
/// again costs one round trip and one `stat`. Each keeps a file open in the kernel, some 300 bytes.
const HELD_MAX: usize = 1024;

/// The ids in use.
#[derive(Debug, Default)]
pub(super) struct Backings(Mutex<Registered>);

#[derive(Debug, Default)]
struct Registered {
    by_inode: HashMap<InodeId, Backing>,
    /// Sealed files without an open, in the order in which they were closed. A file that was
    /// opened again since is still in it; its turn passes without effect.
    held: VecDeque<InodeId>,
}

#[derive(Debug)]
struct Backing {
    id: Arc<BackingId>,
    opens: u32,
    is_sealed: bool,
}

impl Backings {
    fn registered(&self) -> MutexGuard<'_, Registered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id for one more open of an inode; `register` makes one if this is the first.
    pub(super) fn attach(
        &self, inode: InodeId, is_sealed: bool, register: impl FnOnce() -> io::Result<BackingId>,
    ) -> io::Result<Arc<BackingId>> {
        let mut registered = self.registered();
        if let Some(backing) = registered.by_inode.get_mut(&inode) {
            backing.opens += 1;
            return Ok(Arc::clone(&backing.id));
        }
        let id = Arc::new(register()?);
        let backing = Backing { id: Arc::clone(&id), opens: 1, is_sealed };
        registered.by_inode.insert(inode, backing);
        Ok(id)
    }

    /// The id for one more open of a sealed inode whose backing file is still registered.
    pub(super) fn attach_held(&self, inode: InodeId) -> Option<Arc<BackingId>> {
        let mut registered = self.registered();
        let backing = registered.by_inode.get_mut(&inode)?;
        backing.is_sealed.then(|| {
            backing.opens += 1;
            Arc::clone(&backing.id)
        })
    }

    /// Whether the backing file of an inode is registered: it was opened not long ago.
    pub(super) fn is_held(&self, inode: InodeId) -> bool {
        self.registered().by_inode.contains_key(&inode)
    }

    /// An open of an inode is gone; it may have been one without passthrough.
    pub(super) fn detach(&self, inode: InodeId) {
        // Dropped after the lock: other opens do not wait while the kernel closes the file.
        let _dropped = self.registered().close(inode);
    }

    /// The file of an inode is not to be opened again from what is registered now. Whether nothing
    /// of it is registered any more.
    pub(super) fn let_go(&self, inode: InodeId) -> bool {
        let mut registered = self.registered();
        let dropped = registered.take_idle(inode);
        let gone = !registered.by_inode.contains_key(&inode);
        drop(registered);
        drop(dropped);
        gone
    }
}

impl Registered {
    fn close(&mut self, inode: InodeId) -> Option<Backing> {
        let backing = self.by_inode.get_mut(&inode)?;
        backing.opens -= 1;
        if backing.opens > 0 {
            return None;
        }
        if !backing.is_sealed {
            return self.by_inode.remove(&inode);
        }
        self.held.push_back(inode);
        let oldest = (self.held.len() > HELD_MAX).then(|| self.held.pop_front())??;
        self.take_idle(oldest)
    }

    fn take_idle(&mut self, inode: InodeId) -> Option<Backing> {
        let idle = self.by_inode.get(&inode)?.opens == 0;
        idle.then(|| self.by_inode.remove(&inode))?
    }
}

/// Tries once whether this kernel takes backing files from this store.
pub(super) fn trial(
    store: &Store, register: impl FnOnce(BorrowedFd<'_>) -> io::Result<BackingId>,
) -> IoMode {
    let outcome = store.disk.open(&DiskPath::Format, Access::Read).and_then(|file| {
        let descriptor = file.descriptor().ok_or(io::ErrorKind::Unsupported)?;
        register(descriptor).map(drop)
    });
    match outcome {
        Ok(()) => IoMode::Passthrough,
        Err(error) => IoMode::Served(match error.raw_os_error() {
            Some(libc::EPERM) => "the daemon lacks CAP_SYS_ADMIN".to_owned(),
            Some(libc::ELOOP) => "the store's filesystem is stacked too deep".to_owned(),
            Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL) => {
                "the kernel has no FUSE passthrough (Linux 6.9 has)".to_owned()
            }
            _ => error.to_string(),
        }),
    }
}
