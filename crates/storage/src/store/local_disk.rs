//! [`Disk`] on a directory of a real filesystem.
//!
//! Every path is resolved beneath the store's own descriptor without following a symbolic link,
//! so nothing that somebody plants in a store can lead the daemon out of it.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::OFlag;
use nix::sys::memfd::MFdFlags;
use nix::sys::stat::Mode;
use nix::unistd::UnlinkatFlags;

use super::disk::{
    Access, Allocation, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Seek, Space,
};
use super::record::Time;
use memmap2::Mmap;

/// Only the owner may look into a store: the cache holds users' prompts.
const FILE_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);
const DIRECTORY_MODE: Mode = FILE_MODE.union(Mode::S_IXUSR);

/// Files synced at a time. A disk gathers their flushes: 10,000 files of 4 KiB on a virtio disk took 1.8 s one
/// by one, 0.9 s with 4 threads, 0.6 s with 16, and 1.6 s with 32.
const SYNCS_AT_ONCE: usize = 16;

/// From so many files on all are synced at once: below, what others write to the same filesystem would cost more
/// than is saved.
const SYNCED_TOGETHER_MIN: usize = 64;

/// Most bytes that the machine's filesystems may have to write for all files of the store's filesystem to be
/// synced at once: others' as well, and a commit waits for all of them. A disk of today takes a third of a
/// second for so many.
const SYNCED_TOGETHER_BYTES_MAX: u64 = 256 << 20;

/// The attribute that holds a file's note.
const NOTE: &CStr = c"user.kvfs.note";

/// A store's directory on a local filesystem.
#[derive(Debug)]
pub struct LocalDisk {
    root: OwnedFd,
}

/// A file of it.
#[derive(Debug)]
struct LocalFile(File);

impl LocalDisk {
    /// Opens an existing directory.
    pub fn open(path: &Path) -> io::Result<LocalDisk> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let root = nix::fcntl::open(path, flags, Mode::empty())?;
        Ok(LocalDisk { root })
    }

    /// The directory that this descriptor stands for.
    pub fn at(root: OwnedFd) -> LocalDisk {
        LocalDisk { root }
    }

    /// Whether the directory is on a filesystem that is mounted for reading.
    pub(super) fn is_on_read_only_media(&self) -> io::Result<bool> {
        let stat = nix::sys::statvfs::fstatvfs(&self.root)?;
        Ok(stat.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY))
    }

    /// Whether the filesystem refuses every change although it is mounted for writing: it has given up after an error, which
    /// ext4 shows in none of its flags (`emergency_ro`).
    pub(super) fn has_given_up(&self) -> bool {
        // A file without a name. Whatever else keeps it from being made is found by whoever has something to write.
        let made = self.openat(Path::new("."), OFlag::O_TMPFILE | OFlag::O_WRONLY, FILE_MODE);
        made.is_err_and(|error| error.kind() == io::ErrorKind::ReadOnlyFilesystem)
    }

    /// Whether `syncfs(2)` does for each file what `fsync(2)` does. Where it only asks somebody else (FUSE, network
    /// filesystems, overlays), nothing is known of what that does.
    fn syncs_as_a_whole(&self) -> io::Result<bool> {
        use nix::sys::statfs::{BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC};
        let kind = nix::sys::statfs::fstatfs(&self.root)?.filesystem_type();
        Ok([EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC].contains(&kind))
    }

    /// Opens what is a regular file. A FIFO in its place would keep whoever opens it waiting for its other end, and with them
    /// all that wait for that thread.
    fn open_regular(&self, path: &Path, flags: OFlag) -> io::Result<File> {
        let file = match self.openat(path, flags | OFlag::O_NONBLOCK, Mode::empty()) {
            // Somebody looks whether it is in use, by a lease, which only regular files have.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.openat(path, flags, Mode::empty())?
            }
            // What is found there all the same is a link, a directory, a socket, or a FIFO that nobody reads.
            Err(error)
                if error.kind() != io::ErrorKind::NotFound
                    && self
                        .openat(path, OFlag::O_PATH | OFlag::O_NOFOLLOW, Mode::empty())
                        .is_ok_and(|found| {
                            found.metadata().is_ok_and(|found| !found.is_file())
                        }) =>
            {
                return Err(no_regular_file());
            }
            outcome => outcome?,
        };
        // A FIFO is as long as an empty file, and so is a directory on many filesystems.
        if !file.metadata()?.is_file() {
            return Err(no_regular_file());
        }
        Ok(file)
    }

    fn openat(&self, path: &Path, flags: OFlag, mode: Mode) -> io::Result<File> {
        crate::sys::open_beneath(&self.root, path, flags, mode)
    }
}

fn no_regular_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is no regular file")
}

impl AsFd for LocalDisk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

/// A file in memory that has no name, and goes with its last descriptor.
pub fn anonymous_file(label: &CStr) -> io::Result<Arc<dyn DiskFile>> {
    let file = nix::sys::memfd::memfd_create(label, MFdFlags::MFD_CLOEXEC)?;
    Ok(Arc::new(LocalFile(File::from(file))))
}

/// A path to a file that `O_PATH` has found: a descriptor that counts as opened would be taken for
/// a reader by whoever asks whether the file is in use.
fn by_descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Bytes that the machine has yet to write to its disks; `None` if the kernel does not say.
fn waiting_bytes() -> Option<u64> {
    Some(crate::sys::memory_bytes("Dirty")? + crate::sys::memory_bytes("Writeback")?)
}

impl Disk for LocalDisk {
    fn syncs_at_once(&self) -> usize {
        SYNCS_AT_ONCE
    }

    /// 10,000 files of 4 KiB on a virtio disk: 0.2 s, and 0.85 s with a sync of each.
    ///
    /// The descriptor is as old as the mount, so the kernel tells it of every failure since, whoever else has
    /// heard of it (`errseq_t`). But that may be of a file of somebody else.
    fn sync_all_files(&self, instead_of: usize) -> io::Result<bool> {
        if instead_of < SYNCED_TOGETHER_MIN || !self.syncs_as_a_whole()? {
            return Ok(false);
        }
        let is_little = waiting_bytes().is_some_and(|bytes| bytes <= SYNCED_TOGETHER_BYTES_MAX);
        Ok(is_little && nix::unistd::syncfs(&self.root).is_ok())
    }

    fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
        Ok(Box::new(LocalFile(self.openat(&path.relative(), flags, FILE_MODE)?)))
    }

    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        let flags = match access {
            Access::Read => OFlag::O_RDONLY,
            Access::ReadWrite => OFlag::O_RDWR,
        };
        Ok(Box::new(LocalFile(self.open_regular(&path.relative(), flags)?)))
    }

    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        let stat = nix::sys::stat::fstatat(
            &self.root,
            &path.relative(),
            nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW,
        )?;
        Ok(FileStat {
            length: u64::try_from(stat.st_size).unwrap_or(0),
            blocks: u64::try_from(stat.st_blocks).unwrap_or(0),
            mtime: time(stat.st_mtime, stat.st_mtime_nsec),
            inode: stat.st_ino,
        })
    }

    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
        nix::fcntl::renameat(&self.root, &from.relative(), &self.root, &to.relative())?;
        Ok(())
    }

    fn remove(&self, path: &DiskPath) -> io::Result<()> {
        let remove = |flags| nix::unistd::unlinkat(&self.root, &path.relative(), flags);
        match remove(UnlinkatFlags::NoRemoveDir) {
            // Somebody has put it in the place of an object; with something in it it stays.
            Err(nix::errno::Errno::EISDIR) if matches!(path, DiskPath::Object(_)) => {
                Ok(remove(UnlinkatFlags::RemoveDir)?)
            }
            outcome => Ok(outcome?),
        }
    }

    fn create_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        match nix::sys::stat::mkdirat(&self.root, &directory.relative(), DIRECTORY_MODE) {
            Ok(()) | Err(nix::errno::Errno::EEXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn sync_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        self.openat(&directory.relative(), flags, Mode::empty())?.sync_all()
    }

    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let file = match self.openat(&directory.relative(), flags, Mode::empty()) {
            // Every store has it; what took it away took what was in it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && directory.is_ours() => {
                return Ok(Vec::new());
            }
            outcome => outcome?,
        };
        let mut names = Vec::new();
        for entry in nix::dir::Dir::from_fd(OwnedFd::from(file))?.iter() {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn set_note(&self, path: &DiskPath, note: &[u8]) -> io::Result<()> {
        let file = self.openat(&path.relative(), OFlag::O_PATH, Mode::empty())?;
        crate::sys::set_extended_attribute(&by_descriptor(&file), NOTE, note)
    }

    fn note(&self, path: &DiskPath) -> io::Result<Option<Vec<u8>>> {
        let file = self.openat(&path.relative(), OFlag::O_PATH, Mode::empty())?;
        crate::sys::long_extended_attribute(&by_descriptor(&file), NOTE)
    }

    fn space(&self) -> io::Result<Space> {
        let stat = nix::sys::statvfs::fstatvfs(&self.root)?;
        let block = stat.fragment_size();
        Ok(Space {
            total_bytes: stat.blocks().saturating_mul(block),
            free_bytes: stat.blocks_free().saturating_mul(block),
            available_bytes: stat.blocks_available().saturating_mul(block),
            inodes_total: stat.files(),
            inodes_free: stat.files_free(),
        })
    }

    fn stack_depth(&self) -> io::Result<u32> {
        let kind = nix::sys::statfs::fstatfs(&self.root)?.filesystem_type();
        Ok(u32::from(kind == nix::sys::statfs::OVERLAYFS_SUPER_MAGIC))
    }

    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT;
        let file = self.openat(&path.relative(), flags, FILE_MODE)?;
        let backend = redb::backends::FileBackend::new(file).map_err(io::Error::other)?;
        Ok(Box::new(backend))
    }
}

impl DiskFile for LocalFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.0.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn map_at_rest(&self) -> Option<Mmap> {
        crate::sys::map_populated(&self.0).ok()
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn allocate(&self, allocation: Allocation) -> io::Result<()> {
        let mode = nix::fcntl::FallocateFlags::from_bits_retain(allocation.mode);
        nix::fcntl::fallocate(
            &self.0,
            mode,
            signed(allocation.offset)?,
            signed(allocation.length)?,
        )?;
        Ok(())
    }

    fn seek(&self, offset: i64, seek: Seek) -> io::Result<u64> {
        let whence = match seek {
            Seek::Data => nix::unistd::Whence::SeekData,
            Seek::Hole => nix::unistd::Whence::SeekHole,
        };
        let position = nix::unistd::lseek(&self.0, offset, whence)?;
        u64::try_from(position).map_err(io::Error::other)
    }

    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64> {
        // A file of another kind is like one on another filesystem: the caller copies by hand.
        let elsewhere = || io::Error::from_raw_os_error(libc::EXDEV);
        let descriptor = target.descriptor().ok_or_else(elsewhere)?;
        let (mut from, mut to) = (signed(offset)?, signed(target_offset)?);
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let copied = nix::fcntl::copy_file_range(
            &self.0,
            Some(&mut from),
            descriptor,
            Some(&mut to),
            length,
        )?;
        Ok(copied as u64)
    }

    fn bypass_cache(&self) -> bool {
        // Filesystems without it answer EINVAL.
        let flags = nix::fcntl::FcntlArg::F_SETFL(OFlag::O_DIRECT);
        nix::fcntl::fcntl(&self.0, flags).is_ok()
    }

    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        let rest = self.0.metadata()?.len().saturating_sub(offset);
        let length = usize::try_from(length.min(rest)).map_err(io::Error::other)?;
        crate::sys::populate(&self.0, offset, length)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn stat(&self) -> io::Result<FileStat> {
        let metadata = self.0.metadata()?;
        Ok(FileStat {
            length: metadata.len(),
            blocks: metadata.blocks(),
            mtime: time(metadata.mtime(), metadata.mtime_nsec()),
            inode: metadata.ino(),
        })
    }

    fn set_modified(&self, mtime: Time) -> io::Result<()> {
        let omit = nix::sys::time::TimeSpec::UTIME_OMIT;
        let mtime = nix::sys::time::TimeSpec::new(mtime.seconds, i64::from(mtime.nanoseconds));
        nix::sys::stat::futimens(&self.0, &omit, &mtime)?;
        Ok(())
    }

    fn is_at_rest(&self) -> io::Result<bool> {
        crate::sys::is_at_rest(self.0.as_fd())
    }

    fn is_unused(&self) -> io::Result<bool> {
        crate::sys::is_unused(self.0.as_fd())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

fn time(seconds: i64, nanoseconds: i64) -> Time {
    Time { seconds, nanoseconds: u32::try_from(nanoseconds).unwrap_or(0) }
}

fn signed(value: u64) -> io::Result<i64> {
    i64::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

#[cfg(test)]
mod tests;
