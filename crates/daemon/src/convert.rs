//! Numbers of the kernel on one side, ours on the other.

use fuser::Errno;

use kvfs_fs::FsError;

/// What `statfs` counts in. Engines test it for `O_DIRECT`.
pub(super) const BLOCK_BYTES: u64 = 4096;

pub(super) fn permissions(mode: u32) -> u16 {
    u16::try_from(mode & 0o7777).unwrap_or(0)
}

pub(super) fn errno(error: &FsError) -> Errno {
    Errno::from_i32(error.errno())
}
