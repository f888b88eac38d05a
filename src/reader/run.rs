//! What a scan hands out: pages in memory, as blocks for attention.

use std::ops::Range;
use std::sync::Arc;

use super::ReadError;
use super::page::LoadedPage;
use super::tail::TailRows;
use crate::attention::KvBlock;
use crate::page::{Geometry, Layer, TokenStart};

/// Pages of a layer in order, and the tail if it follows. While it lives they stay in memory.
#[derive(Debug)]
pub struct Run {
    layer: Layer,
    geometry: Geometry,
    /// Of the stream.
    end: u64,
    pages: Vec<Arc<LoadedPage>>,
    tail: Option<TailRows>,
}

impl Run {
    pub(super) fn new(layer: Layer, geometry: Geometry, tokens: &Range<u64>) -> Self {
        Self { layer, geometry, end: tokens.end, pages: Vec::new(), tail: None }
    }

    /// The layer.
    pub fn layer(&self) -> Layer {
        self.layer
    }

    /// How many tokens it has, up to the end of the stream.
    pub fn tokens(&self) -> u64 {
        let tail = self.tail.as_ref().map_or(0, TailRows::tokens);
        self.pages.iter().map(|page| self.tokens_of(page)).sum::<u64>() + tail
    }

    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        let tail = self.tail.as_ref().map_or(0, |tail| tail.bytes(&self.geometry));
        self.pages.iter().map(|page| page.bytes()).sum::<u64>() + tail
    }

    /// Bytes of them that are mapped from the mount's memory.
    pub fn mapped_bytes(&self) -> u64 {
        self.pages.iter().filter(|page| page.is_mapped()).map(|page| page.bytes()).sum()
    }

    /// K and V in order, at the positions that they were written for.
    pub fn blocks(&self) -> Vec<KvBlock<'_>> {
        let pages = self.page_blocks(0..self.pages.len());
        pages.chain(self.tail.iter().map(|tail| tail.block(&self.geometry))).collect()
    }

    /// Pages, without the tail.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// K and V of some of the pages.
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
