//! What is open, and who moves its bytes.

use std::sync::Arc;

use crate::FsError;
use crate::batch::Batch;
use crate::core::Core;
use crate::dialogue::Dialogue;
use crate::history::History;
use crate::prefixes::{Draft, OpenSlot, Query, SlotDraft};
use kvfs_storage::store::disk::{Access, DiskFile};
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
    /// The daemon, which makes lines of what happened as they are read.
    History(Arc<History>),
    /// The daemon, which answers what was written.
    Query(Arc<Query>),
    /// The daemon, which answers questions about many names.
    Batch(Arc<Batch>),
    /// The daemon, which carries out what was written.
    Settings(Arc<Dialogue>),
    /// The daemon, which registers at close what was written.
    Draft(Arc<Draft>),
    /// The daemon, from the pages of a sequence, or the kernel, from a file in memory.
    Slot(Arc<OpenSlot>),
    /// The daemon, which makes a sequence at close of what was written.
    SlotDraft(Arc<SlotDraft>),
    /// Nobody any more of what was open for writing when another daemon died; this daemon what was open for reading, from
    /// the file that has its bytes, if any is left.
    Before(Option<Arc<dyn DiskFile>>),
}

impl Served {
    /// Whether the daemon serves it from a resident file.
    pub(crate) fn is_file(&self) -> bool {
        matches!(self, Served::File(_))
    }
}

impl Core {
    pub(crate) fn served(&self, handle: u64) -> Result<(InodeId, bool, Served), FsError> {
        let state = self.state();
        let open = state.handles.get(&handle).ok_or(FsError::BadHandle)?;
        Ok((open.inode, open.writes, open.served.clone()))
    }

    /// Whether the kernel holds a backing file for a handle.
    pub fn is_backed(&self, handle: u64) -> bool {
        let state = self.state();
        let open = state.handles.get(&handle);
        open.is_some_and(|open| match &open.served {
            Served::Passthrough => true,
            Served::Slot(slot) => slot.file().is_some(),
            _ => false,
        })
    }

    /// The file that holds the current bytes of an inode.
    pub(crate) fn open_current(
        &self, id: InodeId, access: Access,
    ) -> Result<Arc<dyn DiskFile>, FsError> {
        let object = {
            let state = self.state();
            let inode = state.inode(id)?;
            let file = inode.file().ok_or(FsError::Invalid)?;
            state.current_object(id, file).ok_or(FsError::Stale)?
        };
        Ok(Arc::from(self.store.open_object(object, access)?))
    }

    /// Whether writes through a handle append: the kernel does not sync them.
    pub fn appends(&self, handle: u64) -> bool {
        let state = self.state();
        let open = state.handles.get(&handle);
        open.is_some_and(|open| matches!(open.served, crate::core::handle::Served::Append(_)))
    }
}
