//! `kvfs bench trace --real`: a trace on a mount with a memory tier, a small disk and a remote directory.
//!
//! Clients take requests by turns, look for the pages of the prompt by their content, load those that are
//! there, compare every byte, and make the others. Meanwhile the daemon is killed at random. Where each page
//! was is compared with what the policy makes of the same uses in its books (`simulate`).

mod arguments;
mod client;
mod gate;
mod pages;
mod report;
mod simulate;
mod supervise;

use std::fs;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

pub(super) use arguments::RealArguments;

use super::read::Trace;
use crate::cli::bench::measure::at;
use crate::cli::bench::workplace::Workplace;
use crate::cli::bench::{BenchArguments, figure, interrupt, machine, note, print};
use crate::cli::preflight;
use crate::page::names;
use client::{Served, Shared};
use pages::Pages;
use report::Outcome;
use simulate::{Leaving, Sizes, simulate};
use supervise::Supervisor;

/// Durable pages that are read once more at the end.
const READ_BACK: usize = 256;
/// What a mount takes for a budget of its disk.
const SSD_BYTES_MIN: u64 = 16 << 20;
/// What a store, its books and its log take beside pages.
const OTHER_BYTES: u64 = 128 << 20;

/// Replays, and prints. The error is one line.
pub(super) fn run(arguments: &BenchArguments) -> Result<(), String> {
    let options = &arguments.trace.real;
    options.check()?;
    preflight::device()?;
    interrupt::watch()?;
    let (mut figures, mut complaints) = (Vec::new(), Vec::new());
    let (mut passthrough, mut replayed) = (String::new(), Vec::new());
    for path in &arguments.trace.files {
        note(&format!("reading {}", path.display()));
        let trace = Trace::read(path, options.requests)?;
        let outcome = replay(arguments, &trace)?;
        passthrough.clone_from(&outcome.passthrough);
        replayed.push(report::describe(&outcome, options));
        figures.extend(report::figures(&outcome));
        complaints.extend(report::complaints(&outcome));
    }
    let workplace = Workplace::make_anywhere(arguments.dir.as_deref())?;
    let mut machine = machine::describe(workplace.path(), &passthrough);
    machine["scaled"] = report::SCALED.into();
    machine["replayed"] = replayed.join("; ").into();
    if let Some(path) = &arguments.markdown {
        std::fs::write(path, figure::markdown(&machine, &figures)).map_err(at(path))?;
    }
    print(arguments.json, &machine, &figures)?;
    if complaints.is_empty() { Ok(()) } else { Err(complaints.join("; ")) }
}

/// One trace.
fn replay(arguments: &BenchArguments, trace: &Trace) -> Result<Outcome, String> {
    let options = &arguments.trace.real;
    let workplace = Workplace::make(arguments.dir.as_deref())?;
    let pages = Pages::new(trace, &workplace.mount())?;
    let sizes = Sizes { ram: options.ram.0, ssd: options.ssd.0, page: pages.file_bytes() };
    check_sizes(sizes)?;
    check_space(&workplace, &pages, sizes)?;
    let mut supervisor = Supervisor::start(&workplace, options, sizes.page)?;
    let passthrough = supervisor.passthrough()?;
    make_model(&pages)?;
    let count = trace.requests.len();
    note(&format!("{}: {count} requests, {} different pages", trace.name, pages.count()));
    let (arrivals, span) = arrivals(trace, options.span);
    let shared = Shared::new(pages, arrivals);
    let (begun, clients) = (Instant::now(), supervise::own_seconds()?);
    let mut served = serve(&shared, &mut supervisor, options.clients)?;
    let seconds = begun.elapsed().as_secs_f64();
    let client_seconds = supervise::own_seconds()? - clients;
    supervisor.count()?;
    let spent = supervisor.spent;
    let kills = supervisor.kills;
    note(&format!("{}: looking back", trace.name));
    if options.kills > 0 {
        supervisor.kill(&shared)?;
    }
    let events = shared.take_events();
    shared.look_back(READ_BACK, &mut served)?;
    supervisor.stop()?;
    Ok(Outcome {
        name: trace.name.clone(),
        requests: count,
        uses: trace.blocks().len() as u64,
        compared: simulate(&events, sizes, Leaving::AsObserved),
        at_once: simulate(&events, sizes, Leaving::AtOnce),
        served,
        spent,
        client_seconds,
        seconds,
        paused: shared.gate.paused(),
        span,
        kills,
        passthrough,
    })
}

/// All clients, until there is nothing left to do.
fn serve(
    shared: &Shared, supervisor: &mut Supervisor<'_>, clients: usize,
) -> Result<Served, String> {
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..clients).map(|_| scope.spawn(|| shared.serve())).collect();
        let watched =
            supervisor.watch(shared, || clients.iter().all(ScopedJoinHandle::is_finished));
        if watched.is_err() {
            shared.gate.end();
        }
        let mut all = Served::default();
        let mut failed = watched.err();
        for client in clients {
            match client.join().map_err(|_| "a client panicked".to_owned())? {
                Ok(served) => all.add(served),
                // What a client met is nearer to the cause.
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(all), Err)
    })
}

/// When requests come, compressed to so many seconds at most, and how long they took to come in the trace.
fn arrivals(trace: &Trace, span: f64) -> (Vec<Duration>, f64) {
    let first = trace.requests.first().map_or(0.0, |request| request.milliseconds);
    let after = |at: f64| (at - first) / 1e3;
    let whole = trace.requests.last().map_or(0.0, |request| after(request.milliseconds));
    let share = if whole > span { span / whole } else { 1.0 };
    let arrival = |at: f64| Duration::try_from_secs_f64(after(at) * share).unwrap_or_default();
    (trace.requests.iter().map(|request| arrival(request.milliseconds)).collect(), whole)
}

fn make_model(pages: &Pages) -> Result<(), String> {
    let model = pages.model();
    fs::create_dir(model).map_err(at(model))?;
    let manifest = model.join(names::MANIFEST);
    fs::write(&manifest, pages.manifest_text()).map_err(at(&manifest))?;
    let sequences = model.join(names::SEQUENCES);
    fs::create_dir(&sequences).map_err(at(&sequences))?;
    fs::File::open(&sequences).and_then(|made| made.sync_all()).map_err(at(&sequences))
}

fn check_sizes(sizes: Sizes) -> Result<(), String> {
    // Below that, what is being written does not fit.
    let least = 64 * sizes.page;
    if sizes.ram > 0 && sizes.ram < least {
        return Err(format!("--ram is 0, or {least} bytes or more"));
    }
    if sizes.ssd < SSD_BYTES_MIN {
        return Err(format!("--ssd is {SSD_BYTES_MIN} bytes or more, as of every mount"));
    }
    Ok(())
}

/// The remote directory keeps everything, beside what the disk holds.
fn check_space(workplace: &Workplace, pages: &Pages, sizes: Sizes) -> Result<(), String> {
    let path = workplace.path();
    let space = nix::sys::statvfs::statvfs(path).map_err(at(path))?;
    let free = space.blocks_available() * space.fragment_size();
    let wanted = pages.count() as u64 * sizes.page + 2 * sizes.ssd + OTHER_BYTES;
    if free < wanted {
        return Err(format!(
            "{}: {free} bytes are free, the replay needs {wanted}: name another directory (--dir), or \
             fewer --requests",
            path.display()
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::read::timed_trace;
    use super::*;

    #[test]
    fn arrivals_are_compressed_and_never_stretched() {
        let trace = timed_trace(&[5000, 5000, 15_000, 45_000]);
        let seconds = |values: &[u64]| values.iter().map(|at| Duration::from_secs(*at)).collect();
        assert_eq!(arrivals(&trace, 4.0), (seconds(&[0, 0, 1, 4]), 40.0));
        assert_eq!(arrivals(&trace, 100.0), (seconds(&[0, 0, 10, 40]), 40.0));
        assert_eq!(arrivals(&trace, 0.0), (seconds(&[0; 4]), 40.0));
    }

    #[test]
    fn tiers_hold_some_pages() {
        let check = |ram, ssd| check_sizes(Sizes { ram, ssd, page: 1 }).is_ok();
        assert!(check(64, 16 << 20) && check(0, 16 << 20));
        assert!(!check(63, 16 << 20) && !check(64, (16 << 20) - 1));
    }
}
