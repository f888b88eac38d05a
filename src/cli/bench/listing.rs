//! `ls -l` of a directory of many pages.

use std::path::Path;
use std::process::{Command, Stdio};

use super::build::{Model, layer_path, native_path};
use super::daemon::drop_caches;
use super::figure::{Better, Figure, Target};
use super::measure::{interleave, timed};
use super::workplace::Workplace;
use super::{Sizes, note};

/// Cold and warm.
pub(super) fn listing(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("listing pages");
    let kvfs = layer_path(workplace, Model::Small, "listed");
    let native = native_path(workplace, Model::Small, "listed");
    let mut figures = Vec::new();
    if drop_caches() {
        let cold = |path: &Path| {
            drop_caches();
            list(path)
        };
        let rounds = interleave(sizes.rounds, |_| cold(&kvfs), |_| cold(&native))?;
        figures.push(figure("ls_l_cold", 2.0, rounds.kvfs, rounds.native));
    } else {
        note("caches cannot be dropped here: no cold listing");
    }
    list(&kvfs)?;
    list(&native)?;
    let rounds = interleave(sizes.rounds, |_| list(&kvfs), |_| list(&native))?;
    figures.push(figure("ls_l_warm", 1.5, rounds.kvfs, rounds.native));
    Ok(figures)
}

fn figure(name: &'static str, target: f64, values: Vec<f64>, baselines: Vec<f64>) -> Figure {
    Figure {
        name,
        unit: "ms",
        better: Better::Lower,
        target: Target::TimesBaseline(target),
        values,
        baselines,
    }
}

/// Milliseconds of a real `ls -l`.
fn list(path: &Path) -> Result<f64, String> {
    let duration = timed(|| {
        let status = Command::new("ls")
            .arg("-l")
            .arg(path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status();
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("ls -l {}: {status}", path.display())),
            Err(error) => Err(format!("ls: {error}")),
        }
    })?;
    Ok(duration.as_secs_f64() * 1e3)
}
