//! A file of the write buffer, and its open handles.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use memmap2::Mmap;

use super::{BYTES_MAX, WriteBuffer};
use crate::store::disk::{Access, Allocation, DiskFile, FileStat, Seek, seek_without_holes};
use crate::store::record::{ObjectId, Time};

/// The bytes of an object that began in memory.
#[derive(Debug)]
pub(super) struct Buffered {
    pub(super) object: ObjectId,
    /// More than these it has on the disk only.
    bytes_max: u64,
    /// Held by whoever changes it, also while the disk is waited for: those who read do not wait then.
    changing: Mutex<()>,
    contents: RwLock<Contents>,
    handles: AtomicUsize,
    writers: AtomicUsize,
    /// Of all files of the buffer.
    used_bytes: Arc<AtomicU64>,
    /// Files of the buffer that are open and in memory, and whether this is one of them. Both change while the buffer's
    /// files are locked.
    open_files: Arc<AtomicUsize>,
    is_counted: AtomicBool,
}

/// The right to change a file.
pub(super) type Turn<'a> = MutexGuard<'a, ()>;

/// Where they are.
#[derive(Debug)]
pub(super) enum Contents {
    /// In memory.
    Memory {
        bytes: Vec<u8>,
        modified: Time,
        /// Nobody has removed it.
        has_name: bool,
    },
    /// In a file of the disk.
    Disk {
        reader: Arc<dyn DiskFile>,
        /// Kept as long as somebody has the file open for writing: a probe of the disk would take it for a writer.
        writer: Option<Arc<dyn DiskFile>>,
    },
}

impl Buffered {
    /// An empty file that nobody has open.
    pub(super) fn new(
        object: ObjectId, bytes_max: u64, used_bytes: Arc<AtomicU64>, open_files: Arc<AtomicUsize>,
    ) -> Buffered {
        let contents =
            Contents::Memory { bytes: Vec::new(), modified: Time::now(), has_name: true };
        Buffered {
            object,
            bytes_max: bytes_max.min(BYTES_MAX),
            changing: Mutex::default(),
            contents: RwLock::new(contents),
            handles: AtomicUsize::new(0),
            writers: AtomicUsize::new(0),
            used_bytes,
            open_files,
            is_counted: AtomicBool::new(false),
        }
    }

    /// Counts it among those that are open and in memory, or does not any more. The buffer's files are locked.
    pub(super) fn count_open(&self, is_open: bool) {
        if self.is_counted.swap(is_open, Ordering::AcqRel) == is_open {
            return;
        }
        if is_open {
            self.open_files.fetch_add(1, Ordering::Relaxed);
        } else {
            self.open_files.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn turn(&self) -> Turn<'_> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn contents(&self) -> RwLockReadGuard<'_, Contents> {
        self.contents.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never held while the disk is waited for.
    pub(super) fn contents_mut(&self, _turn: &Turn<'_>) -> RwLockWriteGuard<'_, Contents> {
        self.contents.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the descriptor for writing on the disk if nobody writes any more.
    pub(super) fn let_go_of_writer(&self, turn: &Turn<'_>) {
        if let Contents::Disk { writer, .. } = &mut *self.contents_mut(turn)
            && !self.has_writers()
        {
            *writer = None;
        }
    }

    /// Whether a handle for writing is open.
    pub(super) fn has_writers(&self) -> bool {
        self.writers.load(Ordering::Acquire) > 0
    }

    /// `fstat`
    pub(super) fn stat(&self) -> io::Result<FileStat> {
        match &*self.contents() {
            Contents::Memory { bytes, modified, .. } => Ok(FileStat {
                length: bytes.len() as u64,
                blocks: (bytes.len() as u64).div_ceil(512),
                mtime: *modified,
                inode: inode_of(self.object),
            }),
            Contents::Disk { reader, .. } => reader.stat(),
        }
    }

    /// So many bytes are not in memory any more.
    pub(super) fn give_back(&self, bytes: usize) {
        self.used_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Makes a file in memory `length` bytes long, if there is room for that.
    fn resize(&self, bytes: &mut Vec<u8>, length: u64) -> bool {
        let Some(length_in_memory) =
            usize::try_from(length).ok().filter(|_| length <= self.bytes_max)
        else {
            return false;
        };
        if length_in_memory > bytes.len() {
            let more = (length_in_memory - bytes.len()) as u64;
            let taken =
                self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                    used.checked_add(more).filter(|used| *used <= BYTES_MAX)
                });
            if taken.is_err() {
                return false;
            }
        } else {
            self.give_back(bytes.len() - length_in_memory);
        }
        bytes.resize(length_in_memory, 0);
        true
    }
}

impl Drop for Buffered {
    fn drop(&mut self) {
        if let Contents::Memory { bytes, .. } = &*self.contents() {
            self.give_back(bytes.len());
        }
    }
}

/// A number that neither a file of a disk nor one in a pack has.
fn inode_of(object: ObjectId) -> u64 {
    0b11 << 62 | object.0
}

/// An open handle.
#[derive(Debug)]
pub(super) struct Open {
    file: Arc<Buffered>,
    buffer: WriteBuffer,
    access: Access,
}

impl Open {
    /// Opens a file that was found among those of the buffer, which are locked.
    pub(super) fn new(file: Arc<Buffered>, buffer: WriteBuffer, access: Access) -> Open {
        file.handles.fetch_add(1, Ordering::AcqRel);
        file.count_open(true);
        if access == Access::ReadWrite {
            file.writers.fetch_add(1, Ordering::AcqRel);
        }
        Open { file, buffer, access }
    }

    /// The file on the disk, for writing, put there if it is still in memory.
    fn on_disk<T>(&self, act: impl FnOnce(&dyn DiskFile) -> io::Result<T>) -> io::Result<T> {
        self.buffer.write_out(&self.file, &self.file.turn())?;
        let file = match &*self.file.contents() {
            Contents::Disk { reader, writer } => Arc::clone(writer.as_ref().unwrap_or(reader)),
            Contents::Memory { .. } => return Err(io::ErrorKind::Unsupported.into()),
        };
        act(file.as_ref())
    }

    fn check_writable(&self) -> io::Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::Read => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.access == Access::ReadWrite
            && self.file.writers.fetch_sub(1, Ordering::AcqRel) == 1
            && matches!(&*self.file.contents(), Contents::Disk { .. })
        {
            self.file.let_go_of_writer(&self.file.turn());
        }
        let _files = self.buffer.files();
        if self.file.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.file.count_open(false);
        }
    }
}

impl DiskFile for Open {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match &*self.file.contents() {
            Contents::Memory { bytes, .. } => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                let count = buffer.len().min(bytes.len() - start);
                buffer[..count].copy_from_slice(&bytes[start..start + count]);
                Ok(count)
            }
            Contents::Disk { reader, .. } => reader.read_at(buffer, offset),
        }
    }

    fn write_all_at(&self, written: &[u8], offset: u64) -> io::Result<()> {
        self.check_writable()?;
        let too_large = || io::Error::from_raw_os_error(libc::EFBIG);
        let end = offset.checked_add(written.len() as u64).ok_or_else(too_large)?;
        let turn = self.file.turn();
        if let Contents::Memory { bytes, modified, .. } = &mut *self.file.contents_mut(&turn) {
            let length = end.max(bytes.len() as u64);
            if self.file.resize(bytes, length) {
                let start = usize::try_from(offset).map_err(|_| too_large())?;
                bytes[start..start + written.len()].copy_from_slice(written);
                *modified = Time::now();
                return Ok(());
            }
        }
        drop(turn);
        self.on_disk(|file| file.write_all_at(written, offset))
    }

    fn write_waits(&self, offset: u64, length: u64) -> bool {
        let Contents::Memory { bytes, .. } = &*self.file.contents() else { return false };
        let end = offset.saturating_add(length);
        let more = end.saturating_sub(bytes.len() as u64);
        end > self.file.bytes_max || self.buffer.used_bytes().saturating_add(more) > BYTES_MAX
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.check_writable()?;
        let turn = self.file.turn();
        if let Contents::Memory { bytes, modified, .. } = &mut *self.file.contents_mut(&turn)
            && self.file.resize(bytes, length)
        {
            *modified = Time::now();
            return Ok(());
        }
        drop(turn);
        self.on_disk(|file| file.set_length(length))
    }

    fn map_at_rest(&self) -> Option<Mmap> {
        match &*self.file.contents() {
            Contents::Memory { .. } => None,
            Contents::Disk { reader, .. } => reader.map_at_rest(),
        }
    }

    fn allocate(&self, allocation: Allocation) -> io::Result<()> {
        self.check_writable()?;
        self.on_disk(|file| file.allocate(allocation))
    }

    fn seek(&self, offset: i64, seek: Seek) -> io::Result<u64> {
        let length = match &*self.file.contents() {
            Contents::Disk { reader, .. } => return reader.seek(offset, seek),
            Contents::Memory { bytes, .. } => bytes.len() as u64,
        };
        seek_without_holes(offset, seek, length)
    }

    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64> {
        let bytes = match &*self.file.contents() {
            Contents::Disk { reader, .. } => {
                return reader.copy_to(offset, target, target_offset, length);
            }
            Contents::Memory { bytes, .. } => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                let count = usize::try_from(length).unwrap_or(usize::MAX).min(bytes.len() - start);
                bytes[start..start + count].to_vec()
            }
        };
        // The target may be this very file.
        target.write_all_at(&bytes, target_offset)?;
        Ok(bytes.len() as u64)
    }

    fn bypass_cache(&self) -> bool {
        false
    }

    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        match &*self.file.contents() {
            Contents::Memory { .. } => Ok(()),
            Contents::Disk { reader, .. } => reader.populate(offset, length),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.on_disk(|file| file.sync())
    }

    fn stat(&self) -> io::Result<FileStat> {
        self.file.stat()
    }

    fn set_modified(&self, mtime: Time) -> io::Result<()> {
        let turn = self.file.turn();
        if let Contents::Memory { modified, .. } = &mut *self.file.contents_mut(&turn) {
            *modified = mtime;
            return Ok(());
        }
        drop(turn);
        self.on_disk(|file| file.set_modified(mtime))
    }

    fn is_at_rest(&self) -> io::Result<bool> {
        if self.file.has_writers() {
            return Ok(false);
        }
        match &*self.file.contents() {
            Contents::Memory { .. } => Ok(true),
            Contents::Disk { reader, .. } => reader.is_at_rest(),
        }
    }

    fn is_unused(&self) -> io::Result<bool> {
        if self.file.handles.load(Ordering::Acquire) > 1 {
            return Ok(false);
        }
        match &*self.file.contents() {
            Contents::Memory { .. } => Ok(true),
            Contents::Disk { reader, .. } => reader.is_unused(),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
