//! One entry of a shared directory: how it gets its name, and how it loses it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, PosixFadviseAdvice, RenameFlags, posix_fadvise};
use nix::sys::stat::{FileStat, SFlag};
use nix::unistd::UnlinkatFlags;

use crate::{Put, PutMode, Stat};

/// What an object that may be deleted is called while it is looked at; its own name follows.
pub(super) const CONDEMNED: &str = ".tmp-old-";

/// A directory of it that is open, for operations on what lies directly in it.
pub(super) struct Open {
    pub(super) directory: File,
    pub(super) leaf: String,
}

/// Gives a synced temporary file its name.
pub(super) fn publish(open: &Open, temporary: &str, file: &File, mode: PutMode) -> io::Result<Put> {
    let (directory, leaf) = (&open.directory, open.leaf.as_str());
    if mode == PutMode::Replace {
        nix::fcntl::renameat(directory, temporary, directory, leaf)?;
        return Ok(Put::Stored);
    }
    match nix::unistd::linkat(directory, temporary, directory, leaf, AtFlags::empty()) {
        Ok(()) => Ok(Put::Stored),
        // An NFS client that repeats a request whose answer was lost may be told that the name
        // exists: it is ours if the file has two names.
        Err(Errno::EEXIST) if file.metadata()?.nlink() == 2 => Ok(Put::Stored),
        Err(Errno::EEXIST) => Ok(Put::AlreadyThere),
        Err(Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EMLINK) => {
            let flags = RenameFlags::RENAME_NOREPLACE;
            match nix::fcntl::renameat2(directory, temporary, directory, leaf, flags) {
                Ok(()) => Ok(Put::Stored),
                Err(Errno::EEXIST) => Ok(Put::AlreadyThere),
                Err(errno) => Err(errno.into()),
            }
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Takes the object's name away first, so that whoever refreshes it later finds it missing, and
/// gives the name back if somebody was earlier.
pub(super) fn delete_if_older(open: &Open, than: SystemTime) -> io::Result<bool> {
    let (directory, leaf) = (&open.directory, open.leaf.as_str());
    let is_older = |leaf: &str| {
        let found = stat(directory, leaf)?;
        io::Result::Ok(found.is_some_and(|stat| stat.modified < than))
    };
    if !is_older(leaf)? {
        return Ok(false);
    }
    let condemned = format!("{CONDEMNED}{leaf}");
    nix::fcntl::renameat(directory, leaf, directory, condemned.as_str())?;
    if is_older(&condemned)? {
        remove(directory, &condemned)?;
        return Ok(true);
    }
    give_back(directory, &condemned, leaf)?;
    Ok(false)
}

/// Whoever put the object anew meanwhile put the same content.
pub(super) fn give_back(directory: &File, condemned: &str, leaf: &str) -> io::Result<()> {
    match nix::unistd::linkat(directory, condemned, directory, leaf, AtFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => remove(directory, condemned),
        // Without hard links; replacing is harmless.
        Err(Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS) => {
            Ok(nix::fcntl::renameat(directory, condemned, directory, leaf)?)
        }
        Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

pub(super) fn stat(directory: impl AsFd, leaf: &str) -> io::Result<Option<Stat>> {
    match nix::sys::stat::fstatat(directory, leaf, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) if is_file(&stat) => Ok(Some(Stat {
            bytes: u64::try_from(stat.st_size).unwrap_or(0),
            modified: modified(&stat),
        })),
        Ok(_) => Err(io::Error::other("not a file: remove what is there")),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn is_file(stat: &FileStat) -> bool {
    stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFREG.bits()
}

fn modified(stat: &FileStat) -> SystemTime {
    let seconds = Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
    let nanoseconds = Duration::from_nanos(u64::try_from(stat.st_mtime_nsec).unwrap_or(0));
    SystemTime::UNIX_EPOCH + seconds + nanoseconds
}

pub(super) fn remove(directory: impl AsFd, leaf: &str) -> io::Result<()> {
    Ok(nix::unistd::unlinkat(directory, leaf, UnlinkatFlags::NoRemoveDir)?)
}

/// Makes names durable. Some user-space filesystems cannot sync a directory and say so.
pub(super) fn sync_directory(directory: &File) -> io::Result<()> {
    match directory.sync_all() {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}

/// Only advice: a kernel that keeps the pages is merely slower to tell the truth.
pub(super) fn drop_cached(file: &File) {
    let _ = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
}

/// Has a part of a file written meanwhile. A sync follows, which knows what failed.
pub(super) fn begin_writeback(file: &File, offset: u64, bytes: u64) {
    let _ = kvfs_os::begin_writeback(file.as_fd(), offset, bytes);
}

/// Has a part of a file read meanwhile. Only advice, too.
pub(super) fn read_ahead(file: &File, offset: u64, bytes: usize) {
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else { return };
    if bytes > 0 {
        let _ = posix_fadvise(file, offset, bytes, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }
}
