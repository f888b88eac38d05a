//! What comparing bytes with their checksums costs: at the first open of a cold page, and in a scrub.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::build::{Model, layer_path, native_path};
use super::daemon::Daemon;
use super::figure::{Better, Figure, Target};
use super::measure::{at, interleave, throughput, timed};
use super::transfer::{gigabytes, paths};
use super::workplace::Workplace;
use super::{Sizes, note};
use crate::sys;

/// Bytes per direct read: what reads this disk fastest from one thread.
const READ_BYTES: usize = 4 << 20;
const LOOK_INTERVAL: Duration = Duration::from_micros(500);
/// Longer than this no scrub takes of what is measured here.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// Figures of a store that nobody has mounted.
pub(super) fn integrity(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("verifying cold pages");
    let cold = |verify| move |_| read_cold(workplace, verify);
    let rounds = interleave(sizes.rounds, cold("first"), cold("never"))?;
    let verification = Figure {
        name: "verified_cold_read",
        unit: "s/GB",
        better: Better::Lower,
        target: Target::TimesBaseline(1.1),
        values: rounds.kvfs,
        baselines: rounds.native,
    };
    note("scrubbing");
    let mut daemon = Daemon::start(workplace)?;
    let native = paths(&native_path(workplace, Model::Large, "s"))?;
    let rounds =
        interleave(sizes.rounds, |_| scrub(workplace, &daemon), |_| read_directly(&native))?;
    daemon.stop()?;
    Ok(vec![verification, gigabytes("scrub", 0.8, rounds)])
}

/// Seconds per GB of reading pages that are not in memory, each opened for the first time.
fn read_cold(workplace: &Workplace, verify: &str) -> Result<f64, String> {
    let mut daemon = Daemon::start_with(workplace, &["--verify", verify])?;
    forget(&workplace.store().join("objects"))?;
    let pages = paths(&layer_path(workplace, Model::Large, "s"))?;
    let (mut buffer, mut bytes) = (vec![0; 1 << 20], 0);
    let duration = timed(|| {
        for path in &pages {
            let mut file = File::open(path).map_err(at(path))?;
            loop {
                match file.read(&mut buffer).map_err(at(path))? {
                    0 => break,
                    count => bytes += count as u64,
                }
            }
        }
        Ok(())
    })?;
    daemon.stop()?;
    Ok(1.0 / throughput(bytes, duration))
}

/// Takes the files below a directory out of memory.
fn forget(directory: &Path) -> Result<(), String> {
    nix::unistd::sync();
    for shard in paths(directory)? {
        for path in paths(&shard)? {
            let file = File::open(&path).map_err(at(&path))?;
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
                .map_err(at(&path))?;
        }
    }
    Ok(())
}

/// GB/s
fn scrub(workplace: &Workplace, daemon: &Daemon) -> Result<f64, String> {
    let layer = layer_path(workplace, Model::Large, "s");
    let start = Instant::now();
    sys::set_extended_attribute(&layer, c"user.kvfs.scrub", b"start").map_err(at(&layer))?;
    while daemon.status("scrub")? == "running" {
        if start.elapsed() > WAIT_MAX {
            return Err("the scrub does not end".to_owned());
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    let duration = start.elapsed();
    if daemon.status_number("scrub_damaged_files")? > 0 {
        return Err("the scrub found damage".to_owned());
    }
    Ok(throughput(daemon.status_number("scrub_bytes_read")?, duration))
}

/// GB/s of reading plain files one after the other, past the page cache.
fn read_directly(files: &[PathBuf]) -> Result<f64, String> {
    let mut memory = MmapMut::map_anon(READ_BYTES).map_err(|error| error.to_string())?;
    let _ = memory.advise(Advice::HugePage);
    let mut bytes = 0;
    let duration = timed(|| {
        for path in files {
            let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
            let mut file = direct.map_err(at(path))?;
            loop {
                match file.read(&mut memory).map_err(at(path))? {
                    0 => break,
                    count => bytes += count as u64,
                }
            }
        }
        Ok(())
    })?;
    Ok(throughput(bytes, duration))
}
