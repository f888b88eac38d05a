//! A worker comes to rest: every slot of its processor's queue holds a request that nobody has begun.
//!
//! A slot that the kernel has is given a request at any moment, and what it is given while this program ends is lost to
//! its client. There is no way to ask for a slot back. So the kernel is asked for something that it answers with a request
//! of its own (`FUSE_NOTIFY_RETRIEVE`, of no bytes), once for each slot: then it has none left, and what clients ask for
//! waits in its queue. These requests are answered with nothing when requests are served again, by this program or the
//! next one.

use std::io;
use std::os::fd::OwnedFd;

use super::slots::Whereabouts;
use super::worker::{Source, Worker};
use crate::notify::retrieve_nothing;
use kvfs_fs::takeover::ASKED_THROUGH;

impl Worker {
    /// One step towards rest, and the rest itself, which ends when the gate is open. To be called as long as it is shut.
    pub(super) fn come_to_rest(&mut self, source: &Source<'_>) -> io::Result<()> {
        self.give_back()?;
        // What was answered is available to the kernel from here on.
        self.submit(0)?;
        self.sort_completed()?;
        if self.holds_all() {
            self.note_held();
            source.gate.pass(source.reader);
            return Ok(());
        }
        self.ask_back(source.device);
        // A request, an answer of another thread, or the bell for a gate that is open again.
        self.submit(1)
    }

    /// Whether this thread runs where the requests of its queue are made: it can empty no other.
    fn is_at_home(&self) -> bool {
        nix::sched::sched_getcpu().is_ok_and(|here| here == self.processor)
    }

    /// Nothing is served or answered, and the kernel has no slot of this processor's queue.
    fn holds_all(&self) -> bool {
        let in_kernel = self.in_kernel.iter().flatten().count();
        let ended = self.ended.iter().filter(|ended| **ended).count();
        let is_served = self.turns.len() + in_kernel + ended < self.in_kernel.len();
        !is_served && (!self.is_at_home() || self.in_kernel_here() == 0)
    }

    /// Slots of this processor's queue that the kernel has.
    fn in_kernel_here(&self) -> usize {
        let slots = self.in_kernel.iter().flatten();
        slots.filter(|slot| usize::from(slot.queue) == self.processor).count()
    }

    fn note_held(&self) {
        for (index, number) in self.numbers.iter().enumerate() {
            let whereabouts = match &self.in_kernel[index] {
                Some(_) => Whereabouts::Kernel,
                None if self.ended[index] => Whereabouts::Ended,
                None => Whereabouts::Held,
            };
            self.slots.note(*number, whereabouts);
        }
    }

    /// Has the kernel fill the slots that it has. Each request that comes meanwhile takes one of them as well.
    fn ask_back(&mut self, device: &OwnedFd) {
        let wanted = self.in_kernel_here();
        while self.is_at_home() && self.asked_back < wanted {
            if let Err(error) = retrieve_nothing(device, ASKED_THROUGH, self.slots.next_retrieved())
            {
                // It is asked again when the gate calls the next time.
                return self.slots.note_refusal(error);
            }
            self.asked_back += 1;
        }
    }
}
