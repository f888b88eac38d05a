//! Taking a mount away: umount2 where that is allowed, otherwise through fusermount3.
//!
//! umount(8) is never called: it would call `umount.fuse.kvfs`, which is this program.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvfs_os::mountinfo;
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

/// How hard to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// Only if nobody uses it.
    Unused,
    /// Take the name away now; it is served until the last user ends.
    Detach,
    /// Also cut the connection to the daemon: users get errors, the daemon ends.
    Abort,
}

/// Why a mount is still there.
#[derive(Debug)]
pub(crate) enum UnmountError {
    /// Somebody uses it.
    Busy,
    /// There is no mount.
    NotMounted,
    /// It is somebody else's.
    NotPermitted,
    /// Anything else, in one line.
    Other(String),
}

/// Unmounts what is on top at `mountpoint`, an absolute path without symbolic links.
pub(crate) fn unmount(mountpoint: &Path, how: How) -> Result<(), UnmountError> {
    let flags = match how {
        How::Unused => MntFlags::empty(),
        How::Detach => MntFlags::MNT_DETACH,
        // Cutting the connection does not make its users let go, so it is detached as well.
        How::Abort => MntFlags::MNT_FORCE | MntFlags::MNT_DETACH,
    };
    match umount2(mountpoint, flags | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::EBUSY) => Err(UnmountError::Busy),
        Err(Errno::EINVAL | Errno::ENOENT) => Err(UnmountError::NotMounted),
        Err(Errno::EPERM) => unprivileged(mountpoint, how),
        Err(error) => Err(UnmountError::Other(format!("{}: {error}", mountpoint.display()))),
    }
}

fn unprivileged(mountpoint: &Path, how: How) -> Result<(), UnmountError> {
    let helper = fusermount().ok_or_else(|| {
        UnmountError::Other("fusermount3 is not installed: install fuse3".to_owned())
    })?;
    // Before the name is gone, which tells the connection.
    let cut = if how == How::Abort { abort(mountpoint) } else { Ok(()) };
    let mut command = Command::new(helper);
    command.arg("-u");
    if how != How::Unused {
        command.arg("-z");
    }
    let output = command.arg("--").arg(mountpoint).stdin(Stdio::null()).output();
    let output = output.map_err(|error| UnmountError::Other(format!("fusermount3: {error}")))?;
    if output.status.success() {
        return cut.map_err(|error| {
            UnmountError::Other(format!(
                "detached, but its users could not be cut off and are served until they end: \
                 {error}"
            ))
        });
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("busy") {
        Err(UnmountError::Busy)
    } else if said.contains("not found in") || said.contains("not mounted") {
        // That is also what it says of a mount that it has not made for this user.
        let mounts = mountinfo::read().unwrap_or_default();
        let is_mounted =
            mountinfo::top_at(&mounts, mountpoint).is_some_and(mountinfo::Mount::is_kvfs);
        Err(if is_mounted { UnmountError::NotPermitted } else { UnmountError::NotMounted })
    } else {
        Err(UnmountError::Other(said.trim_end().replace('\n', " ")))
    }
}

/// Cuts the connection as its owner may: through the control filesystem, where the connection
/// has the minor device number of the mount as its name.
fn abort(mountpoint: &Path) -> io::Result<()> {
    let mounts = mountinfo::read()?;
    let device = mountinfo::top_at(&mounts, mountpoint).map(|mount| mount.device.clone());
    let minor = device.as_deref().and_then(|device| device.strip_prefix("0:"));
    let minor = minor.ok_or(io::ErrorKind::NotFound)?;
    let path = format!("/sys/fs/fuse/connections/{minor}/abort");
    let cut = std::fs::write(&path, "1");
    cut.map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

/// The set-user-id helper that mounts and unmounts for users. Services may have no PATH.
pub(crate) fn fusermount() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let directories: Vec<PathBuf> = std::env::split_paths(&path).chain(usual).collect();
    ["fusermount3", "fusermount"].iter().find_map(|name| {
        directories.iter().map(|directory| directory.join(name)).find(|path| path.is_file())
    })
}
