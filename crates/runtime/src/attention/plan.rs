//! Which tokens each query sees, cut into tiles, and who attends to them.
//!
//! Tiles that no query sees are left out here, so that they cost nothing and the threads get equal
//! shares of what remains. A unit of work is one tile of one KV head; each thread gets a run of
//! consecutive units, in the order in which they lie in memory.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::kernel::{Kernel, Logits, TILE_TOKENS, Tile};
use super::{AttentionError, KvBlock, Options, Queries, Shape};

/// Up to [`TILE_TOKENS`] consecutive tokens of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) block: usize,
    /// Tokens of the block.
    first: usize,
    end: usize,
    /// Of the block's first token among those of all blocks.
    pub(super) block_start: usize,
}

/// A call, validated and prepared.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) shape: Shape,
    pub(super) kernel: Kernel,
    pub(super) blocks: &'a [KvBlock<'a>],
    positions: &'a [u64],
    options: &'a Options<'a>,
    places: Vec<Place>,
    /// Tokens of all blocks.
    pub(super) tokens: usize,
    /// For each shift `[num_kv_heads, num_queries, group, head_dim]`, scaled.
    q: Vec<(i64, Vec<f32>)>,
    /// `[num_qo_heads]` `ALiBi` slopes times log2(e).
    slopes: Vec<f32>,
    /// Rows of a token are closer than those of a head.
    token_major: bool,
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        shape: Shape, kernel: Kernel, queries: &Queries<'a>, blocks: &'a [KvBlock<'a>],
        options: &'a Options<'a>,
    ) -> Result<Self, AttentionError> {
        let tokens = blocks.iter().try_fold(0_usize, |sum, block| sum.checked_add(block.tokens));
        let tokens =
            tokens.ok_or_else(|| AttentionError::Arguments("too many tokens".to_owned()))?;
        queries.check(shape)?;
        options.check(shape, queries.positions.len(), tokens)?;
        for (index, block) in blocks.iter().enumerate() {
            block.check(shape).map_err(|why| AttentionError::Block { index, why })?;
        }
        let slopes = options.alibi_slopes.unwrap_or_default().iter().map(|s| s * LOG2_E).collect();
        let token_major =
            blocks.first().is_some_and(|block| block.k.strides.head < block.k.strides.token);
        let mut plan = Self {
            shape,
            kernel,
            blocks,
            positions: queries.positions,
            options,
            places: Vec::new(),
            tokens,
            q: Vec::new(),
            slopes,
            token_major,
        };
        plan.prepare_queries(queries.q)?;
        plan.find_places();
        Ok(plan)
    }

    pub(super) fn num_queries(&self) -> usize {
        self.positions.len()
    }

    /// One copy of the queries for each shift, scaled and in the order of the KV heads.
    fn prepare_queries(&mut self, q: &[f32]) -> Result<(), AttentionError> {
        let (dim, group) = (self.shape.head_dim(), self.shape.group());
        let scale = self.options.scale(self.shape);
        let scale = self.options.soft_cap.map_or(scale * LOG2_E, |cap| scale / cap);
        for (index, block) in self.blocks.iter().enumerate() {
            if self.q.iter().any(|(shift, _)| *shift == block.shift) {
                continue;
            }
            let rotation = self.options.rotation.filter(|_| block.shift != 0);
            if block.shift != 0 && rotation.is_none() {
                let why = format!("shifted by {}, without a rotation", block.shift);
                return Err(AttentionError::Block { index, why });
            }
            let mut copy = Vec::with_capacity(q.len());
            for kv_head in 0..self.shape.num_kv_heads() {
                for query in q.chunks_exact(self.shape.num_qo_heads() * dim) {
                    copy.extend_from_slice(&query[kv_head * group * dim..][..group * dim]);
                }
            }
            for row in copy.chunks_exact_mut(dim) {
                if let Some(rotation) = rotation {
                    rotation.rotate(row, -block.shift);
                }
                for q in row {
                    *q *= scale;
                }
            }
            self.q.push((block.shift, copy));
        }
        Ok(())
    }

    fn find_places(&mut self) {
        let mut block_start = 0;
        for (index, block) in self.blocks.iter().enumerate() {
            for first in (0..block.tokens).step_by(TILE_TOKENS) {
                let end = (first + TILE_TOKENS).min(block.tokens);
                let place = Place { block: index, first, end, block_start };
                if (0..self.num_queries()).any(|query| self.seen(&place, query).next().is_some()) {
                    self.places.push(place);
                }
            }
            block_start += block.tokens;
        }
    }

    /// Tokens of the block that a query sees, by position alone.
    fn seen_range(&self, place: &Place, query: usize) -> Range<usize> {
        let first_position = self.blocks[place.block].first_position;
        let position = self.positions[query];
        // Positions as tokens of the block, as far as they are in it.
        let token = |position: u64| {
            let token = position.saturating_sub(first_position);
            usize::try_from(token).unwrap_or(usize::MAX).clamp(place.first, place.end)
        };
        let seen = self.options.seen_positions(position);
        let (first, end) = (token(seen.start), token(seen.end));
        first..end.max(first)
    }

    /// Tokens of the block that a query sees.
    fn seen(&self, place: &Place, query: usize) -> impl Iterator<Item = usize> {
        let (start, tokens, options) = (place.block_start, self.tokens, self.options);
        self.seen_range(place, query)
            .filter(move |token| options.admits(query, start + token, tokens))
    }

    /// Queries from `query` on that see the same tokens of a tile with equal rules.
    pub(super) fn run_of_queries(&self, place: &Place, query: usize) -> Range<usize> {
        let mut end = query + 1;
        if self.options.is_plain() {
            let range = self.seen_range(place, query);
            while end < self.num_queries() && self.seen_range(place, end) == range {
                end += 1;
            }
        }
        query..end
    }

    /// Units of work of one of several threads.
    pub(super) fn share(&self, index: usize, count: usize) -> Range<usize> {
        let units = self.places.len() * self.shape.num_kv_heads();
        units * index / count..units * (index + 1) / count
    }

    /// KV head and tile of a unit.
    pub(super) fn unit(&self, unit: usize) -> (usize, &Place) {
        let heads = self.shape.num_kv_heads();
        let (head, place) = if self.token_major {
            (unit % heads, unit / heads)
        } else {
            (unit / self.places.len(), unit % self.places.len())
        };
        (head, &self.places[place])
    }

    /// Whether a unit is the last one of a KV head among `units`, and if it is, whether all of the
    /// head are among them.
    pub(super) fn ends_head(&self, unit: usize, units: &Range<usize>) -> Option<bool> {
        let places = self.places.len();
        if self.token_major {
            return None;
        }
        let is_last = (unit + 1).is_multiple_of(places);
        let is_whole = is_last && unit + 1 >= units.start + places;
        (is_last || unit + 1 == units.end).then_some(is_whole)
    }

    /// Makes `tile` what a query sees of a place.
    #[allow(clippy::cast_possible_truncation, reason = "a block has fewer than 2^32 tokens")]
    pub(super) fn tile(&self, kv_head: usize, place: &Place, query: usize, tile: &mut Tile<'a>) {
        let block = &self.blocks[place.block];
        let values = block.values();
        tile.k = &block.k.bytes[kv_head * block.k.strides.head..];
        tile.v = &values.bytes[kv_head * values.strides.head..];
        (tile.k_stride, tile.v_stride) = (block.k.strides.token, values.strides.token);
        tile.len = 0;
        if self.options.selection.is_none() && self.options.mask.is_none() {
            let range = self.seen_range(place, query);
            tile.len = range.len();
            for (token, index) in tile.tokens.iter_mut().zip(range) {
                *token = index as u32;
            }
            return;
        }
        for token in self.seen(place, query) {
            tile.tokens[tile.len] = token as u32;
            tile.len += 1;
        }
    }

    /// `[num_queries, group, head_dim]` of a KV head, for the shift of a block.
    pub(super) fn q(&self, kv_head: usize, block: usize) -> &[f32] {
        let shift = self.blocks[block].shift;
        let (_, q) = self.q.iter().find(|(of, _)| *of == shift).expect("a copy for each shift");
        let length = self.num_queries() * self.shape.group() * self.shape.head_dim();
        &q[kv_head * length..][..length]
    }

    /// `[group]` slopes of a KV head; empty for none.
    pub(super) fn slopes(&self, kv_head: usize) -> &[f32] {
        let group = self.shape.group();
        self.slopes.get(kv_head * group..(kv_head + 1) * group).unwrap_or_default()
    }

    /// What is done to the scores of a tile, written over what was done to another one of the call.
    #[allow(clippy::cast_precision_loss, reason = "distances beyond 2^24 need no more precision")]
    pub(super) fn logits(&self, place: &Place, tile: &Tile<'_>, query: usize, logits: &mut Logits) {
        logits.soft_cap = self.options.soft_cap.map(|cap| cap * LOG2_E);
        if self.options.alibi_slopes.is_some() {
            let start = self.blocks[place.block].first_position.cast_signed();
            let position = self.positions[query].cast_signed();
            for (distance, token) in logits.distances.iter_mut().zip(tile.tokens()) {
                *distance = (start + i64::from(*token) - position) as f32;
            }
        }
        if let Some(mask) = self.options.mask {
            logits.biased = true;
            let row = query * self.tokens + place.block_start;
            for (bias, token) in logits.bias.iter_mut().zip(tile.tokens()) {
                *bias = mask.get(row + *token as usize) * LOG2_E;
            }
        }
    }
}
