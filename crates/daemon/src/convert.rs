//! Types of the FUSE library on one side, ours on the other.

use std::time::SystemTime;

use fuser::{Errno, FileAttr, FileType, INodeNo, TimeOrNow};

use kvfs_fs::{Attributes, FsError, NewTime};
use kvfs_storage::store::record::InodeId;

/// What `statfs` counts in. Engines test it for `O_DIRECT`.
pub(super) const BLOCK_BYTES: u64 = 4096;

pub(super) fn inode(number: INodeNo) -> InodeId {
    InodeId(number.0)
}

pub(super) fn permissions(mode: u32) -> u16 {
    u16::try_from(mode & 0o7777).unwrap_or(0)
}

pub(super) fn errno(error: &FsError) -> Errno {
    Errno::from_i32(error.errno())
}

pub(super) fn file_type(bits: u32) -> FileType {
    match bits {
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

pub(super) fn attributes(from: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(from.inode.0),
        size: from.size,
        blocks: from.blocks,
        atime: from.atime.into(),
        mtime: from.mtime.into(),
        ctime: from.ctime.into(),
        crtime: SystemTime::UNIX_EPOCH,
        kind: file_type(from.file_type),
        perm: from.mode,
        nlink: from.links,
        uid: from.uid,
        gid: from.gid,
        rdev: from.device,
        blksize: 4096,
        flags: 0,
    }
}

/// The reply that a name is absent: inode 0 tells the kernel to remember it.
pub(super) fn absent() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

pub(super) fn new_time(time: TimeOrNow) -> NewTime {
    match time {
        TimeOrNow::Now => NewTime::Now,
        TimeOrNow::SpecificTime(time) => NewTime::At(time.into()),
    }
}
