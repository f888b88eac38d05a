//! `kvfs bench attention --cuda`: attention on a GPU over pages of a mount, against what its link
//! and its memory give in the same run, and every kernel against f64.
//!
//! Where nothing can be mounted the pages are files of a plain directory: the same files, read in the
//! same way, but not by way of a mount's RAM tier.

mod options;
mod scans;
mod variants;

use std::fs;
use std::path::PathBuf;

use super::mounted::{Mounted, write_deep_sequence, write_sequence};
use super::shape;
use super::throughput::gigabytes;
use crate::cli::bench::daemon::Daemon;
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::measure::at;
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;
use crate::cuda::{CudaAttention, CudaError, Settings, filling};
use crate::page::Dtype;
use crate::reader::Sequence;

/// How much of everything; pages have 1024 tokens and 4 MiB.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rounds: usize,
    /// Pages of the longest context.
    longest: u64,
    /// Pages of the context that stays on the device, and of the one that the CPU shares.
    hot: u64,
    /// Layers of the former.
    hot_layers: u32,
    /// Bytes of the copies that tell what link and memory give.
    ceiling_bytes: usize,
    /// Pages that the ring is filled with.
    filled: u64,
    /// Tokens of the pages that every kernel attends to; the last one is short.
    pages: [usize; 3],
}

/// A million tokens.
const FULL: Sizes = Sizes {
    rounds: 9,
    longest: 1024,
    hot: 64,
    hot_layers: 8,
    ceiling_bytes: 256 << 20,
    filled: 32,
    pages: [300, 300, 61],
};

const QUICK: Sizes = Sizes {
    rounds: 1,
    // One more than fit into the slots of the ring.
    longest: 9,
    hot: 1,
    hot_layers: 2,
    ceiling_bytes: 16 << 20,
    filled: 8,
    pages: [30, 30, 11],
};

/// What was measured, and with what.
#[derive(Debug)]
pub(in crate::cli::bench) struct Outcome {
    pub(in crate::cli::bench) figures: Vec<Figure>,
    pub(in crate::cli::bench) passthrough: String,
    /// The GPU, or why there is none.
    pub(in crate::cli::bench) gpu: String,
    /// What the pages are files of.
    pub(in crate::cli::bench) pages: &'static str,
}

/// Measures. Without a GPU it says why, and measures what needs none.
pub(in crate::cli::bench) fn run(
    workplace: &Workplace, quick: bool, plain: bool,
) -> Result<Outcome, String> {
    let sizes = if quick { QUICK } else { FULL };
    let cuda = match CudaAttention::new(shape()?, settings()) {
        Ok(cuda) => Ok(cuda),
        Err(error @ CudaError::Unavailable(_)) => Err(error.to_string()),
        Err(error) => return Err(error.to_string()),
    };
    let longest = if cuda.is_ok() { sizes.longest } else { 1 };
    let hot = if cuda.is_ok() { sizes.hot * u64::from(sizes.hot_layers) } else { 0 };
    let ram = (longest + sizes.filled + hot) * (4 << 20) + (256 << 20);
    let mut daemon = if plain { None } else { mount(workplace, ram)? };
    if daemon.is_none() {
        note("nothing is mounted: pages are files of a plain directory");
        let models: PathBuf = workplace.mount().join("models");
        fs::create_dir(&models).map_err(at(&models))?;
    }
    let mut figures = vec![ring(workplace, &sizes)?];
    let gpu = match cuda {
        Ok(cuda) => {
            let (major, minor) = cuda.properties().compute_capability;
            let gpu = format!("{}, compute capability {major}.{minor}", cuda.properties().name);
            note(&gpu);
            figures.extend(variants::figures(sizes.pages)?);
            figures.push(options::figure(sizes.pages)?);
            let path = write_sequence(workplace, "cuda", Dtype::F16, longest, 0)?;
            let deep = write_deep_sequence(workplace, "hot", sizes.hot_layers, sizes.hot)?;
            figures.extend(scans::figures(&path, &deep, cuda, &sizes)?);
            gpu
        }
        Err(why) => {
            note(&format!("{why}: no figures of a GPU"));
            format!("none ({why})")
        }
    };
    let Some(daemon) = &mut daemon else {
        let (passthrough, pages) = ("no mount".to_owned(), "a plain directory");
        return Ok(Outcome { figures, passthrough, gpu, pages });
    };
    let passthrough = daemon.status("passthrough")?;
    // Without flushing what was only needed here.
    daemon.kill()?;
    Ok(Outcome { figures, passthrough, gpu, pages: "a mount" })
}

/// A mount whose pages can be mapped; `None` where there is none to be had, for which it takes root, a
/// kernel that passes files through, and memory.
fn mount(workplace: &Workplace, ram_bytes: u64) -> Result<Option<Daemon>, String> {
    if let Err(error) = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        note(&format!("/dev/fuse: {error}"));
        return Ok(None);
    }
    let ram = ram_bytes.to_string();
    let mut daemon =
        match Daemon::start_with(workplace, &["--ram", &ram, "--commit-interval", "3600"]) {
            Ok(daemon) => daemon,
            Err(why) => {
                note(&why);
                return Ok(None);
            }
        };
    // The first open of a file decides.
    let path = write_sequence(workplace, "tried", Dtype::F16, 1, 0)?;
    Sequence::open(&path).map_err(|error| error.to_string())?;
    let passthrough = daemon.status("passthrough")?;
    if passthrough == "yes" {
        note("writing pages into the RAM tier");
        return Ok(Some(daemon));
    }
    note(&format!("the mount has no passthrough ({passthrough}): pages cannot be mapped"));
    daemon.kill()?;
    Ok(None)
}

/// One copy thread for each 10 GB/s of the fastest link (`PCIe` 5) where there are so many cores.
fn settings() -> Settings {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Settings { copy_threads: (cores / 2).clamp(2, 6), ..Settings::default() }
}

/// GB/s of filling a slot of the ring from pages, against copying the same bytes.
fn ring(workplace: &Workplace, sizes: &Sizes) -> Result<Figure, String> {
    let mounted = Mounted::create(workplace, Dtype::F16, sizes.filled)?;
    let blocks = mounted.blocks();
    let bytes = mounted.page_bytes() * blocks.len() as u64;
    let (mut values, mut baselines) = (Vec::new(), Vec::new());
    for _ in 0..sizes.rounds {
        let times = filling(shape()?, &blocks, Settings::default().slot_bytes);
        let (filled, copied) = times.map_err(says)?;
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

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn says(error: CudaError) -> String {
    error.to_string()
}
