//! What would take too long on a thread that takes requests, and so runs beside it.
//!
//! Everybody who uses the mount waits for those threads. What reads, hashes or copies much of a file's
//! content, or waits for a commit, is told apart here before it begins; the bounds stand here alone.

use crate::attributes::Place;
use crate::classify::FileClass;
use crate::core::Core;
use crate::core::handle::Served;
use crate::core::node::ComingRelease;
use crate::core::pack::gets_small_files;
use crate::core::state::State;
use crate::publish::page_beside_tail;
use kvfs_page::PagePlace;
use kvfs_storage::store::record::{InodeId, Role};

/// Bytes that are read or copied where the request came in: it takes less time than another thread takes
/// to wake up.
pub(crate) const READ_AT_ONCE_BYTES: u64 = 256 << 10;

/// Bytes of a page that are hashed where the request came in: 4 MiB in the page cache take 85 to 200 us.
const SEAL_AT_ONCE_BYTES: u64 = 8 << 20;

/// Whether making a page of its rows takes longer than a request may: they are packed, written and hashed.
pub(crate) fn sealing_takes_long(page: &PagePlace) -> bool {
    let geometry = page.geometry();
    geometry.file_bytes(geometry.page_tokens()) > SEAL_AT_ONCE_BYTES
}

/// Whom an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Another request, which is on its way, or the disk.
    Local,
    /// The remote.
    Remote,
    /// Files of the store, which are read to find an answer.
    Reading,
    /// Pages that are sealed first: their bytes are hashed or copied.
    Sealing,
}

/// What requests wait for, as far as names, inodes and handles tell.
#[derive(Debug)]
pub struct Waits<'a> {
    core: &'a Core,
}

impl Core {
    /// Whether a request may work on the thread that took it.
    pub fn waits(&self) -> Waits<'_> {
        Waits { core: self }
    }
}

impl Waits<'_> {
    /// The kernel is about to write back what was changed through a mapping. Where that is the mapping's
    /// end, its release comes after the write is answered, and may be overtaken by a request that the
    /// same program makes next: whoever relies on it waits for it once more.
    pub fn note_written_back(&self, handle: u64) {
        let mut state = self.core.state();
        let State { handles, nodes, .. } = &mut *state;
        let inode = handles.get(&handle).map(|open| open.inode);
        if let Some(node) = inode.and_then(|inode| nodes.get_mut(&inode))
            && node.release == ComingRelease::Overdue
        {
            node.release = ComingRelease::BehindWriteBack;
        }
    }

    /// What a hard link of this file waits for: it may copy much of it.
    pub fn link(&self, id: InodeId) -> Option<Awaited> {
        let state = self.core.state();
        let inode = state.metadata.inode(id).ok().flatten();
        let role = inode.as_ref().and_then(|inode| inode.file()).map(|file| file.role);
        let copies = role.is_some_and(Role::is_append_only);
        (copies && self.size(&state, id) > READ_AT_ONCE_BYTES).then_some(Awaited::Sealing)
    }

    /// Whether a rename reads much of a file, to seal it, or copies it since somebody still writes to it; or
    /// waits for what is sealed before.
    pub fn rename_reads(&self, from: &Place, to: &Place) -> Option<Awaited> {
        if matches!(self.core.class_of(to), Ok((FileClass::Plain, _)) | Err(_)) {
            return self.replacing(to);
        }
        let reads_much = {
            let state = self.core.state();
            let entry = state.entry(from.parent, &from.name).ok().flatten()?;
            let has_writers = self.core.has_writers(&state, entry.inode);
            let at_once = if has_writers { READ_AT_ONCE_BYTES } else { SEAL_AT_ONCE_BYTES };
            self.size(&state, entry.inode) > at_once
        };
        let is_taken = reads_much || self.core.sealing_turns.is_taken(to);
        is_taken.then_some(Awaited::Sealing).or_else(|| self.making(to))
    }

    /// What removing a directory, or putting another in its place, waits for.
    pub fn replacing(&self, place: &Place) -> Option<Awaited> {
        let entry = self.core.state().entry(place.parent, &place.name).ok().flatten();
        let directory = entry.filter(|entry| entry.file_type == libc::S_IFDIR)?;
        self.listing(directory.inode)
    }

    /// What looking a name up waits for, if it is that of a page that was written in place.
    pub fn lookup(&self, place: &Place) -> Option<Awaited> {
        let state = self.core.state();
        let waiting = state.pending.get(place)?;
        self.sealing(&state, waiting.iter().copied())
            .or_else(|| self.core.sealing_turns.is_taken(place).then_some(Awaited::Sealing))
    }

    /// The same for what a new name depends on: on the manifest, and a tail on the page that begins where
    /// it does.
    pub fn making(&self, place: &Place) -> Option<Awaited> {
        let manifest = self.core.pending_manifest_above(place.parent);
        let mut pages = [manifest, page_beside_tail(place)].into_iter().flatten();
        pages.find_map(|page| self.lookup(&page))
    }

    /// Whether making a file waits for the disk, whose journal may be busy: unless it is in memory, or one was made
    /// ahead.
    pub fn creating(&self, place: &Place) -> bool {
        let class = self.core.class_of(place).map(|(class, _)| class);
        let is_appended = matches!(class, Ok(FileClass::Tail(_) | FileClass::Tokens));
        let has_file = || gets_small_files(self.core, place.parent) || self.core.spares.has_one();
        is_appended || !has_file()
    }

    /// The same for listing or removing a directory, where all that was written in it is sealed.
    pub fn listing(&self, directory: InodeId) -> Option<Awaited> {
        let state = self.core.state();
        let here = state.pending.iter().filter(|(place, _)| place.parent == directory);
        self.sealing(&state, here.flat_map(|(_, ids)| ids.iter().copied()))
    }

    /// What sealing some files that were written in place waits for: for descriptors that are being closed,
    /// or until much was read.
    fn sealing(
        &self, state: &State, ids: impl Iterator<Item = InodeId> + Clone,
    ) -> Option<Awaited> {
        let is_awaited = |id| {
            let node = state.nodes.get(&id);
            node.is_some_and(|node| self.core.releases.is_awaited(node, id))
        };
        // With passthrough a probe of the bytes tells who is left, and nobody is waited for.
        if !self.core.is_passthrough() && ids.clone().any(is_awaited) {
            return Some(Awaited::Local);
        }
        let bytes: u64 = ids.map(|id| self.size(state, id)).sum();
        (bytes > SEAL_AT_ONCE_BYTES).then_some(Awaited::Sealing)
    }

    /// What closing a handle, or its release, waits for: it may seal a page that was written in place.
    pub fn close(&self, handle: u64) -> Option<Awaited> {
        let (id, place) = {
            let state = self.core.state();
            let id = state.handles.get(&handle)?.inode;
            let place = state.nodes.get(&id)?.pending.as_deref().cloned()?;
            if self.size(&state, id) > SEAL_AT_ONCE_BYTES {
                return Some(Awaited::Sealing);
            }
            (id, place)
        };
        let manifest =
            self.core.pending_manifest_above(place.parent).filter(|above| *above != place);
        let above = manifest.and_then(|manifest| self.lookup(&manifest));
        // Its own release is what others wait for.
        let others = {
            let state = self.core.state();
            let ids = state.pending.get(&place).into_iter().flatten().copied();
            self.sealing(&state, ids.filter(|other| *other != id))
        };
        let turn = || self.core.sealing_turns.is_taken(&place).then_some(Awaited::Sealing);
        above.or(others).or_else(turn)
    }

    /// Whether closing a handle makes a sequence of what was written.
    pub fn close_saves(&self, handle: u64) -> bool {
        let state = self.core.state();
        let open = state.handles.get(&handle);
        open.is_some_and(|open| matches!(open.served, Served::SlotDraft(_)))
    }

    fn size(&self, state: &State, id: InodeId) -> u64 {
        state.attributes(&self.core.store, id).map_or(0, |shown| shown.size)
    }
}

#[cfg(test)]
mod tests;
