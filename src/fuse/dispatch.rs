//! Where a request runs: at once, on the thread that it came in on, or beside it if it may wait.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::shared::Shared;
use super::slow::Job;
use crate::fs::Awaited;
use crate::store::record::InodeId;

/// What the kernel may ask for, whichever way its requests come.
pub(super) struct Operations {
    shared: Arc<Shared>,
    /// Takes what may wait for the disk; closed when the kernel has let the mount go.
    slow: Sender<Job>,
    /// Takes what waits for the remote.
    fetches: Sender<Job>,
}

impl Operations {
    pub(super) fn new(shared: Arc<Shared>, slow: Sender<Job>, fetches: Sender<Job>) -> Operations {
        Operations { shared, slow, fetches }
    }

    /// Runs what may wait for the remote: such operations keep each other waiting, and nobody else.
    pub(super) fn fetch(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        if self.fetches.try_send(Box::new(move || job(&shared))).is_err() {
            // A request that is dropped is answered with EIO.
            log::error!("too many files wait for the remote: a file was not opened");
        }
    }

    /// Runs what waits.
    pub(super) fn beside(&self, awaited: Awaited, job: impl FnOnce(&Shared) + Send + 'static) {
        match awaited {
            Awaited::Remote => self.fetch(job),
            Awaited::Local => self.later(job),
        }
    }

    /// Answers what looks names up in a directory: at once, unless that has to wait.
    pub(super) fn once_looked_up(
        &self, directory: InodeId, answer: impl FnOnce(&Shared) + Send + 'static,
    ) {
        match self.fs.look_up_waits(directory) {
            Some(awaited) => self.beside(awaited, answer),
            None => answer(self),
        }
    }

    /// Runs what may wait for the remote, if there is one, or for the disk.
    pub(super) fn aside(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        if self.fs.tiers().is_some() { self.fetch(job) } else { self.later(job) }
    }

    /// Runs what may wait for a commit, for the disk or for another request beside the requests:
    /// two clients that fsync must not keep everybody else from opening files.
    pub(super) fn later(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        if let Err(full) = self.slow.try_send(Box::new(move || job(&shared))) {
            full.into_inner()();
        }
    }
}

impl std::ops::Deref for Operations {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}
