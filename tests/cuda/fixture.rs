//! K and V with known numbers, and attention over them by its definition, in f64.

use half::f16;
use kvfs::attention::{KvBlock, Options, Queries, Shape, Tensor, Values};
use kvfs::page::{Dtype, Strides};

/// xorshift64*
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From -1 to 1.
    pub(crate) fn float(&mut self) -> f32 {
        let bits = u16::try_from(self.next() >> 48).unwrap();
        f32::from(bits) / 32768.0 - 1.0
    }

    pub(crate) fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.float() * scale).collect()
    }
}

/// Where rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// `[heads, tokens, dim]`
    Hnd,
    /// `[tokens, heads, dim]`
    Nhd,
    /// Of each token K, then V.
    Tail,
    /// `[heads, tokens, dim]`, and V is the beginning of K.
    Latent,
}

/// Tokens of one layer in memory of their own.
pub(crate) struct Memory {
    shape: Shape,
    dtype: Dtype,
    tokens: usize,
    order: Order,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl Memory {
    pub(crate) fn new(
        shape: Shape, dtype: Dtype, tokens: usize, order: Order, random: &mut Random,
    ) -> Self {
        let mut rows = |elements: usize| -> Vec<u8> {
            let count = shape.num_kv_heads() * tokens * elements;
            match dtype {
                Dtype::F16 => {
                    let row = random.floats(count, 1.5).into_iter();
                    row.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect()
                }
                Dtype::F32 => {
                    random.floats(count, 1.5).into_iter().flat_map(f32::to_le_bytes).collect()
                }
                // Blocks with a scale of about 0.01, whatever the numbers are.
                Dtype::Q8_0 => (0..count / 32)
                    .flat_map(|_| {
                        let scale = f16::from_f32(0.01 + random.float() / 200.0).to_le_bytes();
                        let numbers = (0..32).map(|_| random.next().to_le_bytes()[0]);
                        scale.into_iter().chain(numbers).collect::<Vec<u8>>()
                    })
                    .collect(),
                other => unreachable!("{other} is not asked for"),
            }
        };
        let (mut k, mut v) = (rows(shape.head_dim()), rows(shape.v_head_dim()));
        if order == Order::Tail {
            let (k_token, v_token) = (k.len() / tokens.max(1), v.len() / tokens.max(1));
            let (of_k, of_v) = (k.chunks_exact(k_token.max(1)), v.chunks_exact(v_token.max(1)));
            k = of_k.zip(of_v).flat_map(|(k, v)| [k, v].concat()).collect();
            v = Vec::new();
        }
        Self { shape, dtype, tokens, order, k, v }
    }

    pub(crate) fn block(&self, first_position: u64) -> KvBlock<'_> {
        let bytes = |elements: usize| {
            usize::try_from(self.dtype.row_bytes(u32::try_from(elements).unwrap())).unwrap()
        };
        let (k_row, v_row) = (bytes(self.shape.head_dim()), bytes(self.shape.v_head_dim()));
        let heads = self.shape.num_kv_heads();
        let strides = |row: usize| match self.order {
            Order::Hnd | Order::Latent => Strides { head: self.tokens * row, token: row },
            Order::Nhd => Strides { head: row, token: heads * row },
            Order::Tail => Strides { head: row, token: heads * (k_row + v_row) },
        };
        let v = if self.order == Order::Tail {
            &self.k[(heads * k_row).min(self.k.len())..]
        } else {
            &self.v[..]
        };
        KvBlock {
            k: Tensor { bytes: &self.k, strides: strides(k_row) },
            v: match self.order {
                Order::Latent => Values::Latent,
                _ => Values::Rows(Tensor { bytes: v, strides: strides(v_row) }),
            },
            dtype: self.dtype,
            tokens: self.tokens,
            first_position,
            shift: 0,
        }
    }
}

fn element(dtype: Dtype, row: &[u8], index: usize) -> f64 {
    match dtype {
        Dtype::F16 => f16::from_le_bytes([row[2 * index], row[2 * index + 1]]).to_f64(),
        Dtype::F32 => f64::from(f32::from_le_bytes(row[4 * index..][..4].try_into().unwrap())),
        Dtype::Q8_0 => {
            let block = &row[index / 32 * 34..];
            let scale = f16::from_le_bytes([block[0], block[1]]).to_f64();
            scale * f64::from(block[2 + index % 32].cast_signed())
        }
        other => unreachable!("{other} is not asked for"),
    }
}

fn row<'a>(tensor: &Tensor<'a>, head: usize, token: usize) -> &'a [u8] {
    &tensor.bytes[head * tensor.strides.head + token * tensor.strides.token..]
}

/// `[num_queries, num_qo_heads, v_head_dim]`: softmax over everything that a query sees. Blocks with
/// a shift have their K rotated.
#[allow(clippy::cast_possible_truncation, reason = "an element has 32 bits at most")]
pub(crate) fn reference(
    shape: Shape, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
) -> Vec<f64> {
    let mut out = Vec::new();
    let rows = queries.q.chunks_exact(shape.head_dim());
    for (index, q) in rows.enumerate() {
        let (query, head) = (index / shape.num_qo_heads(), index % shape.num_qo_heads());
        let (kv_head, position) = (head / shape.group(), queries.positions[query]);
        let (mut logits, mut values, mut start) = (Vec::new(), Vec::new(), 0);
        for block in blocks {
            let v = match block.v {
                Values::Rows(v) => v,
                Values::Latent => block.k,
            };
            for token in 0..block.tokens {
                let at = block.first_position + token as u64;
                let is_near = options.window.is_none_or(|window| at + window > position);
                let is_seen = (!options.causal || at <= position) && is_near;
                let is_selected =
                    options.selection.is_none_or(|selection| selection.contains(start + token));
                if is_seen && is_selected {
                    let k = row(&block.k, kv_head, token);
                    let mut k: Vec<f32> =
                        (0..shape.head_dim()).map(|i| element(block.dtype, k, i) as f32).collect();
                    if let Some(rotation) = options.rotation {
                        rotation.rotate(&mut k, block.shift);
                    }
                    let dot = q.iter().zip(&k).map(|(q, k)| f64::from(*q) * f64::from(*k));
                    let logit = dot.sum::<f64>() * f64::from(options.sm_scale.unwrap());
                    let cap = options.soft_cap.map(f64::from);
                    logits.push(cap.map_or(logit, |cap| cap * (logit / cap).tanh()));
                    values.push((block.dtype, row(&v, kv_head, token)));
                }
            }
            start += block.tokens;
        }
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..shape.v_head_dim() {
            let weighted =
                weights.iter().zip(&values).map(|(w, (dtype, v))| w * element(*dtype, v, i));
            out.push(if weights.is_empty() { 0.0 } else { weighted.sum::<f64>() / sum });
        }
    }
    out
}

/// Relative L2.
#[track_caller]
pub(crate) fn assert_close(found: &[f32], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let square = |value: f64| value * value;
    let pairs = found.iter().zip(expected);
    let error: f64 = pairs.map(|(found, expected)| square(f64::from(*found) - expected)).sum();
    let size: f64 = expected.iter().copied().map(square).sum();
    let relative = if size > 0.0 { (error / size).sqrt() } else { error.sqrt() };
    // NaN is not close to anything.
    assert!(relative <= 5e-6, "{what}: off by {relative:e}");
}
