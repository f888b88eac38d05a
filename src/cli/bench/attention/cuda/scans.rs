//! How fast pages are attended to that pass through the ring, that stay on the device, and that the CPU
//! takes a share of.

use std::path::Path;
use std::time::Instant;

use super::super::accuracy::relative_l2;
use super::super::mounted::PAGE_TOKENS;
use super::super::throughput::gigabytes;
use super::super::{failed, shape};
use super::{Sizes, says, settings};
use crate::attention::bench::query;
use crate::attention::{Attention, Options, Queries};
use crate::cli::bench::figure::{Better, Figure, Target, median};
use crate::cli::bench::note;
use crate::cuda::{CudaAttention, Settings};
use crate::reader::Sequence;

/// Pages of a layer, and the milliseconds that a published prototype took for them on `PCIe` 3 (M6000).
const CONTEXTS: [(&str, u64, f64); 5] = [
    ("cuda_cold_4k_tokens", 4, 6.2),
    ("cuda_cold_8k_tokens", 8, 12.4),
    ("cuda_cold_16k_tokens", 16, 24.8),
    ("cuda_cold_32k_tokens", 32, 46.8),
    ("cuda_cold_64k_tokens", 64, 91.7),
];

/// Bytes per second and round of the link and of the memory.
struct Limits {
    uploads: Vec<f64>,
    copies: Vec<f64>,
}

/// A sequence, of one layer mostly.
struct Layer {
    sequence: Sequence,
    page_bytes: u64,
}

impl Layer {
    fn open(path: &Path) -> Result<Self, String> {
        let sequence = Sequence::open(path).map_err(|error| error.to_string())?;
        let page_bytes = sequence.manifest().geometry().row_bytes() * u64::from(PAGE_TOKENS);
        Ok(Self { sequence, page_bytes })
    }
}

/// `path` is a sequence of one layer, `deep` the one that stays on the device.
pub(super) fn figures(
    path: &Path, deep: &Path, mut cuda: CudaAttention, sizes: &Sizes,
) -> Result<Vec<Figure>, String> {
    note(if cuda.reads_mapped_pages() {
        "the GPU reads mapped pages by itself"
    } else {
        "pages go through pinned buffers"
    });
    let layer = Layer::open(path)?;
    let mut limits = Limits { uploads: Vec::new(), copies: Vec::new() };
    for _ in 0..sizes.rounds {
        let ceilings = cuda.ceilings(sizes.ceiling_bytes).map_err(says)?;
        limits.uploads.push(ceilings.upload / 1e9);
        limits.copies.push(ceilings.device / 1e9);
    }
    let mut figures = ceilings(&limits);
    figures.extend(cold(&mut cuda, &layer, &limits, sizes)?);
    figures.push(hybrid(&mut cuda, &layer, sizes)?);
    let mut errors = vec![
        error_of(&mut cuda, &layer, sizes.longest, None)?,
        error_of(&mut cuda, &layer, sizes.hot, Some(0.3))?,
    ];
    drop(cuda);
    let (figure, error) = hot(&Layer::open(deep)?, &limits, sizes)?;
    figures.push(figure);
    errors.push(error);
    figures.push(Figure {
        name: "cuda_relative_l2_scans",
        unit: "ratio",
        better: Better::Lower,
        target: Target::Absolute(1e-4),
        // A NaN is the worst.
        values: vec![errors.into_iter().reduce(|a, b| if a <= b { b } else { a }).unwrap_or(0.0)],
        baselines: Vec::new(),
    });
    Ok(figures)
}

/// What the CPU gives for the first pages of all layers, one after the other.
fn on_cpu(layers: &Layer, pages: u64) -> Result<Vec<f64>, String> {
    let cpu = Attention::new(shape()?, 1).map_err(failed)?;
    let q = query(shape()?);
    let end = pages * u64::from(PAGE_TOKENS);
    let queries = Queries { q: &q, positions: &[end - 1] };
    let mut stream = layers.sequence.stream(0..end).map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    while stream.layer().is_some() {
        let partials = stream.attend(&cpu, &queries, &Options::default());
        let result = partials.map_err(|error| error.to_string())?.finish(None).map_err(failed)?;
        all.extend(result.into_iter().map(f64::from));
    }
    Ok(all)
}

/// Relative L2 of a scan of a layer, against the CPU: figures of wrong results would be worth nothing,
/// and a wait that is missing may show on a device alone.
fn error_of(
    cuda: &mut CudaAttention, layer: &Layer, pages: u64, share: Option<f64>,
) -> Result<f64, String> {
    let cpu = Attention::new(shape()?, 1).map_err(failed)?;
    let q = query(shape()?);
    let end = pages * u64::from(PAGE_TOKENS);
    let queries = Queries { q: &q, positions: &[end - 1] };
    let mut scan = cuda.scan(&layer.sequence, 0..end).map_err(says)?;
    if let Some(share) = share {
        scan = scan.with_cpu(&cpu, share).map_err(says)?;
    }
    let found = scan.attend(&queries, &Options::default()).map_err(says)?;
    Ok(relative_l2(&found.finish(None).map_err(failed)?, &on_cpu(layer, pages)?))
}

fn ceilings(limits: &Limits) -> Vec<Figure> {
    let of = [("cuda_link", &limits.uploads), ("cuda_memory", &limits.copies)];
    let figure = |(name, values): (&'static str, &Vec<f64>)| Figure {
        name,
        unit: "GB/s",
        better: Better::Higher,
        target: Target::None,
        values: values.clone(),
        baselines: Vec::new(),
    };
    of.map(figure).into()
}

/// Pages that pass through the ring: the time against the published one, the target what the link
/// takes; then the rate of the longest context against the link's.
fn cold(
    cuda: &mut CudaAttention, layer: &Layer, limits: &Limits, sizes: &Sizes,
) -> Result<Vec<Figure>, String> {
    let mut figures = Vec::new();
    for (name, pages, published) in CONTEXTS.into_iter().filter(|(_, n, _)| *n <= sizes.longest) {
        let times = scans(cuda, layer, pages, sizes.rounds, None)?;
        let limit_ms = gigabytes(pages * layer.page_bytes) / median(&limits.uploads) * 1e3;
        figures.push(Figure {
            name,
            unit: "ms",
            better: Better::Lower,
            target: Target::Absolute(limit_ms / 0.95),
            values: times.iter().map(|seconds| seconds * 1e3).collect(),
            baselines: vec![published; sizes.rounds],
        });
    }
    let times = scans(cuda, layer, sizes.longest, sizes.rounds, None)?;
    figures.push(Figure {
        name: "cuda_cold_streaming",
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(0.95),
        values: rates(layer, sizes.longest, times),
        baselines: limits.uploads.clone(),
    });
    Ok(figures)
}

/// Pages that the CPU takes a share of, as much as evens out: milliseconds against the longer of what
/// each takes alone for its share.
fn hybrid(cuda: &mut CudaAttention, layer: &Layer, sizes: &Sizes) -> Result<Figure, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = Attention::new(shape()?, threads).map_err(failed)?;
    let gpu_alone = median(&scans(cuda, layer, sizes.hot, sizes.rounds, None)?);
    let mut cpu_times = Vec::new();
    for _ in 0..sizes.rounds {
        let q = query(shape()?);
        let end = sizes.hot * u64::from(PAGE_TOKENS);
        let queries = Queries { q: &q, positions: &[end - 1] };
        let start = Instant::now();
        let stream = layer.sequence.stream(0..end).map_err(|error| error.to_string());
        let partials = stream?.attend(&cpu, &queries, &Options::default());
        partials.map_err(|error| error.to_string())?;
        cpu_times.push(start.elapsed().as_secs_f64());
    }
    let cpu_alone = median(&cpu_times);
    let share = gpu_alone / (gpu_alone + cpu_alone);
    note(&format!("the CPU takes {:.0} % of the pages", share * 100.0));
    let times = scans(cuda, layer, sizes.hot, sizes.rounds, Some((&cpu, share)))?;
    let alone = (gpu_alone * (1.0 - share)).max(cpu_alone * share);
    Ok(Figure {
        name: "cuda_hybrid",
        unit: "ms",
        better: Better::Lower,
        target: Target::TimesBaseline(1.05),
        values: times.iter().map(|seconds| seconds * 1e3).collect(),
        baselines: vec![alone * 1e3; sizes.rounds],
    })
}

/// Pages of several layers that stay on the device, with queries and results there, too; and relative
/// L2 of the results.
fn hot(layers: &Layer, limits: &Limits, sizes: &Sizes) -> Result<(Figure, f64), String> {
    let count = u64::from(sizes.hot_layers);
    let hot_bytes = (sizes.hot + 1) * count * (layers.page_bytes + (64 << 10));
    let settings = Settings { hot_bytes, ..settings() };
    let mut cuda = CudaAttention::new(shape()?, settings).map_err(says)?;
    let q = query(shape()?);
    let end = sizes.hot * u64::from(PAGE_TOKENS);
    let queries = Queries { q: &q, positions: &[end - 1] };
    let (rounds, options) = (sizes.rounds + 1, Options::default());
    let done = cuda.attend_layers((&layers.sequence, 0..end), &queries, &options, rounds);
    let (found, mut times) = done.map_err(says)?;
    // The first one brings them there.
    let times = times.split_off(1);
    if cuda.hot_bytes() < hot_bytes / 2 {
        note(&format!("the hot window has {} bytes, not {hot_bytes}", cuda.hot_bytes()));
    }
    let figure = Figure {
        name: "cuda_hot",
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(0.8),
        values: rates(layers, sizes.hot * count, times),
        baselines: limits.copies.clone(),
    };
    Ok((figure, relative_l2(&found, &on_cpu(layers, sizes.hot)?)))
}

fn rates(layer: &Layer, pages: u64, times: Vec<f64>) -> Vec<f64> {
    times.into_iter().map(|seconds| gigabytes(pages * layer.page_bytes) / seconds).collect()
}

/// Seconds of each scan of the first pages of a layer, after one that is not counted.
fn scans(
    cuda: &mut CudaAttention, layer: &Layer, pages: u64, rounds: usize,
    cpu: Option<(&Attention, f64)>,
) -> Result<Vec<f64>, String> {
    let q = query(shape()?);
    let end = pages * u64::from(PAGE_TOKENS);
    let queries = Queries { q: &q, positions: &[end - 1] };
    let mut times = Vec::new();
    for _ in 0..=rounds {
        let start = Instant::now();
        let mut scan = cuda.scan(&layer.sequence, 0..end).map_err(says)?;
        if let Some((attention, share)) = cpu {
            scan = scan.with_cpu(attention, share).map_err(says)?;
        }
        scan.attend(&queries, &Options::default()).map_err(says)?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(times.split_off(1))
}
