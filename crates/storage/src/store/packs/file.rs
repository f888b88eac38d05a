//! A file that is a record of a pack. It can be read, and nothing else.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError, RwLock};

use memmap2::Mmap;

use super::holes::HeldOpen;
use super::index::{Entry, Index};
use super::opening::Pack;
use super::pack::PackFile;
use super::record::{HEADER_BYTES, Header, Place, record_bytes};
use crate::store::disk::{
    Access, Allocation, Disk, DiskFile, DiskPath, FileStat, Seek, seek_without_holes,
};
use crate::store::record::{ObjectId, Time};

/// The bytes of an object in a pack. If somebody takes them out to change them, they are read from there.
#[derive(Debug)]
pub(super) struct PackedFile {
    pub(super) object: ObjectId,
    pub(super) entry: Entry,
    pub(super) pack: Arc<Pack>,
    pub(super) index: Arc<RwLock<Index>>,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) _held: HeldOpen,
}

/// `fstat` of the bytes at an entry.
pub(super) fn stat_of(entry: &Entry) -> FileStat {
    FileStat {
        length: u64::from(entry.length),
        blocks: record_bytes(u64::from(entry.length)) / 512,
        mtime: entry.mtime,
        inode: inode_of(entry.place),
    }
}

/// A number that no file of a disk has, and that says where the bytes are.
fn inode_of(place: Place) -> u64 {
    1 << 63 | u64::from(place.pack) << 32 | u64::from(place.offset)
}

fn refused<T>() -> io::Result<T> {
    Err(io::Error::from_raw_os_error(libc::EROFS))
}

impl PackedFile {
    /// The file of its own that the object has by now, if it has one.
    ///
    /// # Errors
    /// There is one, and it cannot be opened: what is in the pack is not what the object has any more.
    fn own_file(&self) -> io::Result<Option<Box<dyn DiskFile>>> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        if index.visible(self.object).is_some() {
            return Ok(None);
        }
        drop(index);
        for path in [DiskPath::Staging(self.object), DiskPath::Object(self.object)] {
            match self.disk.open(&path, Access::Read) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                opened => return opened.map(Some),
            }
        }
        Ok(None)
    }

    /// Its pack, which was there when this was opened.
    fn pack(&self) -> io::Result<PackFile> {
        let is_known = |header: &Header| self.entry.is_of(self.object, header);
        let opened = self.pack.open(|file| file.check(self.entry.place.offset, is_known));
        opened.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::from_raw_os_error(libc::EIO),
            _ => error,
        })
    }

    /// Where in the pack a byte is, and how many there are from there.
    fn within(&self, offset: u64) -> (u64, u64) {
        let rest = u64::from(self.entry.length).saturating_sub(offset);
        (u64::from(self.entry.place.offset) + HEADER_BYTES + offset, rest)
    }
}

impl DiskFile for PackedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        if let Some(file) = self.own_file()? {
            return file.read_at(buffer, offset);
        }
        let (at, rest) = self.within(offset);
        let count = buffer.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
        match self.pack()?.file.read_at(&mut buffer[..count], at)? {
            read if read == count => Ok(read),
            // Somebody has cut the pack.
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn write_all_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<()> {
        refused()
    }

    fn set_length(&self, _length: u64) -> io::Result<()> {
        refused()
    }

    fn map_at_rest(&self) -> Option<Mmap> {
        None
    }

    fn allocate(&self, _allocation: Allocation) -> io::Result<()> {
        refused()
    }

    fn seek(&self, offset: i64, seek: Seek) -> io::Result<u64> {
        seek_without_holes(offset, seek, self.stat()?.length)
    }

    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64> {
        if let Some(file) = self.own_file()? {
            return file.copy_to(offset, target, target_offset, length);
        }
        let (at, rest) = self.within(offset);
        let wanted = length.min(rest);
        match self.pack()?.file.copy_to(at, target, target_offset, wanted)? {
            0 if wanted > 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            copied => Ok(copied),
        }
    }

    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        let (at, rest) = self.within(offset);
        self.pack()?.file.populate(at, length.min(rest))
    }

    fn sync(&self) -> io::Result<()> {
        match self.own_file()? {
            Some(file) => file.sync(),
            // What is in a pack is durable before an object has it. Whoever adds to the pack must hear of what became
            // of that himself: an error is told once.
            None => Ok(()),
        }
    }

    fn stat(&self) -> io::Result<FileStat> {
        match self.own_file()? {
            Some(file) => file.stat(),
            None => Ok(stat_of(&self.entry)),
        }
    }

    fn set_modified(&self, _mtime: Time) -> io::Result<()> {
        refused()
    }

    fn is_at_rest(&self) -> io::Result<bool> {
        match self.own_file()? {
            Some(file) => file.is_at_rest(),
            None => Ok(true),
        }
    }

    fn is_unused(&self) -> io::Result<bool> {
        Ok(true)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
