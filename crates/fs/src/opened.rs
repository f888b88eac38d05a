//! An open file, as whoever answers the kernel needs to know it.

use std::sync::Arc;

use kvfs_storage::store::disk::DiskFile;

/// An open file.
#[derive(Debug)]
pub struct Opened {
    /// Number of the handle.
    pub handle: u64,
    /// Who moves its bytes.
    pub by: OpenedBy,
    /// The bytes never change: caches keep them, `close()` has nothing to check.
    pub is_sealed: bool,
    /// What the kernel may keep of the bytes where the daemon serves them.
    pub caching: Caching,
    /// `close()` has nothing to check or to report: the round trip is saved.
    pub closes_quietly: bool,
}

impl Opened {
    /// One of which the kernel keeps nothing: each read and write comes to the daemon.
    pub(super) fn uncached(handle: u64, closes_quietly: bool) -> Opened {
        let (by, caching) = (OpenedBy::Daemon, Caching::Never);
        Opened { handle, by, is_sealed: false, caching, closes_quietly }
    }
}

/// What the kernel may keep of the bytes that the daemon serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// All, what it kept at earlier opens included.
    Kept,
    /// All from this open on: earlier ones may have been of another version.
    Anew,
    /// Nothing. Writes append, whatever their offset claims.
    Never,
}

/// Who moves the bytes of an open file.
#[derive(Debug)]
pub enum OpenedBy {
    /// The kernel, from this file (open read-only, so that it counts as no writer).
    Kernel {
        /// The file.
        file: Arc<dyn DiskFile>,
    },
    /// The daemon.
    Daemon,
}
