//! What a layer keeps of each token beside K and V, where it lies: in the same pages and tail, so whoever has the
//! one has the other.

use super::page::LoadedPage;
use super::run::Run;
use super::tail::TailRows;
use crate::page::{Geometry, Positions};

/// Side rows of consecutive tokens.
#[derive(Debug, Clone, Copy)]
pub struct SideBlock<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    stride: usize,
    /// How many.
    pub tokens: usize,
    /// Position of the first token.
    pub first_position: u64,
    /// That position less the one at which it was written. What in a row depends on the position, such as a
    /// rotation, is still that of the other one.
    pub shift: i64,
}

impl<'a> SideBlock<'a> {
    /// The row of a token, counted from the first one of the block.
    ///
    /// # Panics
    /// As an index would, if the block does not have it.
    pub fn row(&self, token: usize) -> &'a [u8] {
        assert!(token < self.tokens, "side row {token} of {}", self.tokens);
        &self.bytes[token * self.stride..][..self.row_bytes]
    }

    /// The rows one behind the other, as pages have them; `None` where they lie among those of a tail.
    pub fn contiguous(&self) -> Option<&'a [u8]> {
        (self.stride == self.row_bytes).then(|| &self.bytes[..self.tokens * self.row_bytes])
    }

    fn of_page(page: &'a LoadedPage, tokens: u64) -> Self {
        let view = page.view();
        let row_bytes = bytes(view.geometry().side_row_bytes());
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
        Self {
            bytes: view.side(),
            row_bytes,
            stride: row_bytes,
            tokens,
            first_position: page.start(),
            shift: 0,
        }
    }

    fn of_tail(tail: &'a TailRows, geometry: &Geometry) -> Self {
        let rows = tail.rows();
        let first = bytes(geometry.side_row_offset()).min(rows.len());
        Self {
            bytes: &rows[first..],
            row_bytes: bytes(geometry.side_row_bytes()),
            stride: bytes(geometry.row_bytes()),
            tokens: usize::try_from(tail.tokens()).unwrap_or(usize::MAX),
            first_position: tail.start(),
            shift: 0,
        }
    }

    /// The rows that are no holes, where they stand.
    fn placed<'p>(self, positions: &'p Positions) -> impl Iterator<Item = Self> + 'p
    where
        'a: 'p,
    {
        let first = self.first_position;
        positions.within(first..first + self.tokens as u64).map(move |run| {
            let at = |row: u64| usize::try_from(row - first).unwrap_or(usize::MAX);
            let (begin, end) = (at(run.row), at(run.rows().end));
            Self {
                bytes: &self.bytes[begin * self.stride..],
                tokens: end - begin,
                first_position: run.position,
                shift: run.shift,
                ..self
            }
        })
    }
}

impl Run {
    /// Side rows in the order of rows, in blocks of the same tokens as [`blocks`](Self::blocks) has; empty where the
    /// layer keeps none.
    pub fn side_blocks(&self) -> Vec<SideBlock<'_>> {
        if self.geometry().side_row_bytes() == 0 {
            return Vec::new();
        }
        let pages = self.loaded().map(|(page, tokens)| SideBlock::of_page(page, tokens));
        let tail = self.tail().map(|tail| SideBlock::of_tail(tail, self.geometry()));
        pages.chain(tail).flat_map(|block| block.placed(self.positions())).collect()
    }
}

fn bytes(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a row is a few MiB at most")
}
