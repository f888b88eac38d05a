//! Requests that come through rings: FUSE over `io_uring` (Linux 6.14, module
//! parameter `enable_uring` of fuse).
//!
//! Each processor has a queue in the kernel, and a thread here that stays on that processor. A request is
//! written into a slot of the thread, its answer into the same slot, and one system call gives the answer
//! and waits for the next request: nobody on another processor is woken (Documentation/filesystems/
//! fuse/fuse-io-uring.rst in the kernel's sources; libfuse's `lib/fuse_uring.c` does the same).
//! The way of a slot: kernel, [`worker`], [`crate::turns`], [`super::protocol`], an operation, [`outbox`], worker, kernel.
//!
//! The device stays: what the kernel wants to be forgotten comes through it, and what it is to forget goes.

mod outbox;
mod parameter;
mod slot;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use self::outbox::Outbox;
pub(crate) use self::parameter::enable;
pub use self::parameter::is_enabled;
use self::worker::Worker;
use super::dispatch::Operations;

/// Slots of the queues of processors that this process may run on, together. A request that waits for the
/// disk or for the remote keeps its slot, and with none left its queue stands still.
const SLOTS: usize = 1024;
/// Slots of one such queue.
const DEPTH_MIN: usize = 64;
const DEPTH_MAX: usize = 512;
/// Slots of the queue of any other processor: few programs run where this one may not.
const DEPTH_ELSEWHERE: usize = 4;

/// What a worker needs to begin.
type Begin = (Arc<OwnedFd>, Arc<Operations>);

/// Threads that have a ring each, and wait for the mount.
pub(super) struct Rings {
    workers: Vec<Prepared>,
}

struct Prepared {
    begin: Sender<Begin>,
    /// Says whether the kernel took the slots.
    registered: Receiver<io::Result<()>>,
    outbox: Arc<Outbox>,
    thread: JoinHandle<()>,
}

/// Rings of a mount. Dropped when the kernel has let the mount go.
pub(super) struct Running(Vec<Arc<Outbox>>);

impl Drop for Running {
    fn drop(&mut self) {
        for outbox in &self.0 {
            outbox.end();
        }
    }
}

/// A ring, and what wakes it.
const OPEN_FILES_OF_A_RING: u64 = 4;

/// A mount that nobody uses has some twenty files open, with a remote and those who ask for metrics twice as many.
pub const OPEN_FILES_MIN: u64 = 64;

impl Rings {
    /// Makes the rings. It must be known before the handshake whether that is possible: a kernel that was
    /// promised rings waits for them with every request.
    pub(super) fn prepare() -> io::Result<Rings> {
        let plan = plan()?;
        let open_files_max = kvfs_os::open_files_max()?;
        if open_files_max < OPEN_FILES_MIN + OPEN_FILES_OF_A_RING * plan.len() as u64 {
            return Err(io::Error::other(format!(
                "a process may have {open_files_max} files open (ulimit -n), too few for {} rings",
                plan.len()
            )));
        }
        let workers = plan.into_iter().map(|(processor, queues)| prepare(processor, queues));
        Ok(Rings { workers: workers.collect::<io::Result<_>>()? })
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.workers.len()
    }

    /// What ends them, once they have begun.
    pub(super) fn running(&self) -> Running {
        Running(self.workers.iter().map(|worker| Arc::clone(&worker.outbox)).collect())
    }

    /// Gives the slots to the kernel, which sends all requests through them from now on.
    pub(super) fn begin(
        self, device: &Arc<OwnedFd>, operations: &Arc<Operations>,
    ) -> io::Result<Vec<JoinHandle<()>>> {
        for worker in &self.workers {
            let _ = worker.begin.send((Arc::clone(device), Arc::clone(operations)));
        }
        let mut threads = Vec::new();
        for worker in self.workers {
            worker.registered.recv().map_err(|_| io::Error::other("a thread of rings ended"))??;
            threads.push(worker.thread);
        }
        Ok(threads)
    }
}

/// A processor, and the queues that its thread serves, with the slots of each.
type Queues = (usize, Vec<(u16, usize)>);

/// The kernel has a queue for each processor that there may ever be. Those that this process may run on
/// have a thread each, which serves the others' queues as well.
fn plan() -> io::Result<Vec<Queues>> {
    let queues =
        possible_processors(&std::fs::read_to_string("/sys/devices/system/cpu/possible")?)?;
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let is_allowed = |queue: u16| allowed.is_set(usize::from(queue)).unwrap_or(false);
    let here = (0..queues).filter(|queue| is_allowed(*queue));
    let depth = (SLOTS / here.clone().count().max(1)).clamp(DEPTH_MIN, DEPTH_MAX);
    let mut plan: Vec<Queues> =
        here.map(|queue| (usize::from(queue), vec![(queue, depth)])).collect();
    if plan.is_empty() {
        return Err(io::Error::other("no processor to run on"));
    }
    let threads = plan.len();
    for (number, queue) in (0..queues).filter(|queue| !is_allowed(*queue)).enumerate() {
        plan[number % threads].1.push((queue, DEPTH_ELSEWHERE));
    }
    Ok(plan)
}

/// How many processors `/sys/devices/system/cpu/possible` names: `0-7`, or `0,2-3`.
fn possible_processors(text: &str) -> io::Result<u16> {
    let invalid = || io::Error::other(format!("/sys/devices/system/cpu/possible: {text:?}"));
    let mut count = 0_u16;
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<u16>().map_err(|_| invalid());
        let length = number(last)?.checked_sub(number(first)?).ok_or_else(invalid)?;
        count =
            count.checked_add(length).and_then(|count| count.checked_add(1)).ok_or_else(invalid)?;
    }
    Ok(count)
}

/// Starts a thread that makes its ring and waits.
fn prepare(processor: usize, queues: Vec<(u16, usize)>) -> io::Result<Prepared> {
    let (begin, mount) = bounded::<Begin>(1);
    let (registration, registered) = bounded(1);
    let (ready, made) = bounded(1);
    let thread = std::thread::Builder::new().name(format!("kvfs-ring-{processor}"));
    let thread = thread.spawn(move || {
        let mut worker = match Worker::new(&queues) {
            Ok(worker) => worker,
            Err(error) => return drop(ready.send(Err(error))),
        };
        let _ = ready.send(Ok(worker.outbox()));
        let Ok((device, operations)) = mount.recv() else { return };
        stay_on(processor);
        let outcome = worker.register(&device);
        drop(device);
        let is_refused = outcome.is_err();
        let _ = registration.send(outcome);
        if is_refused {
            return;
        }
        if let Err(error) = worker.run(&operations) {
            // Whoever runs there would wait forever; a daemon that dies is replaced, and loses nothing.
            log::error!("the ring of processor {processor} broke, the daemon ends: {error}");
            std::process::abort();
        }
    })?;
    let outbox = made.recv().map_err(|_| io::Error::other("a thread of rings ended"))??;
    Ok(Prepared { begin, registered, outbox, thread })
}

/// Requests of a processor are served where they are made. Elsewhere they are served as well, later.
fn stay_on(processor: usize) {
    let mut here = CpuSet::new();
    if here.set(processor).and_then(|()| sched_setaffinity(Pid::from_raw(0), &here)).is_err() {
        log::debug!("a thread of rings runs anywhere");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-127", 128), ("0,2-3,8", 4)] {
            assert_eq!(possible_processors(list).expect(list), count, "{list}");
        }
        for list in ["", "a", "3-1", "0-", "0-70000"] {
            assert!(possible_processors(list).is_err(), "{list}");
        }
    }
}
