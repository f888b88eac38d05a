//! A disk on which a packed object looks like one that has a file of its own.

use std::io;
use std::sync::Arc;

use super::Packs;
use super::file::stat_of;
use crate::store::disk::{
    Access, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Space, copy_all,
};
use crate::store::record::ObjectId;

/// A store's disk and its packs.
#[derive(Debug)]
pub struct PackedDisk {
    below: Arc<dyn Disk>,
    packs: Arc<Packs>,
}

impl PackedDisk {
    /// What lies on a disk, and in packs on the same disk.
    pub fn new(below: Arc<dyn Disk>, packs: Arc<Packs>) -> PackedDisk {
        PackedDisk { below, packs }
    }

    /// The object of a path, if its bytes are in a pack.
    fn packed(&self, path: &DiskPath) -> Option<ObjectId> {
        let DiskPath::Object(object) = path else { return None };
        self.packs.index().visible(*object).map(|_| *object)
    }
}

impl Disk for PackedDisk {
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
        match self.packed(path) {
            Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
            None => self.below.create(path),
        }
    }

    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        let Some(object) = self.packed(path) else { return self.below.open(path, access) };
        if access == Access::ReadWrite {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        match self.packs.file(object)? {
            Some(file) => Ok(Box::new(file)),
            None => self.below.open(path, access),
        }
    }

    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        if let DiskPath::Object(object) = path
            && let Some(entry) = self.packs.index().visible(*object)
        {
            return Ok(stat_of(entry));
        }
        self.below.stat(path)
    }

    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
        if let Some(object) = self.packed(from) {
            let source = self.open(from, Access::Read)?;
            // A rename takes the place of what is there.
            match self.below.remove(to) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let target = self.below.create(to)?;
            copy_all(source.as_ref(), target.as_ref())?;
            target.set_modified(source.stat()?.mtime)?;
            target.sync()?;
            self.packs.remove(object);
            return Ok(());
        }
        let DiskPath::Object(object) = to else { return self.below.rename(from, to) };
        let is_known = self.packs.index().get(*object).is_some();
        if is_known {
            // From the rename on the file counts, after a crash as well.
            self.packs.begin_to_change()?;
        }
        self.below.rename(from, to)?;
        if is_known {
            self.packs.remove(*object);
        }
        Ok(())
    }

    fn remove(&self, path: &DiskPath) -> io::Result<()> {
        if let Some(object) = self.packed(path) {
            self.packs.remove(object);
            return Ok(());
        }
        if let DiskPath::Object(object) = path {
            // What was taken out of a pack to be changed goes for good.
            self.packs.remove(*object);
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
        if let DiskDirectory::ObjectShard(shard) = directory {
            names.extend(self.packs.index().objects(shard).map(|object| object.to_string()));
        }
        Ok(names)
    }

    fn set_note(&self, path: &DiskPath, note: &[u8]) -> io::Result<()> {
        match self.packed(path) {
            Some(object) => self.packs.set_notes(&[(object, note.to_vec())]),
            None => self.below.set_note(path, note),
        }
    }

    fn note(&self, path: &DiskPath) -> io::Result<Option<Vec<u8>>> {
        match self.packed(path) {
            Some(object) => self.packs.note(object),
            None => self.below.note(path),
        }
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
