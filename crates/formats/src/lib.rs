//! Caches that other programs keep in one file, as the files of a sequence.
//!
//! What such files have in common is [`Rows`]: token ids, and K and V of each layer. llama.cpp's slots and
//! sessions are read by [`slot`], tensors of Hugging Face's shape by [`tensors`].

#![forbid(unsafe_code)]

pub mod model_file;
pub mod slot;
pub mod tensors;
mod types;

use std::io;
use std::ops::Range;

use kvfs_page::names::{format_page, format_state, format_tail, format_window_rows};
use kvfs_page::{
    Layer, Manifest, PageError, PagePlace, StatePlace, TokenStart, pack_page, pack_state,
};

/// The cache of one sequence, which fits a model's manifest.
pub trait Rows {
    /// Ids, of which there may be one more than rows: the next one to be computed.
    fn token_ids(&self) -> &[u32];

    /// Tokens that have rows, in every layer that keeps them all, and after which recurrent layers have a state.
    fn num_tokens(&self) -> u32;

    /// Rows of `count` tokens of a layer from `first` on, each `K[kv_heads, head_dim]`, then
    /// `V[kv_heads, v_head_dim]`.
    ///
    /// # Panics
    /// If there is no such layer.
    fn read_rows(&self, layer: Layer, first: u32, count: u32) -> io::Result<Vec<u8>>;

    /// The first token that has a row in a layer: of one with a window it need not be the first of all.
    fn first_row(&self, layer: Layer) -> u32 {
        let _ = layer;
        0
    }

    /// Bytes of what only the engine knows, to go back to earlier tokens: it is kept as it is, in a file of the sequence
    /// ([`kvfs_page::names::format_checkpoints`]).
    fn checkpoints_bytes(&self) -> u64 {
        0
    }

    /// Fills `to` with them, from `offset` on.
    fn read_checkpoints(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let _ = (offset, to);
        Ok(())
    }

    /// What a recurrent layer is after the last token, the tensors of its state one behind the other.
    fn read_state(&self, layer: Layer) -> io::Result<Option<Vec<u8>>> {
        let _ = layer;
        Ok(None)
    }
}

/// A file of a sequence: a page, a state, or rows that fill no page.
#[derive(Debug)]
pub struct SequenceFile {
    /// Whose it is.
    pub layer: Layer,
    /// In the directory of the layer.
    pub name: String,
    /// Whether it is a page or a state, which gets its name by a rename.
    pub is_sealed: bool,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// The files of a sequence with these rows, layer by layer: pages, and a tail where the last one is not
/// whole. The rows of a layer with a window may begin in the middle of a page: those of that page have a file of
/// their own ([`format_window_rows`]). A recurrent layer has its state after the last token.
pub fn sequence_files<'a>(
    rows: &'a dyn Rows, manifest: &'a Manifest,
) -> impl Iterator<Item = io::Result<SequenceFile>> + 'a {
    let layers = (0..manifest.geometry().num_layers()).map(Layer);
    layers.flat_map(move |layer| -> Box<dyn Iterator<Item = io::Result<SequenceFile>> + 'a> {
        if manifest.layer_kind(layer).is_some_and(|kind| kind.is_recurrent()) {
            return Box::new(std::iter::once_with(move || state_file(rows, manifest, layer)));
        }
        let (page_tokens, num_tokens) = (manifest.geometry().page_tokens(), rows.num_tokens());
        let mut next = rows.first_row(layer);
        Box::new(std::iter::from_fn(move || {
            let first = next;
            next = (first - first % page_tokens).saturating_add(page_tokens).min(num_tokens);
            (first < num_tokens).then(|| rows_file(rows, manifest, layer, first..next))
        }))
    })
}

/// The file that has these rows, which are of one page.
fn rows_file(
    rows: &dyn Rows, manifest: &Manifest, layer: Layer, of: Range<u32>,
) -> io::Result<SequenceFile> {
    let page_tokens = manifest.geometry().page_tokens();
    let count = of.end - of.start;
    let bytes = rows.read_rows(layer, of.start, count)?;
    let start = TokenStart(u64::from(of.start));
    if !of.start.is_multiple_of(page_tokens) {
        let name = format_window_rows(start);
        return Ok(SequenceFile { layer, name, is_sealed: false, bytes });
    }
    if count < page_tokens {
        return Ok(SequenceFile { layer, name: format_tail(start), is_sealed: false, bytes });
    }
    let place = PagePlace::new(manifest, layer, start).map_err(refused)?;
    let bytes = pack_page(&place, &bytes, count).map_err(refused)?;
    Ok(SequenceFile { layer, name: format_page(start), is_sealed: true, bytes })
}

fn state_file(rows: &dyn Rows, manifest: &Manifest, layer: Layer) -> io::Result<SequenceFile> {
    let num_tokens = rows.num_tokens();
    let missing = || io::Error::other(format!("no state of layer {layer}, and ids of its tokens"));
    let state = rows.read_state(layer)?.ok_or_else(missing)?;
    let ids = rows.token_ids().get(..num_tokens as usize).ok_or_else(missing)?;
    let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let prefix = manifest.prefix_of(&ids).ok_or_else(missing)?;
    let row = TokenStart(u64::from(num_tokens));
    let place = StatePlace::new(manifest, layer, row).map_err(refused)?;
    let bytes = pack_state(&place, prefix, &state).map_err(refused)?;
    Ok(SequenceFile { layer, name: format_state(row), is_sealed: true, bytes })
}

fn refused(error: PageError) -> io::Error {
    io::Error::other(error)
}

/// Bytes of [`Rows::read_checkpoints`] that are read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Hands over the checkpoints of a sequence piece by piece, each with where it begins.
///
/// # Errors
/// Those of `write`, and of reading.
pub fn copy_checkpoints<E: From<io::Error>>(
    rows: &dyn Rows, mut write: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (mut at, end) = (0, rows.checkpoints_bytes());
    let mut piece = Vec::new();
    while at < end {
        let count = (end - at).min(PIECE_BYTES);
        piece.resize(kvfs_page::limits::index(count), 0);
        rows.read_checkpoints(at, &mut piece)?;
        write(at, &piece)?;
        at += count;
    }
    Ok(())
}
