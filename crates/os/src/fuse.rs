//! What a mount's connection to the kernel says and is told.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whether an error says that the daemon of a mount is gone: at once, or while it had the request, through
/// the device or through a ring.
pub fn is_daemon_gone(errno: i32) -> bool {
    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED)
}

/// Ends what `FUSE_DEV_IOC_BACKING_OPEN` began. The connection has gone when this fails (ENODEV), and all
/// backing files with it.
pub fn close_backing(device: impl AsFd, id: u32) -> io::Result<()> {
    nix::ioctl_write_ptr!(backing_close, 229, 2, u32);
    // SAFETY: the kernel reads one u32, which outlives the call; the descriptor is borrowed.
    unsafe { backing_close(device.as_fd().as_raw_fd(), &raw const id) }?;
    Ok(())
}
