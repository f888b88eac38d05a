//! What would take too long on a thread that takes requests, and so runs beside it.
//!
//! Everybody who uses the mount waits for those threads. What reads, hashes or copies much of a file's
//! content, or waits for a commit, is told apart here before it begins; the bounds stand here alone.

use super::FileSystem;
use super::attributes::Place;
use super::classify::FileClass;
use super::handle::Served;
use super::publish::page_beside_tail;
use super::settle::Awaited;
use super::state::State;
use kvfs_page::PagePlace;
use kvfs_storage::store::record::{InodeId, Role};

/// Bytes that are read or copied where the request came in: it takes less time than another thread takes
/// to wake up.
pub(super) const READ_AT_ONCE_BYTES: u64 = 256 << 10;

/// Bytes of a page that are hashed where the request came in: 4 MiB in the page cache take 85 to 200 us.
const SEAL_AT_ONCE_BYTES: u64 = 8 << 20;

/// Whether making a page of its rows takes longer than a request may: they are packed, written and hashed.
pub(super) fn sealing_takes_long(page: &PagePlace) -> bool {
    let geometry = page.geometry();
    geometry.file_bytes(geometry.page_tokens()) > SEAL_AT_ONCE_BYTES
}

impl FileSystem {
    /// Whether a hard link of this file copies much of it.
    pub fn link_copies_much(&self, id: InodeId) -> bool {
        let state = self.state();
        let inode = state.metadata.inode(id).ok().flatten();
        let role = inode.as_ref().and_then(|inode| inode.file()).map(|file| file.role);
        role.is_some_and(Role::is_append_only) && self.size(&state, id) > READ_AT_ONCE_BYTES
    }

    /// Whether a rename reads much of a file, to seal it, or copies it since somebody still writes to it; or
    /// waits for what is sealed before.
    pub fn rename_reads(&self, from: &Place, to: &Place) -> Option<Awaited> {
        if matches!(self.class_of(to), Ok((FileClass::Plain, _)) | Err(_)) {
            return self.replacing_waits(to);
        }
        let reads_much = {
            let state = self.state();
            let entry = state.entry(from.parent, &from.name).ok().flatten()?;
            let has_writers = self.has_writers(&state, entry.inode);
            let at_once = if has_writers { READ_AT_ONCE_BYTES } else { SEAL_AT_ONCE_BYTES };
            self.size(&state, entry.inode) > at_once
        };
        let is_taken = reads_much || self.sealing_turns.is_taken(to);
        is_taken.then_some(Awaited::Sealing).or_else(|| self.making_waits(to))
    }

    /// What removing a directory, or putting another in its place, waits for.
    pub fn replacing_waits(&self, place: &Place) -> Option<Awaited> {
        let entry = self.state().entry(place.parent, &place.name).ok().flatten();
        let directory = entry.filter(|entry| entry.file_type == libc::S_IFDIR)?;
        self.listing_waits(directory.inode)
    }

    /// What looking a name up waits for, if it is that of a page that was written in place.
    pub fn lookup_waits(&self, place: &Place) -> Option<Awaited> {
        let state = self.state();
        let waiting = state.pending.get(place)?;
        self.sealing_waits(&state, waiting.iter().copied())
            .or_else(|| self.sealing_turns.is_taken(place).then_some(Awaited::Sealing))
    }

    /// The same for what a new name depends on: on the manifest, and a tail on the page that begins where
    /// it does.
    pub fn making_waits(&self, place: &Place) -> Option<Awaited> {
        let manifest = self.pending_manifest_above(place.parent);
        let mut pages = [manifest, page_beside_tail(place)].into_iter().flatten();
        pages.find_map(|page| self.lookup_waits(&page))
    }

    /// The same for listing or removing a directory, where all that was written in it is sealed.
    pub fn listing_waits(&self, directory: InodeId) -> Option<Awaited> {
        let state = self.state();
        let here = state.pending.iter().filter(|(place, _)| place.parent == directory);
        self.sealing_waits(&state, here.flat_map(|(_, ids)| ids.iter().copied()))
    }

    /// What sealing some files that were written in place waits for: for descriptors that are being closed,
    /// or until much was read.
    fn sealing_waits(
        &self, state: &State, ids: impl Iterator<Item = InodeId> + Clone,
    ) -> Option<Awaited> {
        let is_awaited = |id| {
            let node = state.nodes.get(&id);
            node.is_some_and(|node| {
                node.is_being_released() || node.is_closed_only() && self.releases.is_in_hand(id)
            })
        };
        // With passthrough a probe of the bytes tells who is left, and nobody is waited for.
        if !self.is_passthrough() && ids.clone().any(is_awaited) {
            return Some(Awaited::Local);
        }
        let bytes: u64 = ids.map(|id| self.size(state, id)).sum();
        (bytes > SEAL_AT_ONCE_BYTES).then_some(Awaited::Sealing)
    }

    /// What closing a handle, or its release, waits for: it may seal a page that was written in place.
    pub fn close_waits(&self, handle: u64) -> Option<Awaited> {
        let (id, place) = {
            let state = self.state();
            let id = state.handles.get(&handle)?.inode;
            let place = state.nodes.get(&id)?.pending.as_deref().cloned()?;
            if self.size(&state, id) > SEAL_AT_ONCE_BYTES {
                return Some(Awaited::Sealing);
            }
            (id, place)
        };
        let manifest = self.pending_manifest_above(place.parent).filter(|above| *above != place);
        let above = manifest.and_then(|manifest| self.lookup_waits(&manifest));
        // Its own release is what others wait for.
        let others = {
            let state = self.state();
            let ids = state.pending.get(&place).into_iter().flatten().copied();
            self.sealing_waits(&state, ids.filter(|other| *other != id))
        };
        let turn = || self.sealing_turns.is_taken(&place).then_some(Awaited::Sealing);
        above.or(others).or_else(turn)
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
