//! Making a slot file: where its parts are, and what stands before rows.

use std::io::{self, Write};

use super::format::Format;
use super::{CELL_BYTES, HEAD_BYTES, MAGIC, SESSION_MAGIC, SESSION_VERSION, Version, tensor};

/// Where the parts of a slot file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    head_bytes: u64,
    layers: u64,
    cells: u64,
    /// Of K and of V.
    row_bytes: [u64; 2],
}

/// What is at a place of a slot file, and how far into it that place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What [`Head::write`] writes.
    Head {
        /// Bytes into it.
        at: u64,
    },
    /// What [`write_tensor_head`] writes.
    TensorHead {
        /// Or of K.
        is_v: bool,
        /// Bytes into it.
        at: u64,
    },
    /// Rows of K, or V, of a layer.
    Rows {
        /// Whose they are.
        layer: u32,
        /// Or of K.
        is_v: bool,
        /// Bytes into them.
        at: u64,
    },
}

impl Layout {
    /// Of a slot with so many ids and cells.
    pub fn new(format: &Format, version: Version, ids: u32, cells: u32) -> Self {
        let cells = u64::from(cells);
        let rotation_bytes = size_of_val(format.rotation_of(version)) as u64;
        Self {
            head_bytes: HEAD_BYTES + 4 * u64::from(ids) + CELL_BYTES * cells + rotation_bytes,
            layers: u64::from(format.layers),
            cells,
            row_bytes: format.row_bytes,
        }
    }

    fn tensor_bytes(&self, is_v: bool) -> u64 {
        tensor::HEAD_BYTES + self.cells * self.row_bytes[usize::from(is_v)]
    }

    /// Bytes of K, or V, of one token of a layer.
    pub fn row_bytes(&self, is_v: bool) -> u64 {
        self.row_bytes[usize::from(is_v)]
    }

    /// Bytes of the file.
    pub fn length(&self) -> u64 {
        self.head_bytes + self.layers * (self.tensor_bytes(false) + self.tensor_bytes(true))
    }

    /// What is at `offset`, and how many bytes of it follow; nothing behind the end.
    pub fn part(&self, offset: u64) -> Option<(Part, u64)> {
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
        Some(match at.checked_sub(tensor::HEAD_BYTES) {
            None => (Part::TensorHead { is_v, at }, tensor::HEAD_BYTES - at),
            Some(at) => {
                let layer = u32::try_from(layer).ok()?;
                (Part::Rows { layer, is_v, at }, bytes - tensor::HEAD_BYTES - at)
            }
        })
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
    /// Writes it.
    pub fn write(&self, to: &mut impl Write, format: &Format) -> io::Result<()> {
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
        let cell = |position: u32| [position, 1, 0];
        let numbers = [1, self.cells].into_iter().chain((0..self.cells).flat_map(cell));
        let rotation = format.rotation_of(self.version).iter().copied();
        let order = [u32::from(self.is_transposed), format.layers];
        write_numbers(to, numbers.chain(order).chain(rotation))
    }
}

fn write_numbers(to: &mut impl Write, numbers: impl IntoIterator<Item = u32>) -> io::Result<()> {
    numbers.into_iter().try_for_each(|number| to.write_all(&number.to_le_bytes()))
}

/// Writes what stands before the rows of K, or V, of a layer.
pub fn write_tensor_head(to: &mut impl Write, format: &Format, is_v: bool) -> io::Result<()> {
    to.write_all(&format.kind.to_le_bytes())?;
    to.write_all(&format.row_bytes[usize::from(is_v)].to_le_bytes())
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
