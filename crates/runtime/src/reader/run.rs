//! What a scan hands out: pages in memory, as blocks for attention.

use std::ops::Range;
use std::sync::Arc;

use super::page::LoadedPage;
use super::tail::TailRows;
use super::{ReadError, Sequence};
use crate::attention::KvBlock;
use crate::page::{Geometry, Layer, Positions, TokenStart};

/// Pages of a layer in order, and the tail if it follows. While it lives they stay in memory.
#[derive(Debug)]
pub struct Run {
    layer: Layer,
    geometry: Geometry,
    /// Of the stream.
    end: u64,
    positions: Arc<Positions>,
    pages: Vec<Arc<LoadedPage>>,
    tail: Option<TailRows>,
}

impl Run {
    pub(super) fn new(layer: Layer, sequence: &Sequence, tokens: &Range<u64>) -> Self {
        let geometry = sequence.manifest().layer_geometry(layer);
        let positions = Arc::clone(sequence.positions_of(layer));
        Self { layer, geometry, end: tokens.end, positions, pages: Vec::new(), tail: None }
    }

    /// The layer.
    pub fn layer(&self) -> Layer {
        self.layer
    }

    /// How many rows it has, up to the end of the stream.
    pub fn tokens(&self) -> u64 {
        let tail = self.tail.as_ref().map_or(0, TailRows::tokens);
        self.pages.iter().map(|page| self.tokens_of(page)).sum::<u64>() + tail
    }

    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        let tail = self.tail.as_ref().map_or(0, TailRows::bytes);
        self.pages.iter().map(|page| page.bytes()).sum::<u64>() + tail
    }

    /// Bytes of them that are mapped from the mount's memory.
    pub fn mapped_bytes(&self) -> u64 {
        self.pages.iter().filter(|page| page.is_mapped()).map(|page| page.bytes()).sum()
    }

    /// K and V in the order of rows, at the positions where they stand. Where tokens were removed or
    /// moved, a page has several blocks, or one with a shift.
    pub fn blocks(&self) -> Vec<KvBlock<'_>> {
        self.placed_blocks().map(|(_, block)| block).collect()
    }

    /// The same with the first row of each.
    pub(super) fn placed_blocks(&self) -> impl Iterator<Item = (u64, KvBlock<'_>)> {
        let pages = self.page_blocks(0..self.pages.len());
        let stored = pages.chain(self.tail.iter().map(|tail| tail.block(&self.geometry)));
        // A page says where it was written.
        stored.flat_map(|block| block.placed(&self.positions))
    }

    /// The pages as files, whole: the last one may go on behind the end of the stream.
    pub fn files(&self) -> &[Arc<LoadedPage>] {
        &self.pages
    }

    /// Pages, without the tail.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// K and V of some of the pages, as they were written.
    pub(crate) fn page_blocks(&self, pages: Range<usize>) -> impl Iterator<Item = KvBlock<'_>> {
        self.pages[pages].iter().map(|page| {
            let mut block = page.block();
            let tokens = usize::try_from(self.tokens_of(page));
            block.tokens = block.tokens.min(tokens.unwrap_or(usize::MAX));
            block
        })
    }

    /// The page of a block; `None` for the tail.
    pub(crate) fn page(&self, block: usize) -> Option<&Arc<LoadedPage>> {
        self.pages.get(block)
    }

    pub(super) fn has_tail(&self) -> bool {
        self.tail.is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.tail.is_none()
    }

    pub(super) fn has_pages(&self) -> bool {
        !self.pages.is_empty()
    }

    pub(super) fn add_tail(&mut self, rows: TailRows) {
        self.tail = Some(rows);
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(super) fn positions(&self) -> &Positions {
        &self.positions
    }

    /// The rows behind the pages; only the last run of a layer has any.
    pub fn tail(&self) -> Option<&TailRows> {
        self.tail.as_ref()
    }

    /// The pages, and how many tokens of each count.
    pub(super) fn loaded(&self) -> impl Iterator<Item = (&LoadedPage, u64)> {
        self.pages.iter().map(|page| (page.as_ref(), self.tokens_of(page)))
    }

    fn tokens_of(&self, page: &LoadedPage) -> u64 {
        u64::from(page.tokens()).min(self.end.saturating_sub(page.start()))
    }

    /// A page that is shorter than the stream wants is the last of its layer.
    pub(super) fn push(&mut self, page: Arc<LoadedPage>) -> Result<(), ReadError> {
        let wanted = u64::from(self.geometry.page_tokens()).min(self.end - page.start());
        if u64::from(page.tokens()) < wanted {
            let start = TokenStart(page.start() + u64::from(page.tokens()));
            return Err(ReadError::Missing { layer: self.layer, start });
        }
        self.pages.push(page);
        Ok(())
    }
}
