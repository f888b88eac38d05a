//! `kvfs bench small`: programs make small files as fast as they can, and what another program waits for
//! meanwhile.
//!
//! Each file is made as engines make blocks: under a temporary name, written, closed, renamed; a directory takes a
//! thousand. The other program opens and reads one file, again and again, and asks for the free space. Its waits
//! are judged by the longest one: a mount that stands still is a mount that hangs.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::daemon::Daemon;
use super::figure::{Better, Figure, Target, quantile};
use super::measure::at;
use super::workplace::Workplace;
use super::{BenchArguments, machine, note, require_passthrough};

const FILE_BYTES: usize = 4096;
/// Of the file that the other program reads.
const READ_BYTES: usize = 64 << 10;
const FILES_PER_DIRECTORY: u64 = 1000;
/// Between two looks of the other program.
const LOOK_INTERVAL: Duration = Duration::from_micros(500);
const FULL: Duration = Duration::from_secs(60);
const QUICK: Duration = Duration::from_millis(500);
/// Longest wait that is acceptable, in milliseconds.
const STALL_MAX: f64 = 50.0;

/// What came of one run of some clients.
#[derive(Debug, Default)]
struct Outcome {
    files_per_second: f64,
    /// Of the storage, for each byte of a file; journals of the filesystem below are nobody's and not counted.
    written_per_byte: f64,
    made: Waits,
    opened: Waits,
    asked: Waits,
}

/// How long calls took, in milliseconds.
#[derive(Debug, Default)]
struct Waits(Vec<f64>);

impl Waits {
    fn time<T>(&mut self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let start = Instant::now();
        let done = act();
        self.0.push(start.elapsed().as_secs_f64() * 1e3);
        done
    }

    fn longest(&self) -> f64 {
        quantile(&self.0, 1.0)
    }
}

/// Measures; returns whether the mount had passthrough.
pub(super) fn run(arguments: &BenchArguments, figures: &mut Vec<Figure>) -> Result<String, String> {
    let duration = if arguments.quick { QUICK } else { FULL };
    let workplace = Workplace::make(arguments.dir.as_deref())?;
    let mut daemon = Daemon::start(&workplace)?;
    let passthrough = require_passthrough(arguments, &daemon)?;
    let outcome = |clients: usize| {
        note(&format!("{clients} making small files"));
        let name = clients.to_string();
        let kvfs = workplace.mount().join("files").join(&name);
        let native = workplace.native().join(&name);
        let kvfs = measure(&kvfs, clients, duration, &[std::process::id(), daemon.pid()])?;
        Ok::<_, String>([kvfs, measure(&native, clients, duration, &[std::process::id()])?])
    };
    let [one, one_native] = outcome(1)?;
    let [four, four_native] = outcome(4)?;
    daemon.stop()?;
    let rate = |name, target, outcomes: [&Outcome; 2]| {
        let [value, baseline] = outcomes.map(|outcome| outcome.files_per_second);
        Figure { better: Better::Higher, ..lower(name, "files/s", target, value, baseline) }
    };
    figures.extend([
        rate("small_files_one_client", 10_000.0, [&one, &one_native]),
        rate("small_files_four_clients", 15_000.0, [&four, &four_native]),
    ]);
    let both = [&four, &four_native];
    let wait = |name, target, of: fn(&Outcome) -> f64| {
        let [value, baseline] = both.map(of);
        lower(name, "ms", target, value, baseline)
    };
    figures.extend([
        wait("small_file_made_longest", STALL_MAX, |outcome| outcome.made.longest()),
        wait("others_open_and_read_p99.9", 1.0, |outcome| quantile(&outcome.opened.0, 0.999)),
        wait("others_open_and_read_longest", STALL_MAX, |outcome| outcome.opened.longest()),
        wait("others_statfs_longest", STALL_MAX, |outcome| outcome.asked.longest()),
    ]);
    let [value, baseline] = both.map(|outcome| outcome.written_per_byte);
    figures.push(lower("small_bytes_written_per_byte", "x", 3.0, value, baseline));
    Ok(passthrough)
}

fn lower(name: &'static str, unit: &'static str, target: f64, value: f64, baseline: f64) -> Figure {
    Figure {
        name,
        unit,
        better: Better::Lower,
        target: Target::Absolute(target),
        values: vec![value],
        baselines: vec![baseline],
    }
}

/// So many clients make files for a while below a new directory, beside one that looks on; `writers` are the
/// processes whose writes count.
fn measure(
    directory: &Path, clients: usize, duration: Duration, writers: &[u32],
) -> Result<Outcome, String> {
    fs::create_dir(directory).map_err(at(directory))?;
    let watched = directory.join("watched");
    let written_before = written_bytes(writers)?;
    let prepare = || {
        let mut file = File::create_new(&watched)?;
        file.write_all(&vec![1; READ_BYTES])?;
        file.sync_all()
    };
    prepare().map_err(at(&watched))?;
    let start = Instant::now();
    let end = start + duration;
    let mut outcome = thread::scope(|scope| {
        let makers: Vec<_> = (0..clients)
            .map(|client| scope.spawn(move || make_files(&directory.join(client.to_string()), end)))
            .collect();
        let mut outcome = look_on(&watched, end)?;
        for maker in makers {
            let made = maker.join().expect("it does not panic")?;
            outcome.made.0.extend(made.0);
        }
        Ok(outcome)
    })
    .map_err(|error: io::Error| at(directory)(error))?;
    let seconds = start.elapsed().as_secs_f64();
    // What is not written back yet belongs to these files as well.
    File::open(directory).and_then(|root| sync_filesystem(&root)).map_err(at(directory))?;
    let written = written_bytes(writers)?.saturating_sub(written_before);
    #[allow(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    let files = outcome.made.0.len() as f64;
    outcome.files_per_second = files / seconds;
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let per_byte = written as f64 / (files * FILE_BYTES as f64 + READ_BYTES as f64);
    outcome.written_per_byte = per_byte;
    Ok(outcome)
}

fn sync_filesystem(root: &File) -> io::Result<()> {
    nix::unistd::syncfs(root).map_err(io::Error::from)
}

#[allow(clippy::disallowed_methods, reason = "an engine renames as any program does")]
fn make_files(directory: &Path, end: Instant) -> io::Result<Waits> {
    let mut waits = Waits::default();
    fs::create_dir(directory)?;
    let mut part = PathBuf::new();
    for number in 0_u64.. {
        if Instant::now() >= end {
            break;
        }
        if number.is_multiple_of(FILES_PER_DIRECTORY) {
            part = directory.join((number / FILES_PER_DIRECTORY).to_string());
            fs::create_dir(&part)?;
        }
        let mut bytes = [0; FILE_BYTES];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        let temporary = part.join(".new");
        let path = part.join(number.to_string());
        waits.time(|| {
            File::create_new(&temporary)?.write_all(&bytes)?;
            fs::rename(&temporary, &path)
        })?;
    }
    Ok(waits)
}

/// What somebody waits for who only reads.
fn look_on(watched: &Path, end: Instant) -> io::Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut bytes = vec![0; READ_BYTES];
    while Instant::now() < end {
        outcome.opened.time(|| File::open(watched)?.read_exact(&mut bytes))?;
        outcome.asked.time(|| nix::sys::statfs::statfs(watched).map_err(io::Error::from))?;
        thread::sleep(LOOK_INTERVAL);
    }
    Ok(outcome)
}

/// Bytes that processes have sent to storage, or will (`/proc/PID/io`).
fn written_bytes(processes: &[u32]) -> Result<u64, String> {
    let of = |process: &u32| {
        let line = machine::field(&format!("/proc/{process}/io"), "write_bytes");
        line.and_then(|text| text.parse::<u64>().ok())
            .ok_or(format!("what process {process} wrote cannot be read"))
    };
    processes.iter().map(of).sum()
}
