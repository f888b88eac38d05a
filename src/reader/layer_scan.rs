//! What a scan reads of one layer, as it was listed.

use std::ops::Range;

use super::ReadError;
use super::listing::{ListedLayer, ListedPage};
use crate::page::{Layer, TokenStart};

/// What a stream reads of one layer.
#[derive(Debug)]
pub(super) struct LayerScan {
    layer: Layer,
    pages: Vec<ListedPage>,
    /// Where the tail starts, and how many of its tokens are wanted.
    tail: Option<(TokenStart, u64)>,
}

impl LayerScan {
    /// The pages with `tokens`, without a hole.
    pub(super) fn new(
        layer: Layer, listed: &ListedLayer, tokens: &Range<u64>, page_tokens: u64,
    ) -> Result<Self, ReadError> {
        let mut at = tokens.start / page_tokens * page_tokens;
        let first = listed.pages.partition_point(|page| page.start.0 < at);
        let mut scan = Self { layer, pages: Vec::new(), tail: None };
        for page in &listed.pages[first..] {
            if at >= tokens.end || page.start.0 != at {
                break;
            }
            scan.pages.push(*page);
            at += page_tokens;
        }
        let left = tokens.end.saturating_sub(at);
        if left == 0 || tokens.is_empty() {
            return Ok(scan);
        }
        let mut missing = TokenStart(at);
        if listed.tail == Some(missing) {
            if left <= page_tokens {
                scan.tail = Some((missing, left));
                return Ok(scan);
            }
            missing.0 += page_tokens;
        }
        Err(ReadError::Missing { layer, start: missing })
    }

    pub(super) fn layer(&self) -> Layer {
        self.layer
    }

    pub(super) fn pages(&self) -> &[ListedPage] {
        &self.pages
    }

    pub(super) fn tail(&self) -> Option<(TokenStart, u64)> {
        self.tail
    }

    pub(super) fn tail_tokens(&self) -> u64 {
        self.tail.map_or(0, |(_, tokens)| tokens)
    }
}
