//! [`Disk`] on media that nothing can be written to.
//!
//! A store is kept on such media to be read: it was copied there, or the disk must not change any more.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::record::ObjectId;

    #[test]
    fn all_can_be_read_and_nothing_changes() {
        let directory = tempfile::tempdir().unwrap();
        let below = LocalDisk::open(directory.path()).unwrap();
        below.create_directory(DiskDirectory::Staging).unwrap();
        let path = DiskPath::Staging(ObjectId(7));
        below.create(&path).unwrap().write_all_at(b"bytes", 0).unwrap();
        below.set_note(&path, b"note").unwrap();
        let (stat, space) = (below.stat(&path).unwrap(), below.space().unwrap());
        let disk = ReadOnlyDisk::new(below);
        assert!(disk.is_read_only());
        let file = disk.open(&path, Access::Read).unwrap();
        assert_eq!(crate::store::disk::read_all(file.as_ref(), 5).unwrap(), b"bytes");
        assert_eq!(disk.stat(&path).unwrap(), stat);
        assert_eq!(disk.note(&path).unwrap().as_deref(), Some(&b"note"[..]));
        assert_eq!(disk.list(DiskDirectory::Staging).unwrap(), [ObjectId(7).to_string()]);
        assert_eq!(disk.space().unwrap().total_bytes, space.total_bytes);
        assert_eq!(
            disk.stack_depth().unwrap(),
            LocalDisk::open(directory.path()).unwrap().stack_depth().unwrap()
        );
        assert!(disk.syncs_at_once() == 1 && !disk.sync_all_files(1_000_000).unwrap());
        let other = DiskPath::Staging(ObjectId(8));
        for refused in [
            disk.create(&other).map(drop),
            disk.open(&path, Access::ReadWrite).map(drop),
            disk.rename(&path, &other),
            disk.remove(&path),
            disk.create_directory(DiskDirectory::Objects),
            disk.sync_directory(DiskDirectory::Staging),
            disk.set_note(&path, b"other"),
        ] {
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EROFS));
        }
        assert_eq!(disk.stat(&path).unwrap(), stat);
    }

    #[test]
    fn what_a_database_writes_stays_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("meta.redb");
        std::fs::write(&place, [7; 100]).unwrap();
        let below = LocalDisk::open(directory.path()).unwrap();
        let below = Below(below.open(&DiskPath::Metadata, Access::Read).unwrap());
        assert_eq!(below.len().unwrap(), 100);
        let mut bytes = [0; 10];
        below.read(90, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 10]);
        let short = below.read(91, &mut bytes).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        for refused in [below.set_len(1), below.sync_data(), below.write(0, b"x")] {
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EROFS));
        }
        below.close().unwrap();
        let disk = ReadOnlyDisk::new(LocalDisk::open(directory.path()).unwrap());
        let database = disk.database(&DiskPath::Metadata).unwrap();
        database.write(0, &[8; 10]).unwrap();
        database.read(5, &mut bytes).unwrap();
        assert_eq!(bytes, [8, 8, 8, 8, 8, 7, 7, 7, 7, 7]);
        assert_eq!(std::fs::read(&place).unwrap(), [7; 100]);
    }
}
