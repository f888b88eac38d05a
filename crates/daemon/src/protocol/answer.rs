//! Answers in the kernel's structures.

use std::time::Duration;

use fuser::{Errno, FopenFlags};
use zerocopy::IntoBytes;

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

/// The way back of one request.
pub(crate) trait Way: Send + 'static {
    /// Memory for an answer of at most `length` bytes, less where the kernel has less.
    fn room(&mut self, length: usize) -> &mut [u8];

    /// Ends the answer: so many bytes of the room, or an error number.
    fn finish(self, outcome: Result<usize, i32>);

    /// Answers with these bytes.
    fn send(self, bytes: &[u8]);
}

/// A request that is to be answered. One that is dropped is answered with EIO.
pub(crate) struct Ticket<W: Way> {
    /// There until it is answered.
    way: Option<W>,
}

impl<W: Way> Ticket<W> {
    pub(crate) fn new(way: W) -> Ticket<W> {
        Ticket { way: Some(way) }
    }

    /// The way back; nothing once it is answered.
    pub(crate) fn way(&self) -> Option<&W> {
        self.way.as_ref()
    }

    fn finish(mut self, write: impl FnOnce(&mut W) -> Result<usize, Errno>) {
        if let Some(mut way) = self.way.take() {
            let outcome = write(&mut way).map_err(Errno::code);
            way.finish(outcome);
        }
    }
}

impl<W: Way> Drop for Ticket<W> {
    /// A request that nobody answered.
    fn drop(&mut self) {
        if let Some(way) = self.way.take() {
            way.finish(Err(libc::EIO));
        }
    }
}

impl<Answer: Encode, W: Way> Reply<Answer> for Ticket<W> {
    fn send(mut self, outcome: Result<Answer, Errno>) {
        let Some(way) = self.way.take() else { return };
        match outcome {
            Ok(answer) => answer.encode(|bytes| way.send(bytes)),
            Err(error) => way.finish(Err(error.code())),
        }
    }
}

impl<W: Way> ReplyBytes for Ticket<W> {
    fn fill(self, length: usize, read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) {
        self.finish(|way| read(way.room(length)));
    }
}

/// An answer that is being written.
pub(super) struct Lines<W: Way> {
    ticket: Ticket<W>,
    listing: Listing,
    /// Bytes that the reader has room for.
    room: usize,
    /// Bytes written.
    used: usize,
}

impl<W: Way> Lines<W> {
    pub(super) fn new(ticket: Ticket<W>, listing: Listing, room: u32) -> Lines<W> {
        Lines { ticket, listing, room: room as usize, used: 0 }
    }
}

impl<W: Way> ReplyListing for Lines<W> {
    fn add(&mut self, line: &Listed<'_>) -> bool {
        let Some(way) = &mut self.ticket.way else { return false };
        let Some(buffer) = way.room(self.room).get_mut(self.used..) else { return false };
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

/// An answer in the kernel's structures.
pub(crate) trait Encode: Sized {
    /// Hands the bytes over.
    fn encode(self, send: impl FnOnce(&[u8]));
}

impl Encode for () {
    fn encode(self, send: impl FnOnce(&[u8])) {
        send(&[]);
    }
}

impl Encode for Vec<u8> {
    fn encode(self, send: impl FnOnce(&[u8])) {
        send(&self);
    }
}

impl Encode for Shown {
    fn encode(self, send: impl FnOnce(&[u8])) {
        let (attr_valid, attr_valid_nsec) = split(self.holds);
        let attr = Attr::from(&self.attributes);
        send(AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr }.as_bytes());
    }
}

impl Encode for Entry {
    fn encode(self, send: impl FnOnce(&[u8])) {
        send(encode_entry(&self).as_bytes());
    }
}

impl Encode for Handle {
    fn encode(self, send: impl FnOnce(&[u8])) {
        send(encode_handle(&self).as_bytes());
    }
}

impl Encode for Made {
    fn encode(self, send: impl FnOnce(&[u8])) {
        let (entry, open) = (encode_entry(&self.entry), encode_handle(&self.handle));
        send(CreateOut { entry, open }.as_bytes());
    }
}

impl Encode for Written {
    fn encode(self, send: impl FnOnce(&[u8])) {
        send(WriteOut { size: self.0, padding: 0 }.as_bytes());
    }
}

impl Encode for Position {
    fn encode(self, send: impl FnOnce(&[u8])) {
        send(LseekOut { offset: self.0 }.as_bytes());
    }
}

impl Encode for ExtendedAttribute {
    fn encode(self, send: impl FnOnce(&[u8])) {
        match self {
            ExtendedAttribute::Length(size) => send(GetXattrOut { size, padding: 0 }.as_bytes()),
            ExtendedAttribute::Value(value) => send(&value),
        }
    }
}

impl Encode for Space {
    fn encode(self, send: impl FnOnce(&[u8])) {
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
        send(out.as_bytes());
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
