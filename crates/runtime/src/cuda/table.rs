//! The list of pages of a launch, and how its tokens are divided among blocks.

use std::ops::Range;

use super::arguments::{Page, Split};
use super::rules::Rules;

/// Tokens that make a split worth its part: with fewer, merging costs more than is gained.
const SPLIT_TOKENS_MIN: u32 = 64;

/// Splits begin at multiples of this, which is what the warps of a block read at once.
const SPLIT_TOKENS_MULTIPLE: u32 = 16;

/// K and V of consecutive tokens in device memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub(super) k: u64,
    pub(super) v: u64,
    /// In bytes, of heads and tokens.
    pub(super) k_strides: (u32, u32),
    pub(super) v_strides: (u32, u32),
    pub(super) tokens: usize,
    pub(super) first_position: u64,
    /// Of the first token among those of all blocks.
    pub(super) start: usize,
    /// Which copy of the queries.
    pub(super) queries: u32,
}

impl Placed {
    #[allow(clippy::cast_possible_truncation, reason = "a block has fewer than 2^30 tokens")]
    fn page(&self, run: &Range<usize>) -> Page {
        let offset = |stride: u32| run.start as u64 * u64::from(stride);
        let position = (self.first_position + run.start as u64).cast_signed();
        Page {
            k: self.k + offset(self.k_strides.1),
            v: self.v + offset(self.v_strides.1),
            k_head_stride: self.k_strides.0,
            k_token_stride: self.k_strides.1,
            v_head_stride: self.v_strides.0,
            v_token_stride: self.v_strides.1,
            position,
            tokens: run.len() as u32,
            index: (self.start + run.start) as u32,
            queries: self.queries,
            reserved: 0,
        }
    }
}

/// What a launch reads besides the queries.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) pages: Vec<Page>,
    pub(super) splits: Vec<Split>,
    pub(super) is_masked: bool,
}

impl Table {
    /// The tokens that some query sees.
    pub(super) fn new(placed: &[Placed], rules: &Rules<'_>) -> Self {
        let mut table = Self::default();
        for block in placed {
            let seen = rules.seen(block.first_position, block.tokens, block.start);
            table.is_masked |= seen.is_masked && !seen.runs.is_empty();
            table.pages.extend(seen.runs.iter().map(|run| block.page(run)));
        }
        table
    }

    /// All tokens of some blocks, a page each, for kernels that go by pages.
    pub(super) fn whole(placed: &[Placed]) -> Self {
        let pages = placed.iter().map(|block| block.page(&(0..block.tokens))).collect();
        Self { pages, ..Self::default() }
    }

    /// Divides the tokens into at most `most` runs of nearly equal length.
    pub(super) fn divide(&mut self, most: u32) {
        let total: u64 = self.pages.iter().map(|page| u64::from(page.tokens)).sum();
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let count = (total / SPLIT_TOKENS_MIN).clamp(1, most.max(1));
        let length = total.div_ceil(count).next_multiple_of(SPLIT_TOKENS_MULTIPLE);
        self.splits.clear();
        let (mut page, mut token, mut left) = (0, 0, total);
        while left > 0 {
            let tokens = length.min(left);
            self.splits.push(Split { page, token, tokens });
            left -= tokens;
            token += tokens;
            while let Some(of_page) = self.pages.get(page as usize)
                && token >= of_page.tokens
            {
                token -= of_page.tokens;
                page += 1;
            }
        }
    }

    /// Where the splits begin, in bytes.
    pub(super) fn splits_at(&self) -> usize {
        self.pages.len() * Page::BYTES
    }

    /// As the kernels read it.
    pub(super) fn bytes(&self) -> usize {
        self.splits_at() + self.splits.len() * Split::BYTES
    }

    /// Writes it into memory of at least that many bytes.
    pub(super) fn write(&self, memory: &mut [u8]) {
        let (pages, splits) = memory.split_at_mut(self.splits_at());
        for (bytes, page) in pages.chunks_exact_mut(Page::BYTES).zip(&self.pages) {
            bytes.copy_from_slice(&page.to_bytes());
        }
        for (bytes, split) in splits.chunks_exact_mut(Split::BYTES).zip(&self.splits) {
            bytes.copy_from_slice(&split.to_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Options;

    fn placed(tokens: usize, start: usize) -> Placed {
        let strides = (1 << 20, 64);
        Placed {
            k: 1 << 40,
            v: 1 << 41,
            k_strides: strides,
            v_strides: strides,
            tokens,
            first_position: start as u64,
            start,
            queries: 0,
        }
    }

    #[test]
    fn splits_cover_every_token_once() {
        fn check(pages: &[usize], most: u32, expected: usize) {
            let mut start = 0;
            let placed: Vec<Placed> = pages
                .iter()
                .map(|tokens| {
                    start += tokens;
                    placed(*tokens, start - tokens)
                })
                .collect();
            let options = Options::default();
            let shape = crate::attention::Shape::new(1, 1, 8, 8).unwrap();
            let rules = Rules::new(shape, &[1 << 30], &options, start).unwrap();
            let mut table = Table::new(&placed, &rules);
            table.divide(most);
            assert_eq!(table.splits.len(), expected, "{pages:?} {most}");
            let mut seen = Vec::new();
            for split in &table.splits {
                let (mut page, mut token) = (split.page as usize, split.token);
                for _ in 0..split.tokens {
                    while token >= table.pages[page].tokens {
                        (page, token) = (page + 1, 0);
                    }
                    seen.push(table.pages[page].position + i64::from(token));
                    token += 1;
                }
            }
            let all: Vec<i64> = (0..i64::try_from(start).unwrap()).collect();
            assert_eq!(seen, all, "{pages:?} {most}");
        }
        check(&[], 8, 0);
        check(&[1], 8, 1);
        check(&[1024, 1024], 8, 8);
        check(&[1024, 1024, 7], 8, 8);
        check(&[100, 1, 1, 200], 100, 4);
        check(&[1000], 1, 1);
        check(&[64; 40], 13, 13);
    }
}
