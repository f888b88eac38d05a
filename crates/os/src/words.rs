//! Words in a file in memory, which another process finds there when this one has died.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::memfd::{MFdFlags, memfd_create};

/// See the module. What is set before something else is found set by whoever finds that.
#[derive(Debug)]
pub struct SharedWords {
    file: File,
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the words are atomic, and mapped until this is dropped.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// So many words, all of them 0. OS pages are taken when they are touched.
    ///
    /// # Errors
    /// Those of `memfd_create(2)`, ftruncate(2) and mmap(2).
    pub fn new(count: usize) -> io::Result<SharedWords> {
        let file = File::from(memfd_create(c"kvfs-words", MFdFlags::MFD_CLOEXEC)?);
        file.set_len((count * size_of::<AtomicU64>()) as u64)?;
        SharedWords::map(file, count)
    }

    /// The words of a process that has left their file.
    ///
    /// # Errors
    /// The file has another length, and those of mmap(2).
    pub fn left(file: OwnedFd, count: usize) -> io::Result<SharedWords> {
        let file = File::from(file);
        if file.metadata()?.len() != (count * size_of::<AtomicU64>()) as u64 {
            // Touching what is behind the end of a file is a signal.
            return Err(io::ErrorKind::InvalidInput.into());
        }
        SharedWords::map(file, count)
    }

    fn map(file: File, count: usize) -> io::Result<SharedWords> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let length = count * size_of::<AtomicU64>();
        let (flags, nowhere) = (libc::MAP_SHARED | libc::MAP_NORESERVE, std::ptr::null_mut());
        // SAFETY: the kernel maps where nothing is mapped.
        let found = unsafe { libc::mmap(nowhere, length, protection, flags, file.as_raw_fd(), 0) };
        if found == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(found.cast::<AtomicU64>()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(SharedWords { file, start, count })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped there until this is dropped, and any bytes are words.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }

    /// A word.
    ///
    /// # Panics
    /// There are fewer.
    pub fn get(&self, index: usize) -> u64 {
        self.words()[index].load(Ordering::Acquire)
    }

    /// Sets a word.
    ///
    /// # Panics
    /// There are fewer.
    pub fn set(&self, index: usize, value: u64) {
        self.words()[index].store(value, Ordering::Release);
    }
}

impl AsFd for SharedWords {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.count * size_of::<AtomicU64>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_by_who_has_the_file() {
        let words = SharedWords::new(1000).unwrap();
        words.set(999, 7);
        let file = words.as_fd().try_clone_to_owned().unwrap();
        let other = SharedWords::left(file.try_clone().unwrap(), 1000).unwrap();
        words.set(0, u64::MAX);
        drop(words);
        assert_eq!((other.get(0), other.get(1), other.get(999)), (u64::MAX, 0, 7));
        assert!(SharedWords::left(file, 999).is_err(), "it is longer");
    }
}
