//! Memory that arrays of ours stand in.

use std::sync::Arc;

use kvfs_os::MappedFiles;
use kvfs_runtime::reader::LoadedPage;
use memmap2::MmapRaw;

/// It stays as long as some array, of any library, has it.
#[derive(Debug)]
pub(crate) enum Memory {
    /// A page of the mount, private: whoever writes to it changes its own copy, and no file. So a library that
    /// cannot mark arrays read-only (torch) can neither damage a cache nor crash.
    Mapped(MmapRaw),
    /// Pages of the mount one behind the other, private as well.
    MappedFiles(MappedFiles),
    /// Pages that were read, or rows of a tail.
    Bytes(Vec<u8>),
    /// A page of a stream, of nobody else: mapped privately, or read.
    Loaded(Arc<LoadedPage>),
    /// What was computed.
    Floats(Vec<f32>),
}

impl Memory {
    pub(crate) fn is_mapped(&self) -> bool {
        match self {
            Self::Mapped(_) | Self::MappedFiles(_) => true,
            Self::Loaded(page) => page.is_mapped(),
            Self::Bytes(_) | Self::Floats(_) => false,
        }
    }

    /// Where it begins.
    pub(crate) fn start(&self) -> *const u8 {
        match self {
            Self::Mapped(map) => map.as_ptr(),
            Self::MappedFiles(files) => files.as_ptr(),
            Self::Bytes(bytes) => bytes.as_ptr(),
            Self::Loaded(page) => page.as_ref().as_ref().as_ptr(),
            Self::Floats(values) => values.as_ptr().cast(),
        }
    }

    /// Whether it belongs to nobody else.
    pub(crate) fn is_writable(&self) -> bool {
        matches!(self, Self::Floats(_))
    }
}
