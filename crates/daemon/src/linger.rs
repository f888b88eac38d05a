//! Staying awake for the next request.
//!
//! Requests come in trains: a lookup, an open, a release, the next open. On a core that has gone to
//! sleep meanwhile, waking the thread for each costs more than answering it (30 us against 10 us on
//! a virtual machine), so a thread that has answered looks for the next request for a moment before
//! it sleeps, as the kernel's own haltpoll does. It looks only within a train, one thread at a time,
//! and gives up when somebody else wants the core.
//!
//! A train is that of one client. Where several send requests in turns, the next client is already
//! running when one is answered, and what it runs on is the core that a look would take: sixteen
//! threads that open and read cached files of 1 MiB on two cores got 11 GB/s with looking and 18
//! without (plain files 23 to 28), and the daemon took a third less time.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use kvfs_fs::{FileSystem, Tiers};

/// How long to look: haltpoll's default, and enough for a client that reads a page of 4 MiB between
/// two opens (some 130 us).
const LINGER: Duration = Duration::from_micros(200);
/// The same while objects move. No core sleeps then, so waking up is cheap; and the kernel may have
/// woken whoever got the answer on this very core, where it waits until the looking ends (one open
/// of a hundred on two cores).
const LINGER_BESIDE_MOVERS: Duration = Duration::from_micros(30);
/// A request belongs to a train if it comes this soon after the one before it, and this long after
/// the last one of another client.
const TRAIN_GAP: Duration = Duration::from_millis(1);

/// A look takes half a microsecond; after such a gap somebody else had the core and may want it
/// again. (Yielding after each look instead loses most of the gain.)
const PREEMPTED: Duration = Duration::from_micros(50);

/// Looks for the next request.
pub(super) struct Linger {
    fs: Arc<FileSystem>,
    started: Instant,
    /// When the last request came, in nanoseconds since the start.
    last_request: AtomicU64,
    /// The thread that sent it.
    client: AtomicU32,
    /// When a request came from another thread than the one before it.
    last_change: AtomicU64,
    device: OnceLock<Arc<OwnedFd>>,
    /// Somebody looks already.
    taken: AtomicBool,
}

/// Looks for the next request when it is dropped, which is after the reply.
pub(super) struct Awake<'a>(Option<&'a Linger>);

impl Linger {
    pub(super) fn new(fs: Arc<FileSystem>) -> Linger {
        Linger {
            fs,
            started: Instant::now(),
            last_request: AtomicU64::new(0),
            client: AtomicU32::new(0),
            last_change: AtomicU64::new(0),
            device: OnceLock::new(),
            taken: AtomicBool::new(false),
        }
    }

    /// The device that requests come from. With a single core, whoever sends the next request
    /// needs it.
    pub(super) fn watch(&self, device: Arc<OwnedFd>) {
        if std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1) {
            let _ = self.device.set(device);
        }
    }

    /// To be held while a request of a client's thread is answered. Those that the kernel sends by
    /// itself, such as releases, are of thread 0.
    pub(super) fn after_reply(&self, client: u32) -> Awake<'_> {
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = self.last_request.swap(now, Ordering::Relaxed);
        if client != 0 && self.client.swap(client, Ordering::Relaxed) != client {
            self.last_change.store(now, Ordering::Relaxed);
        }
        let since = |then: u64| Duration::from_nanos(now.saturating_sub(then));
        let is_alone = since(self.last_change.load(Ordering::Relaxed)) > TRAIN_GAP;
        Awake((since(last) < TRAIN_GAP && is_alone).then_some(self))
    }

    fn look(&self) {
        let Some(device) = self.device.get() else {
            return;
        };
        if self.taken.swap(true, Ordering::Acquire) {
            return;
        }
        let started = Instant::now();
        let mut last = started;
        let linger = if self.fs.tiers().is_some_and(Tiers::is_moving) {
            LINGER_BESIDE_MOVERS
        } else {
            LINGER
        };
        let mut watched = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
        // Anything but "not yet" is for the thread's own read to find out.
        while poll(&mut watched, PollTimeout::ZERO) == Ok(0) {
            let now = Instant::now();
            if now - started > linger || now - last > PREEMPTED {
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
        if let Some(linger) = self.0 {
            linger.look();
        }
    }
}
