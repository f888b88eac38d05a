//! The ids of a sequence's tokens.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use kvfs::page::names;
use zerocopy::IntoBytes;

use super::files::{about, publish};
use crate::Result;

/// Bytes of an id in the file.
const ID_BYTES: usize = size_of::<u32>();

/// The file `tokens`: ids as u32 in little endian.
#[derive(Debug)]
pub(super) struct TokenFile {
    directory: PathBuf,
    path: PathBuf,
    file: File,
    ids: Vec<u32>,
}

impl TokenFile {
    /// Opens the file of a sequence, or makes it.
    pub(super) fn open(sequence: &Path) -> Result<Self> {
        let path = sequence.join(names::TOKENS);
        let mut file = open(&path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(about(&path))?;
        let (ids, _) = bytes.as_chunks::<ID_BYTES>();
        Ok(Self {
            directory: sequence.to_owned(),
            path,
            file,
            ids: ids.iter().map(|id| u32::from_le_bytes(*id)).collect(),
        })
    }

    /// The ids in the file.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Adds ids at the end.
    pub(super) fn append(&mut self, ids: &[u32]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        self.file.write_all(ids.as_bytes()).map_err(about(&self.path))?;
        self.ids.extend_from_slice(ids);
        Ok(())
    }

    /// Knows of ids that somebody else adds to the file.
    pub(super) fn note(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
    }

    /// Adds the last `count` ids that are known to the file.
    pub(super) fn write_noted(&mut self, count: usize) -> Result<()> {
        let ids = &self.ids[self.ids.len() - count..];
        self.file.write_all(ids.as_bytes()).map_err(about(&self.path))
    }

    /// Keeps the first `count` ids: the file only grows, so another one takes its place.
    pub(super) fn truncate(&mut self, count: usize) -> Result<()> {
        let length = self.file.metadata().map_err(about(&self.path))?.len();
        if length == (count * ID_BYTES) as u64 {
            return Ok(());
        }
        self.ids.truncate(count);
        publish(&self.directory, names::TOKENS, self.ids.as_bytes())?;
        self.file = open(&self.path)?;
        Ok(())
    }

    /// Returns when the ids survive a crash.
    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(about(&self.path))
    }
}

fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).append(true).create(true);
    options.open(path).map_err(about(path))
}
