//! Threads that stay between calls: starting them for each layer costs a tenth of a decode step.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How long a thread looks for the next call before it sleeps: the layers of a decode step follow
/// each other sooner, and waking a thread on an idle virtual core takes 30 us.
const LINGER: Duration = Duration::from_micros(100);

type Job = &'static (dyn Fn(usize) + Sync);

#[derive(Default)]
struct State {
    job: Option<Job>,
    stop: bool,
    panicked: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    started: Condvar,
    finished: Condvar,
    /// Counts the calls.
    generation: AtomicU64,
    /// Threads that have not finished the call.
    running: AtomicUsize,
}

/// Threads that all do one thing at a time. They end when the pool is dropped.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// One call at a time.
    turn: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `size` threads, of which the caller is one.
    pub(crate) fn new(size: usize) -> io::Result<Self> {
        let mut pool = Self { shared: Arc::default(), threads: Vec::new(), turn: Mutex::default() };
        for index in 1..size {
            let shared = Arc::clone(&pool.shared);
            let thread = Builder::new().name(format!("kvfs-attend-{index}"));
            pool.threads.push(thread.spawn(move || work(&shared, index))?);
        }
        Ok(pool)
    }

    pub(crate) fn size(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `job` with 0 to `size() - 1`, each on a thread of its own, and returns when all have
    /// returned. Calls of a pool with several threads wait for each other.
    ///
    /// # Panics
    /// If one of them does.
    pub(crate) fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() {
            // Nobody to share with: calls from several threads need not wait for each other.
            return job(0);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let finish = Finish(&self.shared);
        // SAFETY: only the lifetime changes, and nobody uses the reference after this call: when it
        // returns or unwinds, `Finish`, which is there already, waits until every thread has
        // returned from the job, and takes the job out of the state.
        let erased = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        {
            let mut state = lock(&self.shared);
            state.job = Some(erased);
            self.shared.running.store(self.threads.len(), Ordering::Relaxed);
            self.shared.generation.fetch_add(1, Ordering::Release);
            self.shared.started.notify_all();
        }
        job(0);
        drop(finish);
        assert!(!std::mem::take(&mut lock(&self.shared).panicked), "an attention thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared).stop = true;
        self.shared.generation.fetch_add(1, Ordering::Release);
        self.shared.started.notify_all();
        for thread in self.threads.drain(..) {
            // A thread catches what panics in it.
            let _ = thread.join();
        }
    }
}

/// Waits for the others when dropped, and takes the job away.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let finished = || self.0.running.load(Ordering::Acquire) == 0;
        linger(finished);
        let mut state = lock(self.0);
        while !finished() {
            state = self.0.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.job = None;
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks for a moment whether something has come true.
fn linger(mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > LINGER {
            return false;
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let called = |seen| shared.generation.load(Ordering::Acquire) != seen;
        linger(|| called(seen));
        let mut state = lock(shared);
        while !called(seen) {
            state = shared.started.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        seen = shared.generation.load(Ordering::Acquire);
        let (job, stop) = (state.job, state.stop);
        drop(state);
        let Some(job) = job.filter(|_| !stop) else { return };
        let result = catch_unwind(AssertUnwindSafe(|| job(index)));
        let mut state = lock(shared);
        state.panicked |= result.is_err();
        if shared.running.fetch_sub(1, Ordering::Release) == 1 {
            shared.finished.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_does_its_share_each_time() {
        for size in [1, 2, 5] {
            let pool = Pool::new(size).unwrap();
            let counts: Vec<AtomicUsize> = (0..size).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..100 {
                pool.run(&|index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 100));
        }
    }

    #[test]
    fn alone_it_takes_several_calls_at_once() {
        let pool = Pool::new(1).unwrap();
        // Neither call returns before both have begun.
        let both = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    pool.run(&|_| {
                        both.wait();
                    });
                });
            }
        });
    }

    #[test]
    fn a_panic_comes_back_and_the_pool_lives_on() {
        let pool = Pool::new(2).unwrap();
        for bad in [0, 1] {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|index| assert!(index != bad, "on purpose"));
            }));
            assert!(outcome.is_err());
            pool.run(&|_| {});
        }
    }
}
