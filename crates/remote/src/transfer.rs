//! Where the bytes of a transfer come from and go to: owned, and read or written by offset.
//!
//! A call on a hung remote is left behind with its thread, perhaps for ever. What it was given
//! must therefore outlive the caller: reference-counted, without a cursor that two could share.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that can be read anywhere, from any thread.
pub trait ReadAt: Send + Sync {
    /// Reads at an offset as `pread(2)` does: possibly fewer bytes, 0 at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// Where bytes can be written, from any thread.
pub trait WriteAt: Send + Sync {
    /// Writes all of it at an offset.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
}

/// Where a get puts its bytes.
pub type Sink = Arc<dyn WriteAt>;

/// What a put stores: so many bytes, from offset 0.
#[derive(Clone)]
pub struct Source {
    bytes: Arc<dyn ReadAt>,
    length: u64,
}

/// Which bytes of an object are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All; if it is known how many there must be, another size is an error.
    Whole {
        /// Bytes of the object.
        bytes: Option<u64>,
    },
    /// A part, which must lie within the object.
    Part {
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
}

impl Extent {
    /// First byte and length in an object of this size, or why there is none.
    pub fn within(self, size: u64) -> Result<(u64, u64), String> {
        match self {
            Extent::Whole { bytes: Some(bytes) } if bytes != size => {
                Err(format!("has {size} bytes instead of {bytes}"))
            }
            Extent::Whole { .. } => Ok((0, size)),
            Extent::Part { offset, bytes } => match offset.checked_add(bytes) {
                Some(end) if end <= size => Ok((offset, bytes)),
                _ => Err(format!("has {size} bytes, not {bytes} from {offset}")),
            },
        }
    }
}

impl Source {
    /// The first `length` bytes of something.
    pub fn new(bytes: Arc<dyn ReadAt>, length: u64) -> Source {
        Source { bytes, length }
    }

    /// Bytes in memory.
    pub fn of(bytes: Vec<u8>) -> Source {
        let length = bytes.len() as u64;
        Source { bytes: Arc::new(bytes), length }
    }

    /// How many bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The same bytes, read through something.
    pub(super) fn through(self, wrap: impl FnOnce(Arc<dyn ReadAt>) -> Arc<dyn ReadAt>) -> Source {
        Source { bytes: wrap(self.bytes), length: self.length }
    }

    /// Fills the buffer; the end of the bytes before that is an error.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.bytes.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Source({} bytes)", self.length)
    }
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len());
        let count = buffer.len().min(self.len() - start);
        buffer[..count].copy_from_slice(&self[start..start + count]);
        Ok(count)
    }
}

impl WriteAt for File {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }
}

/// Collects a small object in memory; more than its limit is refused.
#[derive(Debug)]
pub struct MemorySink {
    bytes: Mutex<Vec<u8>>,
    bytes_max: usize,
}

impl MemorySink {
    /// An empty one.
    pub fn new(bytes_max: usize) -> Arc<MemorySink> {
        Arc::new(MemorySink { bytes: Mutex::default(), bytes_max })
    }

    /// Takes out what has arrived.
    pub fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.bytes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl WriteAt for MemorySink {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let too_long = || io::Error::from_raw_os_error(libc::EFBIG);
        let start = usize::try_from(offset).map_err(|_| too_long())?;
        let end = start.checked_add(bytes.len()).filter(|end| *end <= self.bytes_max);
        let end = end.ok_or_else(too_long)?;
        let mut held = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if held.len() < end {
            held.resize(end, 0);
        }
        held[start..end].copy_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_lies_within_the_object_or_is_refused() {
        fn check(extent: Extent, size: u64, expected: Option<(u64, u64)>) {
            assert_eq!(extent.within(size).ok(), expected, "{extent:?} of {size}");
        }
        check(Extent::Whole { bytes: None }, 5, Some((0, 5)));
        check(Extent::Whole { bytes: Some(5) }, 5, Some((0, 5)));
        check(Extent::Whole { bytes: Some(6) }, 5, None);
        check(Extent::Part { offset: 2, bytes: 3 }, 5, Some((2, 3)));
        check(Extent::Part { offset: 3, bytes: 3 }, 5, None);
        check(Extent::Part { offset: u64::MAX, bytes: 2 }, 5, None);
    }

    #[test]
    fn memory_takes_bytes_in_any_order_up_to_its_limit() {
        let sink = MemorySink::new(6);
        sink.write_all_at(b"def", 3).unwrap();
        sink.write_all_at(b"abc", 0).unwrap();
        assert!(sink.write_all_at(b"g", 6).is_err());
        assert!(sink.write_all_at(b"g", u64::MAX).is_err());
        assert_eq!(sink.take(), b"abcdef");
    }

    #[test]
    fn a_source_that_ends_early_is_an_error() {
        let source = Source::new(Arc::new(b"abc".to_vec()), 4);
        let error = source.read_exact_at(&mut [0; 4], 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
