//! The store: where a mount's bytes and names live on the SSD.
//!
//! ```text
//! STORE/
//! ├── FORMAT          version of this layout; also the lock against a second daemon
//! ├── meta.redb       names, attributes, objects, reference counts
//! ├── meta.reserve    room for meta.redb on a full disk
//! ├── objects/ab/ID   one file per object that a committed name may refer to
//! ├── packs/N         the bytes of many small objects
//! ├── staging/ID      bytes being written; garbage after a crash
//! └── quarantine/     refused or corrupt bytes, each with its reason
//! ```
//!
//! Publishing has one order ([`commit`]): object bytes, fsync, rename into `objects/`, fsync of
//! the directory, then the commit of `meta.redb`. The commit is the last step, so a crash leaves
//! garbage files and never a name without its bytes.

pub(crate) mod arrivals;
pub mod buffer;
pub mod commit;
pub mod database;
pub mod description;
pub mod directories;
pub mod disk;
mod error;
pub mod event;
pub mod events;
mod flush;
pub mod format;
pub mod fsck;
pub mod held_back;

pub mod keys;
mod last_mount;
pub mod layer;
mod layout;
pub mod local_disk;
pub mod metadata;
mod overlay;
pub mod packs;
pub mod quarantine;
mod read_only_disk;
pub mod record;
mod records;
pub mod recovery;
mod reserve;
pub mod standing;
mod unlinked;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::tier::ram::RamTier;
use buffer::WriteBuffer;
use database::Backend;
use disk::{Access, Disk, DiskDirectory, DiskFile, DiskPath};
pub use error::StoreError;
use events::Events;
use packs::{PackedDisk, Packs};
use record::ObjectId;
use reserve::Reserve;

/// Of what is free, changes that wait for their commit may count on one part of so many: a client that writes past the
/// daemon may take the rest before it.
const SHARE_FOR_CHANGES: u64 = 4;

/// An open, locked store: its disk and what to do with the files on it.
#[derive(Clone, Debug)]
pub struct Store {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// What is in memory of it.
    pub buffer: WriteBuffer,
    /// What lies in packs on it.
    pub packs: Arc<Packs>,
    /// Copies in memory, and what the next commit will write to the disk.
    pub ram: Option<Arc<RamTier>>,
    /// What happened, on its way into the database.
    pub events: Arc<Events>,
    path: PathBuf,
    lock: Arc<format::Lock>,
    /// Room for the database on a full disk.
    reserve: Arc<Reserve>,
    /// Directories of objects from which names were removed since they were last synced.
    thinned: Arc<Mutex<BTreeSet<u8>>>,
}

impl Store {
    /// Opens a store, making one of an empty or missing directory.
    pub fn open_or_create(path: &Path) -> Result<Store, StoreError> {
        format::create_if_empty(path)?;
        Store::open(path)
    }

    /// Opens an existing store and locks it.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        Store::open_by(path, |is_read_only| format::lock(path, is_read_only))
    }

    /// Opens a store that is locked already, through the descriptor that has the lock.
    pub fn open_locked(path: &Path, lock: OwnedFd) -> Result<Store, StoreError> {
        Store::open_by(path, |is_read_only| format::keep_lock(path, lock, is_read_only))
    }

    /// The descriptor that has the store's lock.
    pub fn lock_descriptor(&self) -> BorrowedFd<'_> {
        self.lock.descriptor()
    }

    /// Whether this store is the one at `path`. It may have been moved since it was opened, which it needs no path for.
    ///
    /// # Errors
    /// There is none.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        self.lock.is_of(path)
    }

    fn open_by(
        path: &Path, lock: impl FnOnce(bool) -> Result<format::Lock, StoreError>,
    ) -> Result<Store, StoreError> {
        layout::check(path)?;
        let local = local_disk::LocalDisk::open(path)?;
        let is_mounted_so = local.is_on_read_only_media()?;
        let lock = lock(is_mounted_so)?;
        // Not before: whoever only looks whether the store is in use waits for no filesystem that stands still.
        let is_read_only = is_mounted_so || local.has_given_up();
        if is_read_only {
            lock.share()?;
        }
        let disk: Arc<dyn Disk> = if is_read_only {
            Arc::new(read_only_disk::ReadOnlyDisk::new(local))
        } else {
            Arc::new(local)
        };
        format::check(disk.as_ref(), path)?;
        let (buffer, packs, disk) = layers(disk)?;
        let (path, lock) = (path.to_owned(), Arc::new(lock));
        let (events, reserve, thinned) = (Arc::default(), Arc::default(), Arc::default());
        Ok(Store { disk, buffer, packs, ram: None, events, path, lock, reserve, thinned })
    }

    /// The same store on another disk.
    ///
    /// # Errors
    /// A pack on it cannot be read.
    pub fn set_disk(&mut self, disk: Arc<dyn Disk>) -> io::Result<()> {
        (self.buffer, self.packs, self.disk) = layers(disk)?;
        Ok(())
    }

    /// Where the store is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether nothing can be written where the store lies.
    pub fn is_read_only(&self) -> bool {
        self.disk.is_read_only()
    }

    /// Refuses a store that cannot be changed.
    pub fn check_writable(&self) -> Result<(), StoreError> {
        if self.is_read_only() { Err(StoreError::ReadOnlyMedia(self.path.clone())) } else { Ok(()) }
    }

    /// The database in `storage`, which keeps the store locked until it is closed.
    pub(crate) fn database(&self, storage: Box<dyn redb::StorageBackend>) -> Backend {
        let (disk, reserve) = (Arc::clone(&self.disk), Arc::clone(&self.reserve));
        Backend { storage, disk, reserve, lock: Arc::clone(&self.lock) }
    }

    /// Takes room on the disk, as far as some is missing, that the database gets when there is no other.
    ///
    /// # Errors
    /// ENOSPC or EDQUOT: the disk is full, and what is added now might keep it so.
    pub fn fill_reserve(&self) -> io::Result<()> {
        if self.is_read_only() { Ok(()) } else { self.reserve.fill(self.disk.as_ref()) }
    }

    /// Bytes that changes can count on when they are written out: what is kept for them, and a part of what is free,
    /// which others may take meanwhile.
    pub fn room_for_changes_bytes(&self) -> io::Result<u64> {
        let kept_bytes = self.reserve.held_bytes(self.disk.as_ref())?;
        Ok(kept_bytes + self.disk.space()?.available_bytes / SHARE_FOR_CHANGES)
    }

    /// The store's database. Where there is none, one is made under another name first: what a
    /// crash left of a database that was being made could not be opened any more.
    ///
    /// Where there are objects, a new one is refused: the next mount would take all of them for garbage.
    pub fn metadata(&self) -> Result<Backend, StoreError> {
        if !self.has_metadata()? {
            if self.has_objects()? {
                return Err(StoreError::MetadataMissing(self.path.clone()));
            }
            if self.is_read_only() {
                // The store was made and never mounted: it is empty.
                return Ok(self.database(Box::new(redb::backends::InMemoryBackend::new())));
            }
            self.remove_if_there(&DiskPath::MetadataStaging)?;
            let storage = self.disk.database(&DiskPath::MetadataStaging)?;
            database::create(self.database(storage))?;
            self.disk.rename(&DiskPath::MetadataStaging, &DiskPath::Metadata)?;
            self.disk.sync_directory(DiskDirectory::Store)?;
        }
        Ok(self.database(self.disk.database(&DiskPath::Metadata)?))
    }

    /// Whether there is a database. An empty file is none.
    pub(crate) fn has_metadata(&self) -> io::Result<bool> {
        match self.disk.stat(&DiskPath::Metadata) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            outcome => Ok(outcome?.length > 0),
        }
    }

    /// Whether there is any file of an object.
    pub(crate) fn has_objects(&self) -> io::Result<bool> {
        for shard in 0..=u8::MAX {
            let names = self.disk.list(DiskDirectory::ObjectShard(shard))?;
            if names.iter().any(|name| DiskPath::stored(name).is_some()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn remove_if_there(&self, path: &DiskPath) -> io::Result<()> {
        match self.remove(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes a file; [`Store::sync_removals`] makes that durable.
    pub fn remove(&self, path: &DiskPath) -> io::Result<()> {
        self.disk.remove(path)?;
        if let DiskPath::Object(object) | DiskPath::Encoded(object) = path {
            self.thinned().insert(disk::shard(*object));
        }
        Ok(())
    }

    /// Makes all removals durable. A mount that ends in good order promises that there is no
    /// garbage, and the next one will not look for any.
    pub fn sync_removals(&self) -> io::Result<()> {
        let shards = std::mem::take(&mut *self.thinned());
        for shard in shards {
            self.disk.sync_directory(DiskDirectory::ObjectShard(shard))?;
        }
        Ok(())
    }

    fn thinned(&self) -> MutexGuard<'_, BTreeSet<u8>> {
        self.thinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the file of a new object in `staging/`.
    pub fn create_object(&self, object: ObjectId) -> io::Result<Box<dyn DiskFile>> {
        self.disk.create(&DiskPath::Staging(object))
    }

    /// Makes the file of a new object that will most likely be put into a pack, in memory until then, if there is
    /// room.
    pub fn create_small(
        &self, object: ObjectId, access: Access,
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        self.buffer.create_in_memory(object, self.packs.packed_bytes_max(), access)
    }

    /// Makes the file of a new object of up to `bytes` in memory, if there is room.
    pub fn create_in_ram(
        &self, object: ObjectId, bytes: u64, access: Access,
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        let Some(ram) = &self.ram else {
            return Ok(None);
        };
        if !self.disk.space()?.can_take(ram.budget_bytes()) {
            return Ok(None);
        }
        ram.create(object, bytes, access)
    }

    /// A file without a name, for bytes that nobody needs after a crash.
    pub fn scratch(&self) -> io::Result<Box<dyn DiskFile>> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let path = DiskPath::Scratch(NUMBER.fetch_add(1, Ordering::Relaxed));
        let file = self.disk.create(&path)?;
        self.disk.remove(&path)?;
        Ok(file)
    }

    /// Opens an object's file wherever it lies, in memory first. A commit may move it from
    /// `staging/` to `objects/` at any time, never back, so looking twice in that order finds it.
    pub fn open_object(&self, object: ObjectId, access: Access) -> io::Result<Box<dyn DiskFile>> {
        if let Some(outcome) = self.ram.as_ref().and_then(|ram| ram.open_copy(object, access)) {
            return outcome;
        }
        self.find(object, |path| self.disk.open(path, access))
    }

    /// The same for an object that was just written, which most likely is in `staging/` still.
    pub fn open_written(&self, object: ObjectId, access: Access) -> io::Result<Box<dyn DiskFile>> {
        if let Some(outcome) = self.ram.as_ref().and_then(|ram| ram.open_copy(object, access)) {
            return outcome;
        }
        match self.disk.open(&DiskPath::Staging(object), access) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.disk.open(&DiskPath::Object(object), access)
            }
            outcome => outcome,
        }
    }

    /// `fstat` of an object's file.
    pub fn stat_object(&self, object: ObjectId) -> io::Result<disk::FileStat> {
        if let Some(outcome) = self.ram.as_ref().and_then(|ram| ram.stat(object)) {
            return outcome;
        }
        self.find(object, |path| self.disk.stat(path))
    }

    /// What the files of an object take of the disk; `None` if it has none of its own there.
    pub fn file_bytes(&self, object: ObjectId) -> Option<u64> {
        if self.packs.holds(object) || self.buffer.holds(object) {
            return None;
        }
        let raw = self.find(object, |path| self.disk.stat(path));
        let files = [raw, self.disk.stat(&DiskPath::Encoded(object))];
        let blocks = files.into_iter().flatten().map(|stat| stat.blocks);
        blocks.reduce(|sum, blocks| sum + blocks).map(|blocks| blocks.saturating_mul(512))
    }

    /// Removes an object's files; one that is already gone is fine.
    pub fn remove_object(&self, object: ObjectId) -> io::Result<()> {
        self.remove_raw(object)?;
        self.remove_encoded(object)
    }

    /// Removes the encoded copy of an object, if there is one.
    pub fn remove_encoded(&self, object: ObjectId) -> io::Result<()> {
        self.remove_if_there(&DiskPath::Encoded(object))
    }

    /// Looks for an object's file where it may lie.
    fn find<T>(
        &self, object: ObjectId, mut act: impl FnMut(&DiskPath) -> io::Result<T>,
    ) -> io::Result<T> {
        let (staging, stored) = (DiskPath::Staging(object), DiskPath::Object(object));
        if !self.buffer.holds(object) {
            match act(&stored) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                outcome => return outcome,
            }
        }
        match act(&staging) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => act(&stored),
            outcome => outcome,
        }
    }

    /// Removes an object's files but for an encoded copy.
    pub fn remove_raw(&self, object: ObjectId) -> io::Result<()> {
        if let Some(ram) = &self.ram {
            ram.remove(object);
        }
        match self.find(object, |path| self.remove(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        }
    }
}

/// The write buffer and the packs in front of a disk, and the disk as it looks through both.
fn layers(disk: Arc<dyn Disk>) -> io::Result<(WriteBuffer, Arc<Packs>, Arc<dyn Disk>)> {
    let buffer = WriteBuffer::new(disk);
    let disk: Arc<dyn Disk> = Arc::new(buffer.clone());
    let packs = Arc::new(Packs::open(Arc::clone(&disk))?);
    let disk = Arc::new(PackedDisk::new(disk, Arc::clone(&packs)));
    Ok((buffer, packs, disk))
}

#[cfg(test)]
mod faulty_disk;
