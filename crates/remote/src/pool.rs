//! Threads for calls that may never return.
//!
//! A thread that waits for a hung NFS server cannot be interrupted. So every call on a remote runs
//! on a thread of its own, the caller waits as long as there is progress, and then leaves it
//! behind. The thread is *stuck* until the call returns by itself; others take its place, up to a
//! bound, beyond which calls fail at once.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};

/// Calls that wait for a thread; more are refused. Callers wait for their call, so this bounds
/// callers, not work: some 16 movers and 16 openers are expected.
const QUEUE_MAX: usize = 256;
/// How soon a caller notices that the pool is being closed.
const CLOSING_NOTICED: Duration = Duration::from_millis(100);
/// How long closing waits for calls that are nearly done.
const CLOSING_MAX: Duration = Duration::from_secs(2);

/// Why a call has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abandoned {
    /// No progress for the time allowed; the call may still take place.
    Silent,
    /// The time for all calls together is over; the call may still take place.
    Late,
    /// No thread was free in time; the call did not begin.
    NoThread,
    /// The call panicked, or the pool closed.
    Ended,
}

/// Tells that a call makes progress.
#[derive(Debug)]
pub(super) struct Watch {
    start: Instant,
    /// Milliseconds after the start.
    progress: AtomicU64,
    quiet_max: Duration,
    /// Whatever moves, the call is given up then.
    until: Option<Instant>,
}

impl Watch {
    /// Begins now.
    pub(super) fn new(quiet_max: Duration, until: Option<Instant>) -> Arc<Watch> {
        Arc::new(Watch { start: Instant::now(), progress: AtomicU64::new(0), quiet_max, until })
    }

    /// A byte moved.
    pub(super) fn tick(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.progress.store(now, Ordering::Relaxed);
    }

    /// Until the call is given up, if nothing moves.
    fn remaining(&self) -> Duration {
        let progress = Duration::from_millis(self.progress.load(Ordering::Relaxed));
        let quiet = (progress + self.quiet_max).saturating_sub(self.start.elapsed());
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(quiet, |left| left.min(quiet))
    }

    /// Whether the time for all calls together is over.
    fn is_late(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }
}

thread_local! {
    /// The watch of the call that this thread is in.
    static WATCH: RefCell<Option<Arc<Watch>>> = const { RefCell::new(None) };
}

/// The call that this thread is in is known to go on, though no byte has been seen to move. Says nothing on other threads.
pub(super) fn show_progress() {
    WATCH.with_borrow(|watch| watch.iter().for_each(|watch| watch.tick()));
}

/// Bounds of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Threads that work or wait for work.
    pub(super) threads_max: usize,
    /// Stuck threads that are replaced.
    pub(super) stuck_max: usize,
}

type Job = Box<dyn FnOnce() + Send>;

/// The threads.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    jobs: Option<Sender<Job>>,
}

#[derive(Debug)]
struct Shared {
    queue: Receiver<Job>,
    threads: Mutex<Threads>,
    thread_ended: Condvar,
    bounds: Bounds,
    closing: AtomicBool,
}

#[derive(Debug, Default)]
struct Threads {
    /// Work, or wait for work.
    alive: usize,
    /// Of those, wait.
    idle: usize,
    /// In calls that were left behind.
    stuck: usize,
    /// Ever started.
    started: usize,
}

/// Where a call is. It becomes or ceases to be `LEFT` only under the lock of [`Threads`].
#[derive(Debug)]
struct Phase(AtomicU8);
const QUEUED: u8 = 0;
const RUNNING: u8 = 1;
const DONE: u8 = 2;
const LEFT: u8 = 3;

impl Phase {
    fn change(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Pool {
    /// Threads are started when there is work.
    pub(super) fn new(bounds: Bounds) -> Pool {
        let (jobs, queue) = bounded(QUEUE_MAX);
        let shared = Shared {
            queue,
            threads: Mutex::default(),
            thread_ended: Condvar::new(),
            bounds,
            closing: AtomicBool::new(false),
        };
        Pool { shared: Arc::new(shared), jobs: Some(jobs) }
    }

    /// Threads that are stuck now.
    pub(super) fn stuck(&self) -> usize {
        self.shared.lock().stuck
    }

    /// Threads in calls that somebody waits for.
    pub(super) fn busy(&self) -> usize {
        let threads = self.shared.lock();
        threads.alive - threads.idle
    }

    /// Lets callers go; their calls count as ended.
    pub(super) fn close(&self) {
        self.shared.closing.store(true, Ordering::Release);
    }

    /// Runs a call and waits for it while it makes progress.
    pub(super) fn call<T: Send + 'static>(
        &self, watch: &Arc<Watch>, work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Abandoned> {
        if watch.is_late() {
            return Err(Abandoned::Late);
        }
        let phase = Arc::new(Phase(AtomicU8::new(QUEUED)));
        let (answer, answered) = bounded(1);
        let (shared, inner) = (Arc::clone(&self.shared), Arc::clone(&phase));
        let watched = Arc::clone(watch);
        self.submit(Box::new(move || {
            if inner.change(QUEUED, RUNNING) {
                WATCH.set(Some(watched));
                if let Ok(value) = catch_unwind(AssertUnwindSafe(work)) {
                    let _ = answer.send(value);
                }
                WATCH.set(None);
                shared.returned(&inner);
            }
        }))?;
        loop {
            match answered.recv_timeout(watch.remaining().min(CLOSING_NOTICED)) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => return Err(Abandoned::Ended),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let is_closing = self.shared.closing.load(Ordering::Acquire);
            if is_closing || watch.remaining().is_zero() {
                let had_begun = self.shared.leave(&phase);
                let gave_up = match (is_closing, had_begun) {
                    (true, _) => Abandoned::Ended,
                    _ if watch.is_late() => Abandoned::Late,
                    (false, true) => Abandoned::Silent,
                    (false, false) => Abandoned::NoThread,
                };
                return answered.try_recv().map_err(|_| gave_up);
            }
        }
    }

    fn submit(&self, job: Job) -> Result<(), Abandoned> {
        let jobs = self.jobs.as_ref().ok_or(Abandoned::Ended)?;
        let mut threads = self.shared.lock();
        let alive_max = self.shared.alive_max(&threads);
        if alive_max == 0 {
            return Err(Abandoned::NoThread);
        }
        if threads.alive < alive_max && threads.idle <= jobs.len() {
            self.shared.start(&mut threads);
        }
        if threads.alive == 0 {
            return Err(Abandoned::NoThread);
        }
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => Abandoned::NoThread,
            TrySendError::Disconnected(_) => Abandoned::Ended,
        })
    }
}

impl Drop for Pool {
    /// Waits for the threads that are not stuck; nothing can be done about the others.
    fn drop(&mut self) {
        self.close();
        self.jobs = None;
        let threads = self.shared.lock();
        let ended = &self.shared.thread_ended;
        drop(ended.wait_timeout_while(threads, CLOSING_MAX, |threads| threads.alive > 0));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Threads that may be alive: fewer when more are stuck than may be replaced.
    fn alive_max(&self, threads: &Threads) -> usize {
        let Bounds { threads_max, stuck_max } = self.bounds;
        (threads_max + stuck_max).saturating_sub(threads.stuck).min(threads_max)
    }

    fn start(self: &Arc<Shared>, threads: &mut Threads) {
        let shared = Arc::clone(self);
        let name = format!("kvfs-remote-{}", threads.started);
        match std::thread::Builder::new().name(name).spawn(move || shared.serve()) {
            Ok(_) => {
                threads.started += 1;
                threads.alive += 1;
            }
            Err(error) => log::error!("no thread for the remote tier: {error}"),
        }
    }

    fn serve(&self) {
        loop {
            {
                let mut threads = self.lock();
                if threads.alive > self.alive_max(&threads) {
                    break;
                }
                threads.idle += 1;
            }
            let job = self.queue.recv();
            self.lock().idle -= 1;
            let Ok(job) = job else {
                break;
            };
            job();
        }
        self.lock().alive -= 1;
        self.thread_ended.notify_all();
    }

    /// The caller no longer waits; whether the call had begun.
    fn leave(&self, phase: &Phase) -> bool {
        let mut threads = self.lock();
        if phase.change(QUEUED, LEFT) {
            return false;
        }
        if phase.change(RUNNING, LEFT) {
            threads.alive -= 1;
            threads.stuck += 1;
        }
        true
    }

    /// The call came back. A thread that was stuck counts again, and [`Shared::serve`] ends it if
    /// it has been replaced.
    fn returned(&self, phase: &Phase) {
        let mut threads = self.lock();
        if !phase.change(RUNNING, DONE) {
            threads.stuck -= 1;
            threads.alive += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET_MAX: Duration = Duration::from_millis(50);

    fn hang(pool: &Pool) -> Sender<()> {
        let (release, held) = bounded::<()>(0);
        let outcome = pool.call(&Watch::new(QUIET_MAX, None), move || held.recv().is_err());
        assert_eq!(outcome, Err(Abandoned::Silent));
        release
    }

    #[test]
    fn hung_calls_are_left_behind_up_to_a_bound_and_their_threads_return() {
        let pool = Pool::new(Bounds { threads_max: 2, stuck_max: 1 });
        let call = || pool.call(&Watch::new(QUIET_MAX, None), || 7);
        assert_eq!(call(), Ok(7));
        let first = hang(&pool);
        let second = hang(&pool);
        assert_eq!((pool.stuck(), call()), (2, Ok(7)));
        let third = hang(&pool);
        let start = Instant::now();
        assert_eq!((pool.stuck(), call()), (3, Err(Abandoned::NoThread)));
        assert!(start.elapsed() < QUIET_MAX, "calls fail at once");
        drop((first, second, third));
        let deadline = Instant::now() + Duration::from_secs(10);
        while pool.stuck() > 0 {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        assert_eq!(call(), Ok(7));
    }

    #[test]
    fn a_slow_call_that_makes_progress_is_waited_for() {
        let pool = Pool::new(Bounds { threads_max: 1, stuck_max: 0 });
        let watch = Watch::new(QUIET_MAX * 4, None);
        let inner = Arc::clone(&watch);
        let outcome = pool.call(&watch, move || {
            for _ in 0..12 {
                std::thread::sleep(QUIET_MAX);
                inner.tick();
            }
        });
        assert_eq!(outcome, Ok(()));
    }

    #[test]
    fn a_call_that_says_that_it_goes_on_is_waited_for() {
        let pool = Pool::new(Bounds { threads_max: 1, stuck_max: 0 });
        let outcome = pool.call(&Watch::new(QUIET_MAX * 4, None), || {
            for _ in 0..12 {
                std::thread::sleep(QUIET_MAX);
                show_progress();
            }
        });
        assert_eq!(outcome, Ok(()));
        show_progress();
    }

    #[test]
    fn the_end_of_all_calls_is_theirs_whatever_moves() {
        let pool = Pool::new(Bounds { threads_max: 1, stuck_max: 0 });
        let watch = Watch::new(Duration::from_secs(60), Some(Instant::now() + QUIET_MAX * 4));
        let inner = Arc::clone(&watch);
        let (release, held) = bounded::<()>(0);
        let outcome = pool.call(&watch, move || {
            while held.recv_timeout(QUIET_MAX) == Err(RecvTimeoutError::Timeout) {
                inner.tick();
            }
        });
        assert_eq!(outcome, Err(Abandoned::Late));
        assert_eq!(pool.call(&watch, || 7), Err(Abandoned::Late));
        drop(release);
    }

    #[test]
    fn a_call_that_found_no_thread_is_not_silent() {
        let pool = Pool::new(Bounds { threads_max: 1, stuck_max: 0 });
        let (release, held) = bounded::<()>(0);
        std::thread::scope(|scope| {
            let busy = Watch::new(Duration::from_secs(60), None);
            let pool = &pool;
            let long = scope.spawn(move || pool.call(&busy, move || held.recv().is_err()));
            while pool.shared.lock().idle > 0 || pool.shared.lock().started == 0 {
                std::thread::yield_now();
            }
            let waiting = pool.call(&Watch::new(QUIET_MAX, None), || 7);
            assert_eq!((waiting, pool.stuck()), (Err(Abandoned::NoThread), 0));
            drop(release);
            assert_eq!(long.join().unwrap(), Ok(true));
        });
        assert_eq!(pool.call(&Watch::new(Duration::from_secs(10), None), || 7), Ok(7));
    }

    #[test]
    fn a_panic_ends_the_call_and_not_the_thread() {
        let pool = Pool::new(Bounds { threads_max: 1, stuck_max: 0 });
        let watch = Watch::new(Duration::from_secs(10), None);
        assert_eq!(pool.call(&watch, || panic!("expected")), Err::<(), _>(Abandoned::Ended));
        assert_eq!(pool.call(&watch, || 7), Ok(7));
    }
}
