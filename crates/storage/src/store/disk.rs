//! The one door to the disk: every byte of a store passes through [`Disk`] and [`DiskFile`].
//!
//! It is narrow so that a simulated disk can stand in for the real one ([`super::local_disk`])
//! in crash tests. Nothing else in kvfs renames, creates or removes a file of a store.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use super::record::{ObjectId, Time};

impl FileStat {
    /// Whether both are of the same file with the same content. Blocks do not count: they change
    /// when the kernel writes back.
    pub fn is_same_content(&self, other: &FileStat) -> bool {
        (self.inode, self.length, self.mtime) == (other.inode, other.length, other.mtime)
    }
}

/// What direct I/O demands of memory and offsets: the largest logical block of today's disks.
pub const DIRECT_ALIGNMENT: u64 = 4096;

/// Names of files in a store. There is no way to name anything outside of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DiskPath {
    /// `FORMAT`
    Format,
    /// `FORMAT.tmp`, only while a store is being made.
    FormatStaging,
    /// `meta.redb`
    Metadata,
    /// `meta.redb.tmp`, only while the database is being made.
    MetadataStaging,
    /// `meta.reserve`: room for the database on a full disk.
    Reserve,
    /// `staging/<id>`: bytes that no committed name refers to.
    Staging(ObjectId),
    /// `staging/scratch-<n>`: unlinked as soon as it is open.
    Scratch(u64),
    /// `staging/<id>.in`: an object on its way from the remote.
    Incoming(ObjectId),
    /// `staging/<id>.z`: an encoded copy that is being made.
    Encoding(ObjectId),
    /// `objects/ab/<id>`: bytes that a committed name may refer to.
    Object(ObjectId),
    /// `objects/ab/<id>.z`: the same bytes encoded.
    Encoded(ObjectId),
    /// `<id>` on the RAM tier's own filesystem.
    Ram(ObjectId),
    /// `packs/<n>`: the bytes of many small objects.
    Pack(u32),
    /// `quarantine/<name>`: refused or corrupt bytes, and beside them the reason.
    Quarantine(String),
}

/// Directories of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DiskDirectory {
    /// The store itself.
    Store,
    /// `objects/`
    Objects,
    /// `objects/ab/`
    ObjectShard(u8),
    /// `staging/`
    Staging,
    /// `packs/`
    Packs,
    /// `quarantine/`
    Quarantine,
}

/// The directory below `objects/` that holds an object. Neighbouring numbers share one, so that
/// a group commit syncs few directories.
pub fn shard(object: ObjectId) -> u8 {
    (object.0 >> 8).to_le_bytes()[0]
}

impl DiskDirectory {
    /// Whether every store has it from its beginning.
    pub(super) fn is_ours(self) -> bool {
        !matches!(self, DiskDirectory::Store | DiskDirectory::Packs)
    }

    /// Path relative to the store.
    pub fn relative(self) -> PathBuf {
        match self {
            DiskDirectory::Store => PathBuf::from("."),
            DiskDirectory::Objects => PathBuf::from("objects"),
            DiskDirectory::ObjectShard(shard) => PathBuf::from(format!("objects/{shard:02x}")),
            DiskDirectory::Staging => PathBuf::from("staging"),
            DiskDirectory::Packs => PathBuf::from("packs"),
            DiskDirectory::Quarantine => PathBuf::from("quarantine"),
        }
    }
}

/// How the names of [`DiskPath::Incoming`] end.
const INCOMING: &str = ".in";
/// How the names of [`DiskPath::Encoded`] and [`DiskPath::Encoding`] end.
const ENCODED: &str = ".z";

impl DiskPath {
    /// What a name in `staging/` stands for.
    pub fn staged(name: &str) -> Option<DiskPath> {
        if let Some(number) = name.strip_prefix("scratch-") {
            return number.parse().ok().map(DiskPath::Scratch);
        }
        if let Some(id) = name.strip_suffix(INCOMING) {
            return super::recovery::parse(id).map(DiskPath::Incoming);
        }
        if let Some(id) = name.strip_suffix(ENCODED) {
            return super::recovery::parse(id).map(DiskPath::Encoding);
        }
        super::recovery::parse(name).map(DiskPath::Staging)
    }

    /// What a name in a directory below `objects/` stands for.
    pub fn stored(name: &str) -> Option<DiskPath> {
        match name.strip_suffix(ENCODED) {
            Some(id) => super::recovery::parse(id).map(DiskPath::Encoded),
            None => super::recovery::parse(name).map(DiskPath::Object),
        }
    }

    /// Path relative to the store.
    pub fn relative(&self) -> PathBuf {
        match self {
            DiskPath::Format => PathBuf::from("FORMAT"),
            DiskPath::FormatStaging => PathBuf::from("FORMAT.tmp"),
            DiskPath::Metadata => PathBuf::from("meta.redb"),
            DiskPath::MetadataStaging => PathBuf::from("meta.redb.tmp"),
            DiskPath::Reserve => PathBuf::from("meta.reserve"),
            DiskPath::Staging(object) => PathBuf::from(format!("staging/{object}")),
            DiskPath::Scratch(number) => PathBuf::from(format!("staging/scratch-{number}")),
            DiskPath::Incoming(object) => PathBuf::from(format!("staging/{object}{INCOMING}")),
            DiskPath::Encoding(object) => PathBuf::from(format!("staging/{object}{ENCODED}")),
            DiskPath::Object(object) => stored_path(*object, ""),
            DiskPath::Encoded(object) => stored_path(*object, ENCODED),
            DiskPath::Ram(object) => PathBuf::from(object.to_string()),
            DiskPath::Pack(number) => PathBuf::from(format!("packs/{number:08x}")),
            DiskPath::Quarantine(name) => PathBuf::from(format!("quarantine/{name}")),
        }
    }
}

/// `objects/ab/<id>` with an ending. Each open of a file asks for it, and `format!` takes half a microsecond.
fn stored_path(object: ObjectId, ending: &str) -> PathBuf {
    let mut path = String::with_capacity(32);
    path.push_str("objects/");
    push_hexadecimal(&mut path, &[shard(object)]);
    path.push('/');
    push_hexadecimal(&mut path, &object.0.to_be_bytes());
    path.push_str(ending);
    PathBuf::from(path)
}

fn push_hexadecimal(path: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for digit in bytes.iter().flat_map(|byte| [byte >> 4, byte & 0xf]) {
        path.push(char::from(DIGITS[usize::from(digit)]));
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read-only. The fd counts as no writer, and may be registered for passthrough.
    Read,
    /// Read and write.
    ReadWrite,
}

/// What `fstat` tells of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    /// Length in bytes.
    pub length: u64,
    /// Blocks of 512 bytes.
    pub blocks: u64,
    /// Last modification.
    pub mtime: Time,
    /// Inode number on the disk.
    pub inode: u64,
}

/// Free and used space of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Size of the filesystem in bytes.
    pub total_bytes: u64,
    /// Free bytes, those reserved for root included.
    pub free_bytes: u64,
    /// Bytes that an ordinary user may still write.
    pub available_bytes: u64,
    /// Inodes in all.
    pub inodes_total: u64,
    /// Inodes free.
    pub inodes_free: u64,
}

/// A disk that has fewer bytes available is nearly full ...
const NEARLY_FULL_BYTES: u64 = 64 << 20;
/// ... or a small one that has less than one part of so many.
const NEARLY_FULL_SHARE: u64 = 8;

impl Space {
    /// Whether what can wait should leave the rest to others, and what can go should go at once.
    pub fn is_nearly_full(&self) -> bool {
        self.available_bytes < self.nearly_full_bytes()
    }

    /// Available bytes below which it is.
    pub fn nearly_full_bytes(&self) -> u64 {
        NEARLY_FULL_BYTES.min(self.total_bytes / NEARLY_FULL_SHARE)
    }

    /// Whether new files may be made in a memory of that size. What is taken there must fit on the
    /// disk, whatever others write to it until the next commit: on a disk that is nearly full, writers
    /// hear of it at once.
    pub fn can_take(&self, memory_bytes: u64) -> bool {
        self.available_bytes / 2 >= memory_bytes
    }
}

/// A disk that holds one store.
pub trait Disk: Debug + Send + Sync {
    /// Whether nothing can be written to it, ever: it is no disk that failed.
    fn is_read_only(&self) -> bool {
        false
    }
    /// How many files are worth syncing at a time. On a simulated disk one after the other: its steps have
    /// an order.
    fn syncs_at_once(&self) -> usize {
        1
    }
    /// Makes the bytes of all files durable at once, if that costs less than to sync so many of them one by one.
    /// Whether it did; if not, nothing is known of any.
    fn sync_all_files(&self, _instead_of: usize) -> io::Result<bool> {
        Ok(false)
    }
    /// Creates a file, readable and writable by the owner alone; an existing one is an error.
    fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>>;
    /// Opens an existing file.
    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>>;
    /// `fstat` without opening.
    fn stat(&self, path: &DiskPath) -> io::Result<FileStat>;
    /// Renames over whatever is there. Durable only after [`Disk::sync_directory`].
    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &DiskPath) -> io::Result<()>;
    /// Creates a directory; an existing one is fine.
    fn create_directory(&self, directory: DiskDirectory) -> io::Result<()>;
    /// Makes the names in a directory durable.
    fn sync_directory(&self, directory: DiskDirectory) -> io::Result<()>;
    /// Names of the files in a directory.
    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>>;
    /// Keeps some bytes beside those of a file, instead of what was kept before.
    fn set_note(&self, _path: &DiskPath, _note: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// What [`Disk::set_note`] has kept, if anything.
    fn note(&self, _path: &DiskPath) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }
    /// Free and used space.
    fn space(&self) -> io::Result<Space>;
    /// Stacked filesystems below the store (1 on overlayfs): the kernel wants to know when it is
    /// to pass files through.
    fn stack_depth(&self) -> io::Result<u32>;
    /// A file that holds a database, made if it is not there.
    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>>;
}

/// A range operation of `fallocate(2)`, passed on with its mode bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// `FALLOC_FL_*`.
    pub mode: i32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Where `lseek(2)` looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// `SEEK_DATA`
    Data,
    /// `SEEK_HOLE`
    Hole,
}

/// `lseek(2)` in a file of this length whose holes, if it has any, are told as data.
///
/// # Errors
/// ENXIO at the end of the file, and behind it.
pub fn seek_without_holes(offset: i64, seek: Seek, length: u64) -> io::Result<u64> {
    let beyond = || io::Error::from_raw_os_error(libc::ENXIO);
    let offset = u64::try_from(offset).ok().filter(|offset| *offset < length);
    let offset = offset.ok_or_else(beyond)?;
    Ok(match seek {
        Seek::Data => offset,
        Seek::Hole => length,
    })
}

/// Whether an error tells of the file, as it lies on the disk, and not of a process that has too little of something, or
/// of a part of the store that is [away for a while](is_unavailable).
pub fn is_of_file(error: &io::Error) -> bool {
    let of_process = [libc::EINTR, libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    !is_unavailable(error) && !error.raw_os_error().is_some_and(|code| of_process.contains(&code))
}

/// Whether an error says that a file is not what was written: it was cut, or is no file.
pub fn is_damage(error: &io::Error) -> bool {
    [io::ErrorKind::InvalidData, io::ErrorKind::UnexpectedEof].contains(&error.kind())
}

/// Whether the disk cannot read a file, by an error that says nothing of its bytes: they may be read again some day. What
/// may be wrong with who reads it, or with the directory that it is in, is neither.
pub fn is_unreadable(error: &io::Error) -> bool {
    let elsewhere =
        [libc::EACCES, libc::EPERM, libc::ENOENT, libc::ENOTDIR, libc::ELOOP, libc::ESTALE];
    is_of_file(error)
        && !is_damage(error)
        && !error.raw_os_error().is_some_and(|code| elsewhere.contains(&code))
}

/// Whether a part of the store is away for a while.
pub fn is_unavailable(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy
}

/// An error of a part of the store that may come back.
pub(super) fn unavailable(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, why)
}

/// An open file of a store.
pub trait DiskFile: Debug + Send + Sync {
    /// Reads at an offset; short only at the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all at an offset.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Whether such a write makes a file on the disk first, which may take the local filesystem's journal.
    fn write_waits(&self, _offset: u64, _length: u64) -> bool {
        false
    }
    /// Truncates or extends.
    fn set_length(&self, length: u64) -> io::Result<()>;
    /// The whole file, read into memory, where the disk can map it. Only for files to which nobody
    /// can write any more.
    fn map_at_rest(&self) -> Option<Mmap>;
    /// `fallocate(2)`
    fn allocate(&self, allocation: Allocation) -> io::Result<()>;
    /// `lseek(2)` for holes and data.
    fn seek(&self, offset: i64, seek: Seek) -> io::Result<u64>;
    /// Copies a range into another file, in the kernel where it can.
    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64>;
    /// Makes writes from now on go past the page cache, if the disk can; whether it does. Then
    /// buffer, offset and length of each must be multiples of [`DIRECT_ALIGNMENT`].
    fn bypass_cache(&self) -> bool {
        false
    }
    /// Reads a range, as far as the file goes, into the page cache in large pieces, if the disk can.
    fn populate(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }
    /// Makes the content durable.
    fn sync(&self) -> io::Result<()>;
    /// `fstat`
    fn stat(&self) -> io::Result<FileStat>;
    /// Sets the modification time.
    fn set_modified(&self, mtime: Time) -> io::Result<()>;
    /// Whether nobody else can write to the file: no open writer and no shared writable mapping.
    /// Only for files opened with [`Access::Read`].
    fn is_at_rest(&self) -> io::Result<bool>;
    /// Whether nobody else has the file open or mapped at all.
    /// Only for files opened with [`Access::Read`].
    fn is_unused(&self) -> io::Result<bool>;
    /// The descriptor, where the file is a real one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// Reads a whole small file.
pub fn read_all(file: &dyn DiskFile, length_max: u64) -> io::Result<Vec<u8>> {
    let length = file.stat()?.length;
    if length > length_max {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("file of {length} bytes exceeds the limit {length_max}"),
        ));
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => filled += count,
        }
    }
    Ok(bytes)
}

/// Bytes per read and write where the kernel does not copy: as much as a second-level cache holds.
const COPY_BYTES: usize = 1 << 20;

/// Copies a whole file, keeping holes out of the question: every byte is written.
pub fn copy_all(from: &dyn DiskFile, to: &dyn DiskFile) -> io::Result<u64> {
    copy_beginning(from, to, u64::MAX)
}

/// Copies at most so many bytes of a file, from its beginning. Returns how many there were.
pub fn copy_beginning(from: &dyn DiskFile, to: &dyn DiskFile, bytes_max: u64) -> io::Result<u64> {
    let length = from.stat()?.length.min(bytes_max);
    let mut copied = 0;
    while copied < length {
        match from.copy_to(copied, to, copied, length - copied) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => copied += count,
            // The kernel copies only within a filesystem.
            Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {
                return copy_by_hand(from, to, length);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(copied)
}

fn copy_by_hand(from: &dyn DiskFile, to: &dyn DiskFile, length: u64) -> io::Result<u64> {
    // Read and not mapped: a writer may still be there.
    let mut buffer = vec![0; COPY_BYTES];
    let mut copied = 0;
    while copied < length {
        match from.read_at(&mut buffer, copied)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                to.write_all_at(&buffer[..count], copied)?;
                copied += count as u64;
            }
        }
    }
    Ok(copied)
}

#[cfg(test)]
mod tests;
