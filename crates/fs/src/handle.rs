//! What is open, and who moves its bytes.

use std::sync::Arc;

use super::prefixes::{Draft, OpenSlot, Query, SlotDraft};
use kvfs_storage::store::disk::DiskFile;
use kvfs_storage::store::record::InodeId;

/// An open file.
#[derive(Debug)]
pub(crate) struct Handle {
    /// The inode.
    pub(crate) inode: InodeId,
    /// Opened for writing.
    pub(crate) writes: bool,
    /// A descriptor of it was closed.
    pub(crate) flushed: bool,
    /// A program runs from it.
    pub(crate) executes: bool,
    /// How its bytes are served.
    pub(crate) served: Served,
}

impl Handle {
    /// A handle that nobody has closed yet.
    pub(crate) fn new(inode: InodeId, writes: bool, served: Served) -> Handle {
        Handle { inode, writes, flushed: false, executes: false, served }
    }
}

/// Who moves the bytes of a handle.
#[derive(Clone, Debug)]
pub(crate) enum Served {
    /// The kernel.
    Passthrough,
    /// The daemon, from a resident file.
    File(Arc<dyn DiskFile>),
    /// The daemon; writes append.
    Append(Arc<dyn DiskFile>),
    /// The daemon, from a text made at open.
    Text(Arc<[u8]>),
    /// The daemon, which answers what was written.
    Query(Arc<Query>),
    /// The daemon, which registers at close what was written.
    Draft(Arc<Draft>),
    /// The daemon, from the pages of a sequence, or the kernel, from a file in memory.
    Slot(Arc<OpenSlot>),
    /// The daemon, which makes a sequence at close of what was written.
    SlotDraft(Arc<SlotDraft>),
}
