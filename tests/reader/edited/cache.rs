//! A plain cache in memory with the meaning of llama.cpp's: a list of cells for each sequence.

use std::collections::BTreeMap;
use std::ops::Range;

/// A token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    /// What was computed: K and V follow from it.
    pub(super) token: u32,
    pub(super) position: u64,
}

/// The sequences by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Cache {
    pub(super) sequences: BTreeMap<String, Vec<Cell>>,
}

impl Cache {
    pub(super) fn names(&self) -> Vec<String> {
        self.sequences.keys().cloned().collect()
    }

    pub(super) fn cells(&mut self, name: &str) -> &mut Vec<Cell> {
        self.sequences.entry(name.to_owned()).or_default()
    }

    /// Where the next token stands.
    pub(super) fn next(&self, name: &str) -> u64 {
        let cells = self.sequences.get(name).map_or(&[][..], Vec::as_slice);
        cells.iter().map(|cell| cell.position + 1).max().unwrap_or(0)
    }

    pub(super) fn append(&mut self, name: &str, tokens: &[u32]) {
        let next = self.next(name);
        let cells = (next..).zip(tokens).map(|(position, token)| Cell { token: *token, position });
        self.cells(name).extend(cells);
    }

    pub(super) fn seq_rm(&mut self, name: &str, range: &Range<u64>) {
        self.cells(name).retain(|cell| !range.contains(&cell.position));
    }

    pub(super) fn seq_cp(&mut self, from: &str, to: &str, range: &Range<u64>) {
        let cells = self.cells(from).clone();
        let copied = cells.into_iter().filter(|cell| range.contains(&cell.position));
        *self.cells(to) = copied.collect();
    }

    pub(super) fn seq_add(&mut self, name: &str, range: &Range<u64>, delta: i64) {
        let cells = std::mem::take(self.cells(name));
        let moved = cells.into_iter().filter_map(|cell| {
            if !range.contains(&cell.position) {
                return Some(cell);
            }
            Some(Cell { position: cell.position.checked_add_signed(delta)?, ..cell })
        });
        *self.cells(name) = moved.collect();
    }

    pub(super) fn seq_div(&mut self, name: &str, range: &Range<u64>, divisor: u64) {
        for cell in self.cells(name).iter_mut().filter(|cell| range.contains(&cell.position)) {
            cell.position /= divisor;
        }
    }
}
