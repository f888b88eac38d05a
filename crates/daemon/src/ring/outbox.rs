//! Where answers wait for the worker, which alone may talk to its ring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use crossbeam_channel::{Receiver, Sender, bounded};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::slot::Slot;
use crate::protocol::Way;

/// Answers on their way. As many fit as there are slots, so that nobody ever waits here.
pub(super) struct Outbox {
    answers: Sender<Slot>,
    /// Wakes the worker for an answer of another thread.
    bell: EventFd,
    worker: ThreadId,
    is_over: AtomicBool,
}

impl Outbox {
    /// The outbox of the calling thread.
    pub(super) fn new(slots: usize) -> io::Result<(Outbox, Receiver<Slot>)> {
        let (answers, receiver) = bounded(slots);
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let worker = std::thread::current().id();
        Ok((Outbox { answers, bell, worker, is_over: AtomicBool::new(false) }, receiver))
    }

    /// Hands an answer over. Where the worker has ended, the kernel waits for none.
    pub(super) fn put(&self, slot: Slot) {
        let _ = self.answers.try_send(slot);
        if std::thread::current().id() != self.worker {
            self.ring_bell();
        }
    }

    /// Tells the worker that the mount has ended.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.ring_bell();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// What can be polled for a bell that was rung.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Takes note of the bell.
    pub(super) fn hear(&self) {
        // EAGAIN: somebody else has.
        let _ = self.bell.read();
    }

    /// Has the worker look around, at once or when it would wait next.
    pub(super) fn ring_bell(&self) {
        // It fails only where it has been rung 2^64 times.
        let _ = self.bell.write(1);
    }
}

/// A request in a slot, into which its answer goes.
pub(super) struct InSlot {
    slot: Slot,
    unique: u64,
    outbox: Arc<Outbox>,
}

impl InSlot {
    pub(super) fn new(slot: Slot, outbox: Arc<Outbox>) -> InSlot {
        InSlot { unique: slot.header().unique, slot, outbox }
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.slot
    }
}

impl Way for InSlot {
    fn room(&mut self, length: usize) -> &mut [u8] {
        let room = self.slot.answer();
        let length = length.min(room.len());
        &mut room[..length]
    }

    fn finish(mut self, outcome: Result<usize, i32>) {
        self.slot.finish(self.unique, outcome);
        self.outbox.put(self.slot);
    }

    fn send(mut self, bytes: &[u8]) {
        self.slot.answer()[..bytes.len()].copy_from_slice(bytes);
        self.finish(Ok(bytes.len()));
    }
}
