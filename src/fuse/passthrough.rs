//! Backing files registered with the kernel.
//!
//! The kernel allows one backing file per inode while any open of the inode lives (a second one,
//! or a cached open beside it, gives EIO), so opens of an inode share an id until the last closes.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use fuser::BackingId;

use crate::fs::IoMode;
use crate::store::Store;
use crate::store::disk::{Access, DiskPath};
use crate::store::record::InodeId;

/// The ids in use.
#[derive(Debug, Default)]
pub(super) struct Backings(Mutex<HashMap<InodeId, Backing>>);

#[derive(Debug)]
struct Backing {
    id: Arc<BackingId>,
    opens: u32,
}

impl Backings {
    /// The id for one more open of an inode; `register` makes one if this is the first.
    pub(super) fn attach(
        &self,
        inode: InodeId,
        register: impl FnOnce() -> io::Result<BackingId>,
    ) -> io::Result<Arc<BackingId>> {
        let mut backings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backing) = backings.get_mut(&inode) {
            backing.opens += 1;
            return Ok(Arc::clone(&backing.id));
        }
        let id = Arc::new(register()?);
        backings.insert(
            inode,
            Backing {
                id: Arc::clone(&id),
                opens: 1,
            },
        );
        Ok(id)
    }

    /// An open of an inode is gone; it may have been one without passthrough.
    pub(super) fn detach(&self, inode: InodeId) {
        let mut backings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backing) = backings.get_mut(&inode) {
            backing.opens -= 1;
            if backing.opens == 0 {
                backings.remove(&inode);
            }
        }
    }
}

/// Tries once whether this kernel takes backing files from this store.
pub(super) fn trial(
    store: &Store,
    register: impl FnOnce(BorrowedFd<'_>) -> io::Result<BackingId>,
) -> IoMode {
    let outcome = store
        .disk
        .open(&DiskPath::Format, Access::Read)
        .and_then(|file| {
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
