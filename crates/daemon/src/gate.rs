//! Whether requests are taken from the device.
//!
//! Shut, it lets the threads come to rest that read the device: those that wait in the kernel are woken, and what was
//! taken is answered. Requests that come meanwhile wait in the kernel, for this daemon or another one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvfs_os::Wakeable;

/// How often threads are woken that were about to wait when they were woken before.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Gate {
    is_shut: AtomicBool,
    threads: Mutex<Threads>,
    changed: Condvar,
    /// A copy for each request in hand.
    in_hand: Arc<()>,
}

#[derive(Debug, Default)]
struct Threads {
    all: Vec<Arc<Reader>>,
    at_rest: Vec<Wakeable>,
}

/// A thread that reads the device.
#[derive(Debug)]
pub(super) struct Reader {
    thread: Wakeable,
    /// It may wait in the kernel for a request: only then it is woken. What it does with a request may be a call that a
    /// signal ends, on a store of a network filesystem.
    is_reading: AtomicBool,
}

impl Reader {
    pub(super) fn thread(&self) -> Wakeable {
        self.thread
    }

    /// Calls `read`, which may be ended with EINTR.
    pub(super) fn read<T>(&self, read: impl FnOnce() -> T) -> T {
        self.is_reading.store(true, Ordering::SeqCst);
        let outcome = read();
        self.is_reading.store(false, Ordering::SeqCst);
        outcome
    }
}

/// A request in hand, until this is dropped.
#[derive(Debug)]
pub(super) struct InHand(#[expect(dead_code, reason = "it only counts")] Arc<()>);

/// A gate that is shut until this is dropped.
#[derive(Debug)]
pub(super) struct Shut<'a>(&'a Gate);

impl Gate {
    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The calling thread reads the device.
    pub(super) fn enter(&self) -> std::io::Result<Arc<Reader>> {
        let (thread, is_reading) = (Wakeable::this_thread()?, AtomicBool::new(false));
        let reader = Arc::new(Reader { thread, is_reading });
        self.threads().all.push(Arc::clone(&reader));
        Ok(reader)
    }

    /// It does not any more.
    pub(super) fn leave(&self, reader: &Reader) {
        self.threads().all.retain(|other| other.thread != reader.thread);
        self.changed.notify_all();
    }

    pub(super) fn is_shut(&self) -> bool {
        self.is_shut.load(Ordering::SeqCst)
    }

    /// Waits as long as the gate is shut; to be called before each read.
    pub(super) fn pass(&self, reader: &Reader) {
        if !self.is_shut() {
            return;
        }
        let mut threads = self.threads();
        threads.at_rest.push(reader.thread);
        self.changed.notify_all();
        while self.is_shut() {
            threads = self.changed.wait(threads).unwrap_or_else(PoisonError::into_inner);
        }
        threads.at_rest.retain(|other| *other != reader.thread);
    }

    /// A request was taken.
    pub(super) fn take(&self) -> InHand {
        InHand(Arc::clone(&self.in_hand))
    }

    /// Shuts, and waits until all that was taken is answered. `None`, and open again, if that takes longer than `patience`.
    pub(super) fn shut(&self, patience: Duration) -> Option<Shut<'_>> {
        let end = Instant::now() + patience;
        let shut = Shut(self);
        self.is_shut.store(true, Ordering::SeqCst);
        let mut threads = self.threads();
        loop {
            let Threads { all, at_rest } = &*threads;
            let mut awake = all.iter().filter(|one| !at_rest.contains(&one.thread)).peekable();
            if awake.peek().is_none() && Arc::strong_count(&self.in_hand) == 1 {
                return Some(shut);
            }
            if Instant::now() >= end {
                // Opening takes the lock.
                drop(threads);
                return None;
            }
            let reading = awake.filter(|one| one.is_reading.load(Ordering::SeqCst));
            reading.for_each(|one| one.thread.wake());
            let waited = self.changed.wait_timeout(threads, LOOK_INTERVAL);
            threads = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        let _threads = self.0.threads();
        self.0.is_shut.store(false, Ordering::SeqCst);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn it_shuts_when_threads_are_at_rest_and_requests_answered() {
        let gate = Arc::new(Gate::default());
        let (read_end, write_end) = nix::unistd::pipe().unwrap();
        let (told, heard) = crossbeam_channel::unbounded();
        let reading = std::thread::Builder::new().spawn({
            let gate = Arc::clone(&gate);
            move || {
                let reader = gate.enter().unwrap();
                loop {
                    gate.pass(&reader);
                    match reader.read(|| nix::unistd::read(&read_end, &mut [0; 8])) {
                        Err(nix::errno::Errno::EINTR) => {}
                        Ok(0) => return gate.leave(&reader),
                        outcome => told.send(outcome).unwrap(),
                    }
                }
            }
        });
        let reading = reading.unwrap();
        while gate.threads().all.is_empty() {
            std::thread::yield_now();
        }
        let taken = gate.take();
        assert!(gate.shut(SHORT).is_none(), "a request is in hand");
        drop(taken);
        let shut = gate.shut(LONG).unwrap();
        nix::unistd::write(&write_end, b"1").unwrap();
        assert!(heard.recv_timeout(SHORT).is_err(), "nobody reads");
        drop(shut);
        assert_eq!(heard.recv_timeout(LONG), Ok(Ok(1)));
        drop(write_end);
        reading.join().unwrap();
        assert!(gate.shut(SHORT).is_some(), "no thread is left");
    }
}
