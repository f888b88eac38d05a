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

use kvfs_page::names::{format_page, format_tail};
use kvfs_page::{Layer, Manifest, PageError, PagePlace, TokenStart, pack_page};

/// The cache of one sequence, which fits a model's manifest.
pub trait Rows {
    /// Ids, of which there may be one more than rows: the next one to be computed.
    fn token_ids(&self) -> &[u32];

    /// Tokens that have rows, in every layer.
    fn num_tokens(&self) -> u32;

    /// Rows of `count` tokens of a layer from `first` on, each `K[kv_heads, head_dim]`, then
    /// `V[kv_heads, v_head_dim]`.
    ///
    /// # Panics
    /// If there is no such layer.
    fn read_rows(&self, layer: Layer, first: u32, count: u32) -> io::Result<Vec<u8>>;
}

/// A file of a sequence: a page, or the rows that fill none.
#[derive(Debug)]
pub struct SequenceFile {
    /// Whose rows it has.
    pub layer: Layer,
    /// In the directory of the layer.
    pub name: String,
    /// Or a tail.
    pub is_page: bool,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// The files of a sequence with these rows, layer by layer: pages, and a tail where the last one is not
/// whole.
pub fn sequence_files<'a>(
    rows: &'a dyn Rows, manifest: &'a Manifest,
) -> impl Iterator<Item = io::Result<SequenceFile>> + 'a {
    let page_tokens = manifest.geometry().page_tokens();
    let num_tokens = rows.num_tokens();
    let starts = move || (0..num_tokens).step_by(page_tokens as usize);
    let layers = (0..manifest.geometry().num_layers()).map(Layer);
    layers.flat_map(move |layer| starts().map(move |first| (layer, first))).map(
        move |(layer, first)| {
            let count = (num_tokens - first).min(page_tokens);
            let bytes = rows.read_rows(layer, first, count)?;
            let start = TokenStart(u64::from(first));
            if count < page_tokens {
                let name = format_tail(start);
                return Ok(SequenceFile { layer, name, is_page: false, bytes });
            }
            let refused = |error: PageError| io::Error::other(error);
            let place = PagePlace::new(manifest, layer, start).map_err(refused)?;
            let bytes = pack_page(&place, &bytes, count).map_err(refused)?;
            Ok(SequenceFile { layer, name: format_page(start), is_page: true, bytes })
        },
    )
}
