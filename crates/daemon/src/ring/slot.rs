//! Memory that the kernel puts one request into, and finds the answer in.

use kvfs_os::Piece;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::device::WRITE_BYTES_MAX;
use crate::protocol::Request;
use crate::protocol::wire::{
    HEADER_BYTES, IN_OUT_OFFSET, InHeader, OPERATION_OFFSET, OutHeader, RING_OFFSET, RingInOut,
};

/// What follows the header begins on an OS page of its own.
const PAYLOAD_OFFSET: usize = 4096;
/// As large as the largest request (`fuse_uring_create` in `fs/fuse/dev_uring.c` asks for it). Memory is taken
/// when it is touched, which takes reads and writes that the daemon serves.
const PAYLOAD_BYTES: usize = WRITE_BYTES_MAX as usize;
/// Of each slot. Another program goes on with slots as they are: other sizes are another `takeover::FORMAT`.
pub(super) const SLOT_BYTES: usize = PAYLOAD_OFFSET + PAYLOAD_BYTES;

/// One request at a time. Whoever has the slot has the memory: the kernel, the worker or an answer that
/// is on its way.
#[derive(Debug)]
pub(super) struct Slot {
    /// Its place among those of a worker.
    pub(super) index: usize,
    /// Its place among all of the mount.
    pub(super) number: usize,
    /// The queue of the kernel that it serves: a processor's number.
    pub(super) queue: u16,
    memory: Piece,
}

impl Slot {
    pub(super) fn new(index: usize, number: usize, queue: u16, memory: Piece) -> Slot {
        Slot { index, number, queue, memory }
    }

    /// Addresses and lengths of the header and of what follows it, as the kernel takes them.
    pub(super) fn vectors(&mut self) -> [libc::iovec; 2] {
        let (header, payload) = self.memory.split_at_mut(PAYLOAD_OFFSET);
        [
            libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: HEADER_BYTES },
            libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() },
        ]
    }

    fn structure<T: FromBytes>(&self, offset: usize) -> T {
        match T::read_from_prefix(&self.memory[offset..PAYLOAD_OFFSET]) {
            Ok((structure, _)) => structure,
            // The header's OS page is longer than any of them.
            Err(_) => T::new_zeroed(),
        }
    }

    /// What every request begins with.
    pub(super) fn header(&self) -> InHeader {
        self.structure(IN_OUT_OFFSET)
    }

    /// The request in it.
    pub(super) fn request(&self) -> Request<'_> {
        let structure = &self.memory[OPERATION_OFFSET..RING_OFFSET];
        Request { header: self.header(), structure, payload: self.payload() }
    }

    /// The kernel's number for this request, which the answer gives back.
    pub(super) fn commit_id(&self) -> u64 {
        self.structure::<RingInOut>(RING_OFFSET).commit_id
    }

    /// What follows the structure: names, or bytes that are written.
    fn payload(&self) -> &[u8] {
        let length = self.structure::<RingInOut>(RING_OFFSET).payload_sz as usize;
        &self.memory[PAYLOAD_OFFSET..PAYLOAD_OFFSET + length.min(PAYLOAD_BYTES)]
    }

    /// Where the answer goes.
    pub(super) fn answer(&mut self) -> &mut [u8] {
        &mut self.memory[PAYLOAD_OFFSET..]
    }

    /// Ends the answer: `length` bytes of it, or an error number.
    pub(super) fn finish(&mut self, unique: u64, outcome: Result<usize, i32>) {
        let length = u32::try_from(outcome.unwrap_or(0)).unwrap_or(0);
        let error = outcome.err().map_or(0, |error| -error);
        self.put(IN_OUT_OFFSET, &OutHeader { len: length, error, unique });
        let ring = RingInOut { payload_sz: length, ..self.structure(RING_OFFSET) };
        self.put(RING_OFFSET, &ring);
    }

    fn put(&mut self, offset: usize, structure: &(impl IntoBytes + Immutable)) {
        let bytes = structure.as_bytes();
        self.memory[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}
