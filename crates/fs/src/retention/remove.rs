//! Removing one file or sequence, unless somebody wants it after all.

use super::Retention;
use super::below::NamesBelow;
use super::dated::kept_use;
use super::enforcer::Enforcer;
use super::pass::{Unit, What};
use super::rights::{Right, Root};
use crate::FsError;
use crate::attributes::Place;
use crate::core::happened;
use crate::core::idle::{is_idle, is_unmapped, lets_go};
use crate::core::orphan::remove_name;
use crate::core::stale::{mark_stale_without_names, tell_stale};
use crate::core::state::State;
use kvfs_storage::store::Store;
use kvfs_storage::store::event::{self, Event};
use kvfs_storage::store::record::{Inode, InodeId, Role, Time};

/// What a removal did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Removal {
    pub(super) files: u64,
    /// Of files that have no other name: below the directory if it is a limit's.
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

impl Enforcer<'_> {
    /// Removes a file, or so many bytes of a sequence from its end.
    pub(super) fn remove_unit(
        &self, (root, names): (&Root, &NamesBelow), unit: &Unit, bytes_max: u64, why: &str,
    ) -> Result<Removal, FsError> {
        let right = Right::Limit(root, unit, names);
        match &unit.what {
            What::File(id, place) => self.remove_file(*id, place, right, Some(why)),
            What::Sequence(directory) => self.cut_from_end(*directory, bytes_max, (right, why)),
        }
    }

    /// Removes one name of a file. `why` is told, if it goes for itself.
    pub(super) fn remove_file(
        &self, id: InodeId, place: &Place, right: Right<'_>, why: Option<&str>,
    ) -> Result<Removal, FsError> {
        // Or the kernel itself has it open for the next reader.
        lets_go(self.core, id);
        let mut state = self.core.state_to_change()?;
        let entry = state.entry(place.parent, &place.name)?;
        let inode = state.metadata.inode(id)?;
        let used = right.used();
        let may_go = entry.is_some_and(|entry| entry.inode == id) && right.holds(self, &state)?;
        let goes = |inode: &Inode| {
            may_go && !self.retention.is_used_since((&state, &self.core.store), (id, inode), used)
        };
        let Some(mut inode) = inode.filter(goes) else {
            return Ok(Removal { kept: Some(Kept::Changed), ..Removal::default() });
        };
        if let Some(kept) = self.keeps(&state, id, &inode)? {
            return Ok(Removal { kept: Some(kept), ..Removal::default() });
        }
        let size = remove_name(self.core, &mut state, (id, &mut inode), place)?;
        let bytes = if right.has_freed(id, inode.links) { size } else { 0 };
        mark_stale_without_names(&mut state, id)?;
        if let Some(why) = why {
            let event = Event::new(event::What::Deleted, why).of(id).with_bytes(bytes);
            happened::note_at(self.core, &state, place, Event { used, ..event });
        }
        drop(state);
        tell_stale(self.core, place.parent, id);
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
            Some(object) => is_idle(self.core, state, id, object) && is_unmapped(self.core, object),
            None => false,
        };
        let is_committing = file.object.is_some_and(|object| state.metadata.is_committing(object));
        Ok((!is_free).then_some(if is_committing { Kept::Committing } else { Kept::InUse }))
    }
}

impl Retention {
    /// Whether a file was read or written after the time at which it was used last as a walk has seen it.
    pub(super) fn is_used_since(
        &self, (state, store): (&State, &Store), (id, inode): (InodeId, &Inode), used: Option<Time>,
    ) -> bool {
        let Some(used) = used else { return false };
        let shown = state.attributes_of(store, id, inode);
        let modified = shown.map_or(inode.mtime, |shown| shown.mtime);
        let kept = kept_use(state, id).ok().flatten();
        modified > used || kept.max(self.uses().of(id)).is_some_and(|last| last > used)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::retention::{QUOTA, TTL};
    use crate::{Caller, FileSystem, NewTime, SetAttributes};
    use kvfs_observe::Observer;
    use kvfs_storage::store::disk::Access;

    const FILES: InodeId = InodeId(3);

    struct Limited {
        fs: FileSystem,
        _directory: tempfile::TempDir,
        root: Root,
        place: Place,
        id: InodeId,
    }

    /// A directory with a quota, and in it a file that belongs to somebody else.
    fn limited() -> Limited {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        // Room for all that the kernel is told: a removal waits while there is none.
        let (sender, _invalidations) = crossbeam_channel::bounded(64);
        let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
        fs.retention.set_limit(&fs.core, FILES, QUOTA, b"1").unwrap();
        let policy = fs.retention.policies().directories[&FILES];
        let (owned, class) = fs.core.state().directory(FILES).unwrap();
        let root = Root { id: FILES, class, policy, owner: owned.uid };
        let place = Place { parent: FILES, name: b"file".to_vec() };
        let created = fs.create(&place, 0o644, Caller { uid: 1000, gid: 1000 }, true).unwrap();
        let id = created.found.attributes.inode;
        fs.release(created.opened.handle).unwrap();
        fs.commit().unwrap();
        Limited { fs, _directory: directory, root, place, id }
    }

    impl Limited {
        fn modified(&self) -> Time {
            self.fs.core.state().attributes(&self.fs.core.store, self.id).unwrap().mtime
        }

        /// What becomes of the file, which a walk has seen as it was used last at that time.
        fn remove(&self, used: Time) -> Removal {
            let unit = Unit { used, what: What::File(self.id, self.place.clone()) };
            let names = NamesBelow::default();
            self.fs.enforcer().remove_unit((&self.root, &names), &unit, u64::MAX, "quota").unwrap()
        }

        fn give(&self, id: InodeId, uid: u32) {
            let set = SetAttributes { uid: Some(uid), ..SetAttributes::default() };
            self.fs.set_attributes(id, &set).unwrap();
        }
    }

    impl Limited {
        /// The file has a time to live, which is over.
        fn live_for_a_second(&self) {
            self.fs.retention.set_limit(&self.fs.core, self.id, TTL, b"1").unwrap();
            let old = NewTime::At(Time { seconds: 1, nanoseconds: 0 });
            let set = SetAttributes { mtime: Some(old), ..SetAttributes::default() };
            self.fs.set_attributes(self.id, &set).unwrap();
        }
    }

    #[test]
    fn what_is_written_after_the_walk_stays() {
        let limited = limited();
        let (fs, seen) = (&limited.fs, limited.modified());
        let opened = fs.open_file(limited.id, libc::O_WRONLY).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs.write(opened.handle, 0, b"written", false).unwrap();
        fs.sync_file(opened.handle).unwrap();
        fs.release(opened.handle).unwrap();
        assert_eq!(limited.remove(seen).kept, Some(Kept::Changed));
        let outcome = limited.remove(limited.modified());
        assert_eq!((outcome.kept, outcome.files), (None, 1));
    }

    #[test]
    fn what_was_read_after_the_walk_stays() {
        let limited = limited();
        let seen = limited.modified();
        let later = |seconds| Time { seconds: seen.seconds + seconds, ..seen };
        limited.fs.retention.uses().note(limited.id, later(10));
        assert_eq!(limited.remove(later(9)).kept, Some(Kept::Changed));
        assert_eq!(limited.remove(later(10)).files, 1);
    }

    /// A mapping needs no handle.
    #[test]
    fn what_somebody_has_open_without_a_handle_stays() {
        let limited = limited();
        let object = limited.fs.core.state().inode(limited.id).unwrap().file().unwrap().object;
        let open = limited.fs.core.store.open_object(object.unwrap(), Access::Read).unwrap();
        assert_eq!(limited.remove(limited.modified()).kept, Some(Kept::InUse));
        drop(open);
        assert_eq!(limited.remove(limited.modified()).files, 1);
    }

    #[test]
    fn each_reason_to_stay_has_a_word() {
        let all = [Kept::InUse, Kept::Committing, Kept::Pinned, Kept::Changed];
        assert_eq!(all.map(Kept::name), ["in_use", "committing", "pinned", "changed"]);
    }

    #[test]
    fn a_limit_that_was_taken_away_removes_nothing() {
        let limited = limited();
        limited.fs.retention.remove_limit(&limited.fs.core, FILES, QUOTA).unwrap();
        assert_eq!(limited.remove(limited.modified()).kept, Some(Kept::Changed));
        limited.fs.retention.set_limit(&limited.fs.core, FILES, QUOTA, b"2").unwrap();
        assert_eq!(limited.remove(limited.modified()).kept, Some(Kept::Changed));
        limited.fs.retention.set_limit(&limited.fs.core, FILES, QUOTA, b"1").unwrap();
        assert_eq!(limited.remove(limited.modified()).files, 1);
    }

    #[test]
    fn a_limit_whose_directory_has_another_owner_removes_nothing() {
        let limited = limited();
        limited.give(FILES, 1000);
        assert_eq!(limited.remove(limited.modified()).kept, Some(Kept::Changed));
    }

    /// Its owner could not remove it from a directory of somebody else; whoever has it now could, and gave it no time.
    #[test]
    fn a_time_to_live_goes_with_the_owner_who_gave_it() {
        let limited = limited();
        let (fs, id) = (&limited.fs, limited.id);
        limited.live_for_a_second();
        let right = Right::OwnTime(id, &limited.place);
        let outcome = fs.enforcer().remove_file(id, &limited.place, right, None).unwrap();
        assert_eq!(outcome.kept, Some(Kept::Changed), "the directory is not its owner's");
        limited.give(FILES, 1001);
        limited.give(id, 1001);
        let outcome = fs.enforcer().remove_file(id, &limited.place, right, None).unwrap();
        assert_eq!(outcome.kept, Some(Kept::Changed), "the limit was of another owner");
        limited.live_for_a_second();
        assert_eq!(fs.enforcer().remove_file(id, &limited.place, right, None).unwrap().files, 1);
    }
}
