//! A thread with a ring: takes requests from the kernel, and gives answers back.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use zerocopy::IntoBytes;

use super::outbox::{InSlot, Outbox};
use super::slot::Slot;
use super::slots::Slots;
use crate::dispatch::Operations;
use crate::gate::{Gate, Reader};
use crate::held::take_held;
use crate::protocol::wire::{COMMIT_AND_FETCH, REGISTER, RingCommand};
use crate::protocol::{Ticket, answer, take};
use crate::turns::{Turns, User};

/// Submissions that wait for the kernel to look at them. It looks whenever the worker waits.
const SUBMISSIONS: u32 = 64;
/// Stands for the bell among the numbers of slots.
const BELL: u64 = u64::MAX;
/// How long to wait for memory.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);
/// The connection to the kernel among the ring's files.
const DEVICE: types::Fixed = types::Fixed(0);

/// What a worker begins with: the slots of the queues that it serves, and whether each holds a request.
pub(super) struct Share {
    /// The processor that it stays on.
    pub(super) processor: usize,
    pub(super) slots: Vec<(Slot, bool)>,
}

/// The connection to the kernel, and whether requests are taken from it.
pub(super) struct Source<'a> {
    pub(super) device: &'a OwnedFd,
    pub(super) gate: &'a Gate,
    pub(super) reader: &'a Reader,
}

/// A ring and the slots of the queues that it serves.
pub(super) struct Worker {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    pub(super) processor: usize,
    pub(super) slots: Arc<Slots>,
    /// The place among all slots of the mount of each of this worker's.
    pub(super) numbers: Vec<usize>,
    /// By their index; those that the kernel has.
    pub(super) in_kernel: Vec<Option<Slot>>,
    /// By their index; those that the kernel has given back for good.
    pub(super) ended: Vec<bool>,
    /// Of the slots that the kernel has, those that it was asked to fill.
    pub(super) asked_back: usize,
    outbox: Arc<Outbox>,
    answers: Receiver<Slot>,
    /// What the kernel said: a slot's number, and a request (0) or an error.
    completed: VecDeque<(u64, i32)>,
    /// Requests that have not been served.
    pub(super) turns: Turns<Slot>,
}

impl Worker {
    /// A ring of the calling thread.
    pub(super) fn new(share: Share, slots: Arc<Slots>) -> io::Result<Worker> {
        let Share { processor, slots: own } = share;
        let count = own.len();
        // One completion for each slot, and the bell.
        let completions = u32::try_from(count + 1).unwrap_or(u32::MAX).next_power_of_two();
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            // Whoever submits while requests wait learns of others that came meanwhile.
            .setup_taskrun_flag()
            .setup_cqsize(completions.max(SUBMISSIONS))
            .build(SUBMISSIONS)?;
        let numbers = own.iter().map(|(slot, _)| slot.number).collect();
        let (mut in_kernel, mut turns) = (Vec::with_capacity(count), Turns::default());
        for (slot, is_holding) in own {
            in_kernel.push(if is_holding {
                turns.put(User::of(&slot.header()), slot);
                None
            } else {
                Some(slot)
            });
        }
        let (outbox, answers) = Outbox::new(count)?;
        Ok(Worker {
            ring,
            processor,
            slots,
            numbers,
            in_kernel,
            ended: vec![false; count],
            asked_back: 0,
            outbox: Arc::new(outbox),
            answers,
            completed: VecDeque::new(),
            turns,
        })
    }

    pub(super) fn outbox(&self) -> Arc<Outbox> {
        Arc::clone(&self.outbox)
    }

    /// Gives the kernel all slots that hold no request. Once every queue has one, it sends requests.
    pub(super) fn register(&mut self, device: &OwnedFd) -> io::Result<()> {
        self.ring.submitter().register_files(&[device.as_raw_fd()])?;
        for index in 0..self.in_kernel.len() {
            let Some(slot) = &mut self.in_kernel[index] else { continue };
            // The kernel reads the vectors as it takes the submission.
            let vectors = slot.vectors();
            let entry = command(REGISTER, slot, Some(&vectors));
            self.push(&entry)?;
            self.submit(0)?;
        }
        self.watch_bell()?;
        self.submit(0)?;
        // Requests come as soon as each queue has a slot, and so may the end of the mount.
        let refused = self.completed.iter().map(|(_, result)| -result);
        let refused = refused.into_iter().find(|error| *error > 0 && !has_ended(*error));
        refused.map_or(Ok(()), |error| Err(io::Error::from_raw_os_error(error)))
    }

    /// The calling thread takes requests of this ring from now on, or holds some already.
    pub(super) fn enter(&self, gate: &Gate) -> io::Result<Arc<Reader>> {
        let outbox = self.outbox();
        gate.enter_called_by(move || outbox.ring_bell())
    }

    /// Serves requests until the mount ends.
    pub(super) fn run(&mut self, operations: &Operations, source: &Source<'_>) -> io::Result<()> {
        loop {
            self.sort_completed()?;
            if source.gate.is_shut() {
                self.come_to_rest(source)?;
                continue;
            }
            self.asked_back = 0;
            if let Some((user, slot)) = self.turns.take() {
                self.serve(slot, operations);
                self.turns.charge(user, take_held());
            }
            self.give_back()?;
            let is_idle = self.turns.is_empty();
            if is_idle && self.outbox.is_over() && self.in_kernel.iter().all(Option::is_none) {
                return Ok(());
            }
            // Nobody waits for what is done for somebody else.
            self.submit(usize::from(is_idle && self.completed.is_empty()))?;
        }
    }

    /// Takes note of what the kernel said.
    pub(super) fn sort_completed(&mut self) -> io::Result<()> {
        while let Some((number, result)) = self.completed.pop_front() {
            if number == BELL {
                self.outbox.hear();
                self.watch_bell()?;
                continue;
            }
            let Ok(index) = usize::try_from(number) else { continue };
            let slot = self.in_kernel.get_mut(index).and_then(Option::take);
            let Some(slot) = slot else { continue };
            if usize::from(slot.queue) == self.processor {
                self.asked_back = self.asked_back.saturating_sub(1);
            }
            if result == 0 {
                self.turns.put(User::of(&slot.header()), slot);
                continue;
            }
            // The slot comes back for good.
            self.ended[index] = true;
            if !has_ended(-result) {
                log::error!("a request was lost: {}", io::Error::from_raw_os_error(-result));
            }
        }
        Ok(())
    }

    fn serve(&self, slot: Slot, operations: &Operations) {
        let ticket = Ticket::new(InSlot::new(slot, Arc::clone(&self.outbox)));
        // A fault of ours in one request must not stop all of a processor. Who sent it gets EIO.
        let served = catch_unwind(AssertUnwindSafe(|| {
            let Some(slot) = ticket.way().map(InSlot::slot) else { return };
            let (header, call) = (slot.header(), take(operations, &slot.request()));
            answer(operations, &header, call, ticket);
        }));
        if served.is_err() {
            log::error!("a request was not answered: an operation panicked");
        }
    }

    /// Lets the kernel look at the submissions, waits for so many completions, and takes what there is.
    pub(super) fn submit(&mut self, wanted: usize) -> io::Result<()> {
        match self.ring.submit_and_wait(wanted) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                // The kernel has no memory at the moment.
                std::thread::sleep(SHORTAGE_PAUSE);
            }
            outcome => drop(outcome?),
        }
        let completed = self.ring.completion();
        self.completed.extend(completed.map(|entry| (entry.user_data(), entry.result())));
        Ok(())
    }

    /// Gives what was answered to the kernel.
    pub(super) fn give_back(&mut self) -> io::Result<()> {
        while let Ok(slot) = self.answers.try_recv() {
            let entry = command(COMMIT_AND_FETCH, &slot, None);
            let index = slot.index;
            self.in_kernel[index] = Some(slot);
            self.push(&entry)?;
        }
        Ok(())
    }

    fn watch_bell(&mut self) -> io::Result<()> {
        let bell = types::Fd(self.outbox.bell().as_raw_fd());
        let events = u32::from(libc::POLLIN.cast_unsigned());
        self.push(&opcode::PollAdd::new(bell, events).build().user_data(BELL).into())
    }

    /// Puts a submission into the ring, which the kernel looks at with the next call.
    fn push(&mut self, entry: &Entry128) -> io::Result<()> {
        loop {
            // SAFETY: what an entry refers to is a slot, which stays where it is while the kernel has it.
            let pushed = unsafe { self.ring.submission().push(entry) };
            if pushed.is_ok() {
                return Ok(());
            }
            self.submit(0)?;
        }
    }
}

impl Drop for Worker {
    /// The kernel may still write to slots that it has where this ends early.
    fn drop(&mut self) {
        for slot in self.in_kernel.iter_mut().filter_map(Option::take) {
            std::mem::forget(slot);
        }
    }
}

/// Whether an error says that the mount has ended.
fn has_ended(error: i32) -> bool {
    matches!(error, libc::ENOTCONN | libc::ECONNABORTED)
}

/// A submission of a slot.
fn command(number: u32, slot: &Slot, vectors: Option<&[libc::iovec; 2]>) -> Entry128 {
    /// Where a submission has the number of its vectors, in words. `io-uring` has no name for it.
    const LENGTH: usize = 6;
    /// Header and payload.
    const VECTORS: u32 = 2;
    let mut area = [0; 80];
    let body =
        RingCommand { commit_id: slot.commit_id(), qid: slot.queue, ..RingCommand::default() };
    area[..size_of::<RingCommand>()].copy_from_slice(body.as_bytes());
    let address = vectors.map(|vectors| vectors.as_ptr() as u64);
    let entry = opcode::UringCmd80::new(DEVICE, number).cmd(area).addr(address).build();
    let entry = entry.user_data(slot.index as u64);
    // SAFETY: the kernel's structure of 128 bytes, all of which the builder has set.
    let mut words: [u32; 32] = unsafe { std::mem::transmute(entry) };
    words[LENGTH] = if vectors.is_some() { VECTORS } else { 0 };
    // SAFETY: the same structure, with another number in one field.
    unsafe { std::mem::transmute(words) }
}
