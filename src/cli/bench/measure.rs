//! Timing.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Values of the mount and of plain files, round by round.
#[derive(Clone, Debug, Default)]
pub(super) struct Rounds {
    pub(super) kvfs: Vec<f64>,
    pub(super) native: Vec<f64>,
}

/// Runs the same on the mount and on plain files, in turns. Each comes first every other time: what
/// the first one leaves behind (data to be written back, memory that is warm) is there for the second.
pub(super) fn interleave(
    rounds: usize, mut kvfs: impl FnMut(usize) -> Result<f64, String>,
    mut native: impl FnMut(usize) -> Result<f64, String>,
) -> Result<Rounds, String> {
    let mut values = Rounds::default();
    for round in 0..rounds {
        if round % 2 == 0 {
            values.kvfs.push(kvfs(round)?);
        }
        values.native.push(native(round)?);
        if round % 2 == 1 {
            values.kvfs.push(kvfs(round)?);
        }
    }
    Ok(values)
}

/// How long something takes.
pub(super) fn timed(act: impl FnOnce() -> Result<(), String>) -> Result<Duration, String> {
    let start = Instant::now();
    act()?;
    Ok(start.elapsed())
}

/// GB/s
#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
pub(super) fn throughput(bytes: u64, duration: Duration) -> f64 {
    bytes as f64 / 1e9 / duration.as_secs_f64()
}

/// Microseconds for each of `count`.
#[allow(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
pub(super) fn microseconds_each(duration: Duration, count: u64) -> f64 {
    duration.as_secs_f64() * 1e6 / count as f64
}

/// An error of a path as one line.
pub(super) fn at<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

/// Opens a file for reading.
pub(super) fn open(path: &PathBuf) -> Result<File, String> {
    File::open(path).map_err(at(path))
}
