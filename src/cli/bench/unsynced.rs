//! A disk that makes nothing durable: a store with 100,000 pages is built in seconds. Everything
//! is flushed at once before anything is measured.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use memmap2::Mmap;

use crate::store::disk::{
    Access, Allocation, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Seek, Space,
};
use crate::store::record::Time;

/// Passes everything on but syncs.
#[derive(Debug)]
pub(super) struct Unsynced(pub(super) Arc<dyn Disk>);

#[derive(Debug)]
struct UnsyncedFile(Box<dyn DiskFile>);

fn wrap(file: Box<dyn DiskFile>) -> Box<dyn DiskFile> {
    Box::new(UnsyncedFile(file))
}

impl Disk for Unsynced {
    fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
        self.0.create(path).map(wrap)
    }

    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        self.0.open(path, access).map(wrap)
    }

    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        self.0.stat(path)
    }

    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn remove(&self, path: &DiskPath) -> io::Result<()> {
        self.0.remove(path)
    }

    fn create_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        self.0.create_directory(directory)
    }

    fn sync_directory(&self, _directory: DiskDirectory) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
        self.0.list(directory)
    }

    fn space(&self) -> io::Result<Space> {
        self.0.space()
    }

    fn stack_depth(&self) -> io::Result<u32> {
        self.0.stack_depth()
    }

    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>> {
        self.0.database(path)
    }
}

impl DiskFile for UnsyncedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }

    fn map_at_rest(&self) -> Option<Mmap> {
        self.0.map_at_rest()
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.0.set_length(length)
    }

    fn allocate(&self, allocation: Allocation) -> io::Result<()> {
        self.0.allocate(allocation)
    }

    fn seek(&self, offset: i64, seek: Seek) -> io::Result<u64> {
        self.0.seek(offset, seek)
    }

    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64> {
        self.0.copy_to(offset, target, target_offset, length)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn stat(&self) -> io::Result<FileStat> {
        self.0.stat()
    }

    fn set_modified(&self, mtime: Time) -> io::Result<()> {
        self.0.set_modified(mtime)
    }

    fn is_at_rest(&self) -> io::Result<bool> {
        self.0.is_at_rest()
    }

    fn is_unused(&self) -> io::Result<bool> {
        self.0.is_unused()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.0.descriptor()
    }
}
