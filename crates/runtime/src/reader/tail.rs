//! The rows of an open page, which only grow: what is known is not read again.

use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::OFlag;

use super::listing::layer_directory;
use super::{ReadError, Sequence};
use crate::attention::KvBlock;
use crate::page::{Geometry, Layer, TokenStart, names};
use crate::sys;

/// Rows of one layer's tail.
#[derive(Debug, Default)]
pub(super) struct Tail(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    inode: u64,
    rows: Arc<Vec<u8>>,
}

/// Some rows of a tail, as they were when they were read.
#[derive(Debug, Clone)]
pub struct TailRows {
    /// At least these.
    rows: Arc<Vec<u8>>,
    bytes: usize,
    start: TokenStart,
    tokens: u64,
}

impl Sequence {
    /// The rows before token `end` that a layer has in its tail; `None` where all of them are in pages.
    ///
    /// # Errors
    /// [`ReadError::Missing`] if the layer does not have them, [`ReadError::Changed`] if the tail was sealed, or
    /// is another file, since the sequence was listed, and as [`layer_tokens`](Self::layer_tokens).
    pub fn tail(&self, layer: Layer, end: u64) -> Result<Option<TailRows>, ReadError> {
        self.layer_tokens(layer)?;
        let listed = &self.layers[layer.0 as usize];
        let page_tokens = u64::from(self.manifest().geometry().page_tokens());
        match listed.tail {
            Some(start) if end > start.0 + page_tokens => {
                Err(ReadError::Missing { layer, start: TokenStart(start.0 + page_tokens) })
            }
            Some(start) if end > start.0 => self.tail_rows(layer, start, end - start.0).map(Some),
            None if end > listed.end => {
                Err(ReadError::Missing { layer, start: TokenStart(listed.end) })
            }
            _ => Ok(None),
        }
    }

    /// The first rows of the tail that starts at a token.
    pub(super) fn tail_rows(
        &self, layer: Layer, start: TokenStart, tokens: u64,
    ) -> Result<TailRows, ReadError> {
        let path = layer_directory(&self.source.path, layer).join(names::format_tail(start));
        let geometry = self.manifest().layer_geometry(layer);
        let index = layer.0 as usize;
        let inode = self.layers[index].tail_inode;
        self.tails[index].read((&path, inode), (layer, start), tokens, &geometry)
    }
}

impl Tail {
    /// The first `tokens` rows of the tail at `path`, which was listed with that inode.
    fn read(
        &self, (path, inode): (&Path, u64), (layer, start): (Layer, TokenStart), tokens: u64,
        geometry: &Geometry,
    ) -> Result<TailRows, ReadError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match sys::open_no_follow(path, OFlag::empty()) {
            // Sealed, and the next one opened.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ReadError::Changed(path.to_owned()));
            }
            outcome => outcome.map_err(ReadError::io(path))?,
        };
        let metadata = file.metadata().map_err(ReadError::io(path))?;
        if metadata.ino() != inode {
            // Another sequence may have taken the name of this one meanwhile.
            return Err(ReadError::Changed(path.to_owned()));
        }
        let wanted = tokens.min(u64::from(geometry.page_tokens())) * geometry.row_bytes();
        let rows = geometry.rows_in(metadata.len());
        if rows * geometry.row_bytes() < wanted {
            let start = TokenStart(start.0 + rows);
            return Err(ReadError::Missing { layer, start });
        }
        if known.inode != inode {
            *known = Known { inode, rows: Arc::default() };
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
        Ok(TailRows { rows: Arc::clone(&known.rows), bytes: wanted, start, tokens })
    }
}

impl TailRows {
    /// How many.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The first token.
    pub fn start(&self) -> u64 {
        self.start.0
    }

    /// The rows, `[tokens, row_bytes]`: K of all heads, then V, then what the layer keeps beside them.
    pub fn rows(&self) -> &[u8] {
        &self.rows[..self.bytes]
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    pub(super) fn block(&self, geometry: &Geometry) -> KvBlock<'_> {
        KvBlock::tail(self.rows(), geometry, self.start.0)
    }
}
