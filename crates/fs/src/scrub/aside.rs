//! Reading and hashing on threads that get only what others leave of the processor and the disk. Such a thread may not run
//! for seconds where an engine keeps all processors busy, so it must never hold a lock: it takes jobs from one that may.

use std::io;
use std::thread::{Builder, Scope};

use crossbeam_channel::{Receiver, Sender, bounded};
use kvfs_os::Share;

use super::read::Reader;

/// What a reader is to find a checksum of.
type Job<'a> = Box<dyn FnOnce(&mut Reader<'_>) -> io::Result<[u8; 16]> + Send + 'a>;

/// A reader with a thread of its own, for one thread that asks it. It ends when this is dropped.
pub(super) struct Aside<'a> {
    jobs: Sender<Job<'a>>,
    /// With the bytes that were read for it.
    found: Receiver<(io::Result<[u8; 16]>, u64)>,
    count: u64,
}

impl<'a> Aside<'a> {
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>, mut reader: Reader<'a>,
    ) -> io::Result<Aside<'a>>
    where
        'a: 'scope,
    {
        // One job at a time: whoever gives it waits for it.
        let (jobs, given) = bounded::<Job<'a>>(1);
        let (answers, found) = bounded(1);
        let read = move || {
            Share::Leftovers.take();
            for job in given {
                let outcome = job(&mut reader);
                if answers.send((outcome, reader.take_count())).is_err() {
                    return;
                }
            }
        };
        Builder::new().name("kvfs-scrub-read".to_owned()).spawn_scoped(scope, read)?;
        Ok(Aside { jobs, found, count: 0 })
    }

    /// Has a job done, and waits for it.
    pub(super) fn read(
        &mut self, job: impl FnOnce(&mut Reader<'_>) -> io::Result<[u8; 16]> + Send + 'a,
    ) -> io::Result<[u8; 16]> {
        let panicked = || io::Error::other("the thread that reads for a scrub panicked");
        self.jobs.send(Box::new(job)).map_err(|_| panicked())?;
        let (outcome, count) = self.found.recv().map_err(|_| panicked())?;
        self.count += count;
        outcome
    }

    /// Bytes read since the last call.
    pub(super) fn take_count(&mut self) -> u64 {
        std::mem::take(&mut self.count)
    }
}
