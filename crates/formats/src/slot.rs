//! Slot files of llama.cpp: the tokens of one sequence, and its rows of K and V.
//!
//! `llama_state_seq_save_file` writes them, and so does the server's slot saving, in little endian on
//! every machine that this crate runs on:
//!
//! ```text
//! u32 magic, u32 version (3 or 4), u32 n, u32 words[n]
//! u32 streams, u32 cells of each: all but one have 0, and nothing else
//! per cell: i32 position, u32 sequences (1), i32 sequence
//! u32 whether V is transposed, u32 layers
//! version 4: u32 elements of K, u32 of V that are rotated together (0: none)
//! per layer: i32 type, u64 bytes of a row, rows of K [cells, kv_heads, head_dim]
//! per layer: the same of V; transposed: i32 type, u32 bytes of an element, u32 elements of a token,
//!            V [kv_heads, head_dim, cells]
//! ```
//!
//! A session (`llama_state_save_file`, version 10 of which goes with version 3) has the name of the
//! model's architecture behind the words (u32 bytes, the bytes), and all sequences of a context.
//!
//! The words are the tokens; the server of version 4 puts `-1, 1, count` before and the number of its
//! pictures behind them, and reads them without that as well. It has as many tokens as cells, others
//! may have one more: the one that comes next.
//!
//! So it is where all layers see all tokens. `caches` tells what a model has instead: behind the cache of those layers
//! stands one of the layers with a window, of the same form, and `recurrent` has the form of states. A server may add
//! `checkpoints`.
//!
//! Cells of a cache with one sequence stand in the order of their positions. Where several share it, one takes
//! the cells that others left, in any order; positions say which row is which. The order of tokens
//! and heads is that of pages with `layout: nhd`, so their tensors are slices of such a file.

use std::fs::File;
use std::io::{self, Seek};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::Rows;
use kvfs_page::limits::index;
use kvfs_page::{Layer, Manifest};

mod caches;
mod checkpoints;
mod format;
mod read;
mod recurrent;
pub mod reference;
mod tensor;
#[cfg(test)]
mod tests;
mod write;

pub use caches::{Caches, RowsCache};
pub use checkpoints::check_checkpoints;
pub use format::Format;
pub use write::{Head, Layout, Part, write_state_head, write_tensor_head, write_transposed_head};

use checkpoints::Checkpoints;
use format::ToldRotation;
use read::{Fault, Reader};
use recurrent::Recurrent;
use tensor::{Order, Tensor};

/// `LLAMA_STATE_SEQ_MAGIC`, "ggsq" as a number.
const MAGIC: u32 = 0x6767_7371;
/// Bytes before the rows in version 3, without ids and cells.
const HEAD_BYTES: u64 = 28;
/// `LLAMA_SESSION_MAGIC`, "ggsn" as a number.
const SESSION_MAGIC: u32 = 0x6767_736e;
/// `LLAMA_SESSION_VERSION` that goes with version 3.
const SESSION_VERSION: u32 = 10;
/// Bytes of a cell's record.
const CELL_BYTES: u64 = 12;

/// `LLAMA_STATE_SEQ_VERSION` of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// ggml 0.25
    Three,
    /// ggml 0.26 and later
    Four,
}

impl Version {
    /// Every version.
    pub const ALL: [Self; 2] = [Self::Three, Self::Four];

    /// As the file has it.
    pub fn number(self) -> u32 {
        match self {
            Self::Three => 3,
            Self::Four => 4,
        }
    }

    /// Of a session (`LLAMA_SESSION_VERSION`) whose state is that of a version.
    fn of_session(number: u32) -> Option<Self> {
        (number == SESSION_VERSION).then_some(Self::Three)
    }

    /// The version with that number.
    pub fn of_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.number() == number)
    }

    /// Ids of a slot with so many cells, of a conversation with so many.
    pub fn ids(self, known: u64, cells: u64) -> u64 {
        match self {
            // The engine may have had the next token already.
            Self::Three => known.min(cells.saturating_add(1)),
            Self::Four => known.min(cells),
        }
    }
}

/// A slot file whose parts have been found.
#[derive(Debug)]
pub struct Slot {
    file: File,
    version: Option<Version>,
    is_session: bool,
    tokens: Vec<u32>,
    /// Those that the manifest says there are.
    caches: Caches,
    /// Those of them that have rows, as far as they were found.
    parts: Vec<RowsPart>,
    /// Unless there are none.
    states: Option<Recurrent>,
    /// What a server wrote behind them.
    checkpoints: Option<Checkpoints>,
}

/// A cache that has rows, in the file.
#[derive(Debug, Default)]
struct RowsPart {
    streams: u32,
    /// The position of the first row.
    first: u32,
    cells: u32,
    /// The cell of each position, unless they stand in that order.
    cells_of_positions: Vec<u32>,
    /// Unless it has no cells.
    rotation: Option<ToldRotation>,
    k: Vec<Tensor>,
    v: Vec<Tensor>,
}

impl Slot {
    /// Finds the parts of a file that a model's manifest says there are.
    ///
    /// # Errors
    /// The end of a line that says what it is instead of a slot file.
    pub fn open(path: &Path, manifest: &Manifest) -> Result<Self, String> {
        Self::of(File::open(path).map_err(|error| error.to_string())?, manifest)
    }

    /// The same of an open file.
    ///
    /// # Errors
    /// As [`Slot::open`].
    pub fn of(file: File, manifest: &Manifest) -> Result<Self, String> {
        let (slot, outcome) = Self::find(file, manifest)?;
        outcome.map_err(Fault::into_line)?;
        Ok(slot)
    }

    /// Looks whether a file that is not whole yet can become a slot of pages of this shape.
    ///
    /// # Errors
    /// The end of a line that says what is wrong with what is there.
    pub fn check_beginning(
        file: File, version: Version, manifest: &Manifest,
    ) -> Result<(), String> {
        let (slot, outcome) = Self::find(file, manifest)?;
        match outcome {
            Err(Fault::Other(line)) => return Err(line),
            Err(Fault::Ends(_)) | Ok(()) => {}
        }
        slot.check_form(version)?;
        slot.check_found(manifest)
    }

    /// What was found until something was wrong.
    fn find(file: File, manifest: &Manifest) -> Result<(Self, Result<(), Fault>), String> {
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        let mut copy = file.try_clone().map_err(|error| error.to_string())?;
        copy.rewind().map_err(|error| error.to_string())?;
        let mut reader = Reader::new(copy, length);
        let mut slot = Self {
            file,
            version: None,
            is_session: false,
            tokens: Vec::new(),
            caches: Caches::of(manifest)?,
            parts: Vec::new(),
            states: None,
            checkpoints: None,
        };
        let outcome = slot.read(&mut reader);
        Ok((slot, outcome))
    }

    /// Streams of the cache that it was saved from: an engine restores only what has as many as its own.
    pub fn streams(&self) -> u32 {
        self.parts.first().map_or(1, |part| part.streams)
    }

    /// Refuses what would not come back in this form as a slot of this version.
    ///
    /// # Errors
    /// The end of a line that says what to do instead.
    pub fn check_form(&self, version: Version) -> Result<(), String> {
        if self.is_session {
            return Err(
                "is a session, not a slot: save one of a sequence, or kvfs import it".into()
            );
        }
        let mut v = self.parts.iter().flat_map(|part| &part.v);
        if v.any(|v| matches!(v.order, Order::Columns { .. })) {
            return Err(
                "has V transposed: save it with flash attention on, or kvfs import it".into()
            );
        }
        match self.version {
            Some(found) if found != version => {
                let (found, version) = (found.number(), version.number());
                let name =
                    "a name ends in .bin or .ref for version 3, .bin4 or .ref4 for version 4";
                Err(format!("is of version {found}, and called one of version {version}: {name}"))
            }
            _ => Ok(()),
        }
    }

    /// Compares it with the shape of a model's pages.
    ///
    /// # Errors
    /// The end of a line that says what does not fit.
    pub fn check(&self, manifest: &Manifest) -> Result<(), String> {
        if self.num_tokens() == 0 {
            return Err("has no tokens".to_owned());
        }
        self.check_found(manifest)
    }

    fn check_found(&self, manifest: &Manifest) -> Result<(), String> {
        let format = Format::new(manifest)?;
        for (part, cache) in self.parts.iter().zip(&self.caches.rows) {
            if let Some(told) = part.rotation {
                format.check_rotation(told)?;
            }
            for (name, number, tensors) in [("K", 0, &part.k), ("V", 1, &part.v)] {
                for (tensor, layer) in tensors.iter().zip(&cache.layers) {
                    check_tensor(tensor, &format, number)
                        .map_err(|why| format!("layer {layer} has {name} {why}"))?;
                }
            }
        }
        let Some(states) = &self.states else { return Ok(()) };
        if self.tokens.len() < states.tokens as usize {
            let (tokens, ids) = (states.tokens, self.tokens.len());
            return Err(format!("has states after {tokens} tokens, and {ids} ids of them"));
        }
        states.check(&self.caches, manifest.geometry().num_layers())
    }

    /// The cache that has a layer's rows, and which of its layers that is.
    fn part_of(&self, layer: Layer) -> Option<(&RowsPart, usize)> {
        self.caches.rows.iter().zip(&self.parts).find_map(|(cache, part)| {
            Some((part, cache.layers.iter().position(|found| *found == layer)?))
        })
    }
}

impl Rows for Slot {
    fn token_ids(&self) -> &[u32] {
        &self.tokens
    }

    fn num_tokens(&self) -> u32 {
        let states = self.states.as_ref().map_or(0, |states| states.tokens);
        self.parts.first().map_or(states, |part| part.cells)
    }

    fn first_row(&self, layer: Layer) -> u32 {
        self.part_of(layer).map_or(0, |(part, _)| part.first)
    }

    fn read_rows(&self, layer: Layer, first: u32, count: u32) -> io::Result<Vec<u8>> {
        let (part, number) = self.part_of(layer).expect("the layer has rows");
        let (k, v) = (&part.k[number], &part.v[number]);
        let runs = part.runs(first - part.first, count);
        let read = |tensor: &Tensor| {
            let rows = |(first, count)| tensor.rows(&self.file, part.cells, first, count);
            match runs[..] {
                [run] => rows(run),
                _ => runs
                    .iter()
                    .map(|run| rows(*run))
                    .collect::<io::Result<Vec<_>>>()
                    .map(|rows| rows.concat()),
            }
        };
        let (k_rows, v_rows) = (read(k)?, read(v)?);
        let pairs = k_rows.chunks_exact(index(k.row_bytes()));
        let pairs = pairs.zip(v_rows.chunks_exact(index(v.row_bytes())));
        Ok(pairs.flat_map(|(k, v)| [k, v]).flatten().copied().collect())
    }

    fn read_state(&self, layer: Layer) -> io::Result<Option<Vec<u8>>> {
        let number = recurrent::number_of(&self.caches, layer);
        let (Some(states), Some(number)) = (&self.states, number) else { return Ok(None) };
        states.state(&self.file, number).map(Some)
    }

    fn checkpoints_bytes(&self) -> u64 {
        self.checkpoints.map_or(0, |checkpoints| checkpoints.bytes)
    }

    fn read_checkpoints(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let begin = self.checkpoints.map_or(0, |checkpoints| checkpoints.offset);
        self.file.read_exact_at(to, begin + offset)
    }
}

impl RowsPart {
    /// The cells of some rows: the first of each run of cells that stand side by side, and how many.
    fn runs(&self, first: u32, count: u32) -> Vec<(u32, u32)> {
        if self.cells_of_positions.is_empty() {
            return vec![(first, count)];
        }
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for cell in self.cells_of_positions.iter().skip(first as usize).take(count as usize) {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == *cell => *count += 1,
                _ => runs.push((*cell, 1)),
            }
        }
        runs
    }
}

/// Compares K (0) or V (1) of a layer with the rows of a model.
fn check_tensor(tensor: &Tensor, format: &Format, part: usize) -> Result<(), String> {
    let (kind, bytes) = (format.kind, format.row_bytes[part]);
    if tensor.kind != kind {
        return Err(format!("of ggml type {}, the manifest's dtype is {kind}", tensor.kind));
    }
    if tensor.row_bytes() != bytes {
        return Err(format!(
            "of {} bytes for each token, the manifest of {bytes}",
            tensor.row_bytes()
        ));
    }
    match tensor.order {
        Order::Columns { element_bytes, .. } if Some(element_bytes) != format.element_bytes => {
            Err(format!("transposed, in elements of {element_bytes} bytes"))
        }
        _ => Ok(()),
    }
}
