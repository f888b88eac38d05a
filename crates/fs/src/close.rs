//! Descriptors are closed, and synced: what their handles leave behind.

use std::sync::Arc;

use super::attributes::Place;
use super::classify::FileClass;
use super::prefixes::{SlotSaving, register_block};
use super::publish::Publishing;
use super::{FileSystem, FsError, Invalidation, held_back};
use crate::core::handle::Served;
use crate::core::node::{ComingRelease, Node};
use crate::core::recalled;
use crate::core::settle::awaits_rename;
use crate::core::stale::let_go_if_stale;
use crate::core::state::State;
use crate::core::waits::Awaited;
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::record::{InodeId, Role};
use kvfs_storage::tier::counters::Tier;

impl FileSystem {
    /// `close()` on some descriptor of a handle. It answers for pages only, and changes nothing:
    /// it also comes from descriptors that dup and fork made.
    pub fn flush(&self, handle: u64) -> Result<(), FsError> {
        let (id, place, object) = {
            let mut state = self.core.state();
            let State { handles, nodes, unsettled, .. } = &mut *state;
            let open = handles.get_mut(&handle).ok_or(FsError::BadHandle)?;
            if let Served::Draft(draft) = &open.served {
                let draft = Arc::clone(draft);
                drop(state);
                return register_block(self, &draft);
            }
            if let Served::SlotDraft(draft) = &open.served {
                let draft = Arc::clone(draft);
                drop(state);
                return SlotSaving::of(self).import(&draft);
            }
            let Some(node) = nodes.get_mut(&open.inode) else {
                return Ok(());
            };
            if open.writes {
                node.writers_flushed += u32::from(!open.flushed);
                node.release = ComingRelease::Soon;
                node.is_closed_anew = true;
                open.flushed = true;
            }
            if matches!(open.served, Served::Before(_)) {
                return if open.writes { Err(FsError::Lost) } else { Ok(()) };
            }
            match (node.pending.clone(), unsettled.get(open.inode)) {
                (Some(place), Some(object)) => (open.inode, place, *object),
                _ => return Ok(()),
            }
        };
        self.publishing().check(id, &place, object)
    }

    /// The last descriptor of a handle is gone.
    pub fn release(&self, handle: u64) -> Result<(), FsError> {
        self.publishing().release(handle)
    }

    /// Whom a rename of this file may have to wait for: its release, which the same thread would
    /// receive, or the remote.
    pub fn rename_waits(&self, from: &Place, to: &Place) -> Option<Awaited> {
        let state = self.core.state();
        let entry = state.entry(from.parent, &from.name).ok().flatten()?;
        let is_released = state.nodes.get(&entry.inode).is_none_or(Node::all_released);
        let is_awaited = state.unsettled.contains_key(entry.inode) && !is_released;
        let inode = state.inode(entry.inode).ok()?;
        // What was sealed keeps its meaning, or is refused; an ordinary name needs no bytes.
        let is_plain = inode.file().is_some_and(|file| file.role == Role::Plain);
        let becomes_another = || !matches!(self.core.class_of(to), Ok((FileClass::Plain, _)));
        drop(state);
        match self.residency().comes_from(entry.inode).filter(|_| is_plain && becomes_another()) {
            Some(Tier::Remote) => return Some(Awaited::Remote),
            Some(_) => return Some(Awaited::Local),
            None => {}
        }
        is_awaited.then_some(Awaited::Local)
    }

    /// fsync: what was written so far, the file's name and attributes survive a crash.
    pub fn sync_file(&self, handle: u64) -> Result<(), FsError> {
        if self.core.store.is_read_only() {
            return Ok(());
        }
        let (synced, writes, served) = self.core.served(handle)?;
        if writes && matches!(served, Served::Before(_)) {
            return Err(FsError::Lost);
        }
        drop(served);
        recalled::tell_loss(&self.core, synced)?;
        {
            let mut state = self.core.state_to_change()?;
            let Some(open) = state.handles.get(&handle) else {
                return Err(FsError::BadHandle);
            };
            let id = open.inode;
            // A handle that is synced is not about to be released.
            if let Some(node) = state.nodes.get_mut(&id)
                && node.release == ComingRelease::BehindWriteBack
            {
                node.release = ComingRelease::Overdue;
            }
            let Some(mut inode) = state.metadata.inode(id)? else {
                return Ok(());
            };
            let object = inode.file().and_then(|file| state.current_object(id, file));
            let nameless =
                inode.links == 0 || state.nodes.get(&id).is_some_and(|node| node.pending.is_some());
            match object {
                // Its bytes are those of a page by now, which the commit makes durable.
                None => {}
                Some(object) if nameless => {
                    if let Some(node) = state.nodes.get_mut(&id) {
                        node.wanted.is_synced = true;
                    }
                    drop(state);
                    self.core.store.open_object(object, Access::Read)?.sync()?;
                }
                Some(object) => {
                    state.expose(id, &mut inode)?;
                    state.metadata.publish(object);
                }
            }
        }
        held_back::make_all_durable(self)
    }
}

/// fsync of a directory: all changes survive a crash.
///
/// # Errors
/// Changes of it were lost with a daemon that died, and those of a commit.
pub fn sync_directory(fs: &FileSystem, id: InodeId) -> Result<(), FsError> {
    recalled::tell_loss(&fs.core, id)?;
    held_back::make_all_durable(fs)
}

impl Publishing<'_> {
    /// The last descriptor of a handle is gone.
    pub(super) fn release(&self, handle: u64) -> Result<(), FsError> {
        let mut state = self.core.state();
        let Some(closed) = state.handles.remove(&handle) else {
            return Err(FsError::BadHandle);
        };
        let id = closed.inode;
        let was_file = closed.served.is_file();
        if matches!(closed.served, Served::Before(_)) {
            // Nobody may know it any more, and a file that it was opened with by another daemon is let go then.
            self.core.invalidate(Invalidation::Names(id));
        }
        // The file must be closed before the probe, or the daemon sees itself as a writer.
        drop(closed.served);
        let is_awaited = state.waiting_for_release > 0;
        let Some(node) = state.nodes.get_mut(&id) else {
            return Ok(());
        };
        node.served -= u32::from(was_file);
        if closed.writes {
            node.writers -= 1;
            node.writers_flushed -= u32::from(closed.flushed);
            node.release = ComingRelease::Soon;
            node.is_closed_anew = true;
            if is_awaited {
                self.core.released.notify_all();
            }
        } else {
            node.readers -= 1;
        }
        let writers = node.writers;
        let pending: Option<Place> = node.pending.as_deref().cloned();
        if let Some(place) = pending {
            drop(state);
            // Where another handle is left, its release does this.
            if writers == 0 {
                self.publish(&place)?;
            }
            return self.core.state().drop_node_if_idle(id);
        }
        if writers == 0 && state.unsettled.contains_key(id) && !awaits_rename(&state, id) {
            self.core.settle_if_at_rest(&mut state, id)?;
        }
        if let_go_if_stale(&mut state, id)? {
            self.core.invalidate(Invalidation::Names(id));
        }
        state.drop_node_if_idle(id)
    }
}
