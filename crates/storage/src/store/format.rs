//! `FORMAT`: says that a directory is a store and which version wrote it, and is the file whose
//! lock keeps a second daemon out.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::StoreError;
use super::disk::{Access, Disk, DiskDirectory, DiskFile, DiskPath, read_all};
use super::local_disk::LocalDisk;

/// First words of `FORMAT`; the version follows.
const MAGIC: &str = "kvfs store ";
/// Version of the layout and of every record in it.
pub const VERSION: u32 = 1;
/// The version of a store that has packs; everything else is the same.
pub const VERSION_WITH_PACKS: u32 = 2;
/// `FORMAT` is one short line.
const FORMAT_BYTES_MAX: u64 = 256;

/// Held as long as the store is in use; the kernel drops it when the process dies.
#[derive(Debug)]
pub struct Lock {
    file: Flock<File>,
}

impl Lock {
    /// Whoever has this descriptor, or a copy of it, has the lock.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Lets others read the store at the same time.
    pub(super) fn share(&self) -> io::Result<()> {
        Ok(self.file.relock(FlockArg::LockSharedNonblock)?)
    }

    /// Whether the store that it locks is the one at `path`.
    pub(super) fn is_of(&self, path: &Path) -> io::Result<bool> {
        let (found, held) = (std::fs::metadata(lock_file(path))?, self.file.metadata()?);
        Ok((found.dev(), found.ino()) == (held.dev(), held.ino()))
    }
}

/// Makes a store of a missing or empty directory; leaves an existing store alone.
pub fn create_if_empty(path: &Path) -> Result<(), StoreError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error.into()),
    }
    if lock_file(path).exists() {
        return Ok(());
    }
    for entry in path.read_dir()? {
        // `lost+found` of a fresh filesystem and our own half-made store do not count.
        let name = entry?.file_name();
        let ours = ["lost+found", "FORMAT.tmp", "objects", "staging", "quarantine"];
        if !ours.iter().any(|known| name == *known) {
            return Err(not_a_store(path));
        }
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))?;
    create(&LocalDisk::open(path)?)
}

/// Makes the directories and, last, `FORMAT`, so that a crash leaves no half store.
pub fn create(disk: &dyn Disk) -> Result<(), StoreError> {
    disk.create_directory(DiskDirectory::Staging)?;
    disk.create_directory(DiskDirectory::Quarantine)?;
    disk.create_directory(DiskDirectory::Objects)?;
    for shard in 0..=u8::MAX {
        disk.create_directory(DiskDirectory::ObjectShard(shard))?;
    }
    disk.sync_directory(DiskDirectory::Objects)?;
    match disk.remove(&DiskPath::FormatStaging) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let file = disk.create(&DiskPath::FormatStaging)?;
    file.write_all_at(format!("{MAGIC}{VERSION}\n").as_bytes(), 0)?;
    file.sync()?;
    disk.rename(&DiskPath::FormatStaging, &DiskPath::Format)?;
    disk.sync_directory(DiskDirectory::Store)?;
    Ok(())
}

/// The file that whoever uses a store has locked.
pub fn lock_file(path: &Path) -> PathBuf {
    path.join("FORMAT")
}

/// Whether somebody has a store who may write to it. This waits for nobody, also where the filesystem stands still.
pub fn is_locked_for_writing(path: &Path) -> bool {
    let flags = nix::fcntl::OFlag::O_NONBLOCK.bits();
    let file = File::options().read(true).custom_flags(flags).open(lock_file(path));
    let taken = file.map(|file| Flock::lock(file, FlockArg::LockSharedNonblock));
    matches!(taken, Ok(Err((_, nix::errno::Errno::EAGAIN))))
}

/// Takes the store's lock. Where nothing can be written, everybody may read at the same time; a network
/// filesystem would not give a lock of the other kind for a file that is open for reading.
pub fn lock(path: &Path, is_read_only: bool) -> Result<Lock, StoreError> {
    let file = match File::open(lock_file(path)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_a_store(path)),
        Err(error) => return Err(error.into()),
    };
    lock_by(path, file, is_read_only)
}

/// Keeps the lock that a descriptor has; takes it if it has none.
pub(super) fn keep_lock(
    path: &Path, descriptor: OwnedFd, is_read_only: bool,
) -> Result<Lock, StoreError> {
    lock_by(path, File::from(descriptor), is_read_only)
}

fn lock_by(path: &Path, file: File, is_read_only: bool) -> Result<Lock, StoreError> {
    let kind =
        if is_read_only { FlockArg::LockSharedNonblock } else { FlockArg::LockExclusiveNonblock };
    match Flock::lock(file, kind) {
        Ok(file) => Ok(Lock { file }),
        Err((_, nix::errno::Errno::EAGAIN)) => Err(StoreError::Locked(path.to_owned())),
        Err((_, error)) => Err(io::Error::from(error).into()),
    }
}

/// Notes that a store has packs from now on, in place: whoever uses the store has locked this file. The text stays
/// as long as it is, so that no crash leaves half of it.
pub(super) fn note_packs(disk: &dyn Disk) -> io::Result<()> {
    let file = disk.open(&DiskPath::Format, Access::ReadWrite)?;
    file.write_all_at(format!("{MAGIC}{VERSION_WITH_PACKS}\n").as_bytes(), 0)?;
    file.sync()
}

fn version(text: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(text).ok()?.trim_end();
    text.strip_prefix(MAGIC)?.parse().ok()
}

/// Whether a store has had packs.
pub(super) fn has_packs(disk: &dyn Disk) -> io::Result<bool> {
    let file = disk.open(&DiskPath::Format, Access::Read)?;
    Ok(version(&read_all(file.as_ref(), FORMAT_BYTES_MAX)?) == Some(VERSION_WITH_PACKS))
}

/// Refuses a store of another version.
pub fn check(disk: &dyn Disk, path: &Path) -> Result<(), StoreError> {
    let file: Box<dyn DiskFile> = disk.open(&DiskPath::Format, Access::Read)?;
    let bytes = read_all(file.as_ref(), FORMAT_BYTES_MAX).map_err(|_| not_a_store(path))?;
    match version(&bytes) {
        Some(VERSION | VERSION_WITH_PACKS) => Ok(()),
        Some(version) => Err(StoreError::Version(format!(
            "the store {} has format {version}, this kvfs reads formats {VERSION} and {VERSION_WITH_PACKS}: use \
             the kvfs that wrote it",
            path.display()
        ))),
        None => Err(not_a_store(path)),
    }
}

/// `FORMAT` is missing, or says nothing. Where everything else is there it is the only thing that is damaged.
pub(super) fn not_a_store(path: &Path) -> StoreError {
    if !["meta.redb", "objects"].iter().all(|name| path.join(name).exists()) {
        return StoreError::NotAStore(path.to_owned());
    }
    let file = lock_file(path);
    StoreError::Version(format!(
        "{} is damaged or missing, and the rest of a store is there: it has one line, \"{MAGIC}{VERSION_WITH_PACKS}\"; \
         write it anew and run kvfs fsck",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;

    #[test]
    fn a_store_is_made_once_locked_and_checked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let store = Store::open_or_create(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(matches!(Store::open(&path), Err(StoreError::Locked(_))));
        assert!(is_locked_for_writing(&path));
        store.lock.share().unwrap();
        assert!(!is_locked_for_writing(&path));
        drop(store);
        std::fs::write(path.join("FORMAT"), "kvfs store 99\n").unwrap();
        assert!(matches!(Store::open(&path), Err(StoreError::Version(_))));
        std::fs::write(path.join("FORMAT"), "something else").unwrap();
        assert!(matches!(Store::open(&path), Err(StoreError::NotAStore(_))));
    }

    #[test]
    fn the_lock_outlives_the_database() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let store = Store::open_or_create(&path).unwrap();
        let backend = store.metadata().unwrap();
        let metadata = crate::store::metadata::Metadata::open(backend).unwrap();
        drop(store);
        assert!(matches!(Store::open(&path), Err(StoreError::Locked(_))));
        drop(metadata);
        Store::open(&path).unwrap();
    }

    #[test]
    fn a_damaged_format_is_told_and_can_be_written_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        drop(Store::open_or_create(&path).unwrap().metadata().unwrap());
        for damage in [Some("kvfs stOre 2\n"), Some(""), None] {
            match damage {
                Some(text) => std::fs::write(path.join("FORMAT"), text).unwrap(),
                None => std::fs::remove_file(path.join("FORMAT")).unwrap(),
            }
            for outcome in [Store::open(&path), Store::open_or_create(&path)] {
                let told = outcome.unwrap_err().to_string();
                assert!(told.contains("FORMAT is damaged or missing"), "{told}");
                assert!(told.contains("\"kvfs store 2\""), "{told}");
            }
            std::fs::write(path.join("FORMAT"), "kvfs store 2\n").unwrap();
            Store::open(&path).unwrap();
        }
    }

    #[test]
    fn a_directory_with_other_files_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("thesis.tex"), "").unwrap();
        let outcome = Store::open_or_create(directory.path());
        assert!(matches!(outcome, Err(StoreError::NotAStore(_))));
    }
}
