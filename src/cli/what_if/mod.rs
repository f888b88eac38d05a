//! `kvfs what-if`: what a mount would have found with another budget.
//!
//! The mount tells the uses that it has seen (`.kvfs/uses`), and the policy of its tiers is played on them here, so the
//! mount spends nothing on the answer but a copy.

mod table;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args;
use kvfs_os::mountinfo;

use super::history::shown;
use super::output::{Failure, Outcome, Report};
use super::probe::status_value;
use super::size::Size;
use super::status;
use crate::tier::counters::Tier;
use crate::tier::what_if::{Play, Played, Seen};

/// Below the mountpoint.
const USES: &str = ".kvfs/uses";

const WHAT_IF_HELP: &str = "\
Counted are opens to read since the mount began, however much of the file is read then: the kernel does the reading, \
and its page cache serves some of what is not in memory here. New pages go to memory; what left it does not come back \
by being read. The disk takes what is read from the remote. Beyond some 300,000 opens a sample is remembered: of the \
files, or of the last opens. It is lost when the mount ends. Sizes on the disk are those before compression.

Only root and whoever mounted the store may ask. docs/policy.md says how exact the answer is.

Example: kvfs what-if --ram 16G /mnt/kv";

/// `kvfs what-if`.
#[derive(Debug, Args)]
#[command(after_help = WHAT_IF_HELP)]
pub(crate) struct WhatIfArguments {
    /// A budget of memory to tell of, beside a quarter to four times the present one
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// A budget of the disk to tell of; it matters where there is a remote
    #[arg(long, value_name = "SIZE")]
    pub ssd: Option<Size>,
    /// Bytes that the disk reads in a second, for the seconds that memory saves: nobody measures that
    #[arg(long, value_name = "SIZE")]
    pub disk_rate: Option<Size>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Where the cache is mounted, or a file or directory in it
    pub path: PathBuf,
}

/// What is told of one tier.
struct Answer {
    tier: Tier,
    /// `None` without such a tier, or where it has no limit.
    present_bytes: Option<u64>,
    /// What the mount saw itself, and what the policy makes of that with the present budget.
    counted: Played,
    modelled: Played,
    /// Bytes that come from below in a second, if that is known.
    rate: Option<u64>,
    rows: Vec<Row>,
}

/// One budget.
struct Row {
    budget_bytes: u64,
    is_present: bool,
    is_asked: bool,
    played: Played,
}

/// Tells what would have been.
pub(crate) fn run(arguments: &WhatIfArguments) -> Outcome {
    if arguments.disk_rate == Some(Size(0)) {
        return Err(Failure::Usage("--disk-rate is more than 0".to_owned()));
    }
    let (mount, _) = mountinfo::kvfs_above(&arguments.path).map_err(Failure::Failed)?;
    let status = status::read(&mount.mountpoint)?;
    let seen = read(&mount.mountpoint, &status)?;
    let number = |key: &str| status_value(&status, key)?.parse::<u64>().ok();
    let rate = arguments.disk_rate.map(u64::from);
    let memory = answer(&seen, Tier::Ram, (number("ram_budget_bytes"), arguments.ram), rate);
    let rate = number("remote_bytes_per_second").filter(|rate| *rate > 0);
    let budgets = (number("ssd_budget_bytes"), arguments.ssd);
    let has_remote = status_value(&status, "remote").is_some();
    let disk = has_remote.then(|| answer(&seen, Tier::Ssd, budgets, rate));
    let answers: Vec<Answer> = [Some(memory), disk].into_iter().flatten().collect();
    Ok(if arguments.json {
        Report::json(&table::to_json(&mount.mountpoint, &seen, &answers))
    } else {
        Report::text(table::to_text(&mount.mountpoint, &seen, &answers))
    })
}

/// What the mount has seen.
fn read(mountpoint: &Path, status: &str) -> Result<Seen, Failure> {
    let place = shown(mountpoint);
    let told = std::fs::read(mountpoint.join(USES)).map_err(|error| {
        Failure::Failed(match error.kind() {
            ErrorKind::NotFound => {
                let version = status_value(status, "version").unwrap_or("?");
                format!(
                    "{place}: its daemon, of version {version}, does not remember uses: mount the store again with this \
                     kvfs"
                )
            }
            ErrorKind::PermissionDenied => {
                format!("{place}: only root and whoever mounted it may ask")
            }
            _ => format!("{place}/{USES}: {error}"),
        })
    })?;
    Seen::parse(&told).map_err(|error| Failure::Failed(format!("{place}: {error}")))
}

fn answer(
    seen: &Seen, tier: Tier, (present, asked): (Option<u64>, Option<Size>), rate: Option<u64>,
) -> Answer {
    let play =
        |budget: u64| if tier == Tier::Ram { Play::Memory(budget) } else { Play::Disk(budget) };
    // Without a tier memory holds nothing, and without a limit the disk everything.
    let now = present.unwrap_or(if tier == Tier::Ram { 0 } else { u64::MAX });
    let budgets = budgets(present, asked.map(u64::from), seen.all_bytes());
    // One after the other they would take seconds where much was seen.
    let (modelled, played) = std::thread::scope(|scope| {
        let start = |budget: u64| scope.spawn(move || play(budget).on(seen));
        let (modelled, played) = (start(now), budgets.iter().map(|budget| start(*budget)));
        let played: Vec<_> = played.collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Played>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        (join(modelled), played.into_iter().map(join).collect::<Vec<_>>())
    });
    let row = |(budget_bytes, played): (&u64, Played)| Row {
        budget_bytes: *budget_bytes,
        is_present: present == Some(*budget_bytes),
        is_asked: asked.map(u64::from) == Some(*budget_bytes),
        played,
    };
    Answer {
        tier,
        present_bytes: present,
        counted: Play::Counted(tier).on(seen),
        modelled,
        rate,
        rows: budgets.iter().zip(played).map(row).collect(),
    }
}

/// Budgets around the present one; without one, shares of all that was seen.
fn budgets(present: Option<u64>, asked: Option<u64>, all_bytes: u64) -> Vec<u64> {
    let around = |budget: u64| {
        [budget / 4, budget / 2, budget, budget.saturating_mul(2), budget.saturating_mul(4)]
    };
    let shares = [all_bytes / 16, all_bytes / 8, all_bytes / 4, all_bytes / 2, all_bytes];
    let mut budgets: Vec<u64> = present.map_or(shares, around).into_iter().chain(asked).collect();
    budgets.retain(|budget| *budget > 0 || asked == Some(0));
    budgets.sort_unstable();
    budgets.dedup();
    budgets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_stand_around_the_present_one() {
        assert_eq!(budgets(Some(8), None, 100), [2, 4, 8, 16, 32]);
        assert_eq!(budgets(Some(8), Some(16), 100), [2, 4, 8, 16, 32]);
        assert_eq!(budgets(Some(8), Some(5), 100), [2, 4, 5, 8, 16, 32]);
        assert_eq!(budgets(None, Some(7), 1600), [7, 100, 200, 400, 800, 1600]);
        assert_eq!(budgets(None, Some(7), 0), [7]);
        assert_eq!(budgets(Some(u64::MAX), None, 0).len(), 3);
        assert_eq!(budgets(None, None, 0), [0; 0]);
    }
}
