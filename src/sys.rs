//! System calls that neither std nor nix wraps.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memmap2::{Advice, Mmap, MmapOptions};
use nix::fcntl::{OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::Mode;
use nix::unistd::ForkResult;

/// Longest value of an attribute that anybody here asks for.
const ATTRIBUTE_BYTES_MAX: usize = 256;
/// Longest value of an attribute, and longest list of names (xattr(7)).
const LONGEST_ATTRIBUTE_BYTES: usize = 64 << 10;

/// Whether nobody can write through another descriptor or mapping of this file.
///
/// A read lease is granted only while no open write descriptor and no shared writable mapping
/// exists (fcntl(2), "Leases"), so asking for one answers the question. It is given back at once:
/// a held lease would block the next open for write.
///
/// `file` must be open read-only, or it counts as a writer itself (EAGAIN).
pub(crate) fn is_at_rest(file: BorrowedFd<'_>) -> io::Result<bool> {
    probe(file, libc::F_RDLCK)
}

/// Whether nobody has this file open or mapped through another descriptor, for reading either.
///
/// The same with a write lease. `file` must be open read-only.
pub(crate) fn is_unused(file: BorrowedFd<'_>) -> io::Result<bool> {
    probe(file, libc::F_WRLCK)
}

fn probe(file: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<bool> {
    ignore_broken_leases();
    match lease(file, kind) {
        Ok(()) => {
            lease(file, libc::F_UNLCK)?;
            Ok(true)
        }
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// An open for write that comes between the two calls breaks the lease, and the kernel says so by
/// SIGIO, whose default action ends the process. The open itself only waits for the second call.
fn ignore_broken_leases() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: ignoring a signal installs no handler that could run.
        unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    });
}

fn lease(file: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: F_SETLEASE takes an integer and touches no memory; the descriptor is borrowed.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_SETLEASE, kind) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Maps a file to which nobody can write any more, with every page in memory.
///
/// A disk error while pages are read in is an error here (madvise(2), `MADV_POPULATE_READ`) and not
/// a signal later.
pub(crate) fn map_populated(file: &File) -> io::Result<Mmap> {
    // SAFETY: the caller says that nobody writes to the file, and nothing truncates such files.
    let map = unsafe { Mmap::map(file) }?;
    // A kernel without it reads in smaller pieces.
    let _ = map.advise(Advice::HugePage);
    map.advise(Advice::PopulateRead)?;
    Ok(map)
}

/// Reads a range of a file into the page cache, in pieces of 2 MiB where the filesystem can.
///
/// Only a mapping with `MADV_HUGEPAGE` gets those (`do_sync_mmap_readahead` in mm/filemap.c). What comes
/// by read(2), `posix_fadvise` or another mapping lies in small ones, and is slow to copy as long as it
/// stays in memory: 64 files of 4 MiB that came from an ext4 disk, copied by read(2) with one thread, median of five
/// rounds: 17.2 GB/s after this, 16.5 where they were written, 6.6 to 7.2 otherwise.
pub(crate) fn populate(file: &File, offset: u64, length: usize) -> io::Result<()> {
    if length == 0 {
        return Ok(());
    }
    let map = MmapOptions::new().offset(offset).len(length).map_raw_read_only(file)?;
    let _ = map.advise(Advice::HugePage);
    map.advise(Advice::PopulateRead)
}

/// Whether an error says that the daemon of a mount is gone: at once, or while it had the request, through
/// the device or through a ring.
pub(crate) fn is_daemon_gone(errno: i32) -> bool {
    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED)
}

/// Ends what `FUSE_DEV_IOC_BACKING_OPEN` began. The connection has gone when this fails (ENODEV), and all
/// backing files with it.
pub(crate) fn close_backing(device: impl AsFd, id: u32) -> io::Result<()> {
    nix::ioctl_write_ptr!(backing_close, 229, 2, u32);
    // SAFETY: the kernel reads one u32, which outlives the call; the descriptor is borrowed.
    unsafe { backing_close(device.as_fd().as_raw_fd(), &raw const id) }?;
    Ok(())
}

/// Lets everybody else have the processor and the disk before this thread: for work that nobody
/// waits for. It must hold no lock that others need.
pub(crate) fn be_idle() {
    /// `ioprio_set(2)`: of one thread, here the calling one.
    const WHO_THREAD: libc::c_long = 1;
    /// The class that is served when nobody else asks.
    const CLASS_IDLE: libc::c_long = 3 << 13;
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; the kernel reads the structure, which outlives the call.
    // `SCHED_IDLE` gives way at once to whoever wakes up, which the lowest nice value does not.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    // SAFETY: the same. A kernel without it leaves the disk's order as it is.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_THREAD, 0, CLASS_IDLE) };
}

/// Opens a path beneath a directory without following a symbolic link, so that nothing planted
/// there leads out of it. `mode` is that of a file that is made.
pub(crate) fn open_beneath(
    root: impl AsFd, path: &Path, flags: OFlag, mode: Mode,
) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .mode(mode)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    Ok(File::from(nix::fcntl::openat2(root, path, how)?))
}

/// Makes a copy of this process, which must have one thread: in the copy of another, locks would
/// stay taken for ever.
pub(crate) fn fork() -> io::Result<ForkResult> {
    if std::fs::read_dir("/proc/self/task")?.count() > 1 {
        return Err(io::Error::other("the process already has threads"));
    }
    // SAFETY: there is no other thread, so the child may do whatever this one may.
    let result = unsafe { nix::unistd::fork() };
    Ok(result?)
}

/// The value of an extended attribute, or None where the file has no such attribute.
pub(crate) fn extended_attribute(path: &Path, name: &CStr) -> io::Result<Option<Vec<u8>>> {
    attribute_up_to(path, name, ATTRIBUTE_BYTES_MAX)
}

/// The same, however long the value is.
pub(crate) fn long_extended_attribute(path: &Path, name: &CStr) -> io::Result<Option<Vec<u8>>> {
    attribute_up_to(path, name, LONGEST_ATTRIBUTE_BYTES)
}

fn attribute_up_to(path: &Path, name: &CStr, bytes_max: usize) -> io::Result<Option<Vec<u8>>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut value = vec![0; bytes_max];
    let buffer = value.as_mut_ptr().cast();
    // SAFETY: both names end in NUL, and the kernel writes at most the buffer's length.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), buffer, bytes_max) };
    if let Ok(length) = usize::try_from(length) {
        value.truncate(length);
        return Ok(Some(value));
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::ENOTSUP)) => Ok(None),
        error => Err(error),
    }
}

/// Sets an extended attribute, whether it is there or not.
pub(crate) fn set_extended_attribute(path: &Path, name: &CStr, value: &[u8]) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let bytes = value.as_ptr().cast();
    // SAFETY: both names end in NUL, and the kernel reads as many bytes as the value has.
    let result = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), bytes, value.len(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives a directory the extended attributes of another one: those that are listed, and the limits of
/// a mount, which are not.
pub(crate) fn copy_extended_attributes(from: &Path, to: &Path) -> io::Result<()> {
    const LIMITS: [&CStr; 3] = [c"user.kvfs.quota", c"user.kvfs.age", c"user.kvfs.ttl"];
    let listed = extended_attribute_names(from)?;
    for name in LIMITS.into_iter().chain(listed.iter().map(CString::as_c_str)) {
        if let Some(value) = attribute_up_to(from, name, LONGEST_ATTRIBUTE_BYTES)? {
            set_extended_attribute(to, name, &value)?;
        }
    }
    Ok(())
}

/// The names of the attributes of a file; none where the filesystem has no such thing.
fn extended_attribute_names(path: &Path) -> io::Result<Vec<CString>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut names = vec![0_u8; LONGEST_ATTRIBUTE_BYTES];
    let buffer = names.as_mut_ptr().cast();
    // SAFETY: the path ends in NUL, and the kernel writes at most the buffer's length.
    let length = unsafe { libc::listxattr(path.as_ptr(), buffer, LONGEST_ATTRIBUTE_BYTES) };
    let Ok(length) = usize::try_from(length) else {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ENOTSUP) {
            Ok(Vec::new())
        } else {
            Err(error)
        };
    };
    let names = names[..length].split(|byte| *byte == 0).filter(|name| name.starts_with(b"user."));
    names.map(|name| CString::new(name).map_err(io::Error::other)).collect()
}

/// Removes an extended attribute.
pub(crate) fn remove_extended_attribute(path: &Path, name: &CStr) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: both names end in NUL.
    let result = unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    #[test]
    fn an_open_writer_and_a_writable_mapping_are_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [0; 4096]).unwrap();
        let reader = File::open(&path).unwrap();
        assert!(is_at_rest(reader.as_fd()).unwrap());

        let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(!is_at_rest(reader.as_fd()).unwrap());

        // SAFETY: nobody truncates the file while it is mapped.
        let map = unsafe { memmap2::MmapMut::map_mut(&writer) }.unwrap();
        drop(writer);
        assert!(!is_at_rest(reader.as_fd()).unwrap());
        drop(map);
        assert!(is_at_rest(reader.as_fd()).unwrap());
    }
}
