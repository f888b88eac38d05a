//! The rows of an open page, which only grow: what is known is not read again.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::ReadError;
use crate::attention::KvBlock;
use crate::page::{Geometry, Layer, TokenStart};

/// Rows of one layer's tail.
#[derive(Debug, Default)]
pub(super) struct Tail(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    inode: u64,
    rows: Arc<Vec<u8>>,
}

/// Some rows, as they were when they were read.
#[derive(Debug, Clone)]
pub(super) struct TailRows {
    rows: Arc<Vec<u8>>,
    start: TokenStart,
    tokens: u64,
}

impl Tail {
    /// The first `tokens` rows of the tail at `path`.
    pub(super) fn read(
        &self, path: &Path, (layer, start): (Layer, TokenStart), tokens: u64, geometry: &Geometry,
    ) -> Result<TailRows, ReadError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match File::open(path) {
            // Sealed, and the next one opened.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ReadError::Changed(path.to_owned()));
            }
            outcome => outcome.map_err(ReadError::io(path))?,
        };
        let metadata = file.metadata().map_err(ReadError::io(path))?;
        let wanted = tokens.min(u64::from(geometry.page_tokens())) * geometry.row_bytes();
        let rows = geometry.rows_in(metadata.len());
        if rows * geometry.row_bytes() < wanted {
            let start = TokenStart(start.0 + rows);
            return Err(ReadError::Missing { layer, start });
        }
        if known.inode != metadata.ino() {
            *known = Known { inode: metadata.ino(), rows: Arc::default() };
        }
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        let held = known.rows.len();
        if held < wanted {
            // Rows that somebody still attends to are copied, which only a second scan at the same
            // time causes.
            let rows = Arc::make_mut(&mut known.rows);
            rows.resize(wanted, 0);
            if let Err(error) = file.read_exact_at(&mut rows[held..], held as u64) {
                rows.truncate(held);
                return Err(ReadError::io(path)(error));
            }
        }
        Ok(TailRows { rows: Arc::clone(&known.rows), start, tokens })
    }
}

impl TailRows {
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn start(&self) -> u64 {
        self.start.0
    }

    /// At least those of its tokens.
    pub(super) fn rows(&self) -> &[u8] {
        &self.rows
    }

    pub(super) fn bytes(&self, geometry: &Geometry) -> u64 {
        self.tokens * geometry.row_bytes()
    }

    pub(super) fn block(&self, geometry: &Geometry) -> KvBlock<'_> {
        let mut block = KvBlock::tail(&self.rows, geometry, self.start.0);
        block.tokens = block.tokens.min(usize::try_from(self.tokens).unwrap_or(usize::MAX));
        block
    }
}
