//! Answers in the kernel's structures.

use std::sync::Arc;
use std::time::Duration;

use fuser::{Errno, FopenFlags};
use zerocopy::{Immutable, IntoBytes};

use super::outbox::Outbox;
use super::slot::Slot;
use super::wire::{
    Attr, AttrOut, CreateOut, Dirent, EntryOut, GetXattrOut, LseekOut, OpenOut, StatfsOut, WriteOut,
};
use crate::answer::{
    Entry, ExtendedAttribute, Handle, Made, Position, Reply, ReplyBytes, ReplyListing, Shown,
    Written, time_to_live,
};
use crate::convert::BLOCK_BYTES;
use kvfs_fs::{Listed, Listing, NAME_BYTES_MAX};
use kvfs_storage::store::disk::Space;

/// Entries of a listing begin at multiples of this.
const ENTRY_ALIGNMENT: usize = 8;

/// A request and the way of its answer.
pub(super) struct Ticket {
    /// There until it is answered.
    slot: Option<Slot>,
    unique: u64,
    outbox: Arc<Outbox>,
}

impl Ticket {
    pub(super) fn new(slot: Slot, outbox: Arc<Outbox>) -> Ticket {
        Ticket { unique: slot.header().unique, slot: Some(slot), outbox }
    }

    /// The request; nothing once it is answered.
    pub(super) fn request(&self) -> Option<&Slot> {
        self.slot.as_ref()
    }

    fn finish(mut self, write: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) {
        if let Some(mut slot) = self.slot.take() {
            let outcome = write(slot.answer()).map_err(Errno::code);
            slot.finish(self.unique, outcome);
            self.outbox.put(slot);
        }
    }
}

impl Drop for Ticket {
    /// A request that nobody answered.
    fn drop(&mut self) {
        if let Some(mut slot) = self.slot.take() {
            slot.finish(self.unique, Err(libc::EIO));
            self.outbox.put(slot);
        }
    }
}

impl<Answer: Encode> Reply<Answer> for Ticket {
    fn send(self, outcome: Result<Answer, Errno>) {
        self.finish(|buffer| outcome.map(|answer| answer.encode(buffer)));
    }
}

impl ReplyBytes for Ticket {
    fn fill(self, length: usize, read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) {
        self.finish(|buffer| {
            let length = length.min(buffer.len());
            read(&mut buffer[..length])
        });
    }
}

/// An answer that is being written.
pub(super) struct Lines {
    ticket: Ticket,
    listing: Listing,
    /// Bytes that the reader has room for.
    room: usize,
    /// Bytes written.
    used: usize,
}

impl Lines {
    pub(super) fn new(ticket: Ticket, listing: Listing, room: u32) -> Lines {
        Lines { ticket, listing, room: room as usize, used: 0 }
    }
}

impl ReplyListing for Lines {
    fn add(&mut self, line: &Listed<'_>) -> bool {
        let Some(slot) = &mut self.ticket.slot else { return false };
        let buffer = slot.answer();
        let room = self.room.min(buffer.len());
        let Some(buffer) = buffer.get_mut(self.used..room) else { return false };
        let written = write_line(buffer, line, self.listing);
        self.used += written.unwrap_or(0);
        written.is_some()
    }

    fn send(self, outcome: Result<(), Errno>) {
        let used = self.used;
        self.ticket.finish(|_| outcome.map(|()| used));
    }
}

/// Writes a line with its padding; `None` if it has no room.
fn write_line(buffer: &mut [u8], line: &Listed<'_>, listing: Listing) -> Option<usize> {
    let entry = match listing {
        Listing::Names => None,
        Listing::Attributes => Some(entry_of_line(line)),
    };
    let entry = entry.as_ref().map_or(&[][..], IntoBytes::as_bytes);
    let dirent = Dirent {
        ino: line.inode.0,
        off: line.next_offset,
        namelen: u32::try_from(line.name.len()).ok()?,
        kind: line.file_type >> 12,
    };
    let parts = [entry, dirent.as_bytes(), line.name];
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let padded = length.next_multiple_of(ENTRY_ALIGNMENT);
    let buffer = buffer.get_mut(..padded)?;
    let mut at = 0;
    for part in parts {
        buffer[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    buffer[at..].fill(0);
    Some(padded)
}

/// `.` and `..` come without attributes, and as no inode: the kernel takes no reference to them.
fn entry_of_line(line: &Listed<'_>) -> EntryOut {
    match &line.attributes {
        Some(attributes) => {
            let holds = time_to_live(line.is_stable());
            encode_entry(&Entry::Present {
                shown: Shown { attributes: *attributes, holds },
                name_holds: holds,
            })
        }
        None => EntryOut {
            attr: Attr { ino: line.inode.0, mode: line.file_type, ..Attr::default() },
            ..EntryOut::default()
        },
    }
}

/// Writes an answer at the beginning of a buffer that has room for any; returns its length.
pub(super) trait Encode: Sized {
    fn encode(self, buffer: &mut [u8]) -> usize;
}

fn put(buffer: &mut [u8], structure: &(impl IntoBytes + Immutable)) -> usize {
    put_bytes(buffer, structure.as_bytes())
}

fn put_bytes(buffer: &mut [u8], bytes: &[u8]) -> usize {
    buffer[..bytes.len()].copy_from_slice(bytes);
    bytes.len()
}

impl Encode for () {
    fn encode(self, _buffer: &mut [u8]) -> usize {
        0
    }
}

impl Encode for Vec<u8> {
    fn encode(self, buffer: &mut [u8]) -> usize {
        put_bytes(buffer, &self)
    }
}

impl Encode for Shown {
    fn encode(self, buffer: &mut [u8]) -> usize {
        let (attr_valid, attr_valid_nsec) = split(self.holds);
        let attr = Attr::from(&self.attributes);
        put(buffer, &AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr })
    }
}

impl Encode for Entry {
    fn encode(self, buffer: &mut [u8]) -> usize {
        put(buffer, &encode_entry(&self))
    }
}

impl Encode for Handle {
    fn encode(self, buffer: &mut [u8]) -> usize {
        put(buffer, &encode_handle(&self))
    }
}

impl Encode for Made {
    fn encode(self, buffer: &mut [u8]) -> usize {
        let (entry, open) = (encode_entry(&self.entry), encode_handle(&self.handle));
        put(buffer, &CreateOut { entry, open })
    }
}

impl Encode for Written {
    fn encode(self, buffer: &mut [u8]) -> usize {
        put(buffer, &WriteOut { size: self.0, padding: 0 })
    }
}

impl Encode for Position {
    fn encode(self, buffer: &mut [u8]) -> usize {
        put(buffer, &LseekOut { offset: self.0 })
    }
}

impl Encode for ExtendedAttribute {
    fn encode(self, buffer: &mut [u8]) -> usize {
        match self {
            ExtendedAttribute::Length(size) => put(buffer, &GetXattrOut { size, padding: 0 }),
            ExtendedAttribute::Value(value) => value.encode(buffer),
        }
    }
}

impl Encode for Space {
    fn encode(self, buffer: &mut [u8]) -> usize {
        let out = StatfsOut {
            blocks: self.total_bytes / BLOCK_BYTES,
            bfree: self.free_bytes / BLOCK_BYTES,
            bavail: self.available_bytes / BLOCK_BYTES,
            files: self.inodes_total,
            ffree: self.inodes_free,
            bsize: 4096,
            namelen: u32::try_from(NAME_BYTES_MAX).unwrap_or(255),
            frsize: 4096,
            ..StatfsOut::default()
        };
        put(buffer, &out)
    }
}

fn encode_entry(entry: &Entry) -> EntryOut {
    match entry {
        Entry::Present { shown, name_holds } => {
            let (entry_valid, entry_valid_nsec) = split(*name_holds);
            let (attr_valid, attr_valid_nsec) = split(shown.holds);
            EntryOut {
                nodeid: shown.attributes.inode.0,
                generation: 0,
                entry_valid,
                attr_valid,
                entry_valid_nsec,
                attr_valid_nsec,
                attr: Attr::from(&shown.attributes),
            }
        }
        // Inode 0 tells the kernel to remember that the name is absent.
        Entry::Absent => {
            let (entry_valid, entry_valid_nsec) = split(time_to_live(true));
            EntryOut { entry_valid, entry_valid_nsec, ..EntryOut::default() }
        }
    }
}

fn encode_handle(handle: &Handle) -> OpenOut {
    let (flags, backing_id) = match &handle.backing {
        Some(backing) => (handle.flags | FopenFlags::FOPEN_PASSTHROUGH, backing.id()),
        None => (handle.flags, 0),
    };
    OpenOut { fh: handle.number, open_flags: flags.bits(), backing_id }
}

/// Seconds and nanoseconds.
fn split(duration: Duration) -> (u64, u32) {
    (duration.as_secs(), duration.subsec_nanos())
}
