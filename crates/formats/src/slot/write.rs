//! Making a slot file: where its parts are, and what stands before rows and states.

use std::io::{self, Write};

use super::format::Format;
use super::recurrent::{self, tensor_of};
use super::{CELL_BYTES, HEAD_BYTES, MAGIC, SESSION_MAGIC, SESSION_VERSION, Version, tensor};
use kvfs_page::Layer;

/// Bytes of numbers before the cells of a cache, and behind them, without the rotation.
const CACHE_BYTES: u64 = 16;
/// Bytes before the tensors of states.
const STATES_BYTES: u64 = 20;

/// Where the parts of a slot file are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Where each ends, in order.
    pieces: Vec<(u64, Piece)>,
    /// Of K and of V.
    row_bytes: [u64; 2],
}

/// A part, without where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Head { number: usize },
    TensorHead([u8; TENSOR_HEAD_BYTES]),
    Rows { layer: Layer, is_v: bool, first: u32 },
    State { layer: Layer, tensor: usize },
    Checkpoints,
}

/// [`tensor::HEAD_BYTES`].
const TENSOR_HEAD_BYTES: usize = 4 + 8;

/// What is at a place of a slot file, and how far into it that place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What [`Head::write_number`] writes.
    Head {
        /// Of which of the file's caches.
        number: usize,
        /// Bytes into it.
        at: u64,
    },
    /// What stands before a tensor.
    TensorHead {
        /// All of it.
        bytes: [u8; TENSOR_HEAD_BYTES],
        /// Bytes into it.
        at: u64,
    },
    /// Rows of K, or V, of a layer.
    Rows {
        /// Whose they are.
        layer: Layer,
        /// Or of K.
        is_v: bool,
        /// The token of the first of them.
        first: u32,
        /// Bytes into them.
        at: u64,
    },
    /// A tensor of the state of a recurrent layer.
    State {
        /// Whose it is.
        layer: Layer,
        /// Which of those of the state.
        tensor: usize,
        /// Bytes into it.
        at: u64,
    },
    /// What a server keeps to go back to earlier tokens.
    Checkpoints {
        /// Bytes into them.
        at: u64,
    },
}

/// What is added to a layout, piece by piece.
#[derive(Default)]
struct Pieces {
    all: Vec<(u64, Piece)>,
    end: u64,
}

impl Pieces {
    fn add(&mut self, bytes: u64, piece: Piece) {
        self.end += bytes;
        if bytes > 0 {
            self.all.push((self.end, piece));
        }
    }
}

impl Layout {
    /// Of a slot with so many ids and cells.
    pub fn new(format: &Format, version: Version, ids: u32, cells: u32) -> Self {
        let mut pieces = Pieces::default();
        let mut before = HEAD_BYTES - CACHE_BYTES + 4 * u64::from(ids);
        let rotation_bytes = size_of_val(format.rotation_of(version)) as u64;
        for (number, cache) in format.caches.rows.iter().enumerate() {
            let first = cache.first(cells);
            let rows = u64::from(cells - first);
            let bytes = before + CACHE_BYTES + CELL_BYTES * rows + rotation_bytes;
            before = 0;
            pieces.add(bytes, Piece::Head { number });
            for is_v in [false, true] {
                let row_bytes = format.row_bytes[usize::from(is_v)];
                for layer in cache.layers.iter().copied() {
                    let head = tensor_head(format.kind, row_bytes);
                    pieces.add(tensor::HEAD_BYTES, Piece::TensorHead(head));
                    pieces.add(rows * row_bytes, Piece::Rows { layer, is_v, first });
                }
            }
        }
        if !format.caches.states.is_empty() {
            let number = format.caches.rows.len();
            pieces.add(before + STATES_BYTES, Piece::Head { number });
            for tensor in [0, 1] {
                for (layer, shape) in &format.caches.states {
                    let (kind, bytes) = tensor_of(shape, tensor);
                    let head = tensor_head(kind, bytes);
                    pieces.add(tensor::HEAD_BYTES, Piece::TensorHead(head));
                    pieces.add(bytes, Piece::State { layer: *layer, tensor });
                }
            }
        }
        Self { pieces: pieces.all, row_bytes: format.row_bytes }
    }

    /// The same with so many bytes of checkpoints behind it.
    #[must_use]
    pub fn with_checkpoints(mut self, bytes: u64) -> Self {
        if bytes > 0 {
            self.pieces.push((self.length() + bytes, Piece::Checkpoints));
        }
        self
    }

    /// Bytes of K, or V, of one token of a layer.
    pub fn row_bytes(&self, is_v: bool) -> u64 {
        self.row_bytes[usize::from(is_v)]
    }

    /// Bytes of the file.
    pub fn length(&self) -> u64 {
        self.pieces.last().map_or(0, |(end, _)| *end)
    }

    /// What is at `offset`, and how many bytes of it follow; nothing behind the end.
    pub fn part(&self, offset: u64) -> Option<(Part, u64)> {
        let index = self.pieces.partition_point(|(end, _)| *end <= offset);
        let (end, piece) = *self.pieces.get(index)?;
        let begin = index.checked_sub(1).map_or(0, |before| self.pieces[before].0);
        let at = offset - begin;
        let part = match piece {
            Piece::Head { number } => Part::Head { number, at },
            Piece::TensorHead(bytes) => Part::TensorHead { bytes, at },
            Piece::Rows { layer, is_v, first } => Part::Rows { layer, is_v, first, at },
            Piece::State { layer, tensor } => Part::State { layer, tensor, at },
            Piece::Checkpoints => Part::Checkpoints { at },
        };
        Some((part, end - offset))
    }
}

/// What stands before all rows.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Of the format.
    pub version: Version,
    /// Ids of the tokens; one more than cells at most.
    pub tokens: &'a [u32],
    /// Tokens that have rows.
    pub cells: u32,
    /// Whether V stands as columns.
    pub is_transposed: bool,
    /// Makes it a session of a model of this architecture.
    pub session: Option<&'a str>,
}

impl Head<'_> {
    /// Writes it, up to the rows of the first cache.
    pub fn write(&self, to: &mut impl Write, format: &Format) -> io::Result<()> {
        self.write_number(to, format, 0)
    }

    /// Writes what stands before the tensors of the cache of this number.
    pub fn write_number(
        &self, to: &mut impl Write, format: &Format, number: usize,
    ) -> io::Result<()> {
        if number == 0 {
            self.write_ids(to)?;
        }
        let Some(cache) = format.caches.rows.get(number) else {
            return write_numbers(to, recurrent::head(self.cells, format.layers));
        };
        let cell = |position: u32| [position, 1, 0];
        let first = cache.first(self.cells);
        let cells = (first..self.cells).flat_map(cell);
        let rotation = format.rotation_of(self.version).iter().copied();
        let layers = u32::try_from(cache.layers.len()).map_err(io::Error::other)?;
        let order = [u32::from(self.is_transposed), layers];
        write_numbers(to, [1, self.cells - first].into_iter().chain(cells))?;
        write_numbers(to, order.into_iter().chain(rotation))
    }

    fn write_ids(&self, to: &mut impl Write) -> io::Result<()> {
        let count = u32::try_from(self.tokens.len()).map_err(io::Error::other)?;
        let (magic, number) = match self.session {
            Some(_) => (SESSION_MAGIC, SESSION_VERSION),
            None => (MAGIC, self.version.number()),
        };
        write_numbers(to, [magic, number, count].into_iter().chain(self.tokens.iter().copied()))?;
        if let Some(architecture) = self.session {
            let length = u32::try_from(architecture.len()).map_err(io::Error::other)?;
            to.write_all(&length.to_le_bytes())?;
            to.write_all(architecture.as_bytes())?;
        }
        Ok(())
    }
}

fn write_numbers(to: &mut impl Write, numbers: impl IntoIterator<Item = u32>) -> io::Result<()> {
    numbers.into_iter().try_for_each(|number| to.write_all(&number.to_le_bytes()))
}

fn tensor_head(kind: i32, bytes: u64) -> [u8; TENSOR_HEAD_BYTES] {
    let mut head = [0; TENSOR_HEAD_BYTES];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[4..].copy_from_slice(&bytes.to_le_bytes());
    head
}

/// Writes what stands before the rows of K, or V, of a layer.
pub fn write_tensor_head(to: &mut impl Write, format: &Format, is_v: bool) -> io::Result<()> {
    to.write_all(&tensor_head(format.kind, format.row_bytes[usize::from(is_v)]))
}

/// Writes what stands before V of a layer that is transposed, of elements of so many bytes.
pub fn write_transposed_head(
    to: &mut impl Write, format: &Format, element_bytes: u32,
) -> io::Result<()> {
    let elements = format.row_bytes[1] / u64::from(element_bytes);
    let elements = u32::try_from(elements).map_err(io::Error::other)?;
    to.write_all(&format.kind.to_le_bytes())?;
    to.write_all(&element_bytes.to_le_bytes())?;
    to.write_all(&elements.to_le_bytes())
}

/// Writes what stands before a tensor of a state, R (0) or S (1).
pub fn write_state_head(
    to: &mut impl Write, shape: &kvfs_page::StateShape, tensor: usize,
) -> io::Result<()> {
    let (kind, bytes) = tensor_of(shape, tensor);
    to.write_all(&tensor_head(kind, bytes))
}
