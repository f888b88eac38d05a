//! System calls that report errno.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::forks::no_forks;

/// The errno of a failure; 0 of a success.
pub(crate) fn errno<T>(outcome: &io::Result<T>) -> i32 {
    match outcome {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().expect("a system call's error"),
    }
}

/// Asserts that a system call failed with exactly this errno.
#[track_caller]
pub(crate) fn assert_errno<T>(outcome: io::Result<T>, expected: i32) {
    let found = errno(&outcome);
    drop(outcome);
    assert!(
        found == expected,
        "expected {}, found {}",
        io::Error::from_raw_os_error(expected),
        if found == 0 {
            "success".to_owned()
        } else {
            io::Error::from_raw_os_error(found).to_string()
        }
    );
}

/// Opens with flags of open(2), mode 0644 on creation.
pub(crate) fn open(path: impl AsRef<Path>, flags: i32) -> io::Result<File> {
    let access = flags & libc::O_ACCMODE;
    // std refuses combinations that open(2) allows, such as O_RDONLY | O_TRUNC.
    let path = path.as_ref();
    if access == libc::O_RDONLY && flags & (libc::O_CREAT | libc::O_TRUNC) != 0 {
        let flags = nix::fcntl::OFlag::from_bits_retain(flags);
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o644);
        return Ok(File::from(nix::fcntl::open(path, flags, mode)?));
    }
    let mut options = OpenOptions::new();
    options.read(access != libc::O_WRONLY);
    options.write(access != libc::O_RDONLY);
    options.create(flags & libc::O_CREAT != 0 && flags & libc::O_EXCL == 0);
    options.create_new(flags & libc::O_CREAT != 0 && flags & libc::O_EXCL != 0);
    options.truncate(flags & libc::O_TRUNC != 0);
    let rest = flags & !(libc::O_ACCMODE | libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC);
    options.mode(0o644).custom_flags(rest).open(path)
}

/// Stops the filesystem of a directory at once: nothing more is written, its journal neither.
pub(crate) fn shut_down(directory: &Path) -> io::Result<()> {
    /// `EXT4_IOC_SHUTDOWN`, as of XFS: `_IOR('X', 125, __u32)`.
    const SHUTDOWN: libc::Ioctl = 0x8004_587d;
    // `EXT4_GOING_FLAGS_NOLOGFLUSH`
    let without_journal: u32 = 2;
    let directory = File::open(directory)?;
    // SAFETY: the kernel reads one u32, which outlives the call.
    let result =
        unsafe { libc::ioctl(directory.as_raw_fd(), SHUTDOWN, &raw const without_journal) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Closes and reports what close(2) said, which dropping a file does not.
pub(crate) fn close(file: File) -> io::Result<()> {
    Ok(nix::unistd::close(file)?)
}

/// rename(2)
pub(crate) fn rename(from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
    #[allow(clippy::disallowed_methods, reason = "a client renames")]
    std::fs::rename(from, to)
}

/// Writes a new file and reports the first failure, close(2) included. Nobody else has a
/// descriptor of it, so a page is sealed when this returns.
pub(crate) fn write_and_close(path: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
    let _quiet = no_forks();
    let file = open(path, libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL)?;
    file.write_all_at(bytes, 0)?;
    close(file)
}

/// One pwrite(2), as it is: how many bytes were taken, or errno.
pub(crate) fn pwrite(file: &File, bytes: &[u8], offset: i64) -> io::Result<usize> {
    Ok(nix::sys::uio::pwrite(file, bytes, offset)?)
}

/// One write(2).
pub(crate) fn write(file: &File, bytes: &[u8]) -> io::Result<usize> {
    Ok(nix::unistd::write(file, bytes)?)
}

/// An extended attribute as text.
pub(crate) fn getxattr(path: impl AsRef<Path>, name: &str) -> io::Result<String> {
    Ok(String::from_utf8(attribute(path, name)?).expect("text"))
}

/// getxattr(2)
pub(crate) fn attribute(path: impl AsRef<Path>, name: &str) -> io::Result<Vec<u8>> {
    let path = c_string(path.as_ref().as_os_str().as_encoded_bytes());
    let name = c_string(name.as_bytes());
    let mut buffer = vec![0_u8; 64 << 10];
    // SAFETY: both strings end in a zero byte and the buffer is as long as said.
    let count = unsafe {
        libc::getxattr(path.as_ptr(), name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    };
    buffer.truncate(usize::try_from(count).map_err(|_| io::Error::last_os_error())?);
    Ok(buffer)
}

/// setxattr(2)
pub(crate) fn setxattr(path: impl AsRef<Path>, name: &str, value: &[u8]) -> io::Result<()> {
    let path = c_string(path.as_ref().as_os_str().as_encoded_bytes());
    let name = c_string(name.as_bytes());
    let value_pointer = value.as_ptr().cast();
    // SAFETY: both strings end in a zero byte and the value is as long as said.
    let result =
        unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value_pointer, value.len(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// removexattr(2)
pub(crate) fn removexattr(path: impl AsRef<Path>, name: &str) -> io::Result<()> {
    let path = c_string(path.as_ref().as_os_str().as_encoded_bytes());
    let name = c_string(name.as_bytes());
    // SAFETY: both strings end in a zero byte.
    let result = unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Names of the extended attributes, in the order given.
pub(crate) fn listxattr(path: impl AsRef<Path>) -> io::Result<Vec<String>> {
    let path = c_string(path.as_ref().as_os_str().as_encoded_bytes());
    let mut buffer = vec![0_u8; 64 << 10];
    // SAFETY: the path ends in a zero byte and the buffer is as long as said.
    let count = unsafe { libc::listxattr(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    buffer.truncate(usize::try_from(count).map_err(|_| io::Error::last_os_error())?);
    let names = buffer.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

/// Lets everybody else have the processor before this thread, and whatever it starts from now on.
pub(crate) fn be_idle() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; the kernel reads the structure, which outlives the call.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
}

/// A thread of another process: see `proc_pid_stat(5)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) name: String,
    /// As proc(5) has it: `D` waits for a disk.
    pub(crate) state: char,
    pub(crate) nice: i32,
    pub(crate) policy: i32,
}

/// The threads of a process, those that have begun first of all.
pub(crate) fn threads_of(pid: u32) -> Vec<Thread> {
    let mut tasks: Vec<u32> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    tasks.sort_unstable();
    let thread = |task| {
        // It may have ended meanwhile.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{task}/stat")).ok()?;
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        let state = fields[0].parse().unwrap();
        let (nice, policy) = (fields[16].parse().unwrap(), fields[38].parse().unwrap());
        Some(Thread { name: name.to_owned(), state, nice, policy })
    };
    tasks.into_iter().filter_map(thread).collect()
}

/// fsync(2) of a directory.
pub(crate) fn sync_directory(path: impl AsRef<Path>) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Maps a whole file for reading.
pub(crate) fn map(file: &File) -> memmap2::Mmap {
    try_map(file).unwrap()
}

/// [`map`], where the daemon may be gone.
pub(crate) fn try_map(file: &File) -> io::Result<memmap2::Mmap> {
    // SAFETY: the tests that map a file know who writes to it, and nobody makes it shorter.
    unsafe { memmap2::Mmap::map(file) }
}

/// Maps a whole file, shared and writable.
pub(crate) fn map_mut(file: &File) -> memmap2::MmapMut {
    // SAFETY: the tests that map a file know who writes to it, and nobody makes it shorter.
    unsafe { memmap2::MmapMut::map_mut(file) }.unwrap()
}

/// fcntl(2) `F_DUPFD_CLOEXEC`
pub(crate) fn duplicate(file: &File) -> File {
    let duplicate = file.try_clone().unwrap();
    assert_ne!(duplicate.as_raw_fd(), file.as_raw_fd());
    duplicate
}

fn c_string(bytes: &[u8]) -> std::ffi::CString {
    std::ffi::CString::new(bytes).expect("no zero byte")
}

/// utimensat(2) by name: no descriptor for writing is needed.
pub(crate) fn set_modified(path: impl AsRef<Path>, time: std::time::SystemTime) -> io::Result<()> {
    use nix::sys::stat::{UtimensatFlags, utimensat};
    use nix::sys::time::TimeSpec;
    let since = time.duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let time = TimeSpec::from_duration(since);
    let flags = UtimensatFlags::FollowSymlink;
    utimensat(nix::fcntl::AT_FDCWD, path.as_ref(), &time, &time, flags)?;
    Ok(())
}

/// Makes the calling thread, and no other, one of a user, without a umask. What it does is not undone.
pub(crate) fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    let check = |result: libc::c_long| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS)?;
    nix::sys::stat::umask(nix::sys::stat::Mode::empty());
    // The library would change all threads.
    // SAFETY: the kernel reads as many groups as said.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
    // SAFETY: numbers alone.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: numbers alone.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })
}
