//! Which tokens of a block the queries see, as the kernels want it told.

use std::ops::Range;

use super::CudaError;
use crate::attention::{Options, Shape};

/// The kernels count distances in 31 bits.
const WINDOW_MAX: u64 = 1 << 29;

/// Options that the kernels take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules<'a> {
    positions: &'a [u64],
    options: &'a Options<'a>,
}

/// What is read of a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Tokens of the block that some query sees.
    pub(super) runs: Vec<Range<usize>>,
    /// Whether some query sees less than that.
    pub(super) is_masked: bool,
}

impl<'a> Rules<'a> {
    /// # Errors
    /// [`CudaError::Unsupported`] for options that the kernels do not know, and
    /// [`CudaError::Attention`] for those that nobody does. `tokens` are those of all blocks.
    pub(super) fn new(
        shape: Shape, positions: &'a [u64], options: &'a Options<'a>, tokens: usize,
    ) -> Result<Self, CudaError> {
        options.check(shape, positions.len(), tokens)?;
        let unsupported = |what: &str| Err(CudaError::Unsupported(what.to_owned()));
        if options.alibi_slopes.is_some() {
            return unsupported("ALiBi");
        }
        if options.mask.is_some() {
            return unsupported("a mask of values");
        }
        match options.window {
            Some(_) if !options.causal => return unsupported("a window that is not causal"),
            Some(window) if window == 0 || window > WINDOW_MAX => {
                return unsupported("a window of 0 or of more than 2^29 tokens");
            }
            _ => {}
        }
        Ok(Self { positions, options })
    }

    /// What is seen of a block whose first token is the `start`th of all.
    pub(super) fn seen(&self, first_position: u64, tokens: usize, start: usize) -> Seen {
        let token = |position: u64| {
            let token = position.saturating_sub(first_position);
            usize::try_from(token).unwrap_or(usize::MAX).min(tokens)
        };
        let mut ranges = self.positions.iter().map(|position| {
            let seen = self.options.seen_positions(*position);
            token(seen.start)..token(seen.end)
        });
        let Some(first) = ranges.next() else { return Seen { runs: Vec::new(), is_masked: false } };
        let (mut all, mut is_masked) = (first, false);
        for range in ranges {
            is_masked |= range != all && !(range.is_empty() && all.is_empty());
            all = if all.is_empty() {
                range
            } else if range.is_empty() {
                all
            } else {
                all.start.min(range.start)..all.end.max(range.end)
            };
        }
        Seen { runs: self.selected(all, start), is_masked }
    }

    /// Runs of selected tokens in a range.
    fn selected(&self, range: Range<usize>, start: usize) -> Vec<Range<usize>> {
        let Some(selection) = self.options.selection else {
            return if range.is_empty() { Vec::new() } else { vec![range] };
        };
        let mut runs: Vec<Range<usize>> = Vec::new();
        for token in range.filter(|token| selection.contains(start + token)) {
            match runs.last_mut() {
                Some(run) if run.end == token => run.end += 1,
                _ => runs.push(token..token + 1),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::select::TokenSet;

    #[test]
    fn what_queries_see() {
        fn check(positions: &[u64], window: Option<u64>, runs: &[Range<usize>], is_masked: bool) {
            let options = Options { window, ..Options::default() };
            let rules = Rules { positions, options: &options };
            // A block of ten tokens at position 20.
            let seen = rules.seen(20, 10, 0);
            assert_eq!(seen, Seen { runs: runs.to_vec(), is_masked }, "{positions:?} {window:?}");
        }
        check(&[29], None, std::slice::from_ref(&(0..10)), false);
        check(&[1000], None, std::slice::from_ref(&(0..10)), false);
        check(&[24], None, std::slice::from_ref(&(0..5)), false);
        check(&[19], None, &[], false);
        check(&[24], Some(3), std::slice::from_ref(&(2..5)), false);
        check(&[32], Some(5), std::slice::from_ref(&(8..10)), false);
        check(&[40], Some(5), &[], false);
        check(&[24, 25], None, std::slice::from_ref(&(0..6)), true);
        check(&[19, 20], None, std::slice::from_ref(&(0..1)), true);
        check(&[5, 6], None, &[], false);
        check(&[50, 60], None, std::slice::from_ref(&(0..10)), false);
        check(&[24, 26], Some(3), std::slice::from_ref(&(2..7)), true);
    }

    #[test]
    fn selected_tokens_become_runs() {
        let mut selection = TokenSet::none(40);
        for tokens in [0..3, 12..14, 15..16, 25..30] {
            selection.insert(tokens);
        }
        let options = Options { selection: Some(&selection), ..Options::default() };
        let rules = Rules { positions: &[27], options: &options };
        assert_eq!(rules.seen(10, 10, 10).runs, [2..4, 5..6]);
        assert_eq!(rules.seen(20, 20, 20).runs, std::slice::from_ref(&(5..8)));
    }
}
