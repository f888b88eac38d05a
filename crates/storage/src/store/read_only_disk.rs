//! [`Disk`] on media that nothing can be written to.
//!
//! A store is kept on such media to be read: it was copied there, or the disk shall not change any more.
//! Whatever would change it fails with EROFS here, wherever it comes from. What the database writes while it
//! is open, beginning with the mark that it is in use, stays in memory.

use std::io;

use redb::StorageBackend;

use super::disk::{Access, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Space};
use super::local_disk::LocalDisk;
use super::overlay::Overlay;

/// A store's directory on read-only media.
#[derive(Debug)]
pub(super) struct ReadOnlyDisk(LocalDisk);

impl ReadOnlyDisk {
    pub(super) fn new(disk: LocalDisk) -> ReadOnlyDisk {
        ReadOnlyDisk(disk)
    }
}

fn refused<T>() -> io::Result<T> {
    Err(io::Error::from_raw_os_error(libc::EROFS))
}

impl Disk for ReadOnlyDisk {
    fn is_read_only(&self) -> bool {
        true
    }

    fn create(&self, _path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
        refused()
    }

    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        match access {
            Access::Read => self.0.open(path, access),
            Access::ReadWrite => refused(),
        }
    }

    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        self.0.stat(path)
    }

    fn rename(&self, _from: &DiskPath, _to: &DiskPath) -> io::Result<()> {
        refused()
    }

    fn remove(&self, _path: &DiskPath) -> io::Result<()> {
        refused()
    }

    fn create_directory(&self, _directory: DiskDirectory) -> io::Result<()> {
        refused()
    }

    fn sync_directory(&self, _directory: DiskDirectory) -> io::Result<()> {
        refused()
    }

    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
        self.0.list(directory)
    }

    fn set_note(&self, _path: &DiskPath, _note: &[u8]) -> io::Result<()> {
        refused()
    }

    fn note(&self, path: &DiskPath) -> io::Result<Option<Vec<u8>>> {
        self.0.note(path)
    }

    fn space(&self) -> io::Result<Space> {
        self.0.space()
    }

    fn stack_depth(&self) -> io::Result<u32> {
        self.0.stack_depth()
    }

    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn StorageBackend>> {
        let below = Below(self.0.open(path, Access::Read)?);
        Ok(Box::new(Overlay::new(Box::new(below))?))
    }
}

/// A database file that is only read; the overlay above it keeps what is written.
#[derive(Debug)]
struct Below(Box<dyn DiskFile>);

impl StorageBackend for Below {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.stat()?.length)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let count = self.0.read_at(out, offset)?;
        if count == out.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn set_len(&self, _length: u64) -> io::Result<()> {
        refused()
    }

    fn sync_data(&self) -> io::Result<()> {
        refused()
    }

    fn write(&self, _offset: u64, _data: &[u8]) -> io::Result<()> {
        refused()
    }

    fn close(&self) -> io::Result<()> {
        Ok(())
    }
}
