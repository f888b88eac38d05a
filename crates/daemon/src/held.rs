//! How long a request holds the thread that took it: everybody else who uses the mount waits behind it.
//!
//! What counts is the time from the call of an operation to the moment in which its thread is free for the
//! next request, wherever the rest of the work goes on. A thread that would run and has no core is no
//! fault of the request: what the kernel counts of that is taken off. The rest is work of its own, and
//! waiting for a lock or the disk; whose fault waiting is depends on who else runs.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use kvfs_observe::{Observer, Operation};

/// A request that holds its thread longer is worth a line for whoever looks for it (`RUST_LOG=kvfs=debug`):
/// longer than any request takes that neither hashes, copies nor waits.
const NOTED: Duration = Duration::from_millis(20);

/// The same for everybody who reads the log: clients have noticed.
const WARNED: Duration = Duration::from_secs(1);

/// How old what is known of a thread's waiting may be: reading it for each request costs as much as a
/// request. What the thread waited for a core shortly before is taken off as well.
const READ_EVERY: Duration = Duration::from_millis(5);

thread_local! {
    static TIMES: RefCell<Times> = RefCell::default();
}

/// What a thread did since it began (`schedstat`).
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    /// It ran.
    working: Duration,
    /// It would have run and had no core.
    without_core: Duration,
}

/// What the calling thread did, as far as it was read.
#[derive(Default)]
struct Times {
    /// When it was read last.
    read: Option<Instant>,
    /// Nothing where the kernel does not count.
    spent: Spent,
    /// How long requests have held it since that was asked for.
    held: Duration,
}

impl Times {
    fn read(&mut self, now: Instant) -> Spent {
        // Opened each time: clients are promised the descriptors that are left.
        if let Some(spent) = spent() {
            self.spent = spent;
        }
        self.read = Some(now);
        self.spent
    }

    /// The same, unless it was read a moment ago.
    fn read_seldom(&mut self, now: Instant) -> Spent {
        match self.read {
            Some(read) if now.duration_since(read) < READ_EVERY => self.spent,
            _ => self.read(now),
        }
    }
}

/// The first two numbers of a line of three, in nanoseconds.
fn spent() -> Option<Spent> {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let mut numbers = line.split_ascii_whitespace().map(|word| word.parse().ok());
    let mut next = || numbers.next().flatten().map(Duration::from_nanos);
    Some(Spent { working: next()?, without_core: next()? })
}

/// How long requests have held the calling thread since this was called last: whose turn is next depends on that. To
/// measure it once more would take as long as some requests do.
pub(super) fn take_held() -> Duration {
    TIMES.with_borrow_mut(|times| std::mem::take(&mut times.held))
}

/// A thread that serves a request, until this is dropped.
pub(super) struct Held<'a> {
    observer: &'a Observer,
    operation: Operation,
    begun: Instant,
    /// What the thread had done by then, or a moment before.
    spent: Spent,
}

impl<'a> Held<'a> {
    pub(super) fn begin(observer: &'a Observer, operation: Operation) -> Held<'a> {
        let begun = Instant::now();
        let spent = TIMES.with_borrow_mut(|times| times.read_seldom(begun));
        Held { observer, operation, begun, spent }
    }

    pub(super) fn begun(&self) -> Instant {
        self.begun
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let elapsed = self.begun.elapsed();
        TIMES.with_borrow_mut(|times| times.held += elapsed);
        if elapsed < NOTED {
            return self.observer.held(self.operation, elapsed);
        }
        let spent = TIMES.with_borrow_mut(|times| times.read(Instant::now()));
        let held =
            elapsed.saturating_sub(spent.without_core.saturating_sub(self.spent.without_core));
        self.observer.held(self.operation, held);
        let working = spent.working.saturating_sub(self.spent.working).min(held);
        let level = if held >= WARNED { log::Level::Warn } else { log::Level::Debug };
        if held >= NOTED {
            let (operation, held) = (self.operation.name(), held.as_millis());
            let working = working.as_millis();
            log::log!(level, "{operation} held its thread for {held} ms, {working} ms at work");
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
        assert!(held + READ_EVERY >= NOTED * 2, "{held:?}");
    }

    #[test]
    fn what_held_the_thread_is_told_once() {
        let observer = Observer::new();
        take_held();
        for operation in [Operation::Write, Operation::Read] {
            let _held = Held::begin(&observer, operation);
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(take_held() >= Duration::from_millis(4));
        assert_eq!(take_held(), Duration::ZERO);
    }

    #[test]
    fn the_kernel_counts_what_a_thread_waits_for() {
        let line = std::fs::read_to_string("/proc/thread-self/schedstat");
        let Ok(line) = line else { return };
        assert_eq!(line.split_ascii_whitespace().count(), 3, "{line}");
        assert!(spent().is_some());
    }
}
