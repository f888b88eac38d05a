//! Many pages: how long a mount takes, and how much memory the daemon has.

use std::fs;

use super::build::{Model, layer_path};
use super::daemon::Daemon;
use super::figure::{Better, Figure, Target};
use super::measure::at;
use super::workplace::Workplace;
use super::{Sizes, note};

/// What the daemon may use whatever it holds.
const FIXED_BYTES: u64 = 64 << 20;
const MIB: f64 = (1 << 20) as f64;

/// From the start of the daemon until the mount answers, after a clean end and after a crash.
pub(super) fn mounting(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("mounting");
    let (mut clean, mut crashed) = (Vec::new(), Vec::new());
    Daemon::start(workplace)?.stop()?;
    for _ in 0..sizes.rounds {
        let mut daemon = Daemon::start(workplace)?;
        clean.push(daemon.answered_after.as_secs_f64());
        daemon.kill()?;
        let mut daemon = Daemon::start(workplace)?;
        crashed.push(daemon.answered_after.as_secs_f64());
        daemon.stop()?;
    }
    let figure = |name, values| Figure {
        name,
        unit: "s",
        better: Better::Lower,
        target: Target::Absolute(1.0),
        values,
        baselines: Vec::new(),
    };
    Ok(vec![figure("mount_after_unmount", clean), figure("mount_after_kill", crashed)])
}

/// The daemon's memory while the kernel holds many of its inodes.
pub(super) fn memory(workplace: &Workplace, daemon: &Daemon) -> Result<Vec<Figure>, String> {
    note("holding many names");
    let first = layer_path(workplace, Model::Small, "held");
    let sequence = first.parent().unwrap_or(&first);
    let mut held: u64 = 0;
    for layer in fs::read_dir(sequence).map_err(at(sequence))? {
        let layer = layer.map_err(at(sequence))?.path();
        for page in fs::read_dir(&layer).map_err(at(&layer))? {
            page.and_then(|page| page.metadata()).map_err(at(&layer))?;
            held += 1;
        }
    }
    let status = daemon.status("inodes_held")?;
    let inodes: u64 = status.parse().map_err(|_| format!("inodes_held: {status}"))?;
    if inodes < held {
        return Err(format!("the kernel holds {inodes} inodes instead of {held}"));
    }
    let resident = daemon.resident_bytes()?;
    Ok(memory_figures(resident, inodes))
}

#[allow(clippy::cast_precision_loss, reason = "bytes of memory are far below 2^53")]
fn memory_figures(resident: u64, inodes: u64) -> Vec<Figure> {
    let each = resident.saturating_sub(FIXED_BYTES) as f64 / inodes as f64;
    let figure = |name, unit, target, value| Figure {
        name,
        unit,
        better: Better::Lower,
        target,
        values: vec![value],
        baselines: Vec::new(),
    };
    vec![
        figure("memory_above_64mib_per_inode", "B", Target::Absolute(400.0), each),
        figure("memory_resident", "MiB", Target::None, resident as f64 / MIB),
        figure("inodes_held", "inodes", Target::None, inodes as f64),
    ]
}
