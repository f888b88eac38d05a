//! Small files that are being written lie in memory until a commit puts them into a pack.
//!
//! Making, opening and removing a file of the local filesystem costs some 100 us, more than all that a client
//! asks for; and what is in `staging/` is garbage after a crash as well. So the file of a new object that will most
//! likely be small is one of the [`WriteBuffer`] first. Where it becomes large, or must be on the disk by itself
//! (it is synced, or a commit finds it open), its bytes are *written out* to a file in `staging/`, and everybody
//! who has it open goes on with that.
//!
//! It stands between a store and its disk: whoever works with a path need not know.

mod file;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use file::{Buffered, Contents, Open, Turn};

use super::disk::{Access, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Space};
use super::record::{ObjectId, Time};

/// Bytes of all files: a commit a second takes them away, 15,000 of 4 KiB.
const BYTES_MAX: u64 = 64 << 20;

/// Files, some 300 bytes each beside their own: as many as changes wait for a commit at most.
const FILES_MAX: usize = 50_000;

/// A disk whose new small files lie in memory. Clones are the same buffer.
#[derive(Clone, Debug)]
pub struct WriteBuffer {
    below: Arc<dyn Disk>,
    files: Arc<Mutex<HashMap<ObjectId, Arc<Buffered>>>>,
    used_bytes: Arc<AtomicU64>,
    open_files: Arc<AtomicUsize>,
}

impl WriteBuffer {
    /// An empty buffer in front of a disk.
    pub fn new(below: Arc<dyn Disk>) -> WriteBuffer {
        WriteBuffer {
            below,
            files: Arc::default(),
            used_bytes: Arc::default(),
            open_files: Arc::default(),
        }
    }

    /// Makes the file of a new object in memory, for as long as it has at most `bytes_max`. `None` if there is no
    /// room, or the disk may lack it by the time that a commit comes.
    ///
    /// # Errors
    /// The disk does not say how much room it has.
    pub fn create_in_memory(
        &self, object: ObjectId, bytes_max: u64, access: Access,
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        if !self.below.space()?.can_take(BYTES_MAX) {
            return Ok(None);
        }
        let mut files = self.files();
        let has_room =
            files.len() < FILES_MAX && self.used_bytes.load(Ordering::Relaxed) < BYTES_MAX;
        if !has_room || files.contains_key(&object) {
            return Ok(None);
        }
        let used_bytes = Arc::clone(&self.used_bytes);
        let open_files = Arc::clone(&self.open_files);
        let file = Arc::new(Buffered::new(object, bytes_max, used_bytes, open_files));
        files.insert(object, Arc::clone(&file));
        Ok(Some(Box::new(Open::new(file, self.clone(), access))))
    }

    /// Whether the file of an object is in memory.
    pub fn holds(&self, object: ObjectId) -> bool {
        self.files().contains_key(&object)
    }

    /// Bytes that are in memory only.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Files in memory that somebody has open: where one is put on the disk, it takes descriptors as long as that is so.
    pub fn open_files(&self) -> usize {
        self.open_files.load(Ordering::Relaxed)
    }

    /// Whoever has them waits for nothing.
    fn files(&self) -> MutexGuard<'_, HashMap<ObjectId, Arc<Buffered>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file that a path leads to, if that is in memory.
    fn buffered(&self, path: &DiskPath) -> Option<Arc<Buffered>> {
        let DiskPath::Staging(object) = path else { return None };
        self.files().get(object).cloned()
    }

    /// Puts the file of an object on the disk, if it is in memory.
    ///
    /// # Errors
    /// The disk fails, or has no room.
    pub fn put_on_disk(&self, object: ObjectId) -> io::Result<()> {
        let file = self.buffered(&DiskPath::Staging(object));
        file.map_or(Ok(()), |file| self.write_out(&file, &file.turn()))
    }

    /// Puts all files on the disk that are in memory.
    ///
    /// # Errors
    /// The disk fails, or has no room.
    pub fn put_all_on_disk(&self) -> io::Result<()> {
        let objects: Vec<ObjectId> = self.files().keys().copied().collect();
        objects.into_iter().try_for_each(|object| self.put_on_disk(object))
    }

    /// Puts a file on the disk, unless it is there already: without a name, if somebody has removed that.
    ///
    /// Whoever reads goes on meanwhile; whoever changes waits.
    fn write_out(&self, file: &Buffered, turn: &Turn<'_>) -> io::Result<()> {
        let path = DiskPath::Staging(file.object);
        let (bytes, reader, writer) = {
            let contents = file.contents();
            let Contents::Memory { bytes, modified, has_name } = &*contents else { return Ok(()) };
            let made = self.make_file(&path, bytes, *modified).and_then(|writer| {
                let reader = self.below.open(&path, Access::Read)?;
                if !*has_name {
                    self.below.remove(&path)?;
                }
                Ok((bytes.len(), Arc::from(reader), Arc::from(writer)))
            });
            match made {
                // Somebody else's file is not ours to remove.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
                Err(error) => {
                    let _ = self.below.remove(&path);
                    return Err(error);
                }
                Ok(made) => made,
            }
        };
        *file.contents_mut(turn) = Contents::Disk { reader, writer: Some(writer) };
        file.give_back(bytes);
        // From now on nobody opens the file in memory any more: whoever did so is counted.
        {
            let mut files = self.files();
            files.remove(&file.object);
            file.count_open(false);
        }
        file.let_go_of_writer(turn);
        Ok(())
    }

    fn make_file(
        &self, path: &DiskPath, bytes: &[u8], modified: Time,
    ) -> io::Result<Box<dyn DiskFile>> {
        let made = self.below.create(path)?;
        made.write_all_at(bytes, 0)?;
        made.set_modified(modified)?;
        Ok(made)
    }
}

impl Disk for WriteBuffer {
    fn is_read_only(&self) -> bool {
        self.below.is_read_only()
    }

    fn syncs_at_once(&self) -> usize {
        self.below.syncs_at_once()
    }

    fn sync_all_files(&self, instead_of: usize) -> io::Result<bool> {
        self.below.sync_all_files(instead_of)
    }

    fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
        match self.buffered(path) {
            Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
            None => self.below.create(path),
        }
    }

    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        if let DiskPath::Staging(object) = path {
            let files = self.files();
            if let Some(file) = files.get(object) {
                return Ok(Box::new(Open::new(Arc::clone(file), self.clone(), access)));
            }
        }
        self.below.open(path, access)
    }

    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        match self.buffered(path) {
            Some(file) => file.stat(),
            None => self.below.stat(path),
        }
    }

    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
        if let DiskPath::Staging(object) = from {
            self.put_on_disk(*object)?;
        }
        self.below.rename(from, to)
    }

    fn remove(&self, path: &DiskPath) -> io::Result<()> {
        if let Some(file) = self.buffered(path) {
            let turn = file.turn();
            let mut contents = file.contents_mut(&turn);
            if let Contents::Memory { has_name, .. } = &mut *contents {
                if std::mem::replace(has_name, false) {
                    self.files().remove(&file.object);
                    return Ok(());
                }
                return Err(io::ErrorKind::NotFound.into());
            }
        }
        self.below.remove(path)
    }

    fn create_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        self.below.create_directory(directory)
    }

    fn sync_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        self.below.sync_directory(directory)
    }

    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
        let mut names = self.below.list(directory)?;
        if directory == DiskDirectory::Staging {
            names.extend(self.files().keys().map(ToString::to_string));
        }
        Ok(names)
    }

    fn set_note(&self, path: &DiskPath, note: &[u8]) -> io::Result<()> {
        self.below.set_note(path, note)
    }

    fn note(&self, path: &DiskPath) -> io::Result<Option<Vec<u8>>> {
        self.below.note(path)
    }

    fn space(&self) -> io::Result<Space> {
        self.below.space()
    }

    fn stack_depth(&self) -> io::Result<u32> {
        self.below.stack_depth()
    }

    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>> {
        self.below.database(path)
    }
}
