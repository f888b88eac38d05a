//! Threads for operations that may wait for the disk, so that the threads that serve requests do
//! not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, unbounded};

use super::background::start;
use super::dispatch::Pools;
use super::late::{self, Pool};
use super::mount::MountError;
use super::pace::Paced;
use kvfs_observe::Observer;

/// An operation and its reply.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Threads that run them. Commits run one after the other: more threads would only wait for their turn.
const THREADS: usize = 4;

/// Threads for opens that wait for the remote: twice the calls that it takes at a time, since one
/// transfer may serve several opens.
const FETCH_THREADS: usize = 16;

/// Threads for questions and slots. They read the disk and never wait for the remote.
const ASK_THREADS: usize = 4;

/// Threads for questions about many names: who asks about 65,536 of them again and again keeps none of the others
/// waiting, and whoever else asks for as long as some answers take, which are short (`kvfs_fs::batch`).
const BATCH_THREADS: usize = 2;

/// Threads for what copies or hashes much: whoever syncs a file or opens one for writing does not stand
/// behind it.
const BULK_THREADS: usize = 2;

/// Threads that make sequences of slots, which takes seconds. They take turns where they write to the disk.
const SAVE_THREADS: usize = 2;

/// The ends of the queues that threads take jobs from.
#[derive(Debug)]
pub(super) struct Queues {
    slow: Receiver<Job>,
    fetches: Receiver<Job>,
    asks: Receiver<Job>,
    batches: Receiver<Job>,
    bulk: Receiver<Job>,
    saves: Receiver<Job>,
}

/// Queues for operations. The kernel bounds them: an operation in a queue is the system call of a thread
/// that waits for its answer, and takes less memory than the thread does, or one of the few that the kernel
/// sends by itself (`BACKGROUND_MAX`). The threads end when the operations, which hold the other ends, are
/// dropped: when the kernel has let the mount go.
pub(super) fn queues(paced: Paced) -> (Pools, Queues) {
    let (slow, slow_jobs) = unbounded();
    let (fetches, fetch_jobs) = unbounded();
    let (asks, ask_jobs) = unbounded();
    let (batches, batch_jobs) = unbounded();
    let (bulk, bulk_jobs) = unbounded();
    let (saves, save_jobs) = unbounded();
    let queues = Queues {
        slow: slow_jobs,
        fetches: fetch_jobs,
        asks: ask_jobs,
        batches: batch_jobs,
        bulk: bulk_jobs,
        saves: save_jobs,
    };
    (Pools { slow, fetches, asks, batches, bulk, saves, paced }, queues)
}

impl Queues {
    /// Starts their threads. Those that may hang in a remote are not among the ones to be waited for.
    pub(super) fn start(
        self, has_tiers: bool, observer: &Observer,
    ) -> Result<Vec<JoinHandle<()>>, MountError> {
        let mut threads = Vec::new();
        for (pool, count, jobs) in [
            (&late::SLOW, THREADS, &self.slow),
            (&late::ASK, ASK_THREADS, &self.asks),
            (&late::BATCH, BATCH_THREADS, &self.batches),
            (&late::BULK, BULK_THREADS, &self.bulk),
            (&late::SAVE, SAVE_THREADS, &self.saves),
        ] {
            threads.extend(start_workers(pool, count, jobs, observer)?);
        }
        if has_tiers {
            start_workers(&late::FETCH, FETCH_THREADS, &self.fetches, observer)?;
        }
        Ok(threads)
    }
}

fn start_workers(
    pool: &Pool, count: usize, jobs: &Receiver<Job>, observer: &Observer,
) -> Result<Vec<JoinHandle<()>>, MountError> {
    let queue = jobs.clone();
    observer.watch_queue(pool.kind(), move || queue.len());
    let start_one = |number| {
        let jobs = jobs.clone();
        start(&format!("{}-{number}", pool.name), move || run(&jobs))
    };
    (0..count).map(start_one).collect()
}

/// Runs jobs until nobody can send any more.
fn run(jobs: &Receiver<Job>) {
    jobs.iter().for_each(run_one);
}

/// Runs a job. The client of one that panics hears EIO, and the others go on.
pub(super) fn run_one(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        log::error!("a request failed by a fault of kvfs: it was answered with EIO");
    }
}
