//! The daemon of a replay: what it spends, whether the disk holds too much, and its deaths.

use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::unistd::{SysconfVar, sysconf};

use super::arguments::RealArguments;
use super::client::Shared;
use super::simulate::Event;
use crate::cli::bench::daemon::Daemon;
use crate::cli::bench::workplace::Workplace;
use crate::cli::bench::{machine, note};
use crate::cli::series::{Metrics, whole};

/// Between two looks at the metrics.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// A kill comes so long after a request at most, wherever the clients are then.
const KILL_DELAY_MAX_MILLISECONDS: u64 = 250;

/// What all daemons spent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    /// Of processors.
    pub(super) seconds: f64,
    /// Bytes that went to the disk, without the pages in the remote's directory.
    pub(super) written: u64,
}

/// Starts, watches and kills.
#[derive(Debug)]
pub(super) struct Supervisor<'a> {
    workplace: &'a Workplace,
    options: Vec<String>,
    budget: u64,
    daemon: Daemon,
    pub(super) spent: Spent,
    /// Pages that this daemon let leave the disk.
    left: u64,
    page_bytes: u64,
    /// What clients had written themselves when time began.
    own_written: u64,
    /// When the daemon is killed: after so many requests were taken, and then so long.
    plan: Vec<(usize, Duration)>,
    pub(super) kills: usize,
}

impl<'a> Supervisor<'a> {
    pub(super) fn start(
        workplace: &'a Workplace, options: &RealArguments, page_bytes: u64,
    ) -> Result<Supervisor<'a>, String> {
        let mut mount = vec!["--remote".to_owned(), workplace.remote().display().to_string()];
        mount.extend(["--ssd".to_owned(), options.ssd.0.to_string()]);
        if options.ram.0 > 0 {
            mount.extend(["--ram".to_owned(), options.ram.0.to_string()]);
        }
        let daemon = start(workplace, &mount)?;
        Ok(Supervisor {
            workplace,
            options: mount,
            budget: options.ssd.0,
            daemon,
            spent: Spent::default(),
            left: 0,
            page_bytes,
            own_written: written("self")?,
            plan: plan(options.requests, options.kills, options.seed),
            kills: 0,
        })
    }

    pub(super) fn passthrough(&self) -> Result<String, String> {
        self.daemon.passthrough()
    }

    /// Until everybody is done.
    pub(super) fn watch(
        &mut self, shared: &Shared, is_done: impl Fn() -> bool,
    ) -> Result<(), String> {
        let mut due: Option<Instant> = None;
        while !is_done() {
            let wait =
                due.map_or(LOOK_INTERVAL, |due| due.saturating_duration_since(Instant::now()));
            std::thread::sleep(wait.min(LOOK_INTERVAL));
            if due.is_some_and(|due| due <= Instant::now()) {
                note(&format!("killing the daemon after {} requests", shared.taken()));
                self.kill(shared)?;
                self.kills += 1;
                due = None;
            }
            self.look(shared)?;
            if due.is_none()
                && let Some((_, delay)) =
                    self.plan.pop_if(|(requests, _)| *requests <= shared.taken())
            {
                due = Some(Instant::now() + delay);
            }
        }
        Ok(())
    }

    /// What the disk holds, and what left it.
    fn look(&mut self, shared: &Shared) -> Result<(), String> {
        let metrics = self.daemon.metrics()?;
        let disk = [("tier", "ssd")];
        let left = metrics.sum("kvfs_evictions_total", &disk).map_or(0, whole);
        let waiting = self.waiting(&metrics);
        let used = metrics.number("kvfs_tier_used_bytes", &disk);
        let used = used.ok_or("the metrics do not tell what the disk holds")?;
        shared.note(Event::Moved { waiting, left: left.saturating_sub(self.left), used });
        self.left = left;
        shared.gate.pause(used > self.budget);
        Ok(())
    }

    /// Pages that the remote does not have.
    fn waiting(&self, metrics: &Metrics) -> usize {
        // Other files are small.
        let bytes = metrics.number("kvfs_remote_waiting_bytes", &[]).unwrap_or(0);
        usize::try_from(bytes / self.page_bytes).unwrap_or(usize::MAX)
    }

    /// Kills the daemon, whatever it is doing, and starts another one.
    pub(super) fn kill(&mut self, shared: &Shared) -> Result<(), String> {
        self.look(shared)?;
        shared.gate.close();
        self.count()?;
        self.daemon.kill_in_use()?;
        self.daemon = start(self.workplace, &self.options)?;
        self.left = 0;
        // Nobody has anything to note before the gate opens.
        let waiting = self.waiting(&self.daemon.metrics()?);
        shared.note(shared.what_is_left(waiting)?);
        shared.gate.open();
        Ok(())
    }

    /// Adds what this daemon spent; to be called once for each.
    pub(super) fn count(&mut self) -> Result<(), String> {
        self.spent.seconds += processor_seconds(self.daemon.pid())?;
        let own = written("self")?;
        let uploaded = self.daemon.metric("kvfs_move_bytes_total", ("to", "remote"))?.unwrap_or(0);
        let daemon = written(&self.daemon.pid().to_string())?;
        self.spent.written += (daemon + own - self.own_written).saturating_sub(uploaded);
        self.own_written = own;
        Ok(())
    }

    pub(super) fn stop(mut self) -> Result<(), String> {
        self.daemon.stop()
    }
}

fn start(workplace: &Workplace, options: &[String]) -> Result<Daemon, String> {
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let daemon = Daemon::start_with(workplace, &options)?;
    daemon.wait_until("the remote", |daemon| Ok(daemon.status("remote_state")? == "up"))?;
    Ok(daemon)
}

/// When to kill, the first time last.
fn plan(requests: usize, kills: usize, seed: u64) -> Vec<(usize, Duration)> {
    let mut state = seed;
    let mut random = |below: u64| {
        // SplitMix64 (Steele, Lea and Flood, 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below.max(1)
    };
    // At the very beginning there is nothing to lose, at the end nobody to notice.
    let (first, last) = (requests / 10, requests - requests / 5);
    let mut plan: Vec<_> = (0..kills)
        .map(|_| {
            let after = usize::try_from(random((last - first) as u64)).unwrap_or_default();
            (first + after, Duration::from_millis(random(KILL_DELAY_MAX_MILLISECONDS)))
        })
        .collect();
    plan.sort_by(|a, b| b.cmp(a));
    plan
}

/// Seconds of processors that this process has used.
#[expect(clippy::cast_precision_loss, reason = "microseconds of a benchmark are far below 2^53")]
pub(super) fn own_seconds() -> Result<f64, String> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).map_err(|error| format!("getrusage: {error}"))?;
    let used = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Ok(used as f64 / 1e6)
}

/// Seconds of processors that a process has used.
#[expect(clippy::cast_precision_loss, reason = "ticks are far below 2^53")]
fn processor_seconds(pid: u32) -> Result<f64, String> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let ticks = ticks(&text).ok_or_else(|| format!("{path}: tells no times"))?;
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    Ok(ticks as f64 / per_second as f64)
}

/// The 14th and 15th words of the line, where the second may be of several.
fn ticks(line: &str) -> Option<u64> {
    let mut words = line.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut next = || words.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// Bytes that a process caused to be written to disks; 0 where the kernel does not count them.
fn written(process: &str) -> Result<u64, String> {
    let path = format!("/proc/{process}/io");
    match machine::field(&path, "write_bytes") {
        Some(text) => text.parse().map_err(|_| format!("{path}: write_bytes is {text}")),
        None => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_planned_within_the_replay() {
        let planned = plan(100, 20, 7);
        assert_eq!((planned.len(), &planned), (20, &plan(100, 20, 7)));
        assert_ne!(planned, plan(100, 20, 8));
        assert!(planned.iter().all(|(after, _)| (10..80).contains(after)), "{planned:?}");
        assert!(planned.is_sorted_by(|a, b| a >= b), "the first is taken from the end");
        assert!(planned.first() > planned.last());
    }

    #[test]
    fn times_of_a_process_are_found_behind_its_name() {
        let line = "7 (a) b) c) S 1 2 3 4 5 6 7 8 9 10 250 17 99 99";
        assert_eq!(ticks(line), Some(267));
        assert_eq!(ticks("7 (a) S 1"), None);
        assert!(own_seconds().unwrap() > 0.0);
        assert!(processor_seconds(std::process::id()).is_ok());
    }
}
