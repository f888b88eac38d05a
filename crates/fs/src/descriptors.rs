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

use nix::sys::resource::{Resource, getrlimit};

use super::FsError;

/// Kept for commits, moves between tiers and lookups: each opens a few files at a time, and there
/// are some thirty threads.
const KEPT: u64 = 256;

/// Refuses a file to a client while only those are left.
pub(crate) fn check() -> Result<(), FsError> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).map_err(io::Error::from)?;
    // The kernel gives out the lowest number that is free.
    match io::stderr().as_fd().try_clone_to_owned() {
        Ok(next) => {
            let taken = u64::try_from(next.as_raw_fd()).unwrap_or(0);
            if taken < limit.saturating_sub(KEPT.min(limit / 4)) {
                return Ok(());
            }
            Err(FsError::TooManyOpen)
        }
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => Err(FsError::TooManyOpen),
        // Whoever started the daemon closed it.
        Err(_) => Ok(()),
    }
}
