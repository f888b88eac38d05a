//! Descriptors that outlive the program of a process.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// A copy of a descriptor that stays open when another program takes the process over.
///
/// # Errors
/// There are too many descriptors.
pub fn to_be_inherited(descriptor: impl AsFd) -> io::Result<OwnedFd> {
    let copy = descriptor.as_fd().try_clone_to_owned()?;
    fcntl(&copy, FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(copy)
}

/// Takes a descriptor over that the program before has left open. Each may be taken once.
///
/// # Errors
/// It is not open.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number <= libc::STDERR_FILENO {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the call looks whether the number is one of an open descriptor, and changes nothing.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and whoever left it open for this program says that nothing else here has it.
    let owned = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl(&owned, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    debug_assert_eq!(owned.as_raw_fd(), number);
    Ok(owned)
}
