//! One page in memory: mapped where that is safe, else read.
//!
//! A page in the RAM tier that the kernel passes through is mapped: its bytes are in memory
//! already, the mapping is one of the tier's own file, it outlives the daemon, a rename over the
//! page and its removal, and nobody ever truncates such a file. While it is mapped the mount keeps
//! it in the tier.
//!
//! Everything else is read, and a failure is an error. A mapping would be none: a fault on a page
//! of the disk that cannot be read is a SIGBUS, so is one on a page that a dead daemon had to
//! serve (without passthrough). Reading with `O_DIRECT` keeps the page cache out of it, which a
//! sequence larger than memory would only flush. 1 GiB in files of 4 MiB, each byte added up by one
//! thread, in a control group of 192 MiB, on a virtual disk that reads one large file at 3.1 GB/s
//! (median of three rounds; the time of user and system is that of all threads):
//!
//! | | GB/s | user, s per GB | system, s per GB |
//! |---|---|---|---|
//! | `O_DIRECT` by eight threads, into huge pages | 2.98 | 0.03 | 0.01 |
//! | `io_uring`, `O_DIRECT`, 12 files at a time, into huge pages | 2.66 | 0.02 | 0.02 |
//! | the same with registered buffers | 2.67 | 0.04 | 0.01 |
//! | mapped, `MADV_SEQUENTIAL`, eight files ahead with `WILLNEED` | 1.14 | 0.06 | 0.42 |
//! | the same without reading ahead | 0.62 | 0.04 | 0.46 |
//! | mapped, `MADV_POPULATE_READ` | 0.59 | 0.04 | 0.47 |
//!
//! Into small pages `O_DIRECT` is no faster than a mapping (1.07 GB/s).
//!
//! A page that was written a moment ago is the exception ([`Means::PageCache`]): its bytes are in the
//! page cache and have to be written out before `O_DIRECT` can read them from the disk.
//!
//! There is no `posix_fadvise` here. On a passed-through file the kernel applies it to the cache of
//! the FUSE inode, not to that of the file below: the daemon would have to serve bytes that nobody
//! reads.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapMut};
use nix::fcntl::OFlag;

use super::ReadError;
use super::buffer::{Buffer, Buffers};
use crate::attention::KvBlock;
use crate::page::limits::{FILE_ALIGNMENT, PAYLOAD_OFFSET};
use crate::page::{PageError, PagePlace, PageView};
use crate::sys;

/// Bytes of a page's header.
#[allow(clippy::cast_possible_truncation, reason = "4096")]
pub(super) const PAYLOAD_BYTE: usize = PAYLOAD_OFFSET as usize;

/// Where the mount holds a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// In memory.
    Ram,
    /// On the local disk.
    Ssd,
    /// Elsewhere; opening fetches it.
    Remote,
}

impl Tier {
    /// Asks the mount; `None` if the path is not in one.
    pub(super) fn of(path: &Path) -> Result<Option<Self>, ReadError> {
        let value = sys::extended_attribute(path, c"user.kvfs.tier");
        Ok(match value.map_err(ReadError::io(path))?.as_deref() {
            Some(b"ram") => Some(Self::Ram),
            Some(b"ssd") => Some(Self::Ssd),
            Some(b"remote") => Some(Self::Remote),
            _ => None,
        })
    }
}

/// Who moves the bytes of files here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// Nobody in particular: a copy of a sequence, outside of a mount.
    Directory,
    /// A mount's daemon.
    Served,
    /// The kernel: mappings are those of the file below the mount.
    PassedThrough,
}

impl Home {
    /// Asks about a file that has been opened once, which is when the mount decides.
    pub(super) fn of(path: &Path) -> Result<Self, ReadError> {
        let value = sys::extended_attribute(path, c"user.kvfs.served_by");
        Ok(match value.map_err(ReadError::io(path))?.as_deref() {
            None => Self::Directory,
            Some(b"kernel") => Self::PassedThrough,
            Some(_) => Self::Served,
        })
    }
}

/// How the bytes of a page come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Means {
    /// From the disk, past the page cache.
    Direct,
    /// From the page cache, where they still are.
    PageCache,
}

/// Whose the memory of mapped pages is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mapping {
    /// The mount's: whoever writes to it ends the process.
    #[default]
    Shared,
    /// The mount's until somebody writes there, who gets a copy then: for pages that are handed to programs that
    /// know no read-only memory.
    Private,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    MappedPrivately(MmapMut),
    Read(Buffer),
}

/// A page whose bytes are in memory and whose header was checked; the mount has verified the rest
/// when it opened the file.
#[derive(Debug)]
pub struct LoadedPage {
    bytes: Bytes,
    place: PagePlace,
    tokens: u32,
    /// Of the file.
    inode: u64,
}

impl LoadedPage {
    /// Maps a page that is in the RAM tier.
    pub(super) fn map(path: &Path, place: PagePlace, mapping: Mapping) -> Result<Self, ReadError> {
        let file = sys::open_no_follow(path, OFlag::empty());
        let file = file.map_err(|error| absent_or(path, place, error))?;
        let metadata = file.metadata().map_err(ReadError::io(path))?;
        let bytes = match mapping {
            Mapping::Shared => sys::map_populated(&file).map(Bytes::Mapped),
            Mapping::Private => {
                let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
                sys::map_private(&file, length).map(Bytes::MappedPrivately)
            }
        };
        Self::checked(bytes.map_err(ReadError::io(path))?, path, place, metadata.ino())
    }

    /// Reads a page into memory of ours.
    pub(super) fn read(
        path: &Path, place: PagePlace, buffers: &Arc<Buffers>, means: Means,
    ) -> Result<Self, ReadError> {
        let file = match means {
            Means::Direct => open_direct(path),
            Means::PageCache => sys::open_no_follow(path, OFlag::empty()),
        };
        let file = file.map_err(|error| absent_or(path, place, error))?;
        let metadata = file.metadata().map_err(ReadError::io(path))?;
        let most = place.geometry().file_bytes(place.geometry().page_tokens());
        // Compared before anything is allocated, and since `O_DIRECT` reads whole OS pages.
        if metadata.len() > most || !metadata.len().is_multiple_of(FILE_ALIGNMENT) {
            let why = format!(
                "page is {} bytes: pages here are a multiple of {FILE_ALIGNMENT} up to {most}",
                metadata.len()
            );
            return Err(refused(path, PageError::Size(why)));
        }
        let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        let bytes = buffers.filled(length, |buffer| file.read_exact_at(buffer, 0));
        let bytes = Bytes::Read(bytes.map_err(ReadError::io(path))?);
        Self::checked(bytes, path, place, metadata.ino())
    }

    fn checked(bytes: Bytes, path: &Path, place: PagePlace, inode: u64) -> Result<Self, ReadError> {
        let file = bytes.as_slice();
        let first = &file[..file.len().min(PAYLOAD_BYTE)];
        let header = place.check_header(first, file.len() as u64);
        let tokens = header.map_err(|error| refused(path, error))?.tokens;
        Ok(Self { bytes, place, tokens, inode })
    }

    /// How many tokens it has; the last page of a sequence may be short.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Position of its first token.
    pub fn start(&self) -> u64 {
        self.place.start().0
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.as_slice().len() as u64
    }

    /// Whether it lies in the mount's memory and not in ours.
    pub fn is_mapped(&self) -> bool {
        matches!(self.bytes, Bytes::Mapped(_) | Bytes::MappedPrivately(_))
    }

    /// Number of the file that was loaded.
    pub(super) fn inode(&self) -> u64 {
        self.inode
    }

    /// Its K and V, where they lie.
    pub(super) fn block(&self) -> KvBlock<'_> {
        KvBlock::page(&self.view(), self.start())
    }

    /// Its tensors.
    pub(super) fn view(&self) -> PageView<'_> {
        let view = PageView::new(self.bytes.as_slice(), self.place.geometry(), self.tokens);
        view.expect("the length was compared with the header's")
    }
}

impl AsRef<[u8]> for LoadedPage {
    /// The file.
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_slice()
    }
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::MappedPrivately(map) => map,
            Self::Read(buffer) => buffer,
        }
    }
}

fn refused(path: &Path, error: PageError) -> ReadError {
    ReadError::Refused { path: path.to_owned(), error }
}

fn absent_or(path: &Path, place: PagePlace, error: io::Error) -> ReadError {
    if error.kind() == io::ErrorKind::NotFound {
        return ReadError::Missing { layer: place.layer(), start: place.start() };
    }
    ReadError::io(path)(error)
}

/// Opens past the page cache, where the filesystem can do that.
fn open_direct(path: &Path) -> io::Result<File> {
    match sys::open_no_follow(path, OFlag::O_DIRECT) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            sys::open_no_follow(path, OFlag::empty())
        }
        outcome => outcome,
    }
}
