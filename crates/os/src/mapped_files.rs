//! Files one behind the other in memory, so that they can be looked at as one array.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use super::mapping::is_in_memory;

/// Private mappings of files, each of which begins as many bytes behind the one before: what is written there is the
/// process's own copy. The kernel still counts a mapping for each file (`vm.max_map_count`).
#[derive(Debug)]
pub struct MappedFiles {
    start: *mut u8,
    length: usize,
    each: usize,
}

// SAFETY: memory is of the process, and this only hands out where it begins.
unsafe impl Send for MappedFiles {}
// SAFETY: as above; `place` changes what lies there before anybody is told.
unsafe impl Sync for MappedFiles {}

impl MappedFiles {
    /// Takes addresses for so many files of so many bytes, a multiple of those of an OS page. Nothing is there yet.
    pub fn reserve(files: usize, each: usize) -> io::Result<Self> {
        let too_long = || io::Error::from_raw_os_error(libc::ENOMEM);
        let length = files.checked_mul(each).filter(|length| *length > 0).ok_or_else(too_long)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses addresses that nobody has.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: start.cast(), length, each })
    }

    /// Maps a file to which nobody can write any more at its place. What is not in memory is read, as by
    /// [`map_private`](super::map_private), so that what the disk refuses is an error here.
    pub fn place(&self, index: usize, file: &File) -> io::Result<()> {
        let offset = index.checked_mul(self.each).filter(|offset| *offset < self.length);
        let offset = offset.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let start = self.start.wrapping_add(offset).cast();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
        // SAFETY: these addresses are ours, and nobody was told of them; the caller says that nobody writes to the
        // file, and nothing truncates such files.
        let mapped =
            unsafe { libc::mmap(start, self.each, protection, flags, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A kernel without it reads in smaller pieces.
        // SAFETY: the mapping was made above.
        let _ = unsafe { libc::madvise(start, self.each, libc::MADV_HUGEPAGE) };
        if is_in_memory(start.cast(), self.each)? {
            return Ok(());
        }
        // SAFETY: as above.
        if unsafe { libc::madvise(start, self.each, libc::MADV_POPULATE_READ) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Where the first file begins.
    pub fn as_ptr(&self) -> *const u8 {
        self.start
    }
}

impl Drop for MappedFiles {
    fn drop(&mut self) {
        // SAFETY: `reserve` took these addresses, and whoever was told of them keeps this.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(byte: u8) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[byte; 8192]).unwrap();
        file
    }

    #[test]
    fn files_lie_one_behind_the_other() {
        let mapped = MappedFiles::reserve(3, 8192).unwrap();
        for (index, byte) in [(2, 9), (0, 7), (1, 8)] {
            mapped.place(index, &file(byte)).unwrap();
        }
        // SAFETY: three files of that length are there.
        let bytes = unsafe { std::slice::from_raw_parts(mapped.as_ptr(), 3 * 8192) };
        for (part, byte) in bytes.chunks(8192).zip([7, 8, 9]) {
            assert_eq!(part, [byte; 8192]);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(MappedFiles::reserve(0, 8192).is_err());
        assert!(MappedFiles::reserve(usize::MAX, 8192).is_err());
        assert!(MappedFiles::reserve(1 << 40, 1 << 20).is_err());
        let mapped = MappedFiles::reserve(1, 8192).unwrap();
        assert_eq!(mapped.place(1, &file(1)).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let nothing = File::open("/").unwrap();
        assert!(mapped.place(0, &nothing).is_err());
    }
}
