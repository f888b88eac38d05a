//! The pages that can matter most to a query (Quest, Tang et al. 2024).

use super::TokenSet;
use crate::attention::{AttentionError, KvBlock, Options, PageSummary, Queries, Shape};

/// How many pages are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageTopK {
    /// Pages in all, at least the ones below.
    pub pages: usize,
    /// First pages that are always read.
    pub sinks: usize,
    /// Last pages that are always read.
    pub recent: usize,
}

/// The pages to read.
#[derive(Debug, Clone, PartialEq)]
pub struct SelectedPages {
    /// Indices of the selected blocks, ascending.
    pub blocks: Vec<usize>,
    /// Their tokens.
    pub tokens: TokenSet,
}

impl PageTopK {
    /// Chooses among `blocks` by their `summaries`, one each. K and V are not read, so the
    /// [outline](crate::reader::Stream::outline) of a stream will do.
    ///
    /// A page's bound for a head is `sum over d of max(q_d min_d, q_d max_d)`. A page holds all
    /// heads, so its worth is the sum over queries and heads of `exp(bound - best bound)`: a page
    /// that may matter much to one head is read.
    ///
    /// # Errors
    /// [`AttentionError::Arguments`] if there is not one summary for each block, or the queries do
    /// not fit the shape.
    pub fn select(
        &self, shape: Shape, queries: &Queries<'_>, blocks: &[KvBlock<'_>],
        summaries: &[PageSummary], options: &Options<'_>,
    ) -> Result<SelectedPages, AttentionError> {
        queries.check(shape)?;
        if summaries.len() != blocks.len() {
            let (found, blocks) = (summaries.len(), blocks.len());
            let why = format!("{found} page summaries for {blocks} blocks");
            return Err(AttentionError::Arguments(why));
        }
        let mut all = Vec::new();
        let scale = options.scale(shape);
        for (row, q) in queries.q.chunks_exact(shape.head_dim()).enumerate() {
            let kv_head = row % shape.num_qo_heads() / shape.group();
            let bounds =
                blocks.iter().zip(summaries).enumerate().map(|(index, (block, summary))| {
                    let mut q = q.to_vec();
                    match options.rotation {
                        Some(rotation) if block.shift != 0 => rotation.rotate(&mut q, -block.shift),
                        None if block.shift != 0 => {
                            let why = format!("shifted by {}, without a rotation", block.shift);
                            return Err(AttentionError::Block { index, why });
                        }
                        _ => {}
                    }
                    Ok(scale * summary.upper_bound(kv_head, &q))
                });
            all.push(bounds.collect::<Result<Vec<f32>, _>>()?);
        }
        Ok(self.select_by(all.iter().map(Vec::as_slice), blocks))
    }

    /// Chooses by the bounds of each page, in rows of one query and head.
    pub(crate) fn select_by<'b>(
        &self, rows: impl Iterator<Item = &'b [f32]>, blocks: &[KvBlock<'_>],
    ) -> SelectedPages {
        let mut worth = vec![0.0; blocks.len()];
        for bounds in rows {
            let best = bounds.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for (worth, bound) in worth.iter_mut().zip(bounds) {
                // An infinite bound is as good as the best.
                *worth += if *bound >= best { 1.0 } else { (bound - best).exp() };
            }
        }
        self.choose(&worth, blocks)
    }

    fn choose(&self, worth: &[f32], blocks: &[KvBlock<'_>]) -> SelectedPages {
        let recent = blocks.len().saturating_sub(self.recent);
        let always = |index: usize| index < self.sinks || index >= recent;
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_by(|a, b| {
            always(*b).cmp(&always(*a)).then(worth[*b].total_cmp(&worth[*a])).then(a.cmp(b))
        });
        let fixed = (0..blocks.len()).filter(|index| always(*index)).count();
        order.truncate(self.pages.max(fixed));
        order.sort_unstable();
        let mut tokens = TokenSet::none(blocks.iter().map(|block| block.tokens).sum());
        let mut start = 0;
        for (index, block) in blocks.iter().enumerate() {
            if order.binary_search(&index).is_ok() {
                tokens.insert(start..start + block.tokens);
            }
            start += block.tokens;
        }
        SelectedPages { blocks: order, tokens }
    }
}
