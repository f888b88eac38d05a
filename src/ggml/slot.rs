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
//! per layer: the same of V
//! ```
//!
//! The words are the tokens; the server of version 4 puts `-1, 1, count` before and the number of its
//! pictures behind them, and reads them without that as well. It has as many tokens as cells, others
//! may have one more: the one that comes next.
//!
//! Cells of a cache that has no holes stand in the order of their positions. The order of tokens
//! and heads is that of pages with `layout: nhd`, so their tensors are slices of such a file.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::abi::types;
use crate::page::names::{format_page, format_tail};
use crate::page::{Dtype, Geometry, Layer, Manifest, PageError, PagePlace, TokenStart, pack_page};

pub(crate) mod reference;
#[cfg(test)]
mod tests;

/// `LLAMA_STATE_SEQ_MAGIC`, "ggsq" as a number.
const MAGIC: u32 = 0x6767_7371;
/// Bytes before the rows in version 3, without ids and cells.
const HEAD_BYTES: u64 = 28;
/// Bytes of the rotations in version 4.
const ROTATION_BYTES: u64 = 8;
/// No token (`LLAMA_TOKEN_NULL`): what the server kept of a prompt follows, in a form of its own.
const PROMPT: u32 = u32::MAX;
/// Version of that form.
const PROMPT_VERSION: u32 = 1;
/// Bytes before the rows of a tensor.
const TENSOR_HEAD_BYTES: u64 = 12;
/// Bytes of a cell's record.
const CELL_BYTES: u64 = 12;
/// `LLAMA_MAX_SEQ`
const STREAMS_MAX: u32 = 256;
/// No model has more layers; what says so is no slot file.
const LAYERS_MAX: u32 = 1 << 16;

/// `LLAMA_STATE_SEQ_VERSION` of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Version {
    /// ggml 0.25
    Three,
    /// ggml 0.26 and later
    Four,
}

impl Version {
    pub(crate) const ALL: [Self; 2] = [Self::Three, Self::Four];

    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Three => 3,
            Self::Four => 4,
        }
    }

    pub(crate) fn of_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.number() == number)
    }

    /// Ids of a slot with so many cells, of a conversation with so many.
    pub(crate) fn ids(self, known: u64, cells: u64) -> u64 {
        match self {
            // The engine may have had the next token already.
            Self::Three => known.min(cells.saturating_add(1)),
            Self::Four => known.min(cells),
        }
    }
}

/// K or V of one layer, in the file.
#[derive(Clone, Copy, Debug)]
struct Tensor {
    kind: i32,
    row_bytes: u64,
    offset: u64,
}

/// A slot file whose parts have been found.
#[derive(Debug)]
pub(crate) struct Slot {
    file: File,
    version: Option<Version>,
    tokens: Vec<u32>,
    cells: u32,
    /// Unless it has no cells.
    layers: Option<u32>,
    k: Vec<Tensor>,
    v: Vec<Tensor>,
}

/// Why a file is no slot.
enum Fault {
    /// The bytes end before its parts do.
    Ends(String),
    Other(String),
}

impl Fault {
    fn into_line(self) -> String {
        let (Self::Ends(line) | Self::Other(line)) = self;
        line
    }
}

impl From<String> for Fault {
    fn from(line: String) -> Self {
        Self::Other(line)
    }
}

/// A file of a sequence that a slot becomes: a page, or the rows that fill none.
#[derive(Debug)]
pub(crate) struct SequenceFile {
    pub(crate) layer: Layer,
    pub(crate) name: String,
    pub(crate) is_page: bool,
    pub(crate) bytes: Vec<u8>,
}

/// Reads numbers and knows where it is.
struct Reader {
    file: BufReader<File>,
    offset: u64,
    length: u64,
}

impl Reader {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.ends(),
            _ => Fault::Other(error.to_string()),
        })?;
        self.offset += N as u64;
        Ok(bytes)
    }

    fn ends(&self) -> Fault {
        Fault::Ends(format!("ends at byte {}", self.length))
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Result<i32, Fault> {
        self.bytes().map(i32::from_le_bytes)
    }

    /// Refuses counts that the file is too short for, before anything is as large as they say.
    fn count(&mut self, what: &str, bytes_each: u64) -> Result<u32, Fault> {
        let count = self.u32()?;
        if u64::from(count) * bytes_each > self.length - self.offset {
            let line = format!("says that it has {count} {what}, and is too short for them");
            return Err(Fault::Ends(line));
        }
        Ok(count)
    }

    /// Adds a tensor as soon as its head is there.
    fn tensor(&mut self, cells: u32, to: &mut Vec<Tensor>) -> Result<(), Fault> {
        let kind = self.i32()?;
        let row_bytes = self.bytes().map(u64::from_le_bytes)?;
        let offset = self.offset;
        to.push(Tensor { kind, row_bytes, offset });
        let bytes = u64::from(cells).checked_mul(row_bytes);
        let end = bytes.and_then(|bytes| offset.checked_add(bytes));
        let end = end.filter(|end| *end <= self.length);
        self.offset = end.ok_or_else(|| self.ends())?;
        self.file.seek(SeekFrom::Start(self.offset)).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn tokens(&mut self) -> Result<Vec<u32>, Fault> {
        let count = self.count("tokens", 4)?;
        let mut words = (0..count).map(|_| self.u32()).collect::<Result<Vec<_>, _>>()?;
        let [PROMPT, rest @ ..] = words.as_slice() else { return Ok(words) };
        let is_text = match rest {
            [PROMPT_VERSION, tokens, words @ .., pictures] => {
                *tokens as usize == words.len() && *pictures == 0
            }
            _ => false,
        };
        if !is_text {
            return Err("has a prompt of more than tokens, or of another kind".to_owned().into());
        }
        words.drain(..3);
        words.pop();
        Ok(words)
    }

    /// K and V are as the model made them.
    fn refuse_rotation(&mut self) -> Result<(), Fault> {
        match (self.u32()?, self.u32()?) {
            (0, 0) => Ok(()),
            (k, v) => {
                let line = format!("has rows rotated by {k} (K) and {v} (V)");
                Err(format!("{line}: save it with K and V of f16").into())
            }
        }
    }

    /// Cells of the first stream that has any, and how many streams follow. A sequence is in one of
    /// them.
    fn stream(&mut self) -> Result<(u32, u32), Fault> {
        let streams = self.u32()?;
        if !(1..=STREAMS_MAX).contains(&streams) {
            return Err(format!("says that it has {streams} streams").into());
        }
        for behind in (0..streams).rev() {
            let cells = self.cells()?;
            if cells > 0 {
                return Ok((cells, behind));
            }
        }
        Ok((0, 0))
    }

    /// Cells whose positions are 0, 1, 2, ..., each of one sequence.
    fn cells(&mut self) -> Result<u32, Fault> {
        let cells = self.count("cells", CELL_BYTES)?;
        for cell in 0..cells {
            let (position, sequences, _) = (self.i32()?, self.u32()?, self.i32()?);
            if i64::from(position) != i64::from(cell) || sequences != 1 {
                return Err(format!(
                    "cell {cell} is at position {position}: a sequence with holes or shifts, or \
                     with positions of several dimensions, is no sequence of pages"
                )
                .into());
            }
        }
        Ok(cells)
    }
}

impl Slot {
    /// Finds the parts of a file.
    ///
    /// # Errors
    /// The end of a line that says what it is instead of a slot file.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        Self::of(File::open(path).map_err(|error| error.to_string())?)
    }

    /// The same of an open file.
    ///
    /// # Errors
    /// As [`Slot::open`].
    pub(crate) fn of(file: File) -> Result<Self, String> {
        let (slot, outcome) = Self::find(file)?;
        outcome.map_err(Fault::into_line)?;
        Ok(slot)
    }

    /// Looks whether a file that is not whole yet can become a slot of pages of this shape.
    ///
    /// # Errors
    /// The end of a line that says what is wrong with what is there.
    pub(crate) fn check_beginning(
        file: File, version: Version, geometry: &Geometry,
    ) -> Result<(), String> {
        let (slot, outcome) = Self::find(file)?;
        match outcome {
            Err(Fault::Other(line)) => return Err(line),
            Err(Fault::Ends(_)) | Ok(()) => {}
        }
        slot.check_version(version)?;
        slot.check_found(geometry)
    }

    /// What was found until something was wrong.
    fn find(file: File) -> Result<(Self, Result<(), Fault>), String> {
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        let mut copy = file.try_clone().map_err(|error| error.to_string())?;
        copy.rewind().map_err(|error| error.to_string())?;
        let mut reader = Reader { file: BufReader::new(copy), offset: 0, length };
        let (tokens, k, v) = (Vec::new(), Vec::new(), Vec::new());
        let mut slot = Self { file, version: None, tokens, cells: 0, layers: None, k, v };
        let outcome = slot.read(&mut reader);
        Ok((slot, outcome))
    }

    fn read(&mut self, reader: &mut Reader) -> Result<(), Fault> {
        let (magic, number) = (reader.u32()?, reader.u32()?);
        let version = Version::of_number(number).filter(|_| magic == MAGIC);
        let known = || "is no slot file of llama.cpp of version 3 or 4".to_owned();
        let version = version.ok_or_else(known)?;
        self.version = Some(version);
        self.tokens = reader.tokens()?;
        let (cells, streams_behind) = reader.stream()?;
        if cells == 0 {
            return Ok(());
        }
        self.cells = cells;
        let (is_transposed, layers) = (reader.u32()?, reader.u32()?);
        if is_transposed != 0 {
            return Err("has V transposed: save it with flash attention on".to_owned().into());
        }
        if layers > LAYERS_MAX {
            return Err(format!("says that it has {layers} layers").into());
        }
        self.layers = Some(layers);
        if version == Version::Four {
            reader.refuse_rotation()?;
        }
        (0..layers).try_for_each(|_| reader.tensor(cells, &mut self.k))?;
        (0..layers).try_for_each(|_| reader.tensor(cells, &mut self.v))?;
        for _ in 0..streams_behind {
            if reader.u32()? != 0 {
                return Err("has cells in several streams, not one sequence".to_owned().into());
            }
        }
        if reader.offset != reader.length {
            return Err("has more than the cache of one kind of layer".to_owned().into());
        }
        Ok(())
    }

    /// Ids, of which there may be one more than cells: the next one to be computed.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that have rows.
    pub(crate) fn cells(&self) -> u32 {
        self.cells
    }

    /// Refuses another version.
    ///
    /// # Errors
    /// The end of a line that says what to call it instead.
    pub(crate) fn check_version(&self, version: Version) -> Result<(), String> {
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
    pub(crate) fn check(&self, geometry: &Geometry) -> Result<(), String> {
        if self.layers.is_none() {
            return Err("has no tokens".to_owned());
        }
        self.check_found(geometry)
    }

    fn check_found(&self, geometry: &Geometry) -> Result<(), String> {
        let layers = geometry.num_layers();
        if let Some(found) = self.layers.filter(|found| *found != layers) {
            return Err(format!("has {found} layers, the manifest {layers}"));
        }
        let kind = kind(geometry)?;
        let expected = row_bytes(geometry);
        let (k, v) = (self.k.iter().enumerate(), self.v.iter().enumerate());
        let all = k.map(|found| ("K", expected[0], found));
        let all = all.chain(v.map(|found| ("V", expected[1], found)));
        for (name, expected, (layer, tensor)) in all {
            let (found, bytes) = (tensor.kind, tensor.row_bytes);
            if found != kind {
                let dtype = geometry.dtype();
                return Err(format!(
                    "layer {layer} has {name} of ggml type {found}, {dtype} is {kind}"
                ));
            }
            if bytes != expected {
                return Err(format!(
                    "layer {layer} has {bytes} bytes of {name} for each token, the manifest \
                     {expected}"
                ));
            }
        }
        Ok(())
    }

    /// The files of a sequence with its rows, layer by layer: pages, and a tail where the last one is
    /// not whole.
    pub(crate) fn files<'a>(
        &'a self, manifest: &'a Manifest,
    ) -> impl Iterator<Item = io::Result<SequenceFile>> + 'a {
        let page_tokens = manifest.geometry().page_tokens();
        let starts = move || (0..self.cells).step_by(page_tokens as usize);
        let layers = (0..manifest.geometry().num_layers()).map(Layer);
        layers.flat_map(move |layer| starts().map(move |first| (layer, first))).map(
            move |(layer, first)| {
                let count = (self.cells - first).min(page_tokens);
                let bytes = self.rows(layer.0, first, count)?;
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

    /// Rows of `count` tokens of a layer from `first` on, each `K[kv_heads, head_dim]`, then
    /// `V[kv_heads, v_head_dim]`.
    ///
    /// # Panics
    /// If there is no such layer.
    pub(crate) fn rows(&self, layer: u32, first: u32, count: u32) -> io::Result<Vec<u8>> {
        let read = |tensor: &Tensor| {
            let mut bytes = vec![0; tensor.row_bytes as usize * count as usize];
            let offset = tensor.offset + u64::from(first) * tensor.row_bytes;
            self.file.read_exact_at(&mut bytes, offset).map(|()| bytes)
        };
        let (k, v) = (&self.k[layer as usize], &self.v[layer as usize]);
        let (k_bytes, v_bytes) = (k.row_bytes as usize, v.row_bytes as usize);
        let (k, v) = (read(k)?, read(v)?);
        let pairs = k.chunks_exact(k_bytes).zip(v.chunks_exact(v_bytes));
        Ok(pairs.flat_map(|(k, v)| [k, v]).flatten().copied().collect())
    }
}

/// Bytes of K and of V of one token of a layer.
fn row_bytes(geometry: &Geometry) -> [u64; 2] {
    let heads = u64::from(geometry.num_kv_heads());
    [heads * geometry.k_row_bytes(), heads * geometry.v_row_bytes()]
}

/// The number of a dtype in ggml. Quantised K and V are rotated by the engine, depending on the
/// model and its settings, which a slot file does not say.
fn kind(geometry: &Geometry) -> Result<i32, String> {
    if geometry.v_head_dim() == 0 {
        return Err("has V, the manifest's model has none".to_owned());
    }
    match geometry.dtype() {
        Dtype::F32 => Ok(types::F32),
        Dtype::F16 => Ok(types::F16),
        Dtype::Bf16 => Ok(types::BF16),
        other => Err(format!("cannot be pages of {other}: f32, f16 and bf16 can")),
    }
}

/// Where the parts of a slot file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    head_bytes: u64,
    layers: u64,
    cells: u64,
    /// Of K and of V.
    row_bytes: [u64; 2],
}

/// What is at a place of a slot file, and how far into it that place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// What [`write_head`] writes.
    Head { at: u64 },
    /// What [`write_tensor_head`] writes.
    TensorHead { is_v: bool, at: u64 },
    /// Rows of K, or V, of a layer.
    Rows { layer: u32, is_v: bool, at: u64 },
}

impl Layout {
    /// Of a slot with so many ids and cells; nothing, if slots do not have the model's type.
    pub(crate) fn new(geometry: &Geometry, version: Version, ids: u32, cells: u32) -> Option<Self> {
        kind(geometry).ok()?;
        let cells = u64::from(cells);
        let rotation_bytes = if version == Version::Four { ROTATION_BYTES } else { 0 };
        Some(Self {
            head_bytes: HEAD_BYTES + 4 * u64::from(ids) + CELL_BYTES * cells + rotation_bytes,
            layers: u64::from(geometry.num_layers()),
            cells,
            row_bytes: row_bytes(geometry),
        })
    }

    fn tensor_bytes(&self, is_v: bool) -> u64 {
        TENSOR_HEAD_BYTES + self.cells * self.row_bytes[usize::from(is_v)]
    }

    /// Bytes of K, or V, of one token of a layer.
    pub(crate) fn row_bytes(&self, is_v: bool) -> u64 {
        self.row_bytes[usize::from(is_v)]
    }

    /// Bytes of the file.
    pub(crate) fn length(&self) -> u64 {
        self.head_bytes + self.layers * (self.tensor_bytes(false) + self.tensor_bytes(true))
    }

    /// What is at `offset`, and how many bytes of it follow; nothing behind the end.
    pub(crate) fn part(&self, offset: u64) -> Option<(Part, u64)> {
        let Some(mut at) = offset.checked_sub(self.head_bytes) else {
            return Some((Part::Head { at: offset }, self.head_bytes - offset));
        };
        let is_v = at >= self.layers * self.tensor_bytes(false);
        if is_v {
            at -= self.layers * self.tensor_bytes(false);
        }
        let bytes = self.tensor_bytes(is_v);
        let (layer, at) = (at / bytes, at % bytes);
        if layer >= self.layers {
            return None;
        }
        Some(match at.checked_sub(TENSOR_HEAD_BYTES) {
            None => (Part::TensorHead { is_v, at }, TENSOR_HEAD_BYTES - at),
            Some(at) => {
                let layer = u32::try_from(layer).ok()?;
                (Part::Rows { layer, is_v, at }, bytes - TENSOR_HEAD_BYTES - at)
            }
        })
    }
}

/// Writes all of a slot file before the rows.
///
/// # Errors
/// Those of writing, and `InvalidInput` for a dtype that slots do not have.
pub(crate) fn write_head(
    to: &mut impl Write, geometry: &Geometry, version: Version, tokens: &[u32], cells: u32,
) -> io::Result<()> {
    let count = u32::try_from(tokens.len()).map_err(io::Error::other)?;
    let numbers = [MAGIC, version.number(), count].into_iter().chain(tokens.iter().copied());
    let cell = |position: u32| [position, 1, 0];
    let numbers = numbers.chain([1, cells]).chain((0..cells).flat_map(cell));
    let not_rotated: &[u32] = if version == Version::Four { &[0, 0] } else { &[] };
    let numbers = numbers.chain([0, geometry.num_layers()]).chain(not_rotated.iter().copied());
    for number in numbers {
        to.write_all(&number.to_le_bytes())?;
    }
    Ok(())
}

/// Writes what stands before the rows of K, or V, of a layer.
///
/// # Errors
/// As [`write_head`].
pub(crate) fn write_tensor_head(
    to: &mut impl Write, geometry: &Geometry, is_v: bool,
) -> io::Result<()> {
    let kind = kind(geometry).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
    to.write_all(&kind.to_le_bytes())?;
    to.write_all(&row_bytes(geometry)[usize::from(is_v)].to_le_bytes())
}
