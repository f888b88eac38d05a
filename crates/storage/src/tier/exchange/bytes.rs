//! Files of the store as the remote and the encodings take them.

use std::io::{self, Read, Write};
use std::sync::Arc;

use crate::store::disk::DiskFile;
use crate::tier::remote::{ReadAt, WriteAt};

/// A file whose bytes a transfer reads or writes; it may outlive the caller.
pub(in crate::tier) struct FileBytes(pub(in crate::tier) Arc<dyn DiskFile>);

impl ReadAt for FileBytes {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }
}

impl WriteAt for FileBytes {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
}

/// Reads or writes a file from its beginning.
pub(in crate::tier) struct Cursor<'a> {
    file: &'a dyn DiskFile,
    offset: u64,
}

impl<'a> Cursor<'a> {
    pub(in crate::tier) fn new(file: &'a dyn DiskFile) -> Cursor<'a> {
        Cursor { file, offset: 0 }
    }
}

impl Read for Cursor<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

impl Write for Cursor<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all_at(bytes, self.offset)?;
        self.offset += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
