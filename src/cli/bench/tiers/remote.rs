//! Reading what only the remote has, and proof that it is the remote that serves.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{AT_FDCWD, PosixFadviseAdvice, posix_fadvise, renameat};

use super::super::build::{Model, Pages};
use super::super::daemon::Daemon;
use super::super::figure::{Better, Figure, Target};
use super::super::measure::{Rounds, at, open, throughput, timed};
use super::super::note;
use super::super::transfer::{gigabytes, paths, read_all, write_pages};
use super::super::workplace::Workplace;
use super::{MIB, Sizes, alone, make_layer, tier, wait_for_movers};

/// What the remote is slowed down to.
const BANDWIDTH: &str = "500000000";
const BYTES_PER_SECOND: f64 = 500e6;
/// So few bytes stay on the disk that the sequence leaves it.
const SMALL_DISK: &str = "16M";
const READ_BYTES: usize = 1 << 20;
/// Opens without the remote: the daemon logs each.
const HIDDEN_OPENS: usize = 4;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("reading from the remote");
    let pages = Pages::new(Model::Large)?.first(sizes.remote_pages)?;
    let remote = workplace.remote().display().to_string();
    let filling = ["--remote", &remote, "--ssd", SMALL_DISK];
    let mut daemon = Daemon::start_with(workplace, &filling)?;
    let layer = make_layer(workplace, "s")?;
    write_pages(&layer, &pages, |_| Ok(()))?;
    open(&layer)?.sync_all().map_err(at(&layer))?;
    wait_for_movers(&daemon)?;
    daemon.stop()?;
    let serving =
        ["--remote", &remote, "--ssd", SMALL_DISK, "--ram", "1G", "--remote-bandwidth", BANDWIDTH];
    let mut figures = scan(workplace, &layer, &serving, sizes)?;
    figures.extend(part(workplace, &layer, &serving)?);
    figures.extend(proof(workplace, &layer, &pages, &serving)?);
    Ok(figures)
}

/// A mount whose memory is empty, and the pages that only the remote has.
fn start(
    workplace: &Workplace, layer: &Path, options: &[&str],
) -> Result<(Daemon, Vec<PathBuf>), String> {
    let daemon = Daemon::start_with(workplace, options)?;
    daemon.wait_until("the remote", |daemon| Ok(daemon.status("remote_state")? == "up"))?;
    let mut gone = paths(layer)?;
    let tiers = gone.iter().map(|path| tier(path)).collect::<Result<Vec<_>, _>>()?;
    let mut tiers = tiers.iter();
    gone.retain(|_| tiers.next().is_some_and(|tier| tier == "remote"));
    if gone.is_empty() {
        return Err("no page has left for the remote".to_owned());
    }
    Ok((daemon, gone))
}

/// All pages in order, against a plain loop over the blobs at the same rate.
fn scan(
    workplace: &Workplace, layer: &Path, options: &[&str], sizes: &Sizes,
) -> Result<Vec<Figure>, String> {
    let mut rounds = Rounds::default();
    let mut useful = Vec::new();
    for _ in 0..sizes.long_rounds {
        let blobs = blobs(&workplace.remote().join("blobs"))?;
        forget(&blobs)?;
        let (mut daemon, pages) = start(workplace, layer, options)?;
        rounds.kvfs.push(read_pages(&pages)?);
        useful.extend(useful_share(&daemon)?);
        daemon.stop()?;
        forget(&blobs)?;
        rounds.native.push(read_slowly(&blobs)?);
    }
    let mut figures = vec![gigabytes("cold_scan_from_remote", 0.9, rounds)];
    if useful.is_empty() {
        note("nothing was fetched ahead of need: no share of what was useful");
    } else {
        figures.push(Figure {
            better: Better::Higher,
            ..alone("prefetched_and_used", "share", Target::Absolute(0.95), useful)
        });
    }
    Ok(figures)
}

/// Of the pages that were fetched ahead of need, those that somebody opened.
#[allow(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn useful_share(daemon: &Daemon) -> Result<Option<f64>, String> {
    let pages = |outcome: &str| daemon.metric("kvfs_prefetch_pages_total", ("outcome", outcome));
    let used = pages("used")?.unwrap_or(0) + pages("late")?.unwrap_or(0);
    let unused = pages("unused")?.unwrap_or(0);
    Ok((used + unused > 0).then(|| used as f64 / (used + unused) as f64))
}

/// The first tenth of the pages: how much more than that comes.
#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn part(workplace: &Workplace, layer: &Path, options: &[&str]) -> Result<Vec<Figure>, String> {
    let (mut daemon, pages) = start(workplace, layer, options)?;
    let pages = &pages[..pages.len().div_ceil(10)];
    read_pages(pages)?;
    // What is under way is still counted.
    thread::sleep(Duration::from_secs(1));
    let promoted = daemon.metric("kvfs_move_bytes_total", ("from", "remote"))?.unwrap_or(0);
    let read = pages.iter().map(|path| Ok(path.metadata().map_err(at(path))?.len()));
    let ratio = promoted as f64 / read.sum::<Result<u64, String>>()? as f64;
    daemon.stop()?;
    Ok(vec![alone("promoted_by_part_of_scan", "times", Target::Absolute(1.2), vec![ratio])])
}

/// Bytes come back from the remote alone, and do not without it.
fn proof(
    workplace: &Workplace, layer: &Path, written: &[(String, Vec<u8>)], options: &[&str],
) -> Result<Vec<Figure>, String> {
    let (mut daemon, pages) = start(workplace, layer, options)?;
    let (came_back, hidden) = pages.split_at(pages.len() / 2);
    let is_same = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let expected = written.iter().find(|(written, _)| *written == name);
        fs::read(path).is_ok_and(|bytes| expected.is_some_and(|(_, expected)| *expected == bytes))
    };
    let same = came_back.iter().filter(|path| is_same(path)).count();
    daemon.stop()?;
    let aside = workplace.path().join("hidden");
    rename(&workplace.remote(), &aside).map_err(at(&aside))?;
    let mut daemon = Daemon::start_with(workplace, options)?;
    let hidden = &hidden[..hidden.len().min(HIDDEN_OPENS)];
    let failed = hidden.iter().filter(|path| File::open(path).is_err()).count();
    daemon.stop()?;
    Ok(vec![
        share("remote_only_pages_served", same, came_back.len()),
        share("remote_hidden_opens_failed", failed, hidden.len()),
    ])
}

fn rename(from: &Path, to: &Path) -> nix::Result<()> {
    renameat(AT_FDCWD, from, AT_FDCWD, to)
}

#[allow(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn share(name: &'static str, part: usize, whole: usize) -> Figure {
    let value = part as f64 / whole.max(1) as f64;
    let figure = alone(name, "share", Target::Absolute(1.0), vec![value]);
    Figure { better: Better::Higher, ..figure }
}

fn read_pages(pages: &[PathBuf]) -> Result<f64, String> {
    let (mut buffer, mut bytes) = (vec![0; READ_BYTES], 0);
    let duration = timed(|| {
        for path in pages {
            bytes += read_all(&open(path)?, &mut buffer).map_err(at(path))?;
        }
        Ok(())
    })?;
    Ok(throughput(bytes, duration))
}

/// Raw copies of pages in the remote.
fn blobs(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for shard in paths(directory)? {
        for blob in paths(&shard)? {
            if blob.metadata().map_err(at(&blob))?.len() >= 4 * MIB {
                found.push(blob);
            }
        }
    }
    Ok(found)
}

/// Takes files out of the page cache.
fn forget(files: &[PathBuf]) -> Result<(), String> {
    for path in files {
        let file = open(path)?;
        file.sync_all().map_err(at(path))?;
        let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        posix_fadvise(&file, 0, 0, advice).map_err(at(path))?;
    }
    Ok(())
}

/// A plain read loop that waits wherever it gets ahead of the remote's rate.
fn read_slowly(files: &[PathBuf]) -> Result<f64, String> {
    let (mut buffer, mut bytes) = (vec![0; READ_BYTES], 0);
    let duration = timed(|| {
        let start = Instant::now();
        for path in files {
            bytes += read_all(&open(path)?, &mut buffer).map_err(at(path))?;
            wait_until_paid(start, bytes);
        }
        Ok(())
    })?;
    Ok(throughput(bytes, duration))
}

#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn wait_until_paid(start: Instant, bytes: u64) {
    let due = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND);
    thread::sleep(due.saturating_sub(start.elapsed()));
}
