//! Address space in which the tensors of one buffer lie, and the files that are mapped into it.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr;

/// Bytes of an OS page.
pub(super) const OS_PAGE_BYTES: usize = 4096;

/// Bytes of a huge page of x86-64.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Reserved address space: memory, where no file has been mapped over it. It goes when dropped.
#[derive(Debug)]
pub(super) struct Region {
    /// Of the mapping, which has room for the base to start a huge page.
    start: *mut c_void,
    base: *mut c_void,
    length: usize,
}

// SAFETY: address space belongs to the process; who uses it is up to the engine.
unsafe impl Send for Region {}
// SAFETY: the same.
unsafe impl Sync for Region {}

impl Region {
    /// At least `size` bytes, zero, which take memory only once they are touched.
    pub(super) fn reserve(size: usize) -> io::Result<Self> {
        let length = size
            .max(1)
            .checked_next_multiple_of(OS_PAGE_BYTES)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let reserved = length.checked_add(HUGE_PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping where the kernel likes.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), reserved, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = start.wrapping_byte_add(start.addr().wrapping_neg() % HUGE_PAGE_BYTES);
        Ok(Self { start, base, length })
    }

    pub(super) fn base(&self) -> *mut c_void {
        self.base
    }

    /// Offset of an address, if `length` bytes from there on lie inside.
    pub(super) fn offset_of(&self, address: *const c_void, length: usize) -> Option<usize> {
        let offset = address.addr().checked_sub(self.base.addr())?;
        (offset.checked_add(length)? <= self.length).then_some(offset)
    }

    /// Maps the first `length` bytes of a file over the region, shared, in huge pages where it is so
    /// long.
    pub(super) fn map(&self, offset: usize, length: usize, file: &File) -> io::Result<()> {
        let range = offset..offset.saturating_add(length);
        self.map_at(range.clone(), libc::MAP_SHARED, file, 0)?;
        if length >= HUGE_PAGE_BYTES {
            self.advise(range, libc::MADV_HUGEPAGE);
        }
        Ok(())
    }

    /// Maps bytes of a file from `start` on over the region, privately: what is written there from now
    /// on is memory, and not the file's.
    pub(super) fn map_private(
        &self, range: Range<usize>, file: &File, start: u64,
    ) -> io::Result<()> {
        self.map_at(range, libc::MAP_PRIVATE, file, start)
    }

    /// Says that no more than an OS page is to be read when it is touched for the first time.
    pub(super) fn touch_alone(&self, range: Range<usize>) {
        self.advise(range.clone(), libc::MADV_RANDOM);
        self.advise(range, libc::MADV_NOHUGEPAGE);
    }

    /// A kernel that refuses is not asked why: it only costs time.
    fn advise(&self, range: Range<usize>, advice: c_int) {
        if range.is_empty() || range.end > self.length {
            return;
        }
        let address = self.base.wrapping_byte_add(range.start);
        // SAFETY: the addresses are the region's own, and advice changes nothing in memory.
        unsafe { libc::madvise(address, range.len(), advice) };
    }

    fn map_at(
        &self, range: Range<usize>, sharing: c_int, file: &File, start: u64,
    ) -> io::Result<()> {
        let start = libc::off_t::try_from(start).map_err(io::Error::other)?;
        let is_whole = range.start.is_multiple_of(OS_PAGE_BYTES)
            && range.end.is_multiple_of(OS_PAGE_BYTES)
            && start.cast_unsigned().is_multiple_of(OS_PAGE_BYTES as u64);
        if range.is_empty() || range.end > self.length || !is_whole {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let address = self.base.wrapping_byte_add(range.start);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (length, flags, file) = (range.len(), sharing | libc::MAP_FIXED, file.as_raw_fd());
        // SAFETY: the addresses are the region's own, and what was stored there is to be replaced.
        let mapped = unsafe { libc::mmap(address, length, protection, flags, file, start) };
        if mapped == address { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Whether all of it is in memory: in the page cache, for a file.
pub(super) fn is_resident(bytes: &[u8]) -> bool {
    let before = bytes.as_ptr().addr() % OS_PAGE_BYTES;
    let start = bytes.as_ptr().wrapping_sub(before).cast_mut().cast();
    let length = before + bytes.len();
    let mut pages = vec![0_u8; length.div_ceil(OS_PAGE_BYTES)];
    // SAFETY: it looks at no memory, and there is a byte for each OS page.
    let result = unsafe { libc::mincore(start, length, pages.as_mut_ptr()) };
    // A kernel that does not say is asked no further.
    result != 0 || pages.iter().all(|page| page & 1 == 1)
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the engine frees a buffer when no tensor is in it any more.
        unsafe { libc::munmap(self.start, self.length + HUGE_PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn files_start_huge_pages() {
        let region = Region::reserve(3 * HUGE_PAGE_BYTES + 1).unwrap();
        assert!(region.base().addr().is_multiple_of(HUGE_PAGE_BYTES));
        let end = region.base().wrapping_byte_add(3 * HUGE_PAGE_BYTES);
        assert_eq!(region.offset_of(end, 1), Some(3 * HUGE_PAGE_BYTES));
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; HUGE_PAGE_BYTES]).unwrap();
        region.map(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, &file).unwrap();
        region.touch_alone(HUGE_PAGE_BYTES..2 * HUGE_PAGE_BYTES);
        for (offset, expected) in [(HUGE_PAGE_BYTES, 7), (2 * HUGE_PAGE_BYTES, 0)] {
            let byte = region.base().wrapping_byte_add(offset).cast::<u8>();
            // SAFETY: it lies in the region.
            assert_eq!(unsafe { byte.read() }, expected);
        }
        assert!(region.map(4 * HUGE_PAGE_BYTES, OS_PAGE_BYTES, &file).is_err());
    }
}
