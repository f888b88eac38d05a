//! Requests that come through rings: FUSE over `io_uring` (Linux 6.14, module
//! parameter `enable_uring` of fuse).
//!
//! Each processor has a queue in the kernel, and a thread here that stays on that processor. A request is
//! written into a slot of the thread, its answer into the same slot, and one system call gives the answer
//! and waits for the next request: nobody on another processor is woken (Documentation/filesystems/
//! fuse/fuse-io-uring.rst in the kernel's sources; libfuse's `lib/fuse_uring.c` does the same).
//! The way of a slot: kernel, [`worker`], [`crate::turns`], [`super::protocol`], an operation, [`outbox`], worker, kernel.
//! Before another program takes the process over, all workers come to [`rest`], and their [`slots`] hold what waits.
//!
//! The device stays: what the kernel wants to be forgotten comes through it, and what it is to forget goes.

mod outbox;
mod parameter;
mod processors;
mod rest;
mod slot;
mod slots;
mod worker;

use std::collections::BTreeMap;
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
use self::slot::Slot;
pub(super) use self::slots::Slots;
use self::worker::{Share, Source, Worker};
use super::dispatch::Operations;
use super::gate::Gate;
use kvfs_fs::takeover::LiveRings;
use kvfs_os::Piece;

/// Slots of the queues of processors that this process may run on, together. A request that waits for the
/// disk or for the remote keeps its slot, and with none left its queue stands still.
const SLOTS: usize = 1024;
/// Slots of one such queue.
const DEPTH_MIN: usize = 64;
const DEPTH_MAX: usize = 512;
/// Slots of the queue of any other processor: few programs run where this one may not.
const DEPTH_ELSEWHERE: usize = 4;

/// What a worker needs to begin.
type Begin = (Arc<OwnedFd>, Arc<Operations>, Arc<Gate>);

/// Threads that have a ring each, and wait for the mount.
pub(super) struct Rings {
    workers: Vec<Prepared>,
    slots: Arc<Slots>,
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
        let plan = plan(processors::possible_count()?, &allowed()?)?;
        let open_files_max = kvfs_os::open_files_max()?;
        if open_files_max < OPEN_FILES_MIN + OPEN_FILES_OF_A_RING * plan.len() as u64 {
            return Err(io::Error::other(format!(
                "a process may have {open_files_max} files open (ulimit -n), too few for {} rings",
                plan.len()
            )));
        }
        let queues: Vec<(usize, u16)> = plan
            .iter()
            .flat_map(|(processor, queues)| queues.iter().map(|queue| (*processor, *queue)))
            .flat_map(|(processor, (queue, depth))| std::iter::repeat_n((processor, queue), depth))
            .collect();
        let (slots, pieces) = Slots::new(queues.iter().map(|(_, queue)| *queue))?;
        Rings::start(slots, pieces, |number, _| (queues[number].0, false))
    }

    /// Makes rings that go on with the slots which another daemon has left.
    pub(super) fn take_over(left: &LiveRings) -> io::Result<Rings> {
        let (slots, pieces) = Slots::left(left)?;
        let allowed = allowed()?;
        let first = *allowed.first().ok_or_else(no_processor)?;
        Rings::start(slots, pieces, |number, queue| {
            let processor = if allowed.contains(&queue) { queue } else { first };
            (usize::from(processor), left.slots[number].is_holding)
        })
    }

    /// Starts a thread for each processor that serves a slot. Of each slot, which one is that, and does it hold a request?
    fn start(
        slots: Slots, pieces: Vec<Piece>, is_for: impl Fn(usize, u16) -> (usize, bool),
    ) -> io::Result<Rings> {
        let mut shares: BTreeMap<usize, Vec<(Slot, bool)>> = BTreeMap::new();
        for (number, (piece, queue)) in pieces.into_iter().zip(slots.queues()).enumerate() {
            let (processor, is_holding) = is_for(number, queue);
            let share = shares.entry(processor).or_default();
            share.push((Slot::new(share.len(), number, queue, piece), is_holding));
        }
        let slots = Arc::new(slots);
        let start_one = |(processor, own)| prepare(Share { processor, slots: own }, &slots);
        let workers = shares.into_iter().map(start_one).collect::<io::Result<_>>()?;
        Ok(Rings { workers, slots })
    }

    /// Their slots.
    pub(super) fn slots(&self) -> Arc<Slots> {
        Arc::clone(&self.slots)
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
        self, device: &Arc<OwnedFd>, operations: &Arc<Operations>, gate: &Arc<Gate>,
    ) -> io::Result<Vec<JoinHandle<()>>> {
        for worker in &self.workers {
            let begin = (Arc::clone(device), Arc::clone(operations), Arc::clone(gate));
            let _ = worker.begin.send(begin);
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
fn plan(possible: u16, allowed: &[u16]) -> io::Result<Vec<Queues>> {
    let here = (0..possible).filter(|queue| allowed.contains(queue));
    let depth = (SLOTS / here.clone().count().max(1)).clamp(DEPTH_MIN, DEPTH_MAX);
    let mut plan: Vec<Queues> =
        here.map(|queue| (usize::from(queue), vec![(queue, depth)])).collect();
    if plan.is_empty() {
        return Err(no_processor());
    }
    let threads = plan.len();
    let elsewhere = (0..possible).filter(|queue| !allowed.contains(queue));
    for (number, queue) in elsewhere.enumerate() {
        plan[number % threads].1.push((queue, DEPTH_ELSEWHERE));
    }
    Ok(plan)
}

fn no_processor() -> io::Error {
    io::Error::other("no processor to run on")
}

/// Processors that this process may run on.
fn allowed() -> io::Result<Vec<u16>> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let count = u16::try_from(CpuSet::count()).unwrap_or(u16::MAX);
    Ok((0..count).filter(|one| allowed.is_set(usize::from(*one)).unwrap_or(false)).collect())
}

/// Starts a thread that makes its ring and waits.
fn prepare(share: Share, slots: &Arc<Slots>) -> io::Result<Prepared> {
    let (slots, processor) = (Arc::clone(slots), share.processor);
    let (begin, mount) = bounded::<Begin>(1);
    let (registration, registered) = bounded(1);
    let (ready, made) = bounded(1);
    let thread = std::thread::Builder::new().name(format!("kvfs-ring-{processor}"));
    let thread = thread.spawn(move || {
        let mut worker = match Worker::new(share, slots) {
            Ok(worker) => worker,
            Err(error) => return drop(ready.send(Err(error))),
        };
        let _ = ready.send(Ok(worker.outbox()));
        let Ok((device, operations, gate)) = mount.recv() else { return };
        stay_on(processor);
        // Before the kernel has a slot, and before anybody can know that this mount serves.
        let reader = match worker.enter(&gate) {
            Ok(reader) => reader,
            Err(error) => return drop(registration.send(Err(error))),
        };
        let outcome = worker.register(&device);
        let is_refused = outcome.is_err();
        let _ = registration.send(outcome);
        if !is_refused {
            let source = Source { device: &device, gate: &gate, reader: &reader };
            if let Err(error) = worker.run(&operations, &source) {
                // Whoever runs there would wait forever; a daemon that dies is replaced, and loses nothing.
                log::error!("the ring of processor {processor} broke, the daemon ends: {error}");
                std::process::abort();
            }
        }
        gate.leave(&reader);
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
    fn each_processor_that_may_be_used_has_a_thread_and_each_queue_has_slots() {
        let plan_of = |possible, allowed: &[u16]| plan(possible, allowed).unwrap();
        assert_eq!(plan_of(2, &[0, 1]), [(0, vec![(0, 512)]), (1, vec![(1, 512)])]);
        assert_eq!(plan_of(4, &[2]), [(2, vec![(2, 512), (0, 4), (1, 4), (3, 4)])]);
        let many = plan_of(128, &(0..128).collect::<Vec<_>>());
        assert!(many.len() == 128 && many.iter().all(|(_, queues)| queues[0].1 == DEPTH_MIN));
        assert!(plan(2, &[]).is_err());
    }
}
