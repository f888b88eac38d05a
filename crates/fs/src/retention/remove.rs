//! Removing one file or sequence, unless somebody wants it after all.

use super::pass::{Unit, What};
use super::rights::Root;
use crate::attributes::Place;
use crate::core::happened;
use crate::core::stale::{mark_stale_without_names, tell_stale};
use crate::core::state::State;
use crate::{FileSystem, FsError};
use kvfs_storage::store::disk::{Access, DiskPath};
use kvfs_storage::store::event::{self, Event};
use kvfs_storage::store::record::{Inode, InodeId, ObjectId, Role, Time};
/// What a removal did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Removal {
    pub(super) files: u64,
    /// Of files that have no other name.
    pub(super) bytes: u64,
    /// Something stayed, and why.
    pub(super) kept: Option<Kept>,
    /// It stopped to let others have the state.
    pub(super) has_more: bool,
}

/// Why something stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Somebody has it open or mapped, or writes it.
    InUse,
    /// The commit that is under way has it open.
    Committing,
    Pinned,
    /// It is another one by now, or was used since.
    Changed,
}

impl Kept {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kept::InUse => "in_use",
            Kept::Committing => "committing",
            Kept::Pinned => "pinned",
            Kept::Changed => "changed",
        }
    }
}

impl FileSystem {
    /// Removes a file, or so many bytes of a sequence from its end.
    pub(super) fn remove_unit(
        &self, root: &Root, unit: &Unit, bytes_max: u64, why: &str,
    ) -> Result<Removal, FsError> {
        if !self.core.state().may_still_go(root, unit)? {
            return Ok(Removal { kept: Some(Kept::Changed), ..Removal::default() });
        }
        match &unit.what {
            What::File(id, place) => self.remove_file(*id, place, Some(unit.used), Some(why)),
            What::Sequence(directory) => self.cut_from_end(*directory, bytes_max, (unit.used, why)),
        }
    }

    /// Removes one name of a file that was last used at that time. `why` is told, if it goes for itself.
    pub(super) fn remove_file(
        &self, id: InodeId, place: &Place, used: Option<Time>, why: Option<&str>,
    ) -> Result<Removal, FsError> {
        // Or the kernel itself has it open for the next reader.
        self.lets_go(id);
        let mut state = self.core.state_to_change()?;
        let entry = state.entry(place.parent, &place.name)?;
        let inode = state.metadata.inode(id)?;
        let is_same = entry.is_some_and(|entry| entry.inode == id);
        let stays = |inode: &Inode| is_same && !is_used_since(self, &state, (id, inode), used);
        let Some(mut inode) = inode.filter(stays) else {
            return Ok(Removal { kept: Some(Kept::Changed), ..Removal::default() });
        };
        if let Some(kept) = self.keeps(&state, id, &inode)? {
            return Ok(Removal { kept: Some(kept), ..Removal::default() });
        }
        let bytes = self.remove_name(&mut state, id, &mut inode, place)?;
        mark_stale_without_names(&mut state, id)?;
        if let Some(why) = why {
            let event = Event::new(event::What::Deleted, why).of(id).with_bytes(bytes);
            happened::note_at(&self.core, &state, place, Event { used, ..event });
        }
        drop(state);
        tell_stale(&self.core, place.parent, id);
        Ok(Removal { files: 1, bytes, ..Removal::default() })
    }

    /// Why a file must stay, if it must.
    pub(super) fn keeps(
        &self, state: &State, id: InodeId, inode: &Inode,
    ) -> Result<Option<Kept>, FsError> {
        let Some(file) = inode.file() else {
            return Ok(Some(Kept::Changed));
        };
        if state.is_pinned(id)? {
            return Ok(Some(Kept::Pinned));
        }
        if file.role == Role::Manifest {
            return Ok(Some(Kept::Changed));
        }
        let is_free = match file.object {
            // Nobody maps what the daemon serves and lets only grow.
            Some(_) if file.role.is_append_only() => {
                state.nodes.get(&id).is_none_or(|node| !node.is_in_use())
            }
            Some(object) => self.is_idle(state, id, object) && self.is_unmapped(object),
            None => false,
        };
        let is_committing = file.object.is_some_and(|object| state.metadata.is_committing(object));
        Ok((!is_free).then_some(if is_committing { Kept::Committing } else { Kept::InUse }))
    }

    /// Whether nobody has the copies open that [`FileSystem::is_idle`] does not look at: the one in
    /// memory, and one that was not committed yet.
    fn is_unmapped(&self, object: ObjectId) -> bool {
        let in_memory =
            self.core.store.ram.as_ref().and_then(|ram| ram.open_copy(object, Access::Read));
        let staged = self.core.store.disk.open(&DiskPath::Staging(object), Access::Read);
        let files = [in_memory, Some(staged)].into_iter().flatten();
        files.filter_map(Result::ok).all(|file| file.is_unused().unwrap_or(false))
    }

    /// Removes a name; how many bytes go with it.
    pub(crate) fn remove_name(
        &self, state: &mut State, id: InodeId, inode: &mut Inode, place: &Place,
    ) -> Result<u64, FsError> {
        let size = state.attributes_of(&self.core.store, id, inode).map_or(0, |shown| shown.size);
        state.remove_name(place, id);
        state.touch_directory(place.parent, 0)?;
        state.drop_link(id, inode)?;
        Ok(if inode.links == 0 { size } else { 0 })
    }
}

/// Whether a file was read or written after the time at which it was used last as a walk has seen it.
pub(super) fn is_used_since(
    fs: &FileSystem, state: &State, (id, inode): (InodeId, &Inode), used: Option<Time>,
) -> bool {
    let Some(used) = used else { return false };
    let shown = state.attributes_of(&fs.core.store, id, inode);
    let modified = shown.map_or(inode.mtime, |shown| shown.mtime);
    modified > used || fs.retention.uses().of(id).is_some_and(|last| last > used)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Caller;
    use kvfs_observe::Observer;
    use kvfs_storage::store::Store;

    const FILES: InodeId = InodeId(3);

    /// A walk has seen a file, and then somebody writes to it and syncs it.
    #[test]
    fn what_is_written_after_the_walk_stays() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        // Room for all that the kernel is told: a removal waits while there is none.
        let (sender, _invalidations) = crossbeam_channel::bounded(16);
        let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
        let place = Place { parent: FILES, name: b"file".to_vec() };
        let created = fs.create(&place, 0o644, Caller::DAEMON, true).unwrap();
        let id = created.found.attributes.inode;
        fs.release(created.opened.handle).unwrap();
        fs.commit().unwrap();
        let seen = fs.core.state().attributes(&fs.core.store, id).unwrap().mtime;
        let opened = fs.open_file(id, libc::O_WRONLY).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs.write(opened.handle, 0, b"written", false).unwrap();
        fs.sync_file(opened.handle).unwrap();
        fs.release(opened.handle).unwrap();
        let outcome = fs.remove_file(id, &place, Some(seen), Some("age")).unwrap();
        assert_eq!(outcome.kept, Some(Kept::Changed));
        let written = fs.core.state().attributes(&fs.core.store, id).unwrap().mtime;
        let outcome = fs.remove_file(id, &place, Some(written), Some("age")).unwrap();
        assert_eq!((outcome.kept, outcome.files), (None, 1));
    }
}
