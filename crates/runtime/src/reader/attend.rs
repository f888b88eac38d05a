//! Attention over a stream, which reads only the pages that some query sees.
//!
//! Window, mask and selection are known before a page is read, so pages without a token that
//! somebody sees are left out, and stay in the tier that they are in. The next layers are read ahead
//! under the rule of this one as long as they are of its kind; with a selection, which depends on
//! the layer's queries, they are not.

use std::ops::Range;

use half::f16;

use super::{ReadError, Run, Stream};
use crate::attention::select::TokenSet;
use crate::attention::{Attention, Mask, Options, Partials, Queries};
use crate::page::Positions;

impl Stream<'_> {
    /// Attends to this layer, and goes on to the next one.
    ///
    /// The queries see the [`tokens`](Self::tokens) of the stream, as far as the options let them;
    /// a mask and a selection count those, with holes. Pages that no query sees are not read. Tokens
    /// that were moved need [`Options::rotation`].
    ///
    /// # Errors
    /// As [`next_run`](Self::next_run), [`ReadError::Missing`] if a query sees a page that is gone
    /// because a window has passed it, [`ReadError::Attention`] as [`Attention::run`], and
    /// [`ReadError::Arguments`] if there is no layer left.
    pub fn attend(
        &mut self, attention: &Attention, queries: &Queries<'_>, options: &Options<'_>,
    ) -> Result<Partials, ReadError> {
        if self.layer().is_none() {
            return Err(ReadError::Arguments("no layer of the scan is left".to_owned()));
        }
        let span = self.tokens();
        // Refuses what does not fit even where there are no tokens.
        let plain = Options { mask: None, selection: None, ..*options };
        let mut all = attention.run(queries, &[], &plain)?;
        options.check(attention.shape(), queries.positions.len(), length(&span))?;
        let page_tokens = u64::from(self.manifest().geometry().page_tokens());
        let seen = seen_pages(queries, options, &span, (page_tokens, self.positions()));
        self.narrow(seen, self.reach(options));
        if let Some((layer, start)) = self.layer().zip(self.passed_page()) {
            return Err(ReadError::Missing { layer, start });
        }
        while let Some(run) = self.next_seen_run()? {
            let part = Part::new(options, &run, &span);
            all.merge(&attention.run(queries, &run.blocks(), &part.options(options))?)?;
        }
        Ok(all)
    }

    /// The first layer that is not read ahead.
    fn reach(&self, options: &Options<'_>) -> usize {
        let kind = |layer| self.manifest().layer_kind(layer);
        let mut left = self.layers_left();
        let Some((current, layer)) = left.next() else { return 0 };
        let alike = left.take_while(|(_, other)| kind(*other) == kind(layer));
        current + 1 + if options.selection.is_some() { 0 } else { alike.count() }
    }
}

pub(crate) fn length(tokens: &Range<u64>) -> usize {
    usize::try_from(tokens.end - tokens.start).unwrap_or(usize::MAX)
}

/// Which pages have a token that some query sees; `None` if all of them have.
pub(crate) fn seen_pages(
    queries: &Queries<'_>, options: &Options<'_>, span: &Range<u64>,
    (page_tokens, positions): (u64, &Positions),
) -> Option<Vec<bool>> {
    let starts = (span.start..span.end).step_by(usize::try_from(page_tokens).unwrap_or(1));
    let is_plain = options.mask.is_none() && options.selection.is_none();
    let can_see = |query: usize, position: u64, run: crate::page::Run| {
        let seen = options.seen_positions(position);
        let stands = run.positions();
        let mut tokens = stands.start.max(seen.start)..stands.end.min(seen.end);
        if is_plain {
            return !tokens.is_empty();
        }
        let row = |token: u64| run.row + (token - run.position);
        tokens.any(|token| options.admits(query, length(&(span.start..row(token))), length(span)))
    };
    let is_seen = |start: u64| {
        positions.within(start..span.end.min(start + page_tokens)).any(|run| {
            let mut all = queries.positions.iter().enumerate();
            all.any(|(query, position)| can_see(query, *position, run))
        })
    };
    let seen: Vec<bool> = starts.map(is_seen).collect();
    (!seen.iter().all(|seen| *seen)).then_some(seen)
}

/// Mask and selection of the tokens of a run.
struct Part {
    mask: Option<Values>,
    selection: Option<TokenSet>,
}

/// `[num_queries, tokens]`
enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

impl Part {
    fn new(options: &Options<'_>, run: &Run, span: &Range<u64>) -> Self {
        if options.mask.is_none() && options.selection.is_none() {
            return Self { mask: None, selection: None };
        }
        let ranges = run.placed_blocks().map(|(row, block)| {
            let start = length(&(span.start..row));
            start..start + block.tokens
        });
        let ranges: Vec<Range<usize>> = ranges.collect();
        let mask = options.mask.map(|mask| match mask {
            Mask::F32(values) => Values::F32(gather(values, length(span), &ranges)),
            Mask::F16(values) => Values::F16(gather(values, length(span), &ranges)),
        });
        Self { mask, selection: options.selection.map(|selection| selection.gather(&ranges)) }
    }

    fn options<'a>(&'a self, options: &Options<'a>) -> Options<'a> {
        let mask = self.mask.as_ref().map(|mask| match mask {
            Values::F32(values) => Mask::F32(values),
            Values::F16(values) => Mask::F16(values),
        });
        Options { mask, selection: self.selection.as_ref(), ..*options }
    }
}

/// The values of some tokens, of every query.
fn gather<T: Copy>(values: &[T], tokens: usize, ranges: &[Range<usize>]) -> Vec<T> {
    let rows = values.chunks_exact(tokens);
    rows.flat_map(|row| ranges.iter().flat_map(|range| &row[range.clone()])).copied().collect()
}
