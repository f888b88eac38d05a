//! `kvfs bench names`: one flat directory of very many small files, as engines make it that keep
//! every block under its hash.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::daemon::Daemon;
use super::figure::{Better, Figure, Target};
use super::measure::{at, microseconds_each};
use super::workplace::Workplace;
use super::{BenchArguments, note, require_passthrough};

/// A million names, as its users have them.
const FULL: u64 = 1_000_000;
const QUICK: u64 = 2_000;
/// Of what is looked up or renamed, one in so many.
const SAMPLED: usize = 10;
/// What the daemon may use whatever it holds.
const FIXED_BYTES: u64 = 64 << 20;

/// What is done, in this order; each is told in microseconds for one name.
const STEPS: [(&str, Step); 6] = [
    ("flat_create", create),
    ("flat_list", list),
    ("flat_look_up", look_up),
    ("flat_look_up_missing", look_up_missing),
    ("flat_rename", rename),
    ("flat_unlink", unlink),
];

/// Does something to a directory of so many names; returns how many it did it to.
type Step = fn(&Path, u64) -> std::io::Result<u64>;

/// Measures; returns whether the mount had passthrough.
pub(super) fn run(arguments: &BenchArguments, figures: &mut Vec<Figure>) -> Result<String, String> {
    let count = if arguments.quick { QUICK } else { FULL };
    let workplace = Workplace::make(arguments.dir.as_deref())?;
    let mut daemon = Daemon::start(&workplace)?;
    let passthrough = require_passthrough(arguments, &daemon)?;
    let directories = [workplace.mount().join("files/flat"), workplace.native().join("flat")];
    for directory in &directories {
        fs::create_dir(directory).map_err(at(directory))?;
    }
    let mut resident = 0;
    for (name, step) in STEPS {
        note(name);
        let [kvfs, native] = directories.each_ref().map(|directory| {
            let start = Instant::now();
            let done = step(directory, count).map_err(at(directory))?;
            Ok::<f64, String>(microseconds_each(start.elapsed(), done))
        });
        figures.push(Figure {
            name,
            unit: "us",
            better: Better::Lower,
            target: Target::None,
            values: vec![kvfs?],
            baselines: vec![native?],
        });
        resident = resident.max(daemon.resident_bytes()?);
    }
    daemon.stop()?;
    figures.push(memory(resident, count));
    Ok(passthrough)
}

#[allow(clippy::cast_precision_loss, reason = "bytes of memory are far below 2^53")]
fn memory(resident: u64, count: u64) -> Figure {
    Figure {
        name: "flat_memory_above_64mib_per_name",
        unit: "B",
        better: Better::Lower,
        target: Target::Absolute(400.0),
        values: vec![resident.saturating_sub(FIXED_BYTES) as f64 / count as f64],
        baselines: Vec::new(),
    }
}

fn path(directory: &Path, number: u64) -> PathBuf {
    // Hashes come in no order.
    let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    directory.join(format!("{hash:016x}{number:048x}_model_1_0.bin"))
}

fn create(directory: &Path, count: u64) -> std::io::Result<u64> {
    for number in 0..count {
        File::create_new(path(directory, number))?.write_all(b"block")?;
    }
    Ok(count)
}

fn list(directory: &Path, count: u64) -> std::io::Result<u64> {
    let found = fs::read_dir(directory)?.try_fold(0, |found, entry| entry.map(|_| found + 1))?;
    if found == count {
        return Ok(count);
    }
    Err(std::io::Error::other(format!("{found} names were listed instead of {count}")))
}

fn look_up(directory: &Path, count: u64) -> std::io::Result<u64> {
    let mut done = 0;
    for number in (0..count).step_by(SAMPLED) {
        fs::metadata(path(directory, number))?;
        done += 1;
    }
    Ok(done)
}

fn look_up_missing(directory: &Path, count: u64) -> std::io::Result<u64> {
    let mut done = 0;
    for number in (count..2 * count).step_by(SAMPLED) {
        match fs::metadata(path(directory, number)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => done += 1,
            outcome => {
                outcome?;
                return Err(std::io::Error::other("a name is there that nobody has made"));
            }
        }
    }
    Ok(done)
}

#[allow(clippy::disallowed_methods, reason = "an engine renames as any program does")]
fn rename(directory: &Path, count: u64) -> std::io::Result<u64> {
    let mut done = 0;
    for number in (0..count).step_by(SAMPLED) {
        let from = path(directory, number);
        fs::rename(&from, from.with_extension("renamed"))?;
        done += 1;
    }
    Ok(done)
}

fn unlink(directory: &Path, count: u64) -> std::io::Result<u64> {
    for number in 0..count {
        let mut path = path(directory, number);
        if number.is_multiple_of(SAMPLED as u64) {
            path.set_extension("renamed");
        }
        fs::remove_file(path)?;
    }
    Ok(count)
}
