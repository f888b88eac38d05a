//! Up to which change everything is durable, and whose turn it is to commit.
//!
//! One commit runs at a time. Who waits for one and finds its changes durable goes on at once: it does not wait for
//! the commit after that one, which others may have begun before it woke up. So as long as commits succeed nobody waits
//! for more than two of them, however many are asked for. After one that failed each tries for itself, to hear why.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// See the module. Generations are those of the metadata.
#[derive(Debug, Default)]
pub(crate) struct Durable {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// All up to this one is durable.
    generation: u64,
    is_committing: bool,
}

/// Nobody else commits until this is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a Durable);

impl Durable {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn to make a generation durable; `None` where another commit has made it so.
    pub(crate) fn begin(&self, generation: u64) -> Option<Turn<'_>> {
        self.wait_until(|progress| progress.generation >= generation)
    }

    /// Waits for the commit that runs, and keeps others from beginning.
    pub(crate) fn hold(&self) -> Turn<'_> {
        self.wait_until(|_| false).expect("nothing else ends the waiting")
    }

    fn wait_until(&self, is_over: impl Fn(&Progress) -> bool) -> Option<Turn<'_>> {
        let mut progress = self.progress();
        loop {
            if is_over(&progress) {
                return None;
            }
            if !progress.is_committing {
                progress.is_committing = true;
                return Some(Turn(self));
            }
            progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Turn<'_> {
    /// All up to this generation is durable.
    pub(crate) fn reach(self, generation: u64) {
        self.0.progress().generation = generation;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.progress().is_committing = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_waits_for_one_commit_does_not_wait_for_the_next() {
        let durable = Durable::default();
        let (told, heard) = crossbeam_channel::bounded(1);
        std::thread::scope(|scope| {
            let first = durable.begin(1).unwrap();
            let (durable, waiting) = (&durable, told);
            scope.spawn(move || waiting.send(durable.begin(1).is_none()).unwrap());
            assert!(
                heard.recv_timeout(Duration::from_millis(50)).is_err(),
                "it is not durable yet"
            );
            first.reach(1);
            let next = durable.begin(2).unwrap();
            assert_eq!(heard.recv_timeout(Duration::from_secs(20)), Ok(true));
            drop(next);
        });
        assert!(durable.begin(1).is_none());
    }

    #[test]
    fn after_a_commit_that_failed_the_next_one_tries() {
        let durable = Durable::default();
        let (told, heard) = crossbeam_channel::bounded(1);
        std::thread::scope(|scope| {
            let first = durable.begin(1).unwrap();
            let (durable, waiting) = (&durable, told);
            scope.spawn(move || waiting.send(durable.begin(1).is_some()).unwrap());
            assert!(heard.recv_timeout(Duration::from_millis(50)).is_err());
            drop(first);
            assert_eq!(heard.recv_timeout(Duration::from_secs(20)), Ok(true));
        });
        let held = durable.hold();
        drop(held);
        assert!(durable.begin(1).is_some());
    }
}
