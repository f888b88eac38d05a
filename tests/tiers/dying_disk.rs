//! The disk of a daemon that is killed: after so many changes nothing happens any more.
//!
//! It stands before the real disk, so what was changed until then is there afterwards, as after
//! SIGKILL, and nothing else is.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvfs::store::disk::{
    Access, Allocation, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Seek, Space,
};
use kvfs::store::record::Time;
use memmap2::Mmap;

/// Changes that are still allowed.
#[derive(Debug)]
pub(crate) struct Life {
    left: AtomicU64,
    is_over: AtomicBool,
}

impl Life {
    pub(crate) fn of(changes: u64) -> Arc<Life> {
        Arc::new(Life { left: AtomicU64::new(changes), is_over: AtomicBool::new(false) })
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn check(&self) -> io::Result<()> {
        if self.is_over() { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn change(&self) -> io::Result<()> {
        self.check()?;
        let spend = |left: u64| left.checked_sub(1);
        if self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend).is_err() {
            self.is_over.store(true, Ordering::SeqCst);
        }
        self.check()
    }
}

#[derive(Debug)]
pub(crate) struct DyingDisk {
    pub(crate) below: Arc<dyn Disk>,
    pub(crate) life: Arc<Life>,
}

#[derive(Debug)]
struct DyingFile {
    below: Box<dyn DiskFile>,
    life: Arc<Life>,
}

#[derive(Debug)]
struct DyingDatabase {
    below: Box<dyn redb::StorageBackend>,
    life: Arc<Life>,
}

impl DyingDisk {
    fn file(&self, below: Box<dyn DiskFile>) -> Box<dyn DiskFile> {
        Box::new(DyingFile { below, life: Arc::clone(&self.life) })
    }
}

impl Disk for DyingDisk {
    fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
        self.life.change()?;
        Ok(self.file(self.below.create(path)?))
    }
    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        self.life.check()?;
        Ok(self.file(self.below.open(path, access)?))
    }
    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        self.life.check()?;
        self.below.stat(path)
    }
    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
        self.life.change()?;
        self.below.rename(from, to)
    }
    fn remove(&self, path: &DiskPath) -> io::Result<()> {
        self.life.change()?;
        self.below.remove(path)
    }
    fn create_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        self.life.change()?;
        self.below.create_directory(directory)
    }
    fn sync_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        self.life.change()?;
        self.below.sync_directory(directory)
    }
    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
        self.life.check()?;
        self.below.list(directory)
    }
    fn space(&self) -> io::Result<Space> {
        self.below.space()
    }
    fn stack_depth(&self) -> io::Result<u32> {
        self.below.stack_depth()
    }
    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>> {
        let below = self.below.database(path)?;
        Ok(Box::new(DyingDatabase { below, life: Arc::clone(&self.life) }))
    }
}

impl DiskFile for DyingFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.life.check()?;
        self.below.read_at(buffer, offset)
    }
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.life.change()?;
        self.below.write_all_at(bytes, offset)
    }
    fn set_length(&self, length: u64) -> io::Result<()> {
        self.life.change()?;
        self.below.set_length(length)
    }
    fn map_at_rest(&self) -> Option<Mmap> {
        self.below.map_at_rest()
    }
    fn allocate(&self, allocation: Allocation) -> io::Result<()> {
        self.life.change()?;
        self.below.allocate(allocation)
    }
    fn seek(&self, offset: i64, seek: Seek) -> io::Result<u64> {
        self.below.seek(offset, seek)
    }
    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64> {
        let mut bytes = vec![0; usize::try_from(length).unwrap().min(1 << 20)];
        let count = self.read_at(&mut bytes, offset)?;
        target.write_all_at(&bytes[..count], target_offset)?;
        Ok(count as u64)
    }
    fn sync(&self) -> io::Result<()> {
        self.life.change()?;
        self.below.sync()
    }
    fn stat(&self) -> io::Result<FileStat> {
        self.below.stat()
    }
    fn set_modified(&self, mtime: Time) -> io::Result<()> {
        self.life.change()?;
        self.below.set_modified(mtime)
    }
    fn is_at_rest(&self) -> io::Result<bool> {
        self.below.is_at_rest()
    }
    fn is_unused(&self) -> io::Result<bool> {
        self.below.is_unused()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.below.descriptor()
    }
}

impl redb::StorageBackend for DyingDatabase {
    fn len(&self) -> io::Result<u64> {
        self.below.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.life.check()?;
        self.below.read(offset, out)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.life.change()?;
        self.below.set_len(length)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.life.change()?;
        self.below.sync_data()
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.life.change()?;
        self.below.write(offset, data)
    }
    fn close(&self) -> io::Result<()> {
        self.below.close()
    }
}
