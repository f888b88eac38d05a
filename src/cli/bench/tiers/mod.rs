//! `kvfs bench tiers`: what memory, the disk and a remote are worth behind a mount.
//!
//! Each part has a store of its own and mounts it as that part needs. The remote is a directory on
//! the same disk.

mod codec;
mod flush;
mod latency;
mod memory;
mod ratios;
mod remote;
mod scan;
mod sealed;
mod values;

use std::fs;
use std::path::{Path, PathBuf};

use super::build::Model;
use super::daemon::Daemon;
use super::figure::{Better, Figure, Target};
use super::measure::at;
use super::workplace::Workplace;
use super::{BenchArguments, require_passthrough};
use crate::page::names;

const MIB: u64 = 1 << 20;

/// How much of everything.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Rounds of every figure.
    rounds: usize,
    /// Rounds of what takes seconds each.
    long_rounds: usize,
    /// Pages of 4 MiB that are read from memory, and that a burst or a flush has.
    pages: u64,
    /// Pages of a sequence in the remote.
    remote_pages: u64,
    /// Pages that are encoded.
    encoded_pages: u64,
    /// Opens of which the slowest hundredth counts.
    opens: usize,
}

const FULL: Sizes = Sizes {
    rounds: 7,
    long_rounds: 3,
    pages: 64,
    remote_pages: 64,
    encoded_pages: 16,
    opens: 20_000,
};

const QUICK: Sizes =
    Sizes { rounds: 1, long_rounds: 1, pages: 32, remote_pages: 16, encoded_pages: 2, opens: 500 };

/// Measures everything; returns whether the mounts had passthrough.
pub(super) fn run(arguments: &BenchArguments, figures: &mut Vec<Figure>) -> Result<String, String> {
    let sizes = if arguments.quick { QUICK } else { FULL };
    let make = || Workplace::make(arguments.dir.as_deref());
    let passthrough = memory::figures(&make()?, &sizes, arguments, figures)?;
    figures.extend(flush::figures(&make()?, &sizes)?);
    figures.extend(codec::figures(&make()?, &sizes)?);
    figures.extend(remote::figures(&make()?, &sizes)?);
    figures.extend(sealed::figures(&make()?, &sizes)?);
    figures.extend(latency::figures(&make()?, &sizes)?);
    figures.extend(scan::figures(&make()?, &sizes)?);
    Ok(passthrough)
}

/// Mounts with options and makes sure that the kernel passes files through.
fn mount(
    workplace: &Workplace, options: &[&str], arguments: &BenchArguments,
) -> Result<(Daemon, String), String> {
    let daemon = Daemon::start_with(workplace, options)?;
    make_layer(workplace, "s")?;
    let passthrough = require_passthrough(arguments, &daemon)?;
    Ok((daemon, passthrough))
}

/// Makes layer 0 of a sequence of the large model, through the mount.
pub(super) fn make_layer(workplace: &Workplace, sequence: &str) -> Result<PathBuf, String> {
    let model = workplace.mount().join("models").join(Model::Large.name());
    if !model.exists() {
        fs::create_dir(&model).map_err(at(&model))?;
        let manifest = model.join(names::MANIFEST);
        fs::write(&manifest, Model::Large.manifest_text()?).map_err(at(&manifest))?;
    }
    let layer = model.join(names::SEQUENCES).join(sequence).join("000");
    fs::create_dir_all(&layer).map_err(at(&layer))?;
    Ok(layer)
}

/// Where `user.kvfs.tier` says that a file is.
fn tier(path: &Path) -> Result<String, String> {
    let value = crate::sys::extended_attribute(path, c"user.kvfs.tier").map_err(at(path))?;
    let value = value.ok_or_else(|| format!("{}: tells no tier", path.display()))?;
    Ok(String::from_utf8_lossy(&value).into_owned())
}

/// Waits until the remote has everything and the disk holds no more than its budget.
fn wait_for_movers(daemon: &Daemon) -> Result<(), String> {
    daemon.wait_until("objects to leave the disk", |daemon| {
        let budget = daemon.status_number("ssd_budget_bytes")?;
        let is_up = daemon.status("remote_state")? == "up";
        let waiting = daemon.status_number("remote_waiting_files")?;
        Ok(is_up && waiting == 0 && daemon.status_number("ssd_used_bytes")? <= budget)
    })
}

/// A number that is not compared with plain files.
fn alone(name: &'static str, unit: &'static str, target: Target, values: Vec<f64>) -> Figure {
    Figure { name, unit, better: Better::Lower, target, values, baselines: Vec::new() }
}

/// Bytes in MiB.
#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}
