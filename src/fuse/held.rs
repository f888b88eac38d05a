//! How long a request holds the thread that took it: everybody else who uses the mount waits behind it.
//!
//! What counts is the time from the call of an operation to the moment in which its thread is free for the
//! next request, wherever the rest of the work goes on. A thread that would run and has no core is no
//! fault of the request: what the kernel counts of that (`schedstat`, its second number, in nanoseconds)
//! is taken off.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::observe::{Observer, Operation};

/// A request that holds its thread longer is worth a line for whoever looks for it (`RUST_LOG=kvfs=debug`):
/// longer than any request takes that neither hashes, copies nor waits.
const NOTED: Duration = Duration::from_millis(20);

/// The same for everybody who reads the log: clients have noticed.
const WARNED: Duration = Duration::from_secs(1);

/// How old what is known of a thread's waiting may be: reading it for each request costs as much as a
/// request. What the thread waited for a core shortly before is taken off as well.
const READ_EVERY: Duration = Duration::from_millis(5);

thread_local! {
    static WAITING: RefCell<Waiting> = RefCell::new(Waiting::new());
}

/// How long a thread has waited for a core since it began.
struct Waiting {
    /// Absent where the kernel does not count.
    source: Option<File>,
    /// When it was read last.
    read: Option<Instant>,
    total: Duration,
}

impl Waiting {
    fn new() -> Waiting {
        let source = File::open("/proc/thread-self/schedstat").ok();
        Waiting { source, read: None, total: Duration::ZERO }
    }

    fn read(&mut self, now: Instant) -> Duration {
        if let Some(total) = self.source.as_ref().and_then(waited) {
            self.total = total;
        }
        self.read = Some(now);
        self.total
    }

    /// The same, unless it was read a moment ago.
    fn read_seldom(&mut self, now: Instant) -> Duration {
        match self.read {
            Some(read) if now.duration_since(read) < READ_EVERY => self.total,
            _ => self.read(now),
        }
    }
}

/// The second number of a line of three.
fn waited(source: &File) -> Option<Duration> {
    let mut line = [0; 96];
    let length = source.read_at(&mut line, 0).ok()?;
    let line = str::from_utf8(&line[..length]).ok()?;
    line.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// A thread that serves a request, until this is dropped.
pub(super) struct Held<'a> {
    observer: &'a Observer,
    operation: Operation,
    begun: Instant,
    /// What the thread had waited for a core by then.
    waited: Duration,
}

impl<'a> Held<'a> {
    pub(super) fn begin(observer: &'a Observer, operation: Operation) -> Held<'a> {
        let begun = Instant::now();
        let waited = WAITING.with_borrow_mut(|waiting| waiting.read_seldom(begun));
        Held { observer, operation, begun, waited }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut held = self.begun.elapsed();
        if held >= NOTED {
            let now = Instant::now();
            let waited = WAITING.with_borrow_mut(|waiting| waiting.read(now));
            held = held.saturating_sub(waited.saturating_sub(self.waited));
        }
        self.observer.held(self.operation, held);
        if held >= WARNED {
            log::warn!("{} held its thread for {held:.1?}: others waited", self.operation.name());
        } else if held >= NOTED {
            log::debug!("{} held its thread for {held:.1?}", self.operation.name());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_counts_and_waiting_for_a_core_does_not() {
        let observer = Observer::new();
        let longest = || observer.longest_held().map(|(_, held)| held).unwrap_or_default();
        drop(Held::begin(&observer, Operation::Lookup));
        assert!(longest() < NOTED);
        {
            let _held = Held::begin(&observer, Operation::Open);
            std::thread::sleep(NOTED * 2);
        }
        let (operation, held) = observer.longest_held().unwrap();
        assert_eq!(operation, Operation::Open);
        assert!(held >= NOTED * 2 - READ_EVERY, "{held:?}");
    }

    #[test]
    fn the_kernel_counts_what_a_thread_waits_for() {
        let line = std::fs::read_to_string("/proc/thread-self/schedstat");
        let Ok(line) = line else { return };
        let source = File::open("/proc/thread-self/schedstat").unwrap();
        assert_eq!(line.split_ascii_whitespace().count(), 3, "{line}");
        assert!(waited(&source).is_some());
    }
}
