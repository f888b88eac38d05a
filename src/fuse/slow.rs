//! Threads for operations that may wait for the disk, so that the threads that serve requests do
//! not.

use crossbeam_channel::Receiver;

/// An operation and its reply.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Operations that may wait to be run, in each queue. Each stands for a client that waits for its answer:
/// more than a machine has threads for. If even these do not suffice, a request is served where it came in.
pub(super) const JOBS_MAX: usize = 1 << 14;

/// Threads that run them. Commits queue on one mutex anyway: more would only wait there.
pub(super) const THREADS: usize = 4;

/// Threads for opens that wait for the remote: twice the calls that it takes at a time, since one
/// transfer may serve several opens.
pub(super) const FETCH_THREADS: usize = 16;

/// Threads for questions and slots. They read the disk and never wait for the remote.
pub(super) const ASK_THREADS: usize = 4;

/// Threads for what copies or hashes much: whoever syncs a file or opens one for writing does not stand
/// behind it.
pub(super) const BULK_THREADS: usize = 2;

/// Threads that make sequences of slots, which takes seconds, and look at their beginning.
pub(super) const SAVE_THREADS: usize = 2;

/// Runs jobs until nobody can send any more.
pub(super) fn run(jobs: &Receiver<Job>) {
    for job in jobs {
        job();
    }
}
