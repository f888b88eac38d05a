//! All slots of a mount: the file in memory that they lie in, so that another program of the same process finds the
//! requests that they hold where the kernel knows them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvfs_fs::takeover::{FORMAT, LiveRings, LiveSlot};
use kvfs_os::{Piece, PieceFile};
use nix::errno::Errno;

use super::processors;
use super::slot::SLOT_BYTES;

/// Where slots are looked for room: far from where programs, their heaps and libraries lie, so that it is free in the next
/// program as well. The second one is for processors with addresses of 39 bits.
const ADDRESSES: [usize; 2] = [0x1000_0000_0000, 0x20_0000_0000];
/// Mounts that one process may have.
const MOUNTS_MAX: usize = 64;

// The next program goes on with slots as they are: where they have another size, it must refuse this format.
const _: () = assert!(FORMAT == 4 && SLOT_BYTES == 4096 + (1 << 20));

/// Set in the numbers of requests that the kernel is asked for: its own never come so far.
const RETRIEVED: u64 = 1 << 62;

/// See the module.
#[derive(Debug)]
pub(crate) struct Slots {
    memory: PieceFile,
    all: Vec<Known>,
    /// Requests that the kernel was asked for.
    retrieved: AtomicU64,
    /// Why the kernel did not fill slots when it was asked to.
    refusal: Mutex<Option<Errno>>,
}

#[derive(Debug)]
struct Known {
    /// The queue of the kernel that it serves: a processor's number.
    queue: u16,
    /// Where its worker came to rest last, a [`Whereabouts`].
    whereabouts: AtomicU8,
}

/// Who has a slot whose worker is at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Whereabouts {
    /// The kernel, which may give it a request at any time.
    Kernel,
    /// The worker, with a request that nobody has begun.
    Held,
    /// The worker, for good: the kernel has given it back.
    Ended,
}

impl Slots {
    /// Slots for these queues, and the memory of each, in the same order.
    pub(super) fn new(queues: impl Iterator<Item = u16>) -> io::Result<(Slots, Vec<Piece>)> {
        let all: Vec<Known> = queues.map(Known::new).collect();
        let bytes = all.len().saturating_mul(SLOT_BYTES);
        let addresses = ADDRESSES.into_iter().flat_map(|address| {
            (0..MOUNTS_MAX).map(move |number| address.saturating_add(number.saturating_mul(bytes)))
        });
        let (memory, pieces) = PieceFile::new(addresses, all.len(), SLOT_BYTES)?;
        let (retrieved, refusal) = (AtomicU64::default(), Mutex::default());
        Ok((Slots { memory, all, retrieved, refusal }, pieces))
    }

    /// Those that another daemon has left, with what is in them.
    pub(super) fn left(rings: &LiveRings) -> io::Result<(Slots, Vec<Piece>)> {
        let address = usize::try_from(rings.address).map_err(io::Error::other)?;
        let (memory, pieces) =
            PieceFile::left(rings.memory, address, rings.slots.len(), SLOT_BYTES)?;
        let all = rings.slots.iter().map(|slot| Known::new(slot.queue)).collect();
        let (retrieved, refusal) = (AtomicU64::new(rings.retrieved), Mutex::default());
        Ok((Slots { memory, all, retrieved, refusal }, pieces))
    }

    /// The queue of each.
    pub(super) fn queues(&self) -> Vec<u16> {
        self.all.iter().map(|known| known.queue).collect()
    }

    /// Notes who has one, as its worker comes to rest.
    pub(super) fn note(&self, number: usize, whereabouts: Whereabouts) {
        if let Some(known) = self.all.get(number) {
            known.whereabouts.store(whereabouts as u8, Ordering::Release);
        }
    }

    /// A number for a request that the kernel is asked for, which none before it has had. An odd one is that of an
    /// interrupted request.
    pub(super) fn next_retrieved(&self) -> u64 {
        let number = self.retrieved.fetch_add(1, Ordering::Relaxed);
        RETRIEVED | (number << 1) & (RETRIEVED - 1)
    }

    /// Notes that the kernel did not fill a slot.
    pub(super) fn note_refusal(&self, error: Errno) {
        *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// Why slots were not filled since this was asked last.
    pub(crate) fn take_refusal(&self) -> Option<Errno> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What another daemon goes on with, and the descriptor that must stay open until then. All workers are at rest.
    ///
    /// # Errors
    /// A line that says why requests would be lost.
    pub(crate) fn live(&self) -> Result<(LiveRings, OwnedFd), String> {
        let online = processors::online().map_err(|error| error.to_string())?;
        if self.all.iter().all(|known| known.is(Whereabouts::Ended)) {
            return Err("the mount has ended".to_owned());
        }
        // What the kernel still has would be given a request in the very moment at which this program ends.
        let is_open =
            |known: &&Known| known.is(Whereabouts::Kernel) && online.contains(&known.queue);
        if let Some(open) = self.all.iter().find(is_open) {
            return Err(format!(
                "programs may run on processor {}, and the daemon has no thread there, which io_uring needs for that",
                open.queue
            ));
        }
        let memory = self.memory.to_be_inherited().map_err(|error| error.to_string())?;
        let slot = |known: &Known| LiveSlot {
            queue: known.queue,
            is_holding: known.is(Whereabouts::Held),
        };
        let rings = LiveRings {
            memory: memory.as_raw_fd(),
            address: self.memory.address() as u64,
            slots: self.all.iter().map(slot).collect(),
            retrieved: self.retrieved.load(Ordering::Relaxed),
        };
        Ok((rings, memory))
    }
}

impl Known {
    fn new(queue: u16) -> Known {
        Known { queue, whereabouts: AtomicU8::new(Whereabouts::Kernel as u8) }
    }

    fn is(&self, whereabouts: Whereabouts) -> bool {
        self.whereabouts.load(Ordering::Acquire) == whereabouts as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_slot_holds_is_found_by_the_next_program() {
        let (slots, mut pieces) = Slots::new([0, 0, 0, 9999].into_iter()).unwrap();
        pieces[1].fill(7);
        assert!(slots.live().unwrap_err().contains("processor 0"), "the kernel has them");
        slots.note(0, Whereabouts::Held);
        slots.note(1, Whereabouts::Held);
        slots.note(2, Whereabouts::Ended);
        let numbers = [slots.next_retrieved(), slots.next_retrieved()];
        let (rings, descriptor) = slots.live().unwrap();
        // Another mount of this process lies elsewhere.
        let (other, _others) = Slots::new([0].into_iter()).unwrap();
        assert_ne!(other.memory.address(), slots.memory.address());
        drop((slots, pieces));
        std::mem::forget(descriptor);
        let (again, pieces) = Slots::left(&rings).unwrap();
        assert_eq!(again.queues(), [0, 0, 0, 9999]);
        let holding: Vec<bool> = rings.slots.iter().map(|slot| slot.is_holding).collect();
        assert_eq!(holding, [true, true, false, false]);
        assert_eq!((pieces[0][0], pieces[1][0], pieces[1].len()), (0, 7, SLOT_BYTES));
        assert_eq!(pieces[0].as_ptr().addr() as u64, rings.address);
        assert!(again.live().is_err(), "its workers have not come to rest yet");
        assert!(!numbers.contains(&again.next_retrieved()));
        assert!(numbers.iter().all(|number| number & (RETRIEVED | 1) == RETRIEVED));
    }

    #[test]
    fn a_mount_that_has_ended_is_left_to_nobody() {
        let (slots, _pieces) = Slots::new([0, 1].into_iter()).unwrap();
        (0..2).for_each(|number| slots.note(number, Whereabouts::Ended));
        assert_eq!(slots.live().unwrap_err(), "the mount has ended");
    }
}
