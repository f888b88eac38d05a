//! Every kernel of every module against f64 on the host, on the values as they are stored.

use super::super::accuracy::{Reference, relative_l2};
use super::says;
use crate::attention::bench::pattern;
use crate::attention::select::PageTopK;
use crate::attention::{KvBlock, Options, PageSummary, Queries, Shape, Tensor, Values};
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::note;
use crate::cuda::{CudaAttention, Settings};
use crate::page::{Dtype, Strides};

const DTYPES: [(Dtype, &str); 6] = [
    (Dtype::F16, "cuda_relative_l2_f16"),
    (Dtype::Bf16, "cuda_relative_l2_bf16"),
    (Dtype::F32, "cuda_relative_l2_f32"),
    (Dtype::F8E4m3, "cuda_relative_l2_f8_e4m3"),
    (Dtype::Q8_0, "cuda_relative_l2_q8_0"),
    (Dtype::Q4_0, "cuda_relative_l2_q4_0"),
];

/// `head_dim` and `v_head_dim`: each width of the modules, and those that models have below it.
const DIMS: [(usize, usize); 6] =
    [(64, 64), (128, 128), (80, 80), (96, 64), (192, 128), (256, 192)];

/// Query heads of a KV head: one for each kernel of a decode step.
const GROUPS: [usize; 5] = [1, 2, 4, 5, 8];

/// Tokens of each page.
pub(super) type Lengths = [usize; 3];

/// For one page at a time.
pub(super) const SETTINGS: Settings =
    Settings { slot_bytes: 1 << 20, copy_threads: 1, hot_bytes: 0, registered_bytes: 0, device: 0 };

/// The worst of all variants of a dtype.
#[derive(Default)]
struct Worst {
    error: f64,
    mass: f64,
    disagreements: f64,
    variant: String,
}

/// Relative L2 of each dtype; how far the mass of all tokens is from the number of heads, and how
/// often other pages were selected than by the host.
pub(super) fn figures(lengths: Lengths) -> Result<Vec<Figure>, String> {
    note("every kernel against f64");
    let mut worst: Vec<Worst> = DTYPES.iter().map(|_| Worst::default()).collect();
    for dims in DIMS {
        for group in GROUPS {
            let shape = Shape::new(2 * group, 2, dims.0, dims.1).map_err(|e| e.to_string())?;
            let mut cuda = CudaAttention::new(shape, SETTINGS).map_err(says)?;
            // Rows of blocks are whole ones.
            let fits = |dtype: Dtype| dims.0.is_multiple_of(dtype.block_elements() as usize);
            let fitting = DTYPES.iter().zip(&mut worst).filter(|((dtype, _), _)| fits(*dtype));
            for ((dtype, _), worst) in fitting {
                check(&mut cuda, *dtype, lengths, worst)?;
            }
        }
    }
    let figure = |name, value, most| Figure {
        name,
        unit: "ratio",
        better: Better::Lower,
        target: Target::Absolute(most),
        values: vec![value],
        baselines: Vec::new(),
    };
    let mut figures = Vec::new();
    for ((_, name), worst) in DTYPES.iter().zip(&worst) {
        if worst.error > 1e-5 || worst.error.is_nan() {
            note(&format!("{name}: the worst is {}", worst.variant));
        }
        figures.push(figure(name, worst.error, 1e-4));
    }
    let most = |of: fn(&Worst) -> f64| worst.iter().map(of).fold(0.0, f64::max);
    figures.push(figure("cuda_mass", most(|worst| worst.mass), 1e-4));
    figures.push(figure("cuda_pages_selected_otherwise", most(|w| w.disagreements), 0.0));
    Ok(figures)
}

/// K and V of a page, `[heads, tokens, dim]`.
pub(super) struct Page {
    k: Vec<u8>,
    v: Vec<u8>,
    tokens: usize,
}

pub(super) fn pages(shape: Shape, dtype: Dtype, lengths: Lengths) -> Vec<Page> {
    let values = pattern(dtype, 11);
    let mut at = 0;
    let mut rows = |tokens: usize, elements: usize| {
        let bytes = shape.num_kv_heads() * tokens * row_bytes(dtype, elements);
        // Whole blocks of values.
        at = (at + 4096 * dtype.block_bytes() as usize) % (values.len() / 2);
        at -= at % dtype.block_bytes() as usize;
        values[at..at + bytes].to_vec()
    };
    let page = |tokens: usize| Page {
        k: rows(tokens, shape.head_dim()),
        v: rows(tokens, shape.v_head_dim()),
        tokens,
    };
    lengths.map(page).into()
}

fn row_bytes(dtype: Dtype, elements: usize) -> usize {
    elements / dtype.block_elements() as usize * dtype.block_bytes() as usize
}

pub(super) fn blocks(shape: Shape, dtype: Dtype, pages: &[Page]) -> Vec<KvBlock<'_>> {
    let mut blocks: Vec<KvBlock<'_>> = Vec::new();
    for Page { k, v, tokens } in pages {
        let strides = |elements| {
            let token = row_bytes(dtype, elements);
            Strides { head: tokens * token, token }
        };
        let end = blocks.last().map_or(0, |block| block.first_position + block.tokens as u64);
        let v = Tensor { bytes: v, strides: strides(shape.v_head_dim()) };
        blocks.push(KvBlock {
            k: Tensor { bytes: k, strides: strides(shape.head_dim()) },
            v: Values::Rows(v),
            dtype,
            tokens: *tokens,
            first_position: end,
            shift: 0,
        });
    }
    blocks
}

/// A decode step, and two queries of which one sees less, with masses and bounds of pages.
fn check(
    cuda: &mut CudaAttention, dtype: Dtype, lengths: Lengths, worst: &mut Worst,
) -> Result<(), String> {
    let shape = cuda.shape();
    let pages = pages(shape, dtype, lengths);
    let blocks = blocks(shape, dtype, &pages);
    let tokens: usize = lengths.iter().sum();
    let last = tokens as u64 - 1;
    for positions in [&[last][..], &[last / 2, last]] {
        let row = shape.num_qo_heads() * shape.head_dim();
        let values = [0.7_f32, -0.4, 0.1, 0.9, -0.8, 0.3, -0.2].into_iter().cycle();
        let q: Vec<f32> = values.take(row * positions.len()).collect();
        let queries = Queries { q: &q, positions };
        let mut mass = vec![0.0; tokens];
        let partials =
            cuda.run_with_mass(&queries, &blocks, &Options::default(), &mut mass).map_err(says)?;
        let found = partials.finish(None).map_err(|error| error.to_string())?;
        let mut expected = Vec::new();
        for (q, position) in q.chunks_exact(row).zip(positions) {
            let mut reference = Reference::new(shape);
            for block in &blocks {
                let seen = usize::try_from((position + 1).saturating_sub(block.first_position));
                let tokens = block.tokens.min(seen.unwrap_or(usize::MAX));
                reference.add(q, &KvBlock { tokens, ..*block });
            }
            expected.extend(reference.finish());
        }
        let error = relative_l2(&found, &expected);
        if error.is_nan() || error > worst.error {
            let (group, count) = (shape.group(), positions.len());
            let dims = (shape.head_dim(), shape.v_head_dim());
            worst.variant = format!("{dtype} {dims:?}, {group} heads, {count} queries");
            worst.error = error;
        }
        #[allow(clippy::cast_precision_loss, reason = "a few heads")]
        let heads = (shape.num_qo_heads() * positions.len()) as f64;
        let sum: f64 = mass.iter().copied().map(f64::from).sum();
        worst.mass = worst.mass.max((sum / heads - 1.0).abs());
        let policy = PageTopK { pages: 2, sinks: 0, recent: 1 };
        let on_device = cuda.summarise(&blocks).map_err(says)?;
        let options = Options::default();
        let found = cuda.select_pages(&policy, &queries, &blocks, &on_device, &options);
        let summaries: Result<Vec<_>, _> =
            blocks.iter().map(|block| PageSummary::new(shape, block)).collect();
        let summaries = summaries.map_err(|error| error.to_string())?;
        let expected = policy.select(shape, &queries, &blocks, &summaries, &options);
        if found.map_err(says)? != expected.map_err(|error| error.to_string())? {
            worst.disagreements += 1.0;
        }
    }
    Ok(())
}
