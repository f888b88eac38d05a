//! Requests that took so long that a client has noticed: a line in the log says what they were about and what
//! they waited for.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::slow::Job;
use kvfs_fs::{FileSystem, Subject, shown};
use kvfs_observe::Operation;

/// A request that takes longer is worth a line.
const LATE: Duration = Duration::from_secs(1);
/// No more than one line in such a time: where a remote hangs every request that needs it is late.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Threads that serve requests of one kind.
#[derive(Debug)]
pub(super) struct Pool {
    /// The name of each, before its number.
    pub(super) name: &'static str,
    /// What its requests wait for.
    waits_for: &'static str,
}

impl Pool {
    /// The word for its requests in metrics.
    pub(super) fn kind(&self) -> &'static str {
        self.name.trim_start_matches("kvfs-")
    }
}

pub(super) const SLOW: Pool = Pool { name: "kvfs-slow", waits_for: "the disk or a commit" };
pub(super) const ASK: Pool = Pool { name: "kvfs-ask", waits_for: "the store to be read" };
pub(super) const BATCH: Pool = Pool { name: "kvfs-batch", waits_for: "many names to be looked up" };
pub(super) const BULK: Pool = Pool { name: "kvfs-bulk", waits_for: "bytes to be copied or hashed" };
pub(super) const SAVE: Pool = Pool { name: "kvfs-save", waits_for: "a slot to become a sequence" };
pub(super) const FETCH: Pool = Pool { name: "kvfs-fetch", waits_for: "the remote" };
pub(super) const PACE: Pool =
    Pool { name: "kvfs-pace", waits_for: "commits, since changes come faster" };
const POOLS: [&Pool; 7] = [&SLOW, &ASK, &BATCH, &BULK, &SAVE, &FETCH, &PACE];

thread_local! {
    /// How long the request that this thread serves had waited for it.
    static QUEUED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// A job that remembers how long it waits until a thread is free, here and where it was before.
pub(super) fn queued(job: impl FnOnce() + Send + 'static) -> Job {
    let (before, since) = (QUEUED.get(), Instant::now());
    Box::new(move || {
        QUEUED.set(before + since.elapsed());
        job();
        QUEUED.set(Duration::ZERO);
    })
}

/// How long the request of this thread waited for it; what a request does next did not wait.
pub(super) fn take_queued() -> Duration {
    QUEUED.take()
}

/// Lines about late requests.
#[derive(Debug, Default)]
pub(super) struct Late {
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    last: Option<Instant>,
    /// Since then.
    untold: u64,
}

impl Late {
    /// A request was served, which first waited for a thread and then took as long as that.
    pub(super) fn note(
        &self, fs: &FileSystem, operation: Operation, subject: Subject<'_>,
        (queued, served): (Duration, Duration),
    ) {
        if queued + served < LATE {
            return;
        }
        let Some(untold) = self.take_turn(Instant::now()) else { return };
        let (path, operation) = (shown(fs, subject), operation.name());
        let [total, queued] = [queued + served, queued].map(|time| time.as_millis());
        let mut line = vec![format!("{operation} of {path} took {total} ms")];
        if queued > 0 {
            line.push(format!(", {queued} ms of it until a thread was free"));
        }
        if let Some(pool) = pool() {
            line.push(format!(", among those that wait for {}", pool.waits_for));
        }
        if untold > 0 {
            line.push(format!("; so did {untold} others before it"));
        }
        log::warn!("{}", line.concat());
    }

    /// If there may be a line now, how many late requests had none since the last one.
    fn take_turn(&self, now: Instant) -> Option<u64> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.last.is_some_and(|last| now.duration_since(last) < LINE_EVERY) {
            told.untold += 1;
            return None;
        }
        told.last = Some(now);
        Some(std::mem::take(&mut told.untold))
    }
}

/// Whose thread this is, unless requests come to it from the kernel.
fn pool() -> Option<&'static Pool> {
    let thread = std::thread::current();
    let name = thread.name()?;
    POOLS.into_iter().find(|pool| name.starts_with(pool.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_job_knows_how_long_it_waited_in_all_its_queues() {
        let (told, heard) = channel();
        let pause = Duration::from_millis(10);
        let first = queued(move || {
            let second = queued(move || told.send(take_queued()).unwrap());
            std::thread::sleep(pause);
            second();
        });
        std::thread::sleep(pause);
        first();
        assert!(heard.recv().unwrap() >= 2 * pause);
        assert_eq!(take_queued(), Duration::ZERO);
    }

    #[test]
    fn many_late_requests_have_one_line() {
        let (late, start) = (Late::default(), Instant::now());
        assert_eq!(late.take_turn(start), Some(0));
        assert_eq!(late.take_turn(start + LINE_EVERY / 2), None);
        assert_eq!(late.take_turn(start + LINE_EVERY / 2), None);
        assert_eq!(late.take_turn(start + LINE_EVERY), Some(2));
        assert_eq!(late.take_turn(start + 3 * LINE_EVERY), Some(0));
    }

    #[test]
    fn each_thread_is_of_one_pool() {
        for pool in POOLS {
            let named = std::thread::Builder::new().name(format!("{}-0", pool.name));
            let found = named.spawn(super::pool).unwrap().join().unwrap();
            assert_eq!(found.map(|found| found.name), Some(pool.name));
        }
    }
}
