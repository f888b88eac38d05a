//! Where a request runs: at once, on the thread that it came in on, or beside it if it may wait.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;
use fuser::Errno;

use super::answer::Reply;
use super::late::queued;
use super::pace::Paced;
use super::shared::Shared;
use super::slow::Job;
use kvfs_fs::{Awaited, Pace, Waits};

/// Where requests run that are not answered at once.
pub(super) struct Pools {
    pub(super) slow: Sender<Job>,
    pub(super) fetches: Sender<Job>,
    pub(super) asks: Sender<Job>,
    pub(super) batches: Sender<Job>,
    pub(super) bulk: Sender<Job>,
    pub(super) saves: Sender<Job>,
    pub(super) paced: Paced,
}

/// What the kernel may ask for, whichever way its requests come.
pub(super) struct Operations {
    shared: Arc<Shared>,
    /// Takes what may wait for the disk; closed when the kernel has let the mount go.
    slow: Sender<Job>,
    /// Takes what waits for the remote.
    fetches: Sender<Job>,
    /// Takes questions, and what else must look before it knows whether it waits for the remote.
    asks: Sender<Job>,
    /// Takes questions about many names.
    batches: Sender<Job>,
    /// Takes what copies or hashes much of a file.
    bulk: Sender<Job>,
    /// Takes what makes sequences of slots.
    saves: Sender<Job>,
    /// Takes changes that come faster than commits.
    paced: Paced,
}

impl Operations {
    pub(super) fn new(shared: Arc<Shared>, pools: Pools) -> Operations {
        let Pools { slow, fetches, asks, batches, bulk, saves, paced } = pools;
        Operations { shared, slow, fetches, asks, batches, bulk, saves, paced }
    }

    /// What a request waits for.
    pub(super) fn waits(&self) -> Waits<'_> {
        self.fs.core.waits()
    }

    /// Refuses a change where clients may make none. Gives the way of the answer back if they may.
    pub(super) fn to_change<T, R: Reply<T>>(&self, reply: R) -> Option<R> {
        if self.is_read_only {
            reply.send(Err(Errno::EROFS));
            return None;
        }
        Some(reply)
    }

    /// Runs what copies or hashes much of a file.
    pub(super) fn in_bulk(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        hand_over(&self.bulk, move || job(&shared));
    }

    /// Answers a question about many names.
    pub(super) fn in_batches(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        hand_over(&self.batches, move || job(&shared));
    }

    /// Runs what makes a sequence of a slot.
    pub(super) fn save(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        hand_over(&self.saves, move || job(&shared));
    }

    /// Runs a change: at once, or after a while if others come faster than commits. Where commits fail it
    /// tries one first, to tell its client why.
    pub(super) fn change(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        self.change_in_turn(false, job);
    }

    /// The same for a change that may wait for the store's disk: then it runs with those that are delayed, and not
    /// behind who syncs.
    pub(super) fn change_in_turn(&self, waits: bool, job: impl FnOnce(&Shared) + Send + 'static) {
        let delay = match self.fs.pacing().pace() {
            Pace::AtOnce if !waits => return job(self),
            Pace::AtOnce => Duration::ZERO,
            Pace::After(delay) => delay,
            Pace::AfterCommit => return self.later(job),
        };
        let shared = Arc::clone(&self.shared);
        self.paced.run_after(delay, queued(move || job(&shared)));
    }

    /// The same for a change that may wait for the disk or other requests: delayed as others are, it runs [`Self::later`].
    pub(super) fn change_later(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let Pace::After(delay) = self.fs.pacing().pace() else { return self.later(job) };
        let (shared, slow) = (Arc::clone(&self.shared), self.slow.clone());
        let job = move || hand_over(&slow, move || job(&shared));
        self.paced.run_after(delay, queued(job));
    }

    /// Runs what may wait for the remote: such operations keep each other waiting, and nobody else.
    pub(super) fn fetch(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        hand_over(&self.fetches, move || job(&shared));
    }

    /// Runs what reads the disk for a while, and waits for the remote only if `waits` says so: then
    /// it moves to whom it concerns, so that a remote that hangs holds up no question about what is
    /// here.
    pub(super) fn ask(
        &self, waits: impl FnOnce(&Shared) -> bool + Send + 'static,
        job: impl FnOnce(&Shared) + Send + 'static,
    ) {
        let (shared, fetches) = (Arc::clone(&self.shared), self.fetches.clone());
        hand_over(&self.asks, move || {
            if shared.fs.tiers().is_some() && waits(&shared) {
                hand_over(&fetches, move || job(&shared));
            } else {
                job(&shared);
            }
        });
    }

    /// Runs what waits.
    pub(super) fn beside(&self, awaited: Awaited, job: impl FnOnce(&Shared) + Send + 'static) {
        match awaited {
            Awaited::Remote => self.fetch(job),
            Awaited::Local => self.later(job),
            Awaited::Reading => self.ask(|_| false, job),
            Awaited::Sealing => self.in_bulk(job),
        }
    }

    /// Runs what waits for something, or at once what does not.
    pub(super) fn once(
        &self, awaited: Option<Awaited>, job: impl FnOnce(&Shared) + Send + 'static,
    ) {
        match awaited {
            Some(awaited) => self.beside(awaited, job),
            None => job(self),
        }
    }

    /// Runs a change that waits for something, or at once what does not.
    pub(super) fn change_once(
        &self, awaited: Option<Awaited>, job: impl FnOnce(&Shared) + Send + 'static,
    ) {
        match awaited {
            Some(awaited) => self.beside(awaited, job),
            None => self.change(job),
        }
    }

    /// Runs work in the background that waits for the remote, if there is one, or for the disk.
    pub(super) fn aside(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        if self.fs.tiers().is_some() { self.fetch(job) } else { self.later(job) }
    }

    /// Runs what may wait for a commit, for the disk or for another request beside the requests:
    /// two clients that fsync must not keep everybody else from opening files.
    pub(super) fn later(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        hand_over(&self.slow, move || job(&shared));
    }
}

/// Gives a job to other threads, and never waits for them.
fn hand_over(to: &Sender<Job>, job: impl FnOnce() + Send + 'static) {
    if to.send(queued(job)).is_err() {
        // Nobody is left to run it. A request that is dropped is answered with EIO.
        log::error!("a request came when the mount had ended");
    }
}

impl std::ops::Deref for Operations {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}
