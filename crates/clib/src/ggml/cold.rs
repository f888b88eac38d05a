//! Which cells of a cache are not in memory any more, and so must be read ahead.
//!
//! A cache may be larger than memory: the kernel takes from its files what else is needed, and each
//! step needs all of it again, so page faults would wait for the disk one after the other. The
//! kernel is asked what has left ([`is_resident`]) when there were such faults. From then on these
//! cells are read past the page cache ([`ring`](super::ring)), ahead of the layer that needs them,
//! and what is in memory stays there. Cells that a graph writes are used where they are.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use nix::sys::resource::{UsageWho, getrusage};

use super::buffer;
use super::files::{CacheFile, Piece};
use super::operation::FlashAttention;
use super::region::{OS_PAGE_BYTES, is_resident};
use super::ring::{HALF_BYTES, Load};
use super::tensor::TensorView;

/// Page faults that waited for a disk, after which it is looked who has left: with the kernel's usual
/// reading ahead, 8 MiB.
const FAULTS: i64 = 64;

/// Notices page faults.
#[derive(Debug, Default)]
pub(super) struct Faults(i64);

impl Faults {
    /// Whether there were enough since it last said so.
    pub(super) fn are_many(&mut self) -> bool {
        let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return false };
        let faults = usage.major_page_faults();
        let many = faults - self.0 >= FAULTS;
        if many {
            self.0 = faults;
        }
        many
    }
}

/// Cells that a graph writes, by the address of the tensor.
#[derive(Debug, Default)]
pub(super) struct Written(BTreeMap<usize, Cells>);

#[derive(Debug)]
enum Cells {
    All,
    Some(BTreeSet<usize>),
}

impl Written {
    /// Notes what a node that stores rows (`SET_ROWS`) does to its tensor.
    pub(super) fn rows(&mut self, node: TensorView<'_>) {
        let root = node.root();
        let cells = (node.raw().data == root.raw().data && node.strides()[1] == root.strides()[1])
            .then(|| node.source(1)?.leaf_indices())
            .flatten();
        let Some(cells) = cells else { return self.all(node) };
        let known = self.0.entry(root.raw().data.addr()).or_insert(Cells::Some(BTreeSet::new()));
        if let Cells::Some(known) = known {
            known.extend(cells);
        }
    }

    /// Notes another node.
    pub(super) fn all(&mut self, node: TensorView<'_>) {
        self.0.insert(node.root().raw().data.addr(), Cells::All);
    }

    fn are_any(&self, root: TensorView<'_>, cells: &Range<usize>) -> bool {
        match self.0.get(&root.raw().data.addr()) {
            None => false,
            Some(Cells::All) => true,
            Some(Cells::Some(written)) => written.range(cells.clone()).next().is_some(),
        }
    }
}

/// Consecutive cells of a stream, from the first that the operation has.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) cells: Range<usize>,
    /// The number of its load; none, if it is in memory.
    pub(super) load: Option<usize>,
}

/// K or V as rows of a file.
struct Rows<'a> {
    file: Arc<CacheFile>,
    root: TensorView<'a>,
    /// The cell of the file with which the operation starts, and how far the next stream is.
    first: usize,
    stream: usize,
    row_bytes: usize,
    /// Of the heads of a cell.
    bytes: usize,
}

impl<'a> Rows<'a> {
    fn of(tensor: TensorView<'a>) -> Option<Self> {
        let root = tensor.root();
        let file = buffer::cache_file(root)?;
        let [_, row_bytes, head_bytes, stream_bytes] = tensor.strides();
        let offset = tensor.raw().data.addr().checked_sub(root.raw().data.addr())?;
        let bytes = tensor.shape()[2].checked_mul(head_bytes)?;
        let is_rows = row_bytes == root.strides()[1]
            && bytes <= row_bytes
            && offset.is_multiple_of(row_bytes)
            && stream_bytes.is_multiple_of(row_bytes);
        is_rows.then(|| Self {
            file,
            root,
            first: offset / row_bytes,
            stream: stream_bytes / row_bytes,
            row_bytes,
            bytes,
        })
    }

    /// Of cells of the file.
    fn piece(&self, cells: &Range<usize>) -> Piece {
        let length = (cells.len() - 1) * self.row_bytes + self.bytes;
        Piece { offset: cells.start * self.row_bytes, length }
    }

    /// Whether the engine has other rows in their place than its file.
    fn are_covered(&self, cells: &Range<usize>) -> bool {
        self.file.is_covered(&self.piece(cells))
    }

    fn is_resident(&self, cells: &Range<usize>) -> bool {
        let Piece { offset, length } = self.piece(cells);
        self.root
            .bytes()
            .and_then(|bytes| bytes.get(offset..offset + length))
            .is_none_or(is_resident)
    }
}

/// What the operations of a graph read.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) loads: Vec<Load>,
}

impl Plan {
    /// The cells of each stream of an operation, divided where it changes who has them, and what has
    /// to be read of them behind what was planned before, each load for so many `uses`. `is_search`
    /// looks for cells that have left. Nothing, if everything is in memory.
    pub(super) fn add(
        &mut self, operation: &FlashAttention<'_>, uses: usize, written: &Written, is_search: bool,
    ) -> Option<Vec<Vec<Span>>> {
        let (k, v) = (Rows::of(operation.k)?, Rows::of(operation.v)?);
        // A view of the cache has the same cells in both.
        let same_cells = (k.first, k.stream) == (v.first, v.stream);
        let group_cells = (HALF_BYTES - 2 * OS_PAGE_BYTES) / k.row_bytes.max(v.row_bytes);
        let file = Arc::clone(&k.file);
        let mut cold = file.cold();
        if group_cells == 0 || uses == 0 || !same_cells || !(is_search || cold.contains(&true)) {
            return None;
        }
        let mut streams = Vec::new();
        let mut is_all_in_memory = true;
        for stream in 0..operation.streams {
            let first = k.first + stream * k.stream;
            let end = first + operation.cells;
            let mut spans = Vec::new();
            for group in first / group_cells..end.div_ceil(group_cells) {
                let whole = group * group_cells..(group + 1) * group_cells;
                let cells = whole.start.max(first)..whole.end.min(end);
                if cold.len() <= group {
                    cold.resize(group + 1, false);
                }
                let is_written = written.are_any(k.root, &whole) || written.are_any(v.root, &whole);
                let is_elsewhere = is_written || k.are_covered(&cells) || v.are_covered(&cells);
                let has_left = || {
                    cold[group] || is_search && !(k.is_resident(&cells) && v.is_resident(&cells))
                };
                cold[group] = !is_elsewhere && has_left();
                let load = cold[group].then(|| self.load(&k, &v, &cells, uses));
                is_all_in_memory &= load.is_none();
                spans.push(Span { cells: cells.start - first..cells.end - first, load });
            }
            streams.push(spans);
        }
        (!is_all_in_memory).then_some(streams)
    }

    fn load(&mut self, k: &Rows<'_>, v: &Rows<'_>, cells: &Range<usize>, uses: usize) -> usize {
        let part = |rows: &Rows<'_>| (Arc::clone(&rows.file), rows.piece(cells));
        self.loads.push(Load { k: part(k), v: part(v), uses });
        self.loads.len() - 1
    }
}
