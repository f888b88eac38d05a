//! Reading a sequence again and again that is eight times as large as memory may be.

use std::cell::Cell;

use super::super::build::{Model, Pages};
use super::super::daemon::Daemon;
use super::super::figure::{Better, Figure, Target};
use super::super::measure::{at, open, throughput, timed};
use super::super::note;
use super::super::transfer::{paths, read_all, write_pages};
use super::super::workplace::Workplace;
use super::memory::highest_use;
use super::{MIB, Sizes, alone, make_layer, mebibytes, wait_for_movers};

/// How many times the budget the sequence has.
const TIMES: u64 = 8;
/// A pass may be so much slower than the fastest and still be steady.
const STEADY: f64 = 0.8;
/// What the daemon may have in memory beside the copies: buffers of requests and transfers.
const BESIDE_BYTES: u64 = 64 * MIB;
const PASSES: usize = 5;
const READ_BYTES: usize = 1 << 20;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("reading eight times what memory may hold");
    let pages = Pages::new(Model::Large)?.first(sizes.pages)?;
    let budget = sizes.pages * 4 * MIB / TIMES;
    let (ram, remote) = (budget.to_string(), workplace.remote().display().to_string());
    let options = ["--ram", &ram, "--ssd", "16M", "--remote", &remote];
    let mut daemon = Daemon::start_with(workplace, &options)?;
    let layer = make_layer(workplace, "s")?;
    write_pages(&layer, &pages, |_| Ok(()))?;
    open(&layer)?.sync_all().map_err(at(&layer))?;
    wait_for_movers(&daemon)?;
    let paths = paths(&layer)?;
    let (mut rates, resident) = (Vec::new(), Cell::new(0));
    let highest = highest_use(&daemon, || {
        let mut buffer = vec![0; READ_BYTES];
        for _ in 0..PASSES {
            let mut bytes = 0;
            let duration = timed(|| {
                for path in &paths {
                    bytes += read_all(&open(path)?, &mut buffer).map_err(at(path))?;
                }
                Ok(())
            })?;
            rates.push(throughput(bytes, duration));
            resident.set(resident.get().max(daemon.memory("RssAnon")?));
        }
        Ok(())
    })?;
    daemon.stop()?;
    let fastest = rates.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let slowest = rates.iter().copied().fold(fastest, f64::min);
    let higher = |name, unit, target, values| Figure {
        better: Better::Higher,
        ..alone(name, unit, target, values)
    };
    let within = |bytes: u64| Target::Absolute(mebibytes(bytes));
    let steadiness = vec![slowest / fastest];
    Ok(vec![
        higher("scan_8_times_ram", "GB/s", Target::None, rates),
        higher("scan_slowest_of_fastest", "share", Target::Absolute(STEADY), steadiness),
        alone("scan_tmpfs", "MiB", within(budget), vec![mebibytes(highest)]),
        alone("scan_private_memory", "MiB", within(BESIDE_BYTES), vec![mebibytes(resident.get())]),
    ])
}
