//! Opening resident pages while objects are encoded, uploaded and leave for the remote, against
//! opening them while nothing moves and nothing is away.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::super::build::{Model, Pages};
use super::super::daemon::Daemon;
use super::super::figure::{Figure, Target, quantile};
use super::super::measure::{at, open};
use super::super::note;
use super::super::transfer::write_pages;
use super::super::workplace::Workplace;
use super::values;
use super::{Sizes, make_layer};
use crate::page::names;
use crate::sys;

/// Pages that are opened again and again.
const RESIDENT: u64 = 8;
/// Opens between two looks whether anything is still moving.
const LOOK_EVERY: usize = 250;
/// The slowest of a hundred.
const PART: f64 = 0.99;
/// Longer than this nobody measures.
const SAMPLING_MAX: Duration = Duration::from_secs(8);
/// Less than waits to leave, more than the resident pages take.
const DISK_BUDGET: &str = "128M";
/// Pages that wait to leave: as many as are encoded elsewhere, so many times.
const COPIES: usize = 4;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("opening pages while others leave");
    let resident = Pages::new(Model::Large)?.first(RESIDENT)?;
    let remote = workplace.remote().display().to_string();
    let moving = ["--remote", &remote, "--cold", "zstd:3", "--ssd", DISK_BUDGET];
    let (mut busy, mut idle) = (Vec::new(), Vec::new());
    let mut daemon = Daemon::start(workplace)?;
    let layer = make_layer(workplace, "s")?;
    write_pages(&layer, &resident, |_| Ok(()))?;
    let paths: Vec<PathBuf> = resident.iter().map(|(name, _)| layer.join(name)).collect();
    for path in &paths {
        // They are to stay resident, whatever leaves.
        sys::set_extended_attribute(path, c"user.kvfs.pin", b"1").map_err(at(path))?;
    }
    // All of it before anything has left: opening costs more once files are away.
    for _ in 0..sizes.long_rounds {
        check_once(&paths)?;
        let mut times = Vec::new();
        open_often(&paths, sizes.opens, &mut times)?;
        idle.push(quantile(&times, PART));
    }
    for round in 0..sizes.long_rounds {
        leave_behind(workplace, sizes, round)?;
        daemon.stop()?;
        daemon = Daemon::start_with(workplace, &moving)?;
        check_once(&paths)?;
        let times = while_moving(&daemon, &paths, sizes)?;
        busy.push(quantile(&times, PART));
        daemon.stop()?;
        daemon = Daemon::start(workplace)?;
    }
    daemon.stop()?;
    let figure = super::alone("open_p99_while_demoting", "us", Target::TimesBaseline(3.0), busy);
    Ok(vec![Figure { baselines: idle, ..figure }])
}

/// Pages that no remote has yet.
fn leave_behind(workplace: &Workplace, sizes: &Sizes, round: usize) -> Result<(), String> {
    for copy in 0..COPIES {
        let layer = make_layer(workplace, &format!("leaving-{round}-{copy}"))?;
        // No two are the same, or the second would be found in the remote.
        let seed = (2 + round * COPIES + copy) as u64;
        let pages = values::pages(sizes.encoded_pages, seed)?;
        let named = pages.into_iter().map(|p| (names::format_page(p.place.start()), p.bytes));
        write_pages(&layer, &named.collect::<Vec<_>>(), |_| Ok(()))?;
        open(&layer)?.sync_all().map_err(at(&layer))?;
    }
    Ok(())
}

/// The first open after a mount checks the bytes.
fn check_once(paths: &[PathBuf]) -> Result<(), String> {
    paths.iter().try_for_each(|path| open(path).map(drop))
}

fn open_often(paths: &[PathBuf], count: usize, times: &mut Vec<f64>) -> Result<(), String> {
    for path in paths.iter().cycle().take(count) {
        let start = Instant::now();
        open(path)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(())
}

/// Opens pages from the first upload until everything is where it belongs.
fn while_moving(daemon: &Daemon, paths: &[PathBuf], sizes: &Sizes) -> Result<Vec<f64>, String> {
    daemon.wait_until("the remote", |daemon| Ok(daemon.status("remote_state")? == "up"))?;
    let moved =
        || Ok::<_, String>(daemon.metric("kvfs_moves_total", ("to", "remote"))?.unwrap_or(0));
    let (start, wanted) = (Instant::now(), sizes.encoded_pages * COPIES as u64);
    let mut times = Vec::new();
    while moved()? < wanted && start.elapsed() < SAMPLING_MAX {
        open_often(paths, LOOK_EVERY, &mut times)?;
    }
    Ok(times)
}
