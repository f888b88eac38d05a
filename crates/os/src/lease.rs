//! Who else has a file open: the kernel's leases know.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Whether nobody can write through another descriptor or mapping of this file.
///
/// A read lease is granted only while no open write descriptor and no shared writable mapping
/// exists (fcntl(2), "Leases"), so asking for one answers the question. It is given back at once:
/// a held lease would block the next open for write.
///
/// `file` must be open read-only, or it counts as a writer itself (EAGAIN).
pub fn is_at_rest(file: BorrowedFd<'_>) -> io::Result<bool> {
    probe(file, libc::F_RDLCK)
}

/// Whether nobody has this file open or mapped through another descriptor, for reading either.
///
/// The same with a write lease. `file` must be open read-only.
pub fn is_unused(file: BorrowedFd<'_>) -> io::Result<bool> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};

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
