//! How far the result is from the same in f64, on the values as they are stored.

use super::mounted::write_sequence;
use super::{failed, shape};
use crate::attention::bench::query;
use crate::attention::{Attention, KvBlock, Options, Queries, Shape, Tensor, Values};
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;
use crate::page::{Dtype, row_f32};
use crate::reader::{ReadError, Sequence};

const CASES: [(Dtype, &str, &str); 6] = [
    (Dtype::F16, "relative_l2_f16", "small-f16"),
    (Dtype::Bf16, "relative_l2_bf16", "small-bf16"),
    (Dtype::F32, "relative_l2_f32", "small-f32"),
    (Dtype::F8E4m3, "relative_l2_f8_e4m3", "small-f8_e4m3"),
    (Dtype::Q8_0, "relative_l2_q8_0", "small-q8_0"),
    (Dtype::Q4_0, "relative_l2_q4_0", "small-q4_0"),
];

/// Relative L2 of each dtype, over two pages and a tail.
pub(super) fn accuracy(workplace: &Workplace) -> Result<Vec<Figure>, String> {
    note("accuracy");
    let figure = |(dtype, figure, model): (Dtype, &'static str, &str)| {
        let path = write_sequence(workplace, model, dtype, 2, 177)?;
        let sequence = Sequence::open(&path).map_err(|error| error.to_string())?;
        Ok(Figure {
            name: figure,
            unit: "ratio",
            better: Better::Lower,
            target: Target::Absolute(1e-5),
            values: vec![error_of(&sequence).map_err(|error| error.to_string())?],
            baselines: Vec::new(),
        })
    };
    CASES.into_iter().map(figure).collect()
}

fn error_of(sequence: &Sequence) -> Result<f64, ReadError> {
    let shape = shape().map_err(ReadError::Arguments)?;
    let attention = Attention::new(shape, 2)?;
    let tokens = sequence.valid_tokens()?;
    let q = query(shape);
    let queries = Queries { q: &q, positions: &[tokens - 1] };
    let found = sequence.stream(0..tokens)?.attend(&attention, &queries, &Options::default())?;
    let found = found.finish(None).map_err(failed).map_err(ReadError::Arguments)?;

    let mut stream = sequence.stream(0..tokens)?;
    let mut expected = Reference::new(shape);
    while let Some(run) = stream.next_run()? {
        for block in run.blocks() {
            expected.add(&q, &block);
        }
    }
    Ok(relative_l2(&found, &expected.finish()))
}

/// `|found - expected| / |expected|`
pub(super) fn relative_l2(found: &[f32], expected: &[f64]) -> f64 {
    let pairs = found.iter().zip(expected);
    let difference: f64 =
        pairs.map(|(found, expected)| (f64::from(*found) - expected).powi(2)).sum();
    let length: f64 = expected.iter().map(|value| value * value).sum();
    (difference / length).sqrt()
}

/// Attention of one query in f64, token by token. The logits are small, so no largest one needs to
/// be taken off.
pub(super) struct Reference {
    shape: Shape,
    /// `[num_qo_heads, v_head_dim]`
    o: Vec<f64>,
    /// `[num_qo_heads]`
    l: Vec<f64>,
}

impl Reference {
    pub(super) fn new(shape: Shape) -> Self {
        let heads = shape.num_qo_heads();
        Self { shape, o: vec![0.0; heads * shape.v_head_dim()], l: vec![0.0; heads] }
    }

    pub(super) fn add(&mut self, q: &[f32], block: &KvBlock<'_>) {
        let (dim, v_dim) = (self.shape.head_dim(), self.shape.v_head_dim());
        let values = match block.v {
            Values::Rows(tensor) => tensor,
            Values::Latent => block.k,
        };
        #[allow(clippy::cast_precision_loss, reason = "a head dimension")]
        let scale = 1.0 / (dim as f64).sqrt();
        for token in 0..block.tokens {
            for kv_head in 0..self.shape.num_kv_heads() {
                let k = row(block, &block.k, kv_head, token, dim);
                let v = row(block, &values, kv_head, token, v_dim);
                let group = self.shape.group();
                for head in kv_head * group..(kv_head + 1) * group {
                    let pairs = q[head * dim..][..dim].iter().zip(&k);
                    let logit: f64 = pairs.map(|(q, k)| f64::from(*q) * k).sum();
                    let weight = (logit * scale).exp();
                    self.l[head] += weight;
                    let o = &mut self.o[head * v_dim..][..v_dim];
                    o.iter_mut().zip(&v).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
    }

    pub(super) fn finish(self) -> Vec<f64> {
        let heads = self.o.chunks_exact(self.shape.v_head_dim()).zip(self.l);
        heads.flat_map(|(o, l)| o.iter().map(move |o| o / l)).collect()
    }
}

/// A row as f64.
fn row(
    block: &KvBlock<'_>, tensor: &Tensor<'_>, head: usize, token: usize, elements: usize,
) -> Vec<f64> {
    let blocks = elements / block.dtype.block_elements() as usize;
    let bytes = blocks * block.dtype.block_bytes() as usize;
    let start = head * tensor.strides.head + token * tensor.strides.token;
    let mut row = vec![0.0; elements];
    row_f32(block.dtype, &tensor.bytes[start..][..bytes], &mut row);
    row.into_iter().map(f64::from).collect()
}
