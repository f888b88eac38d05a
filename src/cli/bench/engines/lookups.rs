//! Names that are not there: an engine asks for every block of a prompt, and most are missing.

use std::fs;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::Sizes;
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::measure::{at, interleave, timed};
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("looking up names that are not there");
    let directories = [workplace.mount().join("files/lookups"), workplace.native().join("lookups")];
    for directory in &directories {
        fs::create_dir(directory).map_err(at(directory))?;
    }
    let [kvfs, native] = directories.map(|directory| names(&directory, sizes.names));
    // The first time each of them is answered by the daemon.
    let cold = look_up(&kvfs)?;
    look_up(&native)?;
    // More rounds: one takes milliseconds.
    let rounds = interleave(4 * sizes.rounds, |_| look_up(&kvfs), |_| look_up(&native))?;
    let figure = |name, target, values, baselines| Figure {
        name,
        unit: "ms",
        better: Better::Lower,
        target,
        values,
        baselines,
    };
    Ok(vec![
        figure(
            "negative_lookup_10000_warm",
            Target::TimesBaseline(1.5),
            rounds.kvfs,
            rounds.native.clone(),
        ),
        figure("negative_lookup_10000_first", Target::None, vec![cold], rounds.native),
    ])
}

fn names(directory: &Path, count: usize) -> Vec<PathBuf> {
    (0..count).map(|index| directory.join(format!("{index:064x}_model_1_0.bin"))).collect()
}

/// Milliseconds of asking for all of them.
fn look_up(paths: &[PathBuf]) -> Result<f64, String> {
    let duration = timed(|| {
        for path in paths {
            if access(path, AccessFlags::F_OK) != Err(nix::errno::Errno::ENOENT) {
                return Err(format!("{}: should not be there", path.display()));
            }
        }
        Ok(())
    })?;
    Ok(duration.as_secs_f64() * 1e3)
}
