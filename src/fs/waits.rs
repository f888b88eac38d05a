//! What would take too long on a thread that takes requests, and so runs beside it.
//!
//! Everybody who uses the mount waits for those threads. What reads, hashes or copies much of a file's
//! content, or waits for a commit, is told apart here before it begins; the bounds stand here alone.

use super::attributes::Place;
use super::classify::FileClass;
use super::handle::Served;
use super::state::State;
use super::{CHANGES_BYTES_MAX, CHANGES_MAX, FileSystem};
use crate::store::record::{InodeId, Role};

/// Bytes that are read or copied where the request came in: it takes less time than another thread takes
/// to wake up.
pub(super) const READ_AT_ONCE_BYTES: u64 = 256 << 10;

/// Bytes of a page that are hashed where the request came in: 4 MiB in the page cache take 85 to 200 us.
const SEAL_AT_ONCE_BYTES: u64 = 8 << 20;

/// Changes that may still come between a look at what waits for a commit and the change itself.
const CHANGES_MARGIN: usize = 2048;

impl FileSystem {
    /// Whether a change has to wait for a commit first.
    pub fn is_behind(&self) -> bool {
        let metadata = &self.state().metadata;
        metadata.uncommitted() >= CHANGES_MAX - CHANGES_MARGIN
            || metadata.uncommitted_bytes() >= CHANGES_BYTES_MAX / 2
    }

    /// Whether a hard link of this file copies much of it.
    pub fn link_copies_much(&self, id: InodeId) -> bool {
        let state = self.state();
        let inode = state.metadata.inode(id).ok().flatten();
        let role = inode.as_ref().and_then(|inode| inode.file()).map(|file| file.role);
        role.is_some_and(Role::is_append_only) && self.size(&state, id) > READ_AT_ONCE_BYTES
    }

    /// Whether a rename reads much of a file, to seal it, or copies it since somebody still writes to it.
    pub fn rename_reads_much(&self, from: &Place, to: &Place) -> bool {
        if matches!(self.class_of(to), Ok((FileClass::Plain, _)) | Err(_)) {
            return self.replaced_seals_much(to);
        }
        let state = self.state();
        let Ok(Some(entry)) = state.entry(from.parent, &from.name) else { return false };
        let has_writers = self.has_writers(&state, entry.inode);
        let at_once = if has_writers { READ_AT_ONCE_BYTES } else { SEAL_AT_ONCE_BYTES };
        self.size(&state, entry.inode) > at_once
    }

    /// Whether removing a directory, or putting another in its place, seals much that was written in it.
    pub fn replaced_seals_much(&self, place: &Place) -> bool {
        let entry = self.state().entry(place.parent, &place.name).ok().flatten();
        entry.is_some_and(|entry| {
            entry.file_type == libc::S_IFDIR && self.seals_much_in(entry.inode)
        })
    }

    /// Whether looking a name up seals a large page that was written in place.
    pub fn lookup_seals_much(&self, place: &Place) -> bool {
        let state = self.state();
        let waiting = state.pending.get(place);
        waiting.is_some_and(|ids| ids.iter().any(|id| self.size(&state, *id) > SEAL_AT_ONCE_BYTES))
    }

    /// Whether listing or removing a directory seals much that was written in it.
    pub fn seals_much_in(&self, directory: InodeId) -> bool {
        let state = self.state();
        let here = state.pending.iter().filter(|(place, _)| place.parent == directory);
        let ids = here.flat_map(|(_, ids)| ids);
        ids.map(|id| self.size(&state, *id)).sum::<u64>() > SEAL_AT_ONCE_BYTES
    }

    /// Whether closing a handle, or its release, reads much of a page that was written in place.
    pub fn close_reads_much(&self, handle: u64) -> bool {
        let state = self.state();
        let Some(id) = state.handles.get(&handle).map(|handle| handle.inode) else { return false };
        let is_pending = state.nodes.get(&id).is_some_and(|node| node.pending.is_some());
        is_pending && self.size(&state, id) > SEAL_AT_ONCE_BYTES
    }

    /// Whether closing a handle makes a sequence of what was written.
    pub fn close_saves(&self, handle: u64) -> bool {
        let state = self.state();
        let open = state.handles.get(&handle);
        open.is_some_and(|open| matches!(open.served, Served::SlotDraft(_)))
    }

    fn size(&self, state: &State, id: InodeId) -> u64 {
        state.attributes(&self.store, id).map_or(0, |shown| shown.size)
    }
}
