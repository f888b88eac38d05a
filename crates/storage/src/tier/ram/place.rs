//! Where the copies of the RAM tier lie.
//!
//! The tmpfs is mounted nowhere (`fsmount(2)` without `move_mount(2)`): nobody else finds it, and it
//! goes with the daemon, however that ends. `huge=within_size` is the largest single win for
//! readers: mapped pages of 2 MiB are copied at 22 GB/s instead of 2.7.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, fsconfig_create, fsconfig_reconfigure,
    fsconfig_set_string, fsmount, fsopen, fspick,
};

use crate::store::local_disk::LocalDisk;

/// What the tmpfs holds beyond the budget, so that a writer who exceeds the page that it announced
/// is told by the kernel: one large page.
const SLACK_BYTES: u64 = 64 << 20;

/// Directories to make in `/dev/shm` before giving up; one daemon starting beside us takes one.
const ATTEMPTS_MAX: u32 = 8;

/// Where the copies are.
#[derive(Debug)]
pub enum RamPlace {
    /// On a tmpfs of our own.
    Tmpfs,
    /// In a directory of the tmpfs that is there for everybody, since we may not mount one.
    Shared(SharedDirectory),
}

impl std::fmt::Display for RamPlace {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RamPlace::Tmpfs => write!(formatter, "private tmpfs"),
            RamPlace::Shared(directory) => write!(
                formatter,
                "{}: only root may mount a tmpfs of its own",
                directory.path().display()
            ),
        }
    }
}

/// A place for `budget_bytes` of copies: a tmpfs of our own, or, where we may not mount one, a
/// directory of everybody's.
pub(super) fn open(budget_bytes: u64) -> io::Result<(LocalDisk, RamPlace)> {
    match mount_tmpfs(budget_bytes.saturating_add(SLACK_BYTES)) {
        Ok(root) => Ok((LocalDisk::at(root), RamPlace::Tmpfs)),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let shared = SharedDirectory::make()?;
            let disk = LocalDisk::open(shared.path())?;
            Ok((disk, RamPlace::Shared(shared)))
        }
        Err(error) => Err(error),
    }
}

/// Lets a tmpfs of our own hold `budget_bytes` of copies; it refuses less than it holds.
pub(super) fn resize(disk: &LocalDisk, place: &RamPlace, budget_bytes: u64) -> io::Result<()> {
    if let RamPlace::Shared(_) = place {
        return Ok(());
    }
    let context = fspick(disk, "", FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH)?;
    let bytes = budget_bytes.saturating_add(SLACK_BYTES).to_string();
    fsconfig_set_string(&context, "size", bytes.as_str())?;
    Ok(fsconfig_reconfigure(&context)?)
}

/// Makes a tmpfs that is mounted nowhere.
fn mount_tmpfs(bytes: u64) -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "size", bytes.to_string().as_str())?;
    fsconfig_set_string(&context, "mode", "0700")?;
    if let Err(error) = fsconfig_set_string(&context, "huge", "within_size") {
        log::info!("the RAM tier has no huge pages: {error}");
    }
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// A directory of our own in `/dev/shm`, locked while we live.
#[derive(Debug)]
pub struct SharedDirectory {
    path: PathBuf,
    lock: Flock<File>,
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        // Before the lock goes: until then nobody takes it for an orphan.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl SharedDirectory {
    const PLACE: &str = "/dev/shm";
    const PREFIX: &str = "kvfs-";

    fn make() -> io::Result<SharedDirectory> {
        let kind = nix::sys::statfs::statfs(SharedDirectory::PLACE)?.filesystem_type();
        if kind != nix::sys::statfs::TMPFS_MAGIC {
            return Err(io::Error::other("/dev/shm is no tmpfs"));
        }
        SharedDirectory::remove_orphans();
        // Another daemon that starts now may take it for an orphan until it is locked.
        for _ in 0..ATTEMPTS_MAX {
            let directory = tempfile::Builder::new()
                .prefix(SharedDirectory::PREFIX)
                .permissions(Permissions::from_mode(0o700))
                .tempdir_in(SharedDirectory::PLACE)?;
            if let Ok(lock) = lock(directory.path())
                && directory.path().exists()
            {
                return Ok(SharedDirectory { path: directory.keep(), lock });
            }
        }
        Err(io::Error::other("other daemons keep removing its directory in /dev/shm"))
    }

    /// The one that the program before has left in this process, with the descriptor of its lock.
    pub(super) fn left(path: PathBuf, lock: OwnedFd) -> io::Result<SharedDirectory> {
        // It is locked by this descriptor already.
        let lock = Flock::lock(File::from(lock), FlockArg::LockExclusiveNonblock);
        Ok(SharedDirectory { path, lock: lock.map_err(|(_, error)| error)? })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// What a daemon left that was killed: directories of ours that nobody has locked.
    fn remove_orphans() {
        let Ok(entries) = std::fs::read_dir(SharedDirectory::PLACE) else {
            return;
        };
        for entry in entries.flatten() {
            let ours = entry.file_name().to_string_lossy().starts_with(SharedDirectory::PREFIX)
                && entry.metadata().is_ok_and(|metadata| {
                    metadata.is_dir() && metadata.uid() == nix::unistd::geteuid().as_raw()
                });
            if ours && lock(&entry.path()).is_ok() {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}

fn lock(directory: &Path) -> io::Result<Flock<File>> {
    let flags = FlockArg::LockExclusiveNonblock;
    Flock::lock(File::open(directory)?, flags).map_err(|(_, error)| error.into())
}
