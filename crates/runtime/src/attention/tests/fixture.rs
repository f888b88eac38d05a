//! A cache with seeded contents, and what its elements are worth.

use half::{bf16, f16};

use crate::attention::{KvBlock, Shape, Tensor, Values};
use crate::page::{Dtype, Layout, Strides, row_f32};

/// Seeded numbers (splitmix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.bits().to_le_bytes()[7]
    }

    /// Below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.bits() % end as u64).unwrap()
    }

    /// About normal, by the sum of twelve uniform values.
    #[allow(clippy::cast_precision_loss, reason = "24 bits")]
    pub(super) fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32).sum::<f32>() - 6.0
    }

    pub(super) fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }
}

/// Where rows lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    Page(Layout),
    /// K and V of a token side by side.
    Tail,
    /// Odd gaps between rows, heads and before the first.
    Gaps,
}

/// Stored rows of one tensor.
pub(super) struct Stored {
    pub(super) bytes: Vec<u8>,
    pub(super) strides: Strides,
}

/// One run of tokens in memory.
pub(super) struct Run {
    pub(super) k: Stored,
    /// None: latent.
    pub(super) v: Option<Stored>,
    pub(super) tokens: usize,
    pub(super) first_position: u64,
    pub(super) shift: i64,
}

/// K and V of some runs of tokens, stored and as numbers.
pub(super) struct Cache {
    pub(super) shape: Shape,
    pub(super) dtype: Dtype,
    pub(super) runs: Vec<Run>,
    /// `[tokens of all runs, num_kv_heads, head_dim]`
    pub(super) k: Vec<f32>,
    /// `[tokens of all runs, num_kv_heads, v_head_dim]`
    pub(super) v: Vec<f32>,
}

/// A random row and what it is worth.
pub(super) fn row(dtype: Dtype, elements: usize, random: &mut Random) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    let blocks = elements / dtype.block_elements() as usize;
    for _ in 0..blocks {
        match dtype {
            Dtype::F32 => bytes.extend(random.normal().to_le_bytes()),
            Dtype::F16 => bytes.extend(f16::from_f32(random.normal()).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(bf16::from_f32(random.normal()).to_le_bytes()),
            // Up to 1.9 with all exponents below, subnormals included.
            Dtype::F8E4m3 => bytes.push(random.byte() & 0xbf),
            Dtype::Q8_0 | Dtype::Q4_0 => {
                let unit_scale = if dtype == Dtype::Q8_0 { 70.0 } else { 5.0 };
                bytes.extend(f16::from_f32(random.normal() / unit_scale).to_le_bytes());
                bytes.extend((2..dtype.block_bytes()).map(|_| random.byte()));
            }
        }
    }
    let mut values = vec![0.0; elements];
    row_f32(dtype, &bytes, &mut values);
    (bytes, values)
}

impl Cache {
    /// Runs of so many tokens each, one after the other.
    pub(super) fn new(
        shape: Shape, dtype: Dtype, place: Place, runs: &[usize], latent: bool, seed: u64,
    ) -> Self {
        let mut random = Random(seed);
        let mut cache = Self { shape, dtype, runs: Vec::new(), k: Vec::new(), v: Vec::new() };
        let mut first_position = 0;
        for tokens in runs {
            cache.push(place, *tokens, first_position, latent, &mut random);
            first_position += *tokens as u64;
        }
        cache
    }

    fn push(
        &mut self, place: Place, tokens: usize, first_position: u64, latent: bool,
        random: &mut Random,
    ) {
        let (shape, dtype) = (self.shape, self.dtype);
        let [k_row, v_row] = [shape.head_dim(), shape.v_head_dim()]
            .map(|dim| dim / dtype.block_elements() as usize * dtype.block_bytes() as usize);
        let heads = shape.num_kv_heads();
        let strides = |row: usize| match place {
            Place::Page(Layout::Hnd) => Strides { head: tokens * row, token: row },
            Place::Page(Layout::Nhd) => Strides { head: row, token: heads * row },
            Place::Tail if latent => Strides { head: row, token: heads * row },
            Place::Tail => Strides { head: row, token: heads * (k_row + v_row) },
            Place::Gaps => Strides { head: tokens * (row + 3) + 7, token: row + 3 },
        };
        let stored = |row: usize| {
            let strides = strides(row);
            let last = (heads - 1) * strides.head + tokens.saturating_sub(1) * strides.token;
            // What lies between the rows is no number: nobody may look.
            Stored { bytes: vec![0xff; if tokens == 0 { 0 } else { last + row }], strides }
        };
        let (mut k, mut v) = (stored(k_row), stored(v_row));
        for token in 0..tokens {
            for head in 0..heads {
                let at = |strides: Strides| head * strides.head + token * strides.token;
                let (bytes, values) = row(dtype, shape.head_dim(), random);
                k.bytes[at(k.strides)..][..k_row].copy_from_slice(&bytes);
                if latent {
                    self.v.extend(&values[..shape.v_head_dim()]);
                }
                self.k.extend(values);
                if !latent {
                    let (bytes, values) = row(dtype, shape.v_head_dim(), random);
                    v.bytes[at(v.strides)..][..v_row].copy_from_slice(&bytes);
                    self.v.extend(values);
                }
            }
        }
        let v = (!latent).then_some(v);
        self.runs.push(Run { k, v, tokens, first_position, shift: 0 });
    }

    pub(super) fn blocks(&self) -> Vec<KvBlock<'_>> {
        self.runs.iter().map(|run| self.block(run)).collect()
    }

    fn block<'a>(&self, run: &'a Run) -> KvBlock<'a> {
        fn tensor(stored: &Stored) -> Tensor<'_> {
            Tensor { bytes: &stored.bytes, strides: stored.strides }
        }
        KvBlock {
            k: tensor(&run.k),
            v: run.v.as_ref().map_or(Values::Latent, |v| Values::Rows(tensor(v))),
            dtype: self.dtype,
            tokens: run.tokens,
            first_position: run.first_position,
            shift: run.shift,
        }
    }

    /// Multiplies one block of the values of every row by a power of two.
    pub(super) fn amplify_values(&mut self, block: usize, factor: f32) {
        let (elements, bytes) = (self.dtype.block_elements(), self.dtype.block_bytes());
        let (elements, bytes) = (elements as usize, bytes as usize);
        for values in self.v.chunks_exact_mut(self.shape.v_head_dim()) {
            values[block * elements..][..elements].iter_mut().for_each(|value| *value *= factor);
        }
        for run in &mut self.runs {
            let Some(stored) = &mut run.v else { continue };
            for head in 0..self.shape.num_kv_heads() {
                for token in 0..run.tokens {
                    let row = head * stored.strides.head + token * stored.strides.token;
                    let scale = &mut stored.bytes[row + block * bytes..][..2];
                    let larger = f16::from_le_bytes([scale[0], scale[1]]).to_f32() * factor;
                    scale.copy_from_slice(&f16::from_f32(larger).to_le_bytes());
                }
            }
        }
    }

    /// Positions of all tokens.
    pub(super) fn positions(&self) -> Vec<u64> {
        let of_run = |run: &Run| run.first_position..run.first_position + run.tokens as u64;
        self.runs.iter().flat_map(of_run).collect()
    }
}
