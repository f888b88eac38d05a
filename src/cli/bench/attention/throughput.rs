//! How fast pages of the RAM tier are attended to.

use std::hint::black_box;
use std::time::Instant;

use super::mounted::{Mounted, PAGE_TOKENS, attend};
use super::{COMPARED, Sizes, failed, shape};
use crate::attention::bench::{PrivateMemory, Setting, measure, query};
use crate::attention::{Attention, Options, Queries, Shape};
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;
use crate::page::Dtype;

/// Pages of a context, threads, the share of the bandwidth of reading to reach, and the names of
/// the figures.
const CASES: [(usize, usize, f64, [&str; 2]); 4] = [
    (16, 1, 0.78, ["attend_16k_1_thread", "attend_16k_1_thread_private"]),
    (16, 2, 0.85, ["attend_16k_2_threads", "attend_16k_2_threads_private"]),
    (64, 1, 0.78, ["attend_64k_1_thread", "attend_64k_1_thread_private"]),
    (64, 2, 0.85, ["attend_64k_2_threads", "attend_64k_2_threads_private"]),
];

/// Lengths of contexts in pages.
const LENGTHS: [(usize, &str); 3] = [(4, "context_4k"), (64, "context_64k"), (512, "context_512k")];

/// GB/s against reading memory, and against the same loop on private memory.
pub(super) fn against_memory(f16: &Mounted, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    let mapped = f16.mapped_pages()?;
    note(&format!("{mapped} of {} pages are mapped from files of the mount", f16.pages));
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    let share = mapped as f64 / f16.pages as f64;
    let mut figures = vec![Figure {
        name: "pages_mapped_from_the_mount",
        unit: "share",
        better: Better::Higher,
        target: Target::Absolute(1.0),
        values: vec![share],
        baselines: Vec::new(),
    }];
    for case in CASES {
        figures.extend(against_memory_with(f16, sizes, case)?);
    }
    Ok(figures)
}

fn against_memory_with(
    f16: &Mounted, sizes: &Sizes,
    (pages, threads, target, names): (usize, usize, f64, [&'static str; 2]),
) -> Result<[Figure; 2], String> {
    note(names[0]);
    let setting = Setting {
        shape: shape()?,
        is_latent: false,
        tokens: pages * PAGE_TOKENS as usize,
        threads,
        dtypes: vec![Dtype::F16],
        rounds: sizes.rounds,
        memory_bytes: sizes.memory_bytes,
    };
    let private = PrivateMemory::new(&setting).map_err(|error| error.to_string())?;
    let attention = Attention::new(setting.shape, threads).map_err(failed)?;
    let blocks = f16.blocks();
    let bytes = f16.page_bytes() * pages as u64;
    // As much as there is private memory.
    let page_bytes = usize::try_from(f16.page_bytes()).unwrap_or(usize::MAX);
    let blocks = &blocks[..blocks.len().min(sizes.memory_bytes / page_bytes)];
    let rate = |seconds: f64| gigabytes(bytes) / seconds;
    let (mut mount, mut stream, mut same) = (Vec::new(), Vec::new(), Vec::new());
    // The first round is not counted: it wakes what sleeps.
    for round in 0..=sizes.rounds {
        let read = private.read();
        let memory = private.attend(&attention).map_err(failed)?;
        let mapped = attend(&attention, blocks, pages)?;
        if round > 0 {
            stream.push(rate(read));
            same.push(rate(memory));
            mount.push(rate(mapped));
        }
    }
    let figure = |name, target, baselines| Figure {
        name,
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(target),
        values: mount.clone(),
        baselines,
    };
    Ok([figure(names[0], target, stream), figure(names[1], 0.97, same)])
}

/// Contexts of a model that keeps one latent row of 576 elements for each token, of which the first 512 are V: GB/s
/// against reading memory, and against the same arithmetic on rows that stay in the second-level caches, which is
/// what bounds it: with 16 heads it multiplies six times as often for each byte as with 40 on 8 KV heads.
pub(super) fn latent(sizes: &Sizes) -> Result<Vec<Figure>, String> {
    let mut figures = Vec::new();
    for (tokens, names) in [
        (16 << 10, ["latent_16k", "latent_16k_arithmetic"]),
        (64 << 10, ["latent_64k", "latent_64k_arithmetic"]),
    ] {
        note(names[0]);
        let setting = Setting {
            shape: Shape::new(16, 1, 576, 512).map_err(failed)?,
            is_latent: true,
            tokens,
            threads: 2,
            dtypes: vec![Dtype::F16],
            rounds: sizes.rounds,
            memory_bytes: sizes.memory_bytes / 2,
        };
        for found in measure(&setting).map_err(failed)? {
            let rates = |seconds: &[f64]| {
                seconds.iter().map(|s| gigabytes(found.layer_bytes as u64) / s).collect::<Vec<_>>()
            };
            let [stream, cached] = [&found.stream_seconds, &found.cached_seconds].map(|s| rates(s));
            let figure = |name, target, baselines| Figure {
                name,
                unit: "GB/s",
                better: Better::Higher,
                target,
                values: rates(&found.layer_seconds),
                baselines,
            };
            figures.push(figure(names[0], Target::None, stream));
            figures.push(figure(names[1], Target::TimesBaseline(0.9), cached));
        }
    }
    Ok(figures)
}

/// Tokens per second of the other dtypes, against f16.
pub(super) fn by_dtype(
    workplace: &Workplace, f16: &Mounted, sizes: &Sizes,
) -> Result<Vec<Figure>, String> {
    note("other dtypes");
    let others = COMPARED.map(|(dtype, _)| Mounted::create(workplace, dtype, sizes.other_pages));
    let others = others.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut figures = Vec::new();
    for (threads, names) in [
        (1, ["bf16_1_thread", "q8_0_1_thread", "q4_0_1_thread"]),
        (2, ["bf16_2_threads", "q8_0_2_threads", "q4_0_2_threads"]),
    ] {
        let attention = Attention::new(shape()?, threads).map_err(failed)?;
        let f16_blocks = f16.blocks();
        let f16_blocks = &f16_blocks[..f16_blocks.len().min(others[0].blocks().len())];
        let mut baselines = Vec::new();
        let mut values = vec![Vec::new(); others.len()];
        for round in 0..=sizes.rounds {
            let baseline = tokens_per_second(&attention, f16_blocks)?;
            let rates = others.iter().map(|other| tokens_per_second(&attention, &other.blocks()));
            let rates = rates.collect::<Result<Vec<_>, _>>()?;
            if round > 0 {
                baselines.push(baseline);
                for (values, rate) in values.iter_mut().zip(rates) {
                    values.push(rate);
                }
            }
        }
        for ((name, values), (_, target)) in names.into_iter().zip(values).zip(COMPARED) {
            figures.push(Figure {
                name,
                unit: "tokens/us",
                better: Better::Higher,
                target: Target::TimesBaseline(target),
                values,
                baselines: baselines.clone(),
            });
        }
    }
    Ok(figures)
}

/// What counting the mass of each token costs: tokens per second against attention alone, which it
/// may slow down by a tenth.
pub(super) fn with_mass(f16: &Mounted, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("heavy hitters");
    let blocks = f16.blocks();
    let context = &blocks[..blocks.len().min(64)];
    let tokens = context.len() * PAGE_TOKENS as usize;
    let (q, positions) = (query(shape()?), [tokens as u64]);
    let queries = Queries { q: &q, positions: &positions };
    let mut mass = vec![0.0; tokens];
    let mut figures = Vec::new();
    for (threads, name) in [(1, "heavy_hitters_1_thread"), (2, "heavy_hitters_2_threads")] {
        let attention = Attention::new(shape()?, threads).map_err(failed)?;
        let (mut values, mut baselines) = (Vec::new(), Vec::new());
        for round in 0..=sizes.rounds {
            let baseline = tokens_per_second(&attention, context)?;
            let start = Instant::now();
            let options = Options::default();
            let partials = attention.run_with_mass(&queries, context, &options, &mut mass);
            black_box(partials.map_err(failed)?);
            #[allow(clippy::cast_precision_loss, reason = "thousands of tokens")]
            let value = tokens as f64 / start.elapsed().as_secs_f64() / 1e6;
            if round > 0 {
                baselines.push(baseline);
                values.push(value);
            }
        }
        figures.push(Figure {
            name,
            unit: "tokens/us",
            better: Better::Higher,
            target: Target::TimesBaseline(1.0 / 1.1),
            values,
            baselines,
        });
    }
    Ok(figures)
}

/// In millions, over contexts of 64K.
fn tokens_per_second(
    attention: &Attention, blocks: &[crate::attention::KvBlock<'_>],
) -> Result<f64, String> {
    let pages = 64;
    let tokens = f64::from(PAGE_TOKENS) * 64.0;
    Ok(tokens / attend(attention, blocks, pages)? / 1e6)
}

/// Nanoseconds per token: the cost grows with the length and no faster. The baseline is 64K.
pub(super) fn by_length(f16: &Mounted, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("contexts of different lengths");
    let blocks = f16.blocks();
    let attention = Attention::new(shape()?, 2).map_err(failed)?;
    let lengths = LENGTHS.into_iter().filter(|(pages, _)| *pages <= blocks.len());
    let lengths: Vec<_> = lengths.collect();
    let mut values = vec![Vec::new(); lengths.len()];
    for round in 0..=sizes.rounds {
        for ((pages, _), values) in lengths.iter().zip(&mut values) {
            let seconds = attend(&attention, &blocks, *pages)?;
            if round > 0 {
                #[allow(clippy::cast_precision_loss, reason = "thousands of tokens")]
                values.push(seconds * 1e9 / (*pages * PAGE_TOKENS as usize) as f64);
            }
        }
    }
    let is_baseline = |pages: usize| pages == 64;
    let baseline = lengths.iter().position(|(pages, _)| is_baseline(*pages));
    let baseline = baseline.map(|index| values[index].clone()).unwrap_or_default();
    let figures = lengths.iter().zip(values).map(|((pages, name), values)| Figure {
        name,
        unit: "ns/token",
        better: Better::Lower,
        target: if is_baseline(*pages) { Target::None } else { Target::TimesBaseline(1.15) },
        values,
        baselines: if is_baseline(*pages) { Vec::new() } else { baseline.clone() },
    });
    Ok(figures.collect())
}

#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
pub(super) fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}
