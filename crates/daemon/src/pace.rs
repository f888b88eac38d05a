//! Changes that come faster than commits make them durable wait here, each for itself: a little longer the more
//! of them there are, and no longer than what a client would take for a slow disk.
//!
//! The threads that take requests go on meanwhile, and so do those that sync and close files; but the kernel keeps the
//! directory of a change locked, and through rings the request's slot is taken. A change runs here when its time has
//! come (an open that truncates only waits here, and runs where opens do). If there is no room for it then, it waits
//! until a commit has made some, for a second at most: then it runs, and commits itself or hears why that fails.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::background::start;
use super::late;
use super::mount::MountError;
use super::slow::{Job, run_one};
use kvfs_observe::Observer;

/// Threads that run them. They take the state in turns anyway: more would only wait there.
const THREADS: usize = 2;

/// How often changes for which there is no room look for it.
const RETRY_PAUSE: Duration = Duration::from_millis(2);

/// How long they do so. Whoever makes room may have failed.
const HELD_MAX: Duration = Duration::from_secs(1);

/// Whether there is room for another change.
pub(super) type HasRoom = Box<dyn Fn() -> bool + Send + Sync>;

/// Changes and when they may run. Bounded by the kernel: each is a system call of a thread that waits.
pub(super) struct Paced(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when something came, or nothing comes any more.
    changed: Condvar,
    has_room: HasRoom,
}

#[derive(Default)]
struct Queue {
    waiting: BinaryHeap<Reverse<Waiting>>,
    count: u64,
    is_closed: bool,
}

/// Those that may run at the same time run in the order in which they came.
struct Waiting {
    due: (Instant, u64),
    job: Job,
}

impl Paced {
    /// A queue whose threads end when it is dropped, after what waits in it has run.
    pub(super) fn start(has_room: HasRoom) -> Result<(Paced, Vec<JoinHandle<()>>), MountError> {
        let shared =
            Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new(), has_room });
        let paced = Paced(Arc::clone(&shared));
        let start_one = |number| {
            let shared = Arc::clone(&shared);
            start(&format!("{}-{number}", late::PACE.name), move || {
                while let Some(job) = shared.next() {
                    run_one(job);
                }
            })
        };
        Ok((paced, (0..THREADS).map(start_one).collect::<Result<_, _>>()?))
    }

    /// Tells how many wait, as long as there is this queue.
    pub(super) fn tell(&self, observer: &Observer) {
        let shared = Arc::downgrade(&self.0);
        let waiting = move || shared.upgrade().map_or(0, |it| it.queue().waiting.len());
        observer.watch_queue(late::PACE.kind(), waiting);
    }

    /// Runs a change after a while.
    pub(super) fn run_after(&self, delay: Duration, job: Job) {
        self.0.queue().put(Instant::now() + delay, job);
        self.0.changed.notify_one();
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        self.0.queue().is_closed = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next change whose time has come; `None` at the end.
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue();
        loop {
            let Some(Reverse(first)) = queue.waiting.peek() else {
                if queue.is_closed {
                    return None;
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (due, now) = (first.due.0, Instant::now());
            if queue.is_closed || now >= due + HELD_MAX {
                return self.take(&mut queue);
            }
            let mut left = due.saturating_duration_since(now);
            if left.is_zero() {
                drop(queue);
                let has_room = (self.has_room)();
                queue = self.queue();
                if has_room {
                    if queue.waiting.peek().is_some_and(|Reverse(first)| first.due.0 <= now) {
                        return self.take(&mut queue);
                    }
                    continue;
                }
                left = RETRY_PAUSE;
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the first change. The other thread looks at the next one: it may not have been woken for it.
    fn take(&self, queue: &mut Queue) -> Option<Job> {
        let Reverse(first) = queue.waiting.pop()?;
        self.changed.notify_one();
        Some(first.job)
    }
}

impl Queue {
    fn put(&mut self, at: Instant, job: Job) {
        self.count += 1;
        self.waiting.push(Reverse(Waiting { due: (at, self.count), job }));
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Waiting) -> bool {
        self.due == other.due
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Waiting) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Waiting) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::background::join;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn milliseconds(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn each_waits_for_itself_alone() {
        let (paced, threads) = Paced::start(Box::new(|| true)).unwrap();
        let (told, order) = crossbeam_channel::unbounded();
        let begun = Instant::now();
        for (name, delay) in [("late", 300), ("soon", 40), ("now", 0)] {
            let told = told.clone();
            paced.run_after(milliseconds(delay), Box::new(move || told.send(name).unwrap()));
        }
        let order: Vec<&str> = order.iter().take(3).collect();
        assert_eq!(order, ["now", "soon", "late"]);
        assert!(begun.elapsed() >= milliseconds(300));
        drop(paced);
        join(threads);
    }

    #[test]
    fn without_room_a_change_waits_and_at_the_end_it_runs() {
        let has_room = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&has_room);
        let (paced, threads) =
            Paced::start(Box::new(move || asked.load(Ordering::Relaxed))).unwrap();
        let (told, ran) = crossbeam_channel::unbounded();
        let job = |number: u8| {
            let told = told.clone();
            Box::new(move || told.send(number).unwrap())
        };
        paced.run_after(Duration::ZERO, job(1));
        assert!(ran.recv_timeout(milliseconds(50)).is_err());
        has_room.store(true, Ordering::Relaxed);
        assert_eq!(ran.recv_timeout(milliseconds(5000)), Ok(1));
        has_room.store(false, Ordering::Relaxed);
        // Whoever makes room may be gone.
        let begun = Instant::now();
        paced.run_after(Duration::ZERO, job(3));
        assert_eq!(ran.recv_timeout(milliseconds(20_000)), Ok(3));
        assert!(begun.elapsed() >= HELD_MAX);
        paced.run_after(milliseconds(60_000), job(2));
        drop(paced);
        join(threads);
        assert_eq!(ran.try_recv(), Ok(2));
    }
}
