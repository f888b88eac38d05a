//! `kvfs bench attention --cuda`: attention on a GPU over pages of a mount, against what its link
//! and its memory give in the same run.

use std::time::Instant;

use super::mounted::{Mounted, PAGE_TOKENS, write_sequence};
use super::shape;
use super::throughput::gigabytes;
use crate::attention::bench::query;
use crate::attention::{Options, Queries};
use crate::cli::bench::daemon::Daemon;
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;
use crate::cuda::{CudaAttention, CudaError, Settings, filling};
use crate::page::Dtype;
use crate::reader::Sequence;

/// Tokens of a layer, in pages.
const CONTEXTS: [(&str, u64, f64); 5] = [
    ("cuda_cold_4k_tokens", 4, 6.2),
    ("cuda_cold_8k_tokens", 8, 12.4),
    ("cuda_cold_16k_tokens", 16, 24.8),
    ("cuda_cold_32k_tokens", 32, 46.8),
    ("cuda_cold_64k_tokens", 64, 91.7),
];

/// Pages of the longest context of a full run: a million tokens.
const LONGEST_PAGES: u64 = 1024;

/// Measures. Without a GPU it says why, and measures what needs none.
pub(in crate::cli::bench) fn run(
    workplace: &Workplace, quick: bool,
) -> Result<(Vec<Figure>, String), String> {
    let rounds = if quick { 3 } else { 9 };
    let shape = shape()?;
    let cuda = match CudaAttention::new(shape, Settings::default()) {
        Ok(cuda) => Some(cuda),
        Err(error @ CudaError::Unavailable(_)) => {
            note(&format!("{error}: no figures of a GPU"));
            None
        }
        Err(error) => return Err(error.to_string()),
    };
    note("writing pages into the RAM tier");
    let longest = if quick || cuda.is_none() { 64 } else { LONGEST_PAGES };
    let ram = ((longest + 64) * (4 << 20) + (256 << 20)).to_string();
    let mut daemon = Daemon::start_with(workplace, &["--ram", &ram, "--commit-interval", "3600"])?;
    let passthrough = daemon.status("passthrough")?;
    let mut figures = vec![ring(workplace, rounds)?];
    if let Some(cuda) = cuda {
        figures.extend(on_gpu(workplace, cuda, longest, rounds)?);
    }
    // Without flushing what was only needed here.
    daemon.kill()?;
    Ok((figures, passthrough))
}

/// GB/s of filling a slot of the ring from pages, against copying the same bytes.
fn ring(workplace: &Workplace, rounds: usize) -> Result<Figure, String> {
    let mounted = Mounted::create(workplace, Dtype::F16, 32)?;
    let blocks = mounted.blocks();
    let bytes = mounted.page_bytes() * blocks.len() as u64;
    let (mut values, mut baselines) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let times = filling(shape()?, &blocks, Settings::default().slot_bytes);
        let (filled, copied) = times.map_err(|error| error.to_string())?;
        values.push(gigabytes(bytes) / filled);
        baselines.push(gigabytes(bytes) / copied);
    }
    Ok(Figure {
        name: "cuda_ring_filling",
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(0.9),
        values,
        baselines,
    })
}

fn on_gpu(
    workplace: &Workplace, mut cuda: CudaAttention, longest: u64, rounds: usize,
) -> Result<Vec<Figure>, String> {
    let says = |error: CudaError| error.to_string();
    let (name, (major, minor)) =
        (cuda.properties().name.clone(), cuda.properties().compute_capability);
    note(&format!("{name}, compute capability {major}.{minor}"));
    note(if cuda.reads_mapped_pages() {
        "the GPU reads mapped pages by itself"
    } else {
        "pages go through pinned buffers"
    });
    let path = write_sequence(workplace, "cuda", Dtype::F16, longest, 0)?;
    let sequence = Sequence::open(&path).map_err(|error| error.to_string())?;
    let page_bytes = sequence.manifest().geometry().row_bytes() * u64::from(PAGE_TOKENS);
    let (mut uploads, mut copies) = (Vec::new(), Vec::new());
    let mut figures = Vec::new();
    for _ in 0..rounds {
        let ceilings = cuda.ceilings().map_err(says)?;
        uploads.push(ceilings.upload / 1e9);
        copies.push(ceilings.device / 1e9);
    }
    for (name, pages, published) in CONTEXTS {
        let times = scans(&mut cuda, &sequence, pages, rounds)?;
        figures.push(Figure {
            name,
            unit: "ms",
            better: Better::Lower,
            target: Target::None,
            values: times.iter().map(|seconds| seconds * 1e3).collect(),
            baselines: vec![published; rounds],
        });
    }
    let rates = |pages: u64, times: Vec<f64>| {
        times.into_iter().map(|seconds| gigabytes(pages * page_bytes) / seconds).collect()
    };
    let times = scans(&mut cuda, &sequence, longest, rounds)?;
    figures.push(Figure {
        name: "cuda_cold_streaming",
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(0.95),
        values: rates(longest, times),
        baselines: uploads,
    });
    drop(cuda);
    let settings = Settings { hot_bytes: 65 * (page_bytes + (64 << 10)), ..Settings::default() };
    let mut cuda = CudaAttention::new(shape()?, settings).map_err(says)?;
    let times = scans(&mut cuda, &sequence, 64, rounds)?;
    figures.push(Figure {
        name: "cuda_hot_64k_tokens",
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(0.8),
        values: rates(64, times),
        baselines: copies,
    });
    Ok(figures)
}

/// Seconds of each scan of the first pages of a layer, after one that is not counted.
fn scans(
    cuda: &mut CudaAttention, sequence: &Sequence, pages: u64, rounds: usize,
) -> Result<Vec<f64>, String> {
    let q = query(shape()?);
    let end = pages * u64::from(PAGE_TOKENS);
    let queries = Queries { q: &q, positions: &[end - 1] };
    let mut times = Vec::new();
    for _ in 0..=rounds {
        let start = Instant::now();
        let mut scan = cuda.scan(sequence, 0..end).map_err(|error| error.to_string())?;
        scan.attend(&queries, &Options::default()).map_err(|error| error.to_string())?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(times.split_off(1))
}
