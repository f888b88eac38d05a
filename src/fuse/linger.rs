//! Staying awake for the next request.
//!
//! Requests come in trains: a lookup, an open, a release, the next open. On a core that has gone to
//! sleep meanwhile, waking the thread for each costs more than answering it (30 us against 10 us on
//! a virtual machine), so a thread that has answered looks for the next request for a moment before
//! it sleeps, as the kernel's own haltpoll does. It looks only within a train, one thread at a time,
//! and gives up when somebody else wants the core.
//!
//! It looks no longer than the train lets expect. The client may have been woken on the very core
//! that is kept awake, when something else runs on the other one, and then it waits for the look to
//! end: with 200 us for everybody, the slowest hundredth of the opens took 227 us while pages left
//! for the remote, and takes 97 us now (50 us while nothing moves).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How long to look at most: haltpoll's default, and enough for a client that reads a page of 4 MiB
/// between two opens (some 130 us). A train whose gaps are longer is not waited for at all.
const LINGER_MAX: Duration = Duration::from_micros(200);
/// How long to look at least, as one round trip takes.
const LINGER_MIN: Duration = Duration::from_micros(20);
/// A request belongs to a train if it comes this soon after the one before it.
const TRAIN_GAP: Duration = Duration::from_millis(1);

/// A look takes half a microsecond; after such a gap somebody else had the core and may want it
/// again. (Yielding after each look instead loses most of the gain.)
const PREEMPTED: Duration = Duration::from_micros(50);

/// Looks for the next request.
#[derive(Debug)]
pub(super) struct Linger {
    started: Instant,
    /// When the last request came, in nanoseconds since the start.
    last_request: AtomicU64,
    gaps: Gaps,
    device: OnceLock<OwnedFd>,
    /// Somebody looks already.
    taken: AtomicBool,
}

/// Looks for the next request when it is dropped, which is after the reply, for so long.
pub(super) struct Awake<'a>(Option<(&'a Linger, Duration)>);

impl Linger {
    pub(super) fn new() -> Linger {
        Linger {
            started: Instant::now(),
            last_request: AtomicU64::new(0),
            gaps: Gaps::default(),
            device: OnceLock::new(),
            taken: AtomicBool::new(false),
        }
    }

    /// The device that requests come from. With a single core, whoever sends the next request
    /// needs it.
    pub(super) fn watch(&self, device: OwnedFd) {
        if std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1) {
            let _ = self.device.set(device);
        }
    }

    /// To be held while a request is answered.
    pub(super) fn after_reply(&self) -> Awake<'_> {
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = self.last_request.swap(now, Ordering::Relaxed);
        let gap = Duration::from_nanos(now.saturating_sub(last));
        self.gaps.note(gap);
        let longest = if gap < TRAIN_GAP { self.gaps.look_for() } else { None };
        Awake(longest.map(|longest| (self, longest)))
    }

    fn look(&self, longest: Duration) {
        let Some(device) = self.device.get() else {
            return;
        };
        if self.taken.swap(true, Ordering::Acquire) {
            return;
        }
        let started = Instant::now();
        let mut last = started;
        let mut watched = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
        // Anything but "not yet" is for the thread's own read to find out.
        while poll(&mut watched, PollTimeout::ZERO) == Ok(0) {
            let now = Instant::now();
            if now - started > longest || now - last > PREEMPTED {
                break;
            }
            last = now;
            std::hint::spin_loop();
        }
        self.taken.store(false, Ordering::Release);
    }
}

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        if let Some((linger, longest)) = self.0 {
            linger.look(longest);
        }
    }
}

/// The last few gaps between requests, four times 16 bits of microseconds.
#[derive(Debug, Default)]
struct Gaps(AtomicU64);

impl Gaps {
    fn note(&self, gap: Duration) {
        let gap = u64::from(u16::try_from(gap.as_micros()).unwrap_or(u16::MAX));
        // Two threads at once may lose one of their gaps: nothing depends on it.
        self.0.store((self.0.load(Ordering::Relaxed) << 16) | gap, Ordering::Relaxed);
    }

    /// How long to look for the next request; `None` if not at all.
    ///
    /// The second longest of the last four gaps is expected: long and short ones take turns (an
    /// open, the reading, a release, the next open), and one that was held up once tells nothing.
    fn look_for(&self) -> Option<Duration> {
        let gaps = self.0.load(Ordering::Relaxed);
        let mut gaps = [48, 32, 16, 0].map(|shift| (gaps >> shift) & 0xffff);
        gaps.sort_unstable();
        let expected = Duration::from_micros(gaps[2]);
        (expected <= LINGER_MAX).then(|| (expected * 2).clamp(LINGER_MIN, LINGER_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_train_is_waited_for_as_long_as_its_gaps_let_expect() {
        /// How long is looked, in microseconds, after gaps of so many.
        fn check(gaps: &[u64], expected: Option<u64>) {
            let known = Gaps::default();
            for gap in gaps {
                known.note(Duration::from_micros(*gap));
            }
            assert_eq!(known.look_for(), expected.map(Duration::from_micros), "{gaps:?}");
        }
        check(&[1], Some(20));
        check(&[30, 30], Some(60));
        check(&[130, 5, 130, 5], Some(200));
        check(&[5, 130, 5, 130], Some(200));
        check(&[15, 15, 700, 15], Some(30));
        check(&[300, 300, 15, 15], None);
        check(&[1 << 40, 300, 15, 15], None);
    }
}
