//! Memory of a file, at an address at which another program of the same process can map it again.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{SysconfVar, sysconf};

use crate::inherit::{inherited, to_be_inherited};

/// A part of such memory, which nobody else in this program has.
#[derive(Debug)]
pub struct Piece {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is memory, and whoever has the piece is alone in having it.
unsafe impl Send for Piece {}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes are mapped there until this is dropped.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for Piece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: the mapping is this piece's own.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// The file that pieces are parts of.
#[derive(Debug)]
pub struct PieceFile {
    file: File,
    address: usize,
}

impl PieceFile {
    /// Memory of `count` pieces of `bytes` each, a multiple of the size of an OS page, at the first of these addresses where
    /// nothing else lies. OS pages are taken when they are touched, one by one.
    ///
    /// # Errors
    /// There is no such address, and those of `memfd_create(2)`, ftruncate(2) and mmap(2).
    pub fn new(
        addresses: impl Iterator<Item = usize>, count: usize, bytes: usize,
    ) -> io::Result<(PieceFile, Vec<Piece>)> {
        let length = length_of(count, bytes)?;
        let file = File::from(memfd_create(c"kvfs-rings", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(length as u64)?;
        let mut refused = io::Error::from(io::ErrorKind::InvalidInput);
        for address in addresses {
            match map(&file, address, count, bytes) {
                Ok(pieces) => return Ok((PieceFile { file, address }, pieces)),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// The same memory again, in the program that another one has left the descriptor to.
    ///
    /// # Errors
    /// The descriptor is not open or too short, something else lies there, and those of mmap(2).
    pub fn left(
        number: RawFd, address: usize, count: usize, bytes: usize,
    ) -> io::Result<(PieceFile, Vec<Piece>)> {
        let length = length_of(count, bytes)?;
        let file = File::from(inherited(number)?);
        if file.metadata()?.len() != length as u64 {
            // Touching what is behind the end of a file is a signal.
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let pieces = map(&file, address, count, bytes)?;
        Ok((PieceFile { file, address }, pieces))
    }

    /// Where the first piece lies.
    pub fn address(&self) -> usize {
        self.address
    }

    /// A descriptor for the next program.
    ///
    /// # Errors
    /// There are too many.
    pub fn to_be_inherited(&self) -> io::Result<OwnedFd> {
        to_be_inherited(&self.file)
    }
}

fn length_of(count: usize, bytes: usize) -> io::Result<usize> {
    let page_bytes = sysconf(SysconfVar::PAGE_SIZE)?.and_then(|bytes| usize::try_from(bytes).ok());
    // A piece that ends within an OS page would take that of the next one along.
    let is_whole =
        bytes > 0 && page_bytes.is_some_and(|page_bytes| bytes.is_multiple_of(page_bytes));
    let length = count.checked_mul(bytes).filter(|length| is_whole && *length > 0);
    length.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Maps a file that nothing here has mapped, and that is so long.
fn map(file: &File, address: usize, count: usize, bytes: usize) -> io::Result<Vec<Piece>> {
    let length = length_of(count, bytes)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let wanted = std::ptr::without_provenance_mut(address);
    // SAFETY: the kernel maps where nothing was mapped before.
    let found = unsafe { libc::mmap(wanted, length, protection, flags, file.as_raw_fd(), 0) };
    if found == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if found != wanted {
        // Before Linux 4.17 the address is a wish.
        // SAFETY: it was mapped above, and nobody has it yet.
        unsafe { libc::munmap(found, length) };
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    // One large OS page for the first byte that is touched of each piece would take all memory. A kernel without them refuses.
    // SAFETY: it was mapped above, and advice changes no bytes.
    unsafe { libc::madvise(found, length, libc::MADV_NOHUGEPAGE) };
    let start = NonNull::new(found.cast::<u8>()).ok_or(io::ErrorKind::InvalidInput)?;
    let piece = |number: usize| {
        // SAFETY: it lies within the mapping.
        let start = unsafe { start.add(number * bytes) };
        Piece { start, length: bytes }
    };
    Ok((0..count).map(piece).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;

    const PAGE: usize = 1 << 16;
    const ADDRESS: usize = 0x0f00_0000_0000;

    #[test]
    fn pieces_are_found_again_at_their_address() {
        let (file, mut pieces) = PieceFile::new([ADDRESS].into_iter(), 3, PAGE).unwrap();
        for (number, piece) in pieces.iter_mut().enumerate() {
            assert_eq!(piece.as_ptr().addr(), ADDRESS + number * PAGE);
            piece.fill(u8::try_from(number).unwrap() + 1);
        }
        let taken = PieceFile::new([ADDRESS + PAGE].into_iter(), 1, PAGE).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
        // One piece may go before the others, and what it had is free.
        drop(pieces.remove(1));
        let places = [ADDRESS, ADDRESS + PAGE].into_iter();
        let (other, others) = PieceFile::new(places, 1, PAGE).unwrap();
        assert_eq!((other.address(), others[0][0]), (ADDRESS + PAGE, 0));
        assert_eq!((pieces[0][0], pieces[1][0]), (1, 3));
        let left = file.to_be_inherited().unwrap().into_raw_fd();
        drop((file, pieces, other, others));
        assert!(PieceFile::left(left, ADDRESS, 2, PAGE).is_err(), "it is longer");
    }

    #[test]
    fn another_program_has_the_same_bytes() {
        let address = ADDRESS + (PAGE << 8);
        let (file, mut pieces) = PieceFile::new([address].into_iter(), 2, PAGE).unwrap();
        pieces[1].fill(7);
        let left = file.to_be_inherited().unwrap().into_raw_fd();
        drop((file, pieces));
        let (file, pieces) = PieceFile::left(left, address, 2, PAGE).unwrap();
        assert_eq!((file.address(), pieces[0][0], pieces[1][PAGE - 1]), (address, 0, 7));
    }

    #[test]
    fn what_is_no_number_of_os_pages_is_refused() {
        for (count, bytes) in [(0, PAGE), (1, 0), (2, 100), (usize::MAX, PAGE)] {
            let address = [ADDRESS - (PAGE << 8)].into_iter();
            let error = PieceFile::new(address, count, bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{count} {bytes}");
        }
    }
}
