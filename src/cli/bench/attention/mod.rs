//! `kvfs bench attention`: attention over pages of a mount.
//!
//! What is in the mount's RAM tier is compared with the same in private memory and with reading
//! memory and nothing else, in turns. What is on the disk is read by a process that may not have as
//! much memory, and compared with reading one large file past the page cache.

mod accuracy;
mod control_group;
pub(super) mod cuda;
mod disk;
mod mounted;
mod throughput;

use super::daemon::Daemon;
use super::figure::Figure;
use super::note;
use super::workplace::Workplace;
use crate::attention::{AttentionError, Shape};
use crate::page::Dtype;

/// How much of everything.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rounds: usize,
    /// Pages of 1024 tokens in f16: 4 MiB each.
    f16_pages: u64,
    /// Pages of each other dtype.
    other_pages: u64,
    /// Memory that each loop goes through, to be far more than the caches.
    memory_bytes: usize,
    /// Pages on the disk.
    disk_pages: u64,
    /// Memory of the process that reads them.
    memory_limit_bytes: u64,
}

const FULL: Sizes = Sizes {
    rounds: 9,
    f16_pages: 512,
    other_pages: 128,
    memory_bytes: 512 << 20,
    disk_pages: 256,
    memory_limit_bytes: 256 << 20,
};

const QUICK: Sizes = Sizes {
    rounds: 3,
    f16_pages: 64,
    other_pages: 64,
    memory_bytes: 256 << 20,
    disk_pages: 48,
    memory_limit_bytes: 96 << 20,
};

/// Dtypes that are compared with f16, and how many times its tokens per second they must reach.
const COMPARED: [(Dtype, f64); 3] = [(Dtype::Bf16, 0.95), (Dtype::Q8_0, 1.5), (Dtype::Q4_0, 1.8)];

/// Measures. Returns whether the kernel passed the files through as well.
pub(super) fn run(workplace: &Workplace, quick: bool) -> Result<(Vec<Figure>, String), String> {
    let sizes = if quick { QUICK } else { FULL };
    let mut figures = Vec::new();
    let budget = ram_bytes(&sizes)?;
    note("writing pages into the RAM tier");
    // Nothing is committed meanwhile: the disk has no part in this.
    let options = ["--ram", &budget.to_string(), "--commit-interval", "3600"];
    let mut daemon = Daemon::start_with(workplace, &options)?;
    let f16 = mounted::Mounted::create(workplace, Dtype::F16, sizes.f16_pages)?;
    let passthrough = daemon.status("passthrough")?;
    if passthrough == "yes" {
        figures.extend(throughput::against_memory(&f16, &sizes)?);
        figures.extend(throughput::by_length(&f16, &sizes)?);
        figures.extend(throughput::with_mass(&f16, &sizes)?);
        figures.extend(throughput::by_dtype(workplace, &f16, &sizes)?);
    } else {
        note(&format!("the mount has no passthrough ({passthrough}): pages cannot be mapped"));
    }
    drop(f16);
    figures.extend(throughput::latent(&sizes)?);
    figures.extend(accuracy::accuracy(workplace)?);
    // Without flushing what was only needed here.
    daemon.kill()?;
    figures.extend(disk::streaming(workplace, &sizes)?);
    Ok((figures, passthrough))
}

/// 40 query heads on 8 KV heads of 128.
fn shape() -> Result<Shape, String> {
    Shape::new(40, 8, 128, 128).map_err(failed)
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: AttentionError) -> String {
    error.to_string()
}

/// Budget of the RAM tier, if the machine has it and the private memory beside it.
fn ram_bytes(sizes: &Sizes) -> Result<u64, String> {
    const MARGIN_BYTES: u64 = 1 << 30;
    let others = COMPARED.iter().map(|(dtype, _)| {
        Ok(mounted::manifest(*dtype)?.geometry().file_bytes(mounted::PAGE_TOKENS)
            * sizes.other_pages)
    });
    let others = others.sum::<Result<u64, String>>()?;
    let f16 = mounted::manifest(Dtype::F16)?.geometry().file_bytes(mounted::PAGE_TOKENS);
    // And the pages of the accuracy figures.
    let budget = others + f16 * sizes.f16_pages + (256 << 20);
    let needed = budget + sizes.memory_bytes as u64 + MARGIN_BYTES;
    let available = crate::reader::Limits::default().kept_bytes * 4;
    if available < needed {
        let [needed, available] = [needed, available].map(crate::cli::output::bytes);
        return Err(format!(
            "{needed} of memory are needed, {available} are available: use --quick"
        ));
    }
    Ok(budget)
}
