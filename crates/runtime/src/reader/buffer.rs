//! Memory that pages are read into, used again and again.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{Advice, MmapMut};

use super::page::PAYLOAD_BYTE;

/// Buffers that nobody uses are kept up to this many: what one stream has in flight.
const IDLE_MAX: usize = 32;

/// Size of a huge page. The kernel aligns mappings to it whose length is a multiple of it.
const HUGE_BYTES: usize = 2 << 20;

/// Buffers of one size, for page files.
///
/// The payload of a page, which starts behind the header, lies on huge pages as far as it fills
/// them: a disk is told of 2 MiB at a time then and not of 4 KiB (3.0 instead of 1.1 GB/s with
/// `O_DIRECT` on a virtual disk), and attention reads them a tenth faster.
#[derive(Debug)]
pub(super) struct Buffers {
    bytes: usize,
    /// Where a file starts in the memory.
    start: usize,
    idle: Mutex<Vec<MmapMut>>,
}

/// A file's bytes. Its memory goes back when it is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    /// None while it is being dropped.
    memory: Option<MmapMut>,
    length: usize,
    home: Arc<Buffers>,
}

impl Buffers {
    /// Buffers for files of up to `bytes`.
    pub(super) fn new(bytes: usize) -> Self {
        let is_huge = bytes >= PAYLOAD_BYTE + HUGE_BYTES;
        let start = if is_huge { HUGE_BYTES - PAYLOAD_BYTE } else { 0 };
        Self { bytes, start, idle: Mutex::default() }
    }

    /// A buffer of that many bytes, aligned to OS pages as `O_DIRECT` wants it, after `fill` has
    /// filled it. New memory costs a page fault for each of its OS pages, or for each 2 MiB where
    /// huge pages may be had, so a buffer is not given back to the kernel at once.
    pub(super) fn filled(
        self: &Arc<Self>, length: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<Buffer> {
        if length > self.bytes {
            return Err(io::Error::other("a file that is longer than the buffers"));
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match idle {
            Some(memory) => memory,
            None => self.allocate()?,
        };
        let mut buffer = Buffer { memory: Some(memory), length, home: Arc::clone(self) };
        if let Some(memory) = &mut buffer.memory {
            fill(&mut memory[self.start..][..length])?;
        }
        Ok(buffer)
    }

    fn allocate(&self) -> io::Result<MmapMut> {
        if self.start == 0 {
            return MmapMut::map_anon(self.bytes.max(1));
        }
        // What lies before the file and behind it is never touched, so it takes no memory.
        let end = self.start + self.bytes;
        let memory = MmapMut::map_anon(end.next_multiple_of(HUGE_BYTES))?;
        let huge_bytes = (end - HUGE_BYTES) / HUGE_BYTES * HUGE_BYTES;
        // A kernel without huge pages refuses; then the memory has small ones.
        let _ = memory.advise_range(Advice::HugePage, HUGE_BYTES, huge_bytes);
        Ok(memory)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[self.home.start..][..self.length])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut idle = self.home.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.extend(self.memory.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_lie_on_huge_pages() {
        fn check(bytes: usize, expected: usize) {
            let buffers = Arc::new(Buffers::new(bytes));
            let fill = |memory: &mut [u8]| {
                memory.fill(1);
                Ok(())
            };
            let buffer = buffers.filled(bytes, fill).unwrap();
            assert_eq!(buffer.len(), bytes);
            let payload = buffer.as_ptr().addr() + PAYLOAD_BYTE;
            assert_eq!(payload % expected, 0);
        }
        check(8192, 4096);
        check(HUGE_BYTES, 4096);
        check(PAYLOAD_BYTE + HUGE_BYTES, HUGE_BYTES);
        check(PAYLOAD_BYTE + 2 * HUGE_BYTES + 4096, HUGE_BYTES);
    }

    #[test]
    fn memory_is_used_again() {
        let buffers = Arc::new(Buffers::new(3 * 4096));
        let buffer = buffers.filled(4096, |bytes| {
            bytes.fill(7);
            Ok(())
        });
        let buffer = buffer.unwrap();
        assert_eq!(buffer[..], [7; 4096]);
        let address = buffer.as_ptr();
        assert_eq!(address.addr() % 4096, 0);
        drop(buffer);
        let again = buffers.filled(3 * 4096, |_| Ok(())).unwrap();
        assert_eq!(again.as_ptr(), address);
        assert!(buffers.filled(3 * 4096 + 1, |_| Ok(())).is_err());
        assert!(buffers.filled(1, |_| Err(io::Error::other("disk"))).is_err());
        // The second one was made for the failure, and is kept as well.
        drop(again);
        assert_eq!(buffers.idle.lock().unwrap().len(), 2);
    }
}
