//! What a scan reads of one layer, as it was listed.

use std::ops::Range;

use super::ReadError;
use super::listing::{ListedLayer, ListedPage};
use crate::page::{Layer, LayerKind, Manifest, Positions, TokenStart};

/// Which pages of a layer have to be there.
#[derive(Debug)]
pub(crate) struct Rules<'a> {
    page_tokens: u64,
    positions: &'a Positions,
    /// Positions before this one are not looked at any more.
    window_start: u64,
}

impl<'a> Rules<'a> {
    /// Those of a layer whose last token is the last one before `end`.
    pub(crate) fn new(
        layer: Layer, manifest: &Manifest, positions: &'a Positions, end: u64,
    ) -> Self {
        let window = match manifest.layer_kind(layer) {
            Some(LayerKind::Sliding { window }) => Some(u64::from(window)),
            _ => None,
        };
        let ends = window.and_then(|window| Some((window, positions.ends(end)?.1)));
        let page_tokens = u64::from(manifest.geometry().page_tokens());
        let window_start = ends.map_or(0, |(window, last)| (last + 1).saturating_sub(window));
        Self { page_tokens, positions, window_start }
    }

    /// Whether no later token looks at any of these rows.
    pub(crate) fn has_passed(&self, rows: Range<u64>) -> bool {
        self.window_start > 0
            && self.positions.within(rows).all(|run| run.positions().end <= self.window_start)
    }
}

/// What a stream reads of one layer.
#[derive(Debug)]
pub(crate) struct LayerScan {
    layer: Layer,
    pages: Vec<ListedPage>,
    passed: Vec<TokenStart>,
    /// Where the tail starts, and how many of its tokens are wanted.
    tail: Option<(TokenStart, u64)>,
}

impl LayerScan {
    /// The pages with `tokens` that have a row. All of them must be there, but those that only
    /// a window has passed.
    pub(crate) fn new(
        layer: Layer, listed: &ListedLayer, tokens: &Range<u64>, rules: &Rules<'_>,
    ) -> Result<Self, ReadError> {
        let page_tokens = rules.page_tokens;
        let mut at = tokens.start / page_tokens * page_tokens;
        let first = listed.pages.partition_point(|page| page.start.0 < at);
        let mut listed_pages = listed.pages[first..].iter().peekable();
        let mut scan = Self { layer, pages: Vec::new(), passed: Vec::new(), tail: None };
        while !tokens.is_empty() && at < tokens.end {
            let page = listed_pages.next_if(|page| page.start.0 == at);
            let rows = at..tokens.end.min(at + page_tokens);
            if !rules.positions.has_any(rows.clone()) {
                at = rows.end;
                continue;
            }
            match page {
                Some(page) => scan.pages.push(*page),
                None if listed.tail == Some(TokenStart(at)) && tokens.end <= at + page_tokens => {
                    scan.tail = Some((TokenStart(at), tokens.end - at));
                }
                None if rules.has_passed(rows.clone()) => scan.passed.push(TokenStart(at)),
                None => {
                    let is_tail = listed.tail == Some(TokenStart(at));
                    let start = TokenStart(if is_tail { at + page_tokens } else { at });
                    return Err(ReadError::Missing { layer, start });
                }
            }
            at = rows.end;
        }
        Ok(scan)
    }

    /// Pages that are not there because a window has passed them.
    pub(super) fn passed(&self) -> &[TokenStart] {
        &self.passed
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
