//! How much attention each token got.
//!
//! A weight is known relative to the largest logit so far; what it is worth is known when all
//! tokens have been seen. So the kernel's weights are kept, 4 bytes for each query head and token,
//! with the `m` that they are relative to, and are added up at the end: no exponential is taken
//! twice.

use std::f64::consts::LOG2_E;
use std::ops::Range;

use super::Partials;
use super::kernel::TILE_TOKENS;

/// The weights of some rows for one tile.
#[derive(Debug)]
struct Record {
    /// Rows are `[num_kv_heads, num_queries, group]`.
    first_row: usize,
    rows: usize,
    /// Index of the block's first token among those of all blocks.
    block_start: usize,
    tokens: Tokens,
    /// Where its weights are in [`Recorder::weights`].
    weights: usize,
    /// Where its `m` are.
    m: usize,
}

/// Tokens of a block.
#[derive(Debug)]
enum Tokens {
    Consecutive(Range<usize>),
    /// Where they are in [`Recorder::tokens`].
    Listed(Range<usize>),
}

/// What one thread remembers of a call. It keeps its memory for the next call.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    records: Vec<Record>,
    tokens: Vec<u32>,
    weights: Vec<[f32; TILE_TOKENS]>,
    /// In log2.
    m: Vec<f32>,
    /// `[tokens]`
    mass: Vec<f32>,
}

impl Recorder {
    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.tokens.clear();
        self.weights.clear();
        self.m.clear();
    }

    /// Keeps the weights of one tile, `[rows, tokens]`, relative to `m`. `tokens` are ascending
    /// tokens of a block.
    pub(super) fn record(
        &mut self, first_row: usize, m: &[f32], block_start: usize, tokens: &[u32],
        weights: &[[f32; TILE_TOKENS]],
    ) {
        let [Some(first), Some(last)] = [tokens.first(), tokens.last()] else { return };
        let range = *first as usize..*last as usize + 1;
        let tokens = if range.len() == tokens.len() {
            Tokens::Consecutive(range)
        } else {
            let start = self.tokens.len();
            self.tokens.extend_from_slice(tokens);
            Tokens::Listed(start..self.tokens.len())
        };
        let (rows, first_weight, first_m) = (m.len(), self.weights.len(), self.m.len());
        self.records.push(Record {
            first_row,
            rows,
            block_start,
            tokens,
            weights: first_weight,
            m: first_m,
        });
        self.m.extend_from_slice(m);
        self.weights.extend_from_slice(&weights[..rows]);
    }

    /// Adds everything up, normalised by the result of the call; `tokens` are those of all blocks.
    #[allow(clippy::cast_possible_truncation, reason = "f32 is what the mass is in")]
    pub(super) fn add_up(&mut self, result: &Partials, tokens: usize) {
        self.mass.clear();
        self.mass.resize(tokens, 0.0);
        // `m` and factor of each row; mostly `m` is that of the tile before.
        let mut known = vec![(f32::NAN, 0.0_f32); result.m.len()];
        for record in &self.records {
            let mut sums = [0.0; TILE_TOKENS];
            for row in 0..record.rows {
                let (m, known) = (self.m[record.m + row], &mut known[record.first_row + row]);
                if known.0.to_bits() != m.to_bits() {
                    let out = output_row(result, record.first_row + row);
                    let exponent = f64::from(m) - f64::from(result.m[out]) * LOG2_E;
                    *known = (m, (exponent.exp2() / f64::from(result.l[out])) as f32);
                }
                let weights = &self.weights[record.weights + row];
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum += weight * known.1;
                }
            }
            let mass = &mut self.mass[record.block_start..];
            match &record.tokens {
                Tokens::Consecutive(range) => {
                    for (mass, sum) in mass[range.clone()].iter_mut().zip(sums) {
                        *mass += sum;
                    }
                }
                Tokens::Listed(range) => {
                    for (token, sum) in self.tokens[range.clone()].iter().zip(sums) {
                        mass[*token as usize] += sum;
                    }
                }
            }
        }
    }

    pub(super) fn mass(&self) -> &[f32] {
        &self.mass
    }
}

/// The index in the result of a row in the order of KV heads.
pub(super) fn output_row(result: &Partials, row: usize) -> usize {
    let (group, queries) = (result.shape().group(), result.num_queries());
    let (head, in_head) = (row / (queries * group), row % (queries * group));
    let (query, in_group) = (in_head / group, in_head % group);
    query * result.shape().num_qo_heads() + head * group + in_group
}
