//! What requests are answered with, whichever way the answers take.

use std::sync::Arc;
use std::time::Duration;

use fuser::{Errno, FopenFlags};

use super::passthrough::Backing;
use kvfs_fs::{Attributes, Found, Listed, Lookup};
use kvfs_storage::store::record::InodeId;

/// The kernel may believe what it was told until it changes it itself or is told otherwise.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// Long enough for who makes a file to write, close and rename it without a question after each
/// step; the kernel itself notes what its writes change. Only what a mapping writes is told so much later.
const NEW: Duration = Duration::from_millis(100);

/// The way of one answer to the kernel. One that is dropped without an answer answers EIO.
pub(super) trait Reply<Answer>: Send + Sized + 'static {
    /// Answers.
    fn send(self, outcome: Result<Answer, Errno>);
}

/// The way of bytes that are read.
pub(super) trait ReplyBytes: Send + 'static {
    /// Answers with what `read` puts into a buffer of `length` bytes; it returns how many those are.
    fn fill(self, length: usize, read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>);
}

/// The way of a listing.
pub(super) trait ReplyListing: Send + 'static {
    /// Adds a line; false if there was no room for it.
    fn add(&mut self, line: &Listed<'_>) -> bool;
    /// Answers with what was added.
    fn send(self, outcome: Result<(), Errno>);
}

/// How long the kernel may cache.
pub(super) fn time_to_live(is_stable: bool) -> Duration {
    if is_stable { LONG } else { Duration::ZERO }
}

/// Attributes, and how long they hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shown {
    pub(super) attributes: Attributes,
    pub(super) holds: Duration,
}

impl From<Attributes> for Shown {
    fn from(attributes: Attributes) -> Shown {
        Shown { holds: time_to_live(attributes.is_at_rest), attributes }
    }
}

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry {
    /// A file or directory, and how long the name holds.
    Present { shown: Shown, name_holds: Duration },
    /// Nothing; the kernel may remember that.
    Absent,
}

impl Entry {
    /// What is there.
    pub(super) fn inode(&self) -> Option<InodeId> {
        match self {
            Entry::Present { shown, .. } => Some(shown.attributes.inode),
            Entry::Absent => None,
        }
    }

    /// Of a name that was looked up.
    pub(super) fn of_lookup(lookup: Lookup) -> Result<Entry, Errno> {
        match lookup {
            Lookup::Found(found) => Ok(found.into()),
            Lookup::Absent { stable: true } => Ok(Entry::Absent),
            Lookup::Absent { stable: false } => Err(Errno::ENOENT),
        }
    }

    /// Of a file that was just made.
    pub(super) fn of_new(found: &Found) -> Entry {
        let holds = if found.name_is_stable { NEW } else { Duration::ZERO };
        Entry::Present { shown: Shown { attributes: found.attributes, holds }, name_holds: holds }
    }
}

impl From<Found> for Entry {
    fn from(found: Found) -> Entry {
        let name_holds = time_to_live(found.name_is_stable);
        Entry::Present { shown: found.attributes.into(), name_holds }
    }
}

/// An open file.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) number: u64,
    pub(super) flags: FopenFlags,
    /// The file that the kernel itself reads and writes.
    pub(super) backing: Option<Arc<Backing>>,
}

/// A file that was made and opened.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) entry: Entry,
    pub(super) handle: Handle,
}

/// How many bytes were written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written(pub(super) u32);

impl Written {
    /// All of these bytes, which came in one request.
    pub(super) fn all(bytes: &[u8]) -> Written {
        Written(u32::try_from(bytes.len()).unwrap_or(u32::MAX))
    }
}

/// A position in a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position(pub(super) u64);

/// An extended attribute, or the list of their names.
#[derive(Debug)]
pub(super) enum ExtendedAttribute {
    /// Its length in bytes.
    Length(u32),
    Value(Vec<u8>),
}

impl ExtendedAttribute {
    /// getxattr and listxattr answer the length when asked with a buffer of none.
    pub(super) fn new(value: Vec<u8>, buffer_bytes: u32) -> Result<ExtendedAttribute, Errno> {
        if buffer_bytes == 0 {
            let length = u32::try_from(value.len()).unwrap_or(u32::MAX);
            return Ok(ExtendedAttribute::Length(length));
        }
        if value.len() > buffer_bytes as usize {
            return Err(Errno::ERANGE);
        }
        Ok(ExtendedAttribute::Value(value))
    }
}
