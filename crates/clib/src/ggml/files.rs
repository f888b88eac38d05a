//! Where the tensors of a cache are: files below the directory that `KVFS_KV` names.
//!
//! ```text
//! KVFS_KV/0/cache_k_l0        rows of K of layer 0, as the engine lays them out
//! KVFS_KV/0/cache_v_l0
//! KVFS_KV/0/lock              taken by the process that has the cache
//! KVFS_KV/1/...               the next cache: another process, draft model or kind of layer
//! ```
//!
//! Numbers are used again, so an engine that is killed leaves at most what it had.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvfs_os::mountinfo;
use nix::fcntl::{FallocateFlags, fallocate};

use super::region::OS_PAGE_BYTES;
use crate::sys;

/// Most caches below one directory: no machine runs more engines.
const CACHES_MAX: usize = 256;

/// In the directory of a cache, taken by the process that has it.
const LOCK: &str = "lock";

/// The environment variable that turns the backend on.
pub(super) const VARIABLE: &str = "KVFS_KV";

/// The directory that `value`, the variable's, stands for, made if it is missing.
///
/// # Errors
/// A line that says why it cannot be used.
pub(super) fn directory(value: &Path) -> Result<PathBuf, String> {
    let fail = |why: &dyn std::fmt::Display| format!("{VARIABLE}={}: {why}", value.display());
    let path = std::path::absolute(value).map_err(|error| fail(&error))?;
    let is_there = |path: &&Path| match path.symlink_metadata() {
        Err(error) => error.kind() != io::ErrorKind::NotFound,
        Ok(_) => true,
    };
    let there = path.ancestors().find(is_there).unwrap_or(&path);
    let explain = |error: io::Error| match error.raw_os_error() {
        Some(errno) if sys::is_daemon_gone(errno) => {
            fail(&"its daemon is gone: mount the store again")
        }
        _ => fail(&error),
    };
    let resolved = there.canonicalize().map_err(explain)?;
    let (mount, _) = mountinfo::kvfs_above(&resolved)
        .map_err(|_| fail(&"not in a kvfs mount: mount the store first"))?;
    // In a mountpoint itself plain files have a place of their own.
    let is_mountpoint = there == path && resolved == mount.mountpoint;
    let directory = if is_mountpoint { path.join("files/llama") } else { path };
    fs::create_dir_all(&directory).map_err(explain)?;
    Ok(directory)
}

/// The files of one cache. Others may have the number once this is dropped.
#[derive(Debug)]
pub(super) struct CacheFiles {
    directory: PathBuf,
    _lock: File,
}

impl CacheFiles {
    /// Takes the first number that nobody has.
    pub(super) fn take(parent: &Path) -> Result<Self, String> {
        let fail = |path: &Path, error: &io::Error| format!("{}: {error}", path.display());
        for number in 0..CACHES_MAX {
            let directory = parent.join(number.to_string());
            fs::create_dir_all(&directory).map_err(|error| fail(&directory, &error))?;
            let path = directory.join(LOCK);
            let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
            let lock = lock.map_err(|error| fail(&path, &error))?;
            match lock.try_lock() {
                Ok(()) => {
                    remove_caches(&directory).map_err(|error| fail(&directory, &error))?;
                    return Ok(Self { directory, _lock: lock });
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(fail(&path, &error)),
            }
        }
        Err(format!("{}: {CACHES_MAX} caches are in use", parent.display()))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A file of zeros whose space is there: a write to a mapping of it cannot run out of disk.
    ///
    /// # Errors
    /// A line with the path and what to do.
    pub(super) fn create(&self, name: &str, length: usize) -> Result<File, String> {
        let path = self.path(name);
        create_file(&path, length).map_err(|error| {
            // Half a cache is of no use, and whoever makes room must not find it.
            let _ = fs::remove_file(&path);
            let why = if error.kind() == io::ErrorKind::StorageFull {
                format!("no space for {length} bytes of the KV cache: free some, or use a smaller context")
            } else {
                error.to_string()
            };
            format!("{}: {why}", path.display())
        })
    }
}

fn create_file(path: &Path, length: usize) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(path)?;
    let bytes = i64::try_from(length).map_err(io::Error::other)?;
    if let Err(error) = fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        // A full disk gave what it had: back at once, or the store cannot even note the removal.
        let _ = file.set_len(0);
        return Err(error.into());
    }
    Ok(file)
}

/// Bytes of a file of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) offset: usize,
    pub(super) length: usize,
}

impl Piece {
    /// Its bytes in a buffer that [`CacheFile::read`] has filled.
    pub(super) fn rows<'b>(&self, buffer: &'b [u8]) -> &'b [u8] {
        &buffer[self.offset % OS_PAGE_BYTES..][..self.length]
    }
}

/// A file of a cache, to be read past the page cache: what is read like this takes no place from
/// what is in memory. The kernel writes what is still to be written first.
#[derive(Debug)]
pub(super) struct CacheFile {
    file: File,
    /// Groups of cells that have left memory, in the K of a layer.
    cold: Mutex<Vec<bool>>,
    /// Bytes whose place in memory other files have.
    covered: Mutex<Vec<Range<usize>>>,
}

impl CacheFile {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
        Ok(Self { file, cold: Mutex::default(), covered: Mutex::default() })
    }

    /// Fills a buffer with whole OS pages, in which the piece is.
    pub(super) fn read(&self, piece: &Piece, to: &mut [u8]) -> io::Result<()> {
        let start = piece.offset / OS_PAGE_BYTES * OS_PAGE_BYTES;
        let end = (piece.offset + piece.length).next_multiple_of(OS_PAGE_BYTES);
        let to = to.get_mut(..end - start).ok_or(io::ErrorKind::InvalidInput)?;
        self.file.read_exact_at(to, start as u64)
    }

    /// Notes that another file is mapped over some of its bytes, which are not to be read from here.
    pub(super) fn cover(&self, bytes: Range<usize>) {
        self.covered().push(bytes);
    }

    /// Notes that all of it is mapped again; whether other files were mapped over it.
    pub(super) fn uncover(&self) -> bool {
        !std::mem::take(&mut *self.covered()).is_empty()
    }

    pub(super) fn is_covered(&self, piece: &Piece) -> bool {
        let end = piece.offset + piece.length;
        self.covered().iter().any(|bytes| bytes.start < end && piece.offset < bytes.end)
    }

    fn covered(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        self.covered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn cold(&self) -> MutexGuard<'_, Vec<bool>> {
        self.cold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes room: what the last engine had is of no use to this one. A store gives space back when
/// the removal is durable, so that is waited for.
fn remove_caches(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name() != LOCK {
            fs::remove_file(entry.path())?;
        }
    }
    File::open(directory)?.sync_all()
}
