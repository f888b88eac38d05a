//! What calls can ask for besides, on the device against the CPU, which the tests compare with f64.

use super::super::accuracy::relative_l2;
use super::super::failed;
use super::says;
use super::variants::{self, Lengths};
use crate::attention::select::TokenSet;
use crate::attention::{Attention, KvBlock, Options, Pairing, Queries, Rotation, Shape};
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::note;
use crate::cuda::CudaAttention;
use crate::page::{Dtype, Rope};

/// Relative L2, the worst of soft caps, windows, selections, positions that moved, and a chunk of queries.
pub(super) fn figure(lengths: Lengths) -> Result<Figure, String> {
    note("every option against the CPU");
    let shape = Shape::new(10, 2, 128, 128).map_err(failed)?;
    let mut cuda = CudaAttention::new(shape, variants::SETTINGS).map_err(says)?;
    let cpu = Attention::new(shape, 1).map_err(failed)?;
    let pages = variants::pages(shape, Dtype::F16, lengths);
    let blocks = variants::blocks(shape, Dtype::F16, &pages);
    let moved: Vec<_> = blocks.iter().map(|block| block.shifted(7)).collect();
    let tokens: usize = lengths.iter().sum();
    let mut selection = TokenSet::none(tokens);
    (0..tokens).step_by(3).for_each(|token| selection.insert(token..token + 2.min(tokens - token)));
    let rope = Rope { theta: 10_000.0, scaling: None, dims: None, other: serde_json::Map::new() };
    let rotation = |pairing| Rotation::new(&rope, shape.head_dim(), pairing).map_err(failed);
    let (halves, interleaved) = (rotation(Pairing::Halves)?, rotation(Pairing::Interleaved)?);
    let plain = Options::default();
    let cases: [(&[KvBlock<'_>], Options<'_>); 6] = [
        (&blocks, Options { soft_cap: Some(2.0), ..plain }),
        (&blocks, Options { window: Some(20), ..plain }),
        (&blocks, Options { causal: false, ..plain }),
        (&blocks, Options { selection: Some(&selection), ..plain }),
        (&moved, Options { rotation: Some(&halves), ..plain }),
        (&moved, Options { rotation: Some(&interleaved), ..plain }),
    ];
    let last = tokens as u64 - 1;
    let mut worst: f64 = 0.0;
    for (blocks, options) in cases {
        for positions in [&[last][..], &[last - 9, last - 1, last]] {
            let row = shape.num_qo_heads() * shape.head_dim();
            let values = [0.6_f32, -0.5, 0.2, 0.8, -0.7, 0.1, -0.3].into_iter().cycle();
            let q: Vec<f32> = values.take(row * positions.len()).collect();
            let queries = Queries { q: &q, positions };
            let found = cuda.run(&queries, blocks, &options).map_err(says)?;
            let expected = cpu.run(&queries, blocks, &options).map_err(failed)?;
            let expected = expected.finish(None).map_err(failed)?;
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            let error = relative_l2(&found.finish(None).map_err(failed)?, &expected);
            // NaN, too.
            worst = if error <= worst { worst } else { error };
        }
    }
    Ok(Figure {
        name: "cuda_relative_l2_options",
        unit: "ratio",
        better: Better::Lower,
        target: Target::Absolute(1e-4),
        values: vec![worst],
        baselines: Vec::new(),
    })
}
