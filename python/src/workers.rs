//! A few threads for many files: what a disk or a daemon answers overlaps.

use std::sync::Mutex;
use std::thread::available_parallelism;

/// Files at a time, at least: a thread waits for the daemon or the disk most of the time, also where there are few
/// processors.
const THREADS_MIN: usize = 4;

/// And at most: beyond that a disk gives no more.
const THREADS_MAX: usize = 8;

/// Does the jobs, and returns what came of each, in their order.
///
/// `least` is how many jobs are worth a thread: starting one takes as long as some requests to the daemon.
pub(crate) fn each<Job: Send, Outcome: Send>(
    jobs: Vec<Job>, least: usize, work: impl Fn(Job) -> Outcome + Sync,
) -> Vec<Outcome> {
    let threads = available_parallelism().map_or(1, Into::into).clamp(THREADS_MIN, THREADS_MAX);
    let threads = threads.min(jobs.len() / least.max(1));
    if threads <= 1 {
        return jobs.into_iter().map(work).collect();
    }
    let mut outcomes: Vec<Option<Outcome>> = jobs.iter().map(|_| None).collect();
    let queue = Mutex::new(jobs.into_iter().zip(outcomes.iter_mut()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().ok().and_then(|mut queue| queue.next());
                    let Some((job, outcome)) = next else { return };
                    *outcome = Some(work(job));
                }
            });
        }
    });
    outcomes.into_iter().flatten().collect()
}
