//! Having the kernel write to a disk what a sync would wait for.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Has dirty bytes of a file written while the caller goes on (`sync_file_range(2)` with
/// `SYNC_FILE_RANGE_WRITE`). A promise of nothing: a sync has to follow, which tells of errors, too.
///
/// # Errors
/// ESPIPE where the file has no such thing as dirty bytes, EINVAL for a range below 0.
pub fn begin_writeback(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<()> {
    let invalid = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let offset = i64::try_from(offset).map_err(invalid)?;
    let bytes = i64::try_from(bytes).map_err(invalid)?;
    // SAFETY: it takes integers and touches no memory; the descriptor is borrowed.
    let result = unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_can_be_written_and_a_pipe_cannot() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"bytes").unwrap();
        begin_writeback(file.as_fd(), 0, 5).unwrap();
        begin_writeback(file.as_fd(), 100, 5).unwrap();
        let above = begin_writeback(file.as_fd(), u64::MAX, 5).unwrap_err();
        assert_eq!(above.raw_os_error(), Some(libc::EINVAL));
        let (reader, _writer) = io::pipe().unwrap();
        let pipe = begin_writeback(reader.as_fd(), 0, 5).unwrap_err();
        assert_eq!(pipe.raw_os_error(), Some(libc::ESPIPE));
    }
}
