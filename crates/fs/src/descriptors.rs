//! Descriptors that clients may take of the daemon's.
//!
//! Where the daemon moves the bytes, each open file is one of its descriptors. Without any left a
//! commit cannot open what it syncs, so some are kept from clients.
//!
//! What is taken is asked of the kernel, not counted with the handles: the limit is one for the whole process, and
//! besides handles there are slots that are written or lie in memory, spare files, the database, transfers with
//! the remote and its sockets. A count of some of them would let clients in where nothing is left.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::FsError;
use crate::core::Core;

/// Kept for commits, moves between tiers and lookups: each opens a few files at a time, and there
/// are some thirty threads.
const KEPT: u64 = 256;

/// Where a new small file that is in memory, and open, grows or is synced, its file on the disk is opened to read and to
/// write: a commit that finds many of them open must not be the first to find out that nothing is left.
const OF_A_FILE_IN_MEMORY: u64 = 2;

/// Refuses a file to a client while only those are left.
pub(crate) fn check(core: &Core) -> Result<(), FsError> {
    if leaves_some(core)? { Ok(()) } else { Err(FsError::TooManyOpen) }
}

/// Whether one more file leaves those that are kept.
pub(crate) fn leaves_some(core: &Core) -> io::Result<bool> {
    let limit = kvfs_os::open_files_max()?;
    let in_memory = core.store.buffer.open_files() as u64;
    let promised = in_memory.saturating_mul(OF_A_FILE_IN_MEMORY);
    // The kernel gives out the lowest number that is free.
    match io::stderr().as_fd().try_clone_to_owned() {
        Ok(next) => {
            let taken = u64::try_from(next.as_raw_fd()).unwrap_or(0).saturating_add(promised);
            Ok(taken < limit.saturating_sub(KEPT.min(limit / 4)))
        }
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => Ok(false),
        // Whoever started the daemon closed it.
        Err(_) => Ok(true),
    }
}
