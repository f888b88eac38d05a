//! unlink(2) and rmdir(2).

use super::attributes::Place;
use super::prefixes::unlink_block;
use super::{FileSystem, FsError, views};
use crate::core::orphan::remove_name;
use crate::core::stale::mark_stale;
use crate::core::state::State;
use kvfs_page::names;
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{Inode, InodeId, Kind, Time};

impl FileSystem {
    /// Removes a name of a file. Whoever has the file open keeps its bytes.
    pub fn unlink(&self, place: &Place) -> Result<(), FsError> {
        if let Some(outcome) = unlink_block(self, place) {
            return outcome;
        }
        if views::is_virtual_name(self, place)? {
            return Err(FsError::NotPermitted);
        }
        self.pacing().throttle_removal();
        let mut state = self.core.state_to_change()?;
        let entry = state.entry(place.parent, &place.name)?.ok_or(FsError::NotFound)?;
        let mut inode = state.inode(entry.inode)?;
        if inode.is_directory() {
            return Err(FsError::IsDirectory);
        }
        if place.name == names::MANIFEST.as_bytes() {
            state.models.remove(&place.parent);
        }
        let size = remove_name(&self.core, &mut state, (entry.inode, &mut inode), place)?;
        let freed = if inode.links == 0 { size } else { 0 };
        self.retention.note_removed(&state, place.parent, freed)
    }

    /// Removes an empty directory.
    pub fn remove_directory(&self, place: &Place) -> Result<(), FsError> {
        if views::is_virtual_name(self, place)? {
            return Err(FsError::NotPermitted);
        }
        self.pacing().throttle_removal();
        // A page whose writer is done makes its directory one that is not empty.
        let entry = self.core.state().entry(place.parent, &place.name)?;
        if let Some(entry) = entry {
            self.publishing().publish_all(Some(entry.inode));
        }
        let mut state = self.core.state_to_change()?;
        let entry = state.entry(place.parent, &place.name)?.ok_or(FsError::NotFound)?;
        if entry.file_type != libc::S_IFDIR {
            return Err(FsError::NotDirectory);
        }
        if place.parent == InodeId::ROOT {
            return Err(FsError::NotPermitted);
        }
        check_empty(&state, entry.inode)?;
        let inode = state.inode(entry.inode)?;
        state.metadata.remove_entry(Life::Durable, place.parent, &place.name);
        state.touch_directory(place.parent, -1)?;
        let orphans = state.orphan_pending(entry.inode)?;
        state.remove_directory_inode(entry.inode, &inode)?;
        drop(state);
        for orphan in orphans {
            // Or the kernel keeps them, not knowing that they have no name any more.
            self.core.invalidate(super::Invalidation::Names(orphan));
        }
        Ok(())
    }
}

impl State {
    /// Removes the inode of an empty directory. One that is somebody's working directory still
    /// answers `stat`, but names can no longer be made in it.
    pub(super) fn remove_directory_inode(
        &mut self, id: InodeId, inode: &Inode,
    ) -> Result<(), FsError> {
        self.models.remove(&id);
        self.metadata.remove_inode(Life::Durable, id)?;
        if self.nodes.contains_key(&id) {
            let kind = Kind::Special { file_type: libc::S_IFDIR, device: 0 };
            let inode = Inode { kind, links: 0, ctime: Time::now(), ..inode.clone() };
            self.metadata.put_inode(Life::Volatile, id, &inode);
        }
        Ok(())
    }

    /// What is being written in place in a directory that goes has no name to come: it is like
    /// any other file that was removed while it was open. Returns those files.
    pub(super) fn orphan_pending(&mut self, directory: InodeId) -> Result<Vec<InodeId>, FsError> {
        let first = Place { parent: directory, name: Vec::new() };
        let here = self.pending.range(first..).map(|(place, _)| place);
        let places: Vec<Place> =
            here.take_while(|place| place.parent == directory).cloned().collect();
        let mut orphans = Vec::new();
        for place in &places {
            for id in self.pending.remove(place).unwrap_or_default() {
                if let Some(node) = self.nodes.get_mut(&id) {
                    node.pending = None;
                }
                let mut inode = self.inode(id)?;
                self.drop_link(id, &mut inode)?;
                mark_stale(self, id);
                orphans.push(id);
            }
        }
        Ok(orphans)
    }
}

/// Refuses a directory that has names.
pub(super) fn check_empty(state: &State, directory: InodeId) -> Result<(), FsError> {
    let mut empty = true;
    state.metadata.entries(directory, 0, |_, _, _| {
        empty = false;
        false
    })?;
    if empty { Ok(()) } else { Err(FsError::NotEmpty) }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::attributes::Caller;
    use crate::core::orphan::let_unused_go;
    use crate::unmounted::{Unmounted, place};
    use kvfs_storage::tier::ram::LetGo;

    const FILES: InodeId = InodeId(3);
    const NAME: &str = "file";

    /// A request may come between an exchange of daemons and the lookup of its directory.
    #[test]
    fn a_directory_of_the_daemon_before_is_stale() {
        let unmounted = Unmounted::new();
        let place = place(InodeId(u64::MAX), "0123.000");
        assert!(matches!(unmounted.fs.unlink(&place), Err(FsError::Stale)));
        assert!(matches!(unmounted.fs.remove_directory(&place), Err(FsError::Stale)));
    }

    #[test]
    fn bytes_go_with_the_commit_unless_somebody_uses_them_or_there_is_room() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let told: Arc<Mutex<Vec<InodeId>>> = Arc::default();
        let tell = Arc::clone(&told);
        fs.on_leaving(LetGo(Arc::new(move |id| {
            tell.lock().unwrap().push(id);
            true
        })));
        for is_open in [false, true] {
            let id = unmounted.write(FILES, NAME, b"bytes");
            fs.lookup_for(&place(FILES, NAME), Caller::DAEMON).unwrap();
            fs.commit().unwrap();
            let object = fs.core.state().inode(id).unwrap().file().unwrap().object.unwrap();
            let has_bytes = || fs.core.store.stat_object(object).is_ok();
            let opened = is_open.then(|| fs.open_for(id, libc::O_RDONLY, Caller::DAEMON).unwrap());
            fs.unlink(&place(FILES, NAME)).unwrap();
            assert!(has_bytes(), "the name is not durably gone");
            assert_eq!(fs.core.state().orphans, [(id, 5)].into());
            // As a commit does on a disk that is nearly full.
            let_unused_go(&fs.core).unwrap();
            fs.commit().unwrap();
            assert_eq!(has_bytes(), is_open);
            assert_eq!(fs.core.state().orphans.contains_key(&id), is_open, "it is asked again");
            assert_eq!(fs.attributes(id).is_ok(), is_open);
            if let Some(opened) = opened {
                fs.release(opened.handle).unwrap();
                assert!(told.lock().unwrap().is_empty());
            } else {
                let again = fs.open_for(id, libc::O_RDWR, Caller::DAEMON);
                assert!(matches!(again, Err(FsError::Stale)), "{again:?}");
                assert_eq!(std::mem::take(&mut *told.lock().unwrap()), [id]);
            }
            fs.forget(id, u64::MAX);
            fs.commit().unwrap();
            assert!(!has_bytes() && fs.attributes(id).is_err());
            assert!(fs.core.state().orphans.is_empty());
        }
    }
}
