//! Whether requests are taken from the kernel.
//!
//! Shut, it lets the threads come to rest that take them: those that wait in the kernel are woken, and what was
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

/// A thread that takes requests.
#[derive(Debug)]
pub(super) struct Reader {
    thread: Wakeable,
    caller: Caller,
}

/// How a thread that waits in the kernel is called.
enum Caller {
    /// By a signal, while this is so. What it does with a request may be a call that a signal ends, on a store of a
    /// network filesystem.
    Signal(AtomicBool),
    /// In a way of its own, which it notices also if it begins to wait later.
    Own(Box<dyn Fn() + Send + Sync>),
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Caller::Signal(_) => "Signal",
            Caller::Own(_) => "Own",
        })
    }
}

impl Reader {
    pub(super) fn thread(&self) -> Wakeable {
        self.thread
    }

    /// Calls `read`, which may be ended with EINTR.
    pub(super) fn read<T>(&self, read: impl FnOnce() -> T) -> T {
        let Caller::Signal(is_reading) = &self.caller else { return read() };
        is_reading.store(true, Ordering::SeqCst);
        let outcome = read();
        is_reading.store(false, Ordering::SeqCst);
        outcome
    }

    /// Has it look whether the gate is shut.
    fn call(&self) {
        match &self.caller {
            Caller::Signal(is_reading) if is_reading.load(Ordering::SeqCst) => self.thread.wake(),
            Caller::Signal(_) => {}
            Caller::Own(call) => call(),
        }
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

    /// The calling thread takes requests with [`Reader::read`].
    pub(super) fn enter(&self) -> std::io::Result<Arc<Reader>> {
        self.enter_with(Caller::Signal(AtomicBool::new(false)))
    }

    /// The calling thread takes requests; `call` has it look whether the gate is shut, or open again.
    pub(super) fn enter_called_by(
        &self, call: impl Fn() + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Reader>> {
        self.enter_with(Caller::Own(Box::new(call)))
    }

    fn enter_with(&self, caller: Caller) -> std::io::Result<Arc<Reader>> {
        let reader = Arc::new(Reader { thread: Wakeable::this_thread()?, caller });
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
            awake.for_each(|one| one.call());
            let waited = self.changed.wait_timeout(threads, LOOK_INTERVAL);
            threads = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        let threads = self.0.threads();
        self.0.is_shut.store(false, Ordering::SeqCst);
        self.0.changed.notify_all();
        // Who was not at rest yet may wait for that, with requests that it holds.
        let own = threads.all.iter().filter(|one| matches!(one.caller, Caller::Own(_)));
        own.for_each(|one| one.call());
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

    #[test]
    fn who_has_a_way_of_its_own_is_called_when_it_shuts_and_when_it_opens() {
        let gate = Arc::new(Gate::default());
        let (call, called) = crossbeam_channel::unbounded::<()>();
        let (told, heard) = crossbeam_channel::unbounded();
        let taking = std::thread::Builder::new().spawn({
            let gate = Arc::clone(&gate);
            move || {
                let reader = gate.enter_called_by(move || _ = call.send(())).unwrap();
                told.send(gate.is_shut()).unwrap();
                while called.recv_timeout(LONG).is_ok() {
                    told.send(gate.is_shut()).unwrap();
                    if gate.is_shut() {
                        continue;
                    }
                    return gate.leave(&reader);
                }
            }
        });
        assert_eq!(heard.recv_timeout(LONG), Ok(false));
        assert!(gate.shut(SHORT).is_none(), "it does not come to rest");
        taking.unwrap().join().unwrap();
        let told: Vec<bool> = heard.try_iter().collect();
        assert!(told.contains(&true) && told.last() == Some(&false), "{told:?}");
    }
}
