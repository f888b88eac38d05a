//! Watching a process that is not our child.

use std::ffi::CStr;
use std::time::{Duration, Instant};

/// What a keeper calls itself.
pub(crate) const KEEPER_NAME: &CStr = c"kvfs-keeper";

/// How often the process is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// See [`Process::work`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    written_bytes: u64,
    /// Hundredths of a second.
    processor_ticks: u64,
}

impl Work {
    /// Whether a process that has done so much by now has got on since.
    pub(crate) fn is_less_than(self, now: Work) -> bool {
        now.written_bytes > self.written_bytes || now.processor_ticks > self.processor_ticks + 100
    }
}

/// The parent of a process; `None` if there is none.
pub(crate) fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may have anything in it; state and parent follow.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Whether a process keeps a mount whose daemon may die.
pub(crate) fn is_keeper(pid: i32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    name.is_ok_and(|name| name.trim_end().as_bytes() == KEEPER_NAME.to_bytes())
}

/// A running process. The start time tells it from a later one with the same number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pid: i32,
    start_ticks: u64,
}

impl Process {
    /// The process with this number; None if there is none (any more).
    pub(crate) fn find(pid: i32) -> Option<Process> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (state, start_ticks) = parse_stat(&stat)?;
        // A zombie has exited; nobody has collected it, as in a container without init.
        (!matches!(state, 'Z' | 'X')).then_some(Process { pid, start_ticks })
    }

    /// Its number.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether one of its threads is left: one that waits in the kernel outlives the others.
    pub(crate) fn has_threads(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid));
        threads.into_iter().flatten().flatten().any(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat"));
            stat.is_ok_and(|stat| {
                parse_stat(&stat).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
            })
        })
    }

    /// What it has done since it began, if that can be seen.
    pub(crate) fn work(&self) -> Option<Work> {
        let told = std::fs::read_to_string(format!("/proc/{}/io", self.pid)).ok()?;
        let written = told.lines().find_map(|line| line.strip_prefix("write_bytes: "))?;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        // Fields 14 and 15 of proc(5), of which the first here is field 3.
        let (user, system) =
            (fields.nth(11)?.parse::<u64>().ok()?, fields.next()?.parse::<u64>().ok()?);
        Some(Work { written_bytes: written.parse().ok()?, processor_ticks: user + system })
    }

    /// Waits until it has exited; false if it has not by the deadline.
    pub(crate) fn wait_for_exit(&self, deadline: Duration) -> bool {
        let end = Instant::now() + deadline;
        while Process::find(self.pid).as_ref() == Some(self) {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        true
    }
}

/// State and start time of `/proc/PID/stat`. The name in parentheses may hold anything.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    // The state is field 3 of proc(5), the start time field 22.
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat() {
        let tail = "1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 0 0";
        assert_eq!(parse_stat(&format!("7 (a) Z (b) S {tail}")), Some(('S', 4711)));
        assert_eq!(parse_stat("7 (a) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn an_exit_is_noticed_even_if_nobody_collects_the_process() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        if let Some(process) = Process::find(pid) {
            assert!(process.wait_for_exit(Duration::from_secs(10)));
        }
        assert_eq!(Process::find(pid), None);
        child.wait().unwrap();
        let own = Process::find(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(!own.wait_for_exit(Duration::ZERO));
        assert!(own.has_threads());
        let work = own.work().unwrap();
        assert!(!work.is_less_than(work));
        let more = Work { written_bytes: work.written_bytes + 1, ..work };
        let longer = Work { processor_ticks: work.processor_ticks + 101, ..work };
        assert!(work.is_less_than(more) && work.is_less_than(longer) && !more.is_less_than(work));
    }
}
