//! How much attention each token got.
//!
//! A weight is known relative to the largest logit so far; what it is worth is known when all
//! tokens have been seen. So the kernel's weights are kept, 2 bytes for each query head and token,
//! with the `m` that they are relative to, and are added up at the end: no exponential is taken
//! twice. What is kept goes out of the caches and back: in f32 that was a seventh of the traffic of K
//! and V, and cost 12 % where two threads share the memory. A thread that has seen all tokens of a KV
//! head adds that head's up at once, while they are in its caches; what several threads have seen
//! parts of waits for the merged result.

use std::f64::consts::LOG2_E;
use std::ops::Range;

use super::Partials;
use super::kernel::{KeptWeights, Kernel, TILE_TOKENS};

/// The weights of some rows for one tile.
#[derive(Debug)]
struct Record {
    /// Rows are `[num_kv_heads, num_queries, group]`.
    first_row: usize,
    rows: usize,
    /// Index of the block's first token among those of all blocks.
    block_start: usize,
    tokens: Tokens,
    /// Where its weights are in [`Records::weights`].
    weights: usize,
    /// Where its `m` are.
    m: usize,
}

/// Tokens of a block.
#[derive(Debug)]
enum Tokens {
    Consecutive(Range<usize>),
    /// Where they are in [`Records::tokens`].
    Listed(Range<usize>),
}

/// Weights of several tiles.
#[derive(Debug, Default)]
struct Records {
    tiles: Vec<Record>,
    tokens: Vec<u32>,
    /// The first `kept` count: what is behind them is written without being cleared before.
    weights: Vec<KeptWeights>,
    kept: usize,
    /// In log2.
    m: Vec<f32>,
}

/// What one thread remembers of a call. It keeps its memory for the next call.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// Of the KV head that is being attended to.
    current: Records,
    /// Of heads that other threads see the rest of.
    shared: Vec<Records>,
    /// `[tokens]`
    mass: Vec<f32>,
}

impl Records {
    fn clear(&mut self) {
        self.tiles.clear();
        self.tokens.clear();
        self.kept = 0;
        self.m.clear();
    }

    /// Room for so many weights.
    fn extend(&mut self, rows: usize) -> &mut [KeptWeights] {
        let start = self.kept;
        self.kept += rows;
        if self.weights.len() < self.kept {
            self.weights.resize(self.kept.next_power_of_two(), [0; TILE_TOKENS]);
        }
        &mut self.weights[start..self.kept]
    }

    /// Adds everything up; `total` is the final `m`, in log2, and `l` of a row.
    #[allow(clippy::cast_possible_truncation, reason = "f32 is what the mass is in")]
    fn add_up(&self, kernel: Kernel, total: impl Fn(usize) -> (f64, f64), mass: &mut [f32]) {
        // `m` and factor of each row; mostly `m` is that of the tile before.
        let rows = self.tiles.iter().map(|record| record.first_row + record.rows).max();
        let mut known = vec![(f32::NAN, 0.0_f32); rows.unwrap_or(0)];
        let mut factors = Vec::new();
        for record in &self.tiles {
            factors.clear();
            for row in 0..record.rows {
                let (m, known) = (self.m[record.m + row], &mut known[record.first_row + row]);
                if known.0.to_bits() != m.to_bits() {
                    let (final_m, l) = total(record.first_row + row);
                    *known = (m, ((f64::from(m) - final_m).exp2() / l) as f32);
                }
                factors.push(known.1);
            }
            let weights = &self.weights[record.weights..][..record.rows];
            let mass = &mut mass[record.block_start..];
            if let Tokens::Consecutive(range) = &record.tokens
                && let Ok(mass) = (&mut mass[range.clone()]).try_into()
            {
                kernel.add_weighted(weights, &factors, mass);
                continue;
            }
            let mut sums = [0.0; TILE_TOKENS];
            kernel.add_weighted(weights, &factors, &mut sums);
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
}

impl Recorder {
    /// Begins a call; `tokens` are those of all blocks.
    pub(super) fn begin(&mut self, tokens: usize) {
        self.current.clear();
        self.shared.clear();
        self.mass.clear();
        self.mass.resize(tokens, 0.0);
    }

    /// Keeps the weights of one tile, `[rows, tokens]`, relative to `m`. `tokens` are ascending
    /// tokens of a block.
    pub(super) fn record(
        &mut self, kernel: Kernel, (first_row, m): (usize, &[f32]), block_start: usize,
        tokens: &[u32], weights: &[[f32; TILE_TOKENS]],
    ) {
        let [Some(first), Some(last)] = [tokens.first(), tokens.last()] else { return };
        let current = &mut self.current;
        let range = *first as usize..*last as usize + 1;
        let tokens = if range.len() == tokens.len() {
            Tokens::Consecutive(range)
        } else {
            let start = current.tokens.len();
            current.tokens.extend_from_slice(tokens);
            Tokens::Listed(start..current.tokens.len())
        };
        let (rows, weights_start, m_start) = (m.len(), current.kept, current.m.len());
        current.tiles.push(Record {
            first_row,
            rows,
            block_start,
            tokens,
            weights: weights_start,
            m: m_start,
        });
        current.m.extend_from_slice(m);
        kernel.keep(&weights[..rows], current.extend(rows));
    }

    /// All tokens of the current KV head have been seen: `total` is the `m`, in log2, and `l` of a
    /// row.
    pub(super) fn finish_head(&mut self, kernel: Kernel, total: impl Fn(usize) -> (f64, f64)) {
        self.current.add_up(kernel, total, &mut self.mass);
        self.current.clear();
    }

    /// The current KV head goes on in another thread.
    pub(super) fn leave_head(&mut self) {
        self.shared.push(std::mem::take(&mut self.current));
    }

    /// Adds up what was left, by the result of the call.
    pub(super) fn finish(&mut self, kernel: Kernel, result: &Partials) {
        let total = |row| {
            let out = output_row(result, row);
            (f64::from(result.m[out]) * LOG2_E, f64::from(result.l[out]))
        };
        for records in self.shared.iter().chain([&self.current]) {
            records.add_up(kernel, total, &mut self.mass);
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
