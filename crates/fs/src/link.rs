//! link(2): names share a file, never copy it. The exception are files that grow: a hard link of
//! a tail or token file would let two sequences append to one, so the new name gets a copy.

use std::sync::Arc;

use super::attributes::{Found, Place};
use super::classify::FileClass;
use super::rename::check_role_fits;
use super::{FileSystem, FsError, check_new, errands};
use crate::core::Core;
use crate::core::share::LINKS_MAX;
use kvfs_storage::ingest::seal;
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{Entry, Inode, InodeId, Role, Time};

impl FileSystem {
    /// Gives a file another name.
    pub fn link(&self, id: InodeId, place: &Place) -> Result<Found, FsError> {
        check_new(place)?;
        self.pacing().throttle()?;
        self.publishing().publish_before(place)?;
        let mut state = self.core.state_to_change()?;
        let mut inode = state.inode(id)?;
        if inode.is_directory() {
            return Err(FsError::NotPermitted);
        }
        if inode.links == 0 {
            return Err(FsError::NotFound);
        }
        if state.sealing.contains(&id) {
            return Err(FsError::Busy);
        }
        if state.nodes.get(&id).is_some_and(|node| node.pending.is_some()) {
            // Its bytes are to become another inode: a second name would be left without any.
            return Err(FsError::NotPermitted);
        }
        if inode.links >= LINKS_MAX {
            return Err(FsError::TooManyLinks);
        }
        let (_, directory) = state.directory(place.parent)?;
        if state.entry(place.parent, &place.name)?.is_some() {
            return Err(FsError::Exists);
        }
        let class = self.core.class_in(&mut state, directory, place);
        check_role_fits(&self.core, &mut state, &inode, place, class)?;
        if let Some(role) = inode.file().map(|file| file.role).filter(|role| role.is_append_only())
        {
            drop(state);
            return link_by_copy(&self.core, id, &inode, place, (role, class));
        }
        state.expose(id, &mut inode)?;
        inode.links += 1;
        inode.ctime = Time::now();
        state.put_inode(id, &inode);
        errands::note_shared(self.residency(), &state, (id, &inode));
        let entry = Entry { inode: id, file_type: inode.file_type() };
        state.metadata.put_entry(Life::Durable, place.parent, &place.name, entry);
        state.touch_directory(place.parent, 0)?;
        state.models.remove(&place.parent);
        state.nodes.entry(id).or_default().lookups += 1;
        let attributes = state.attributes_of(&self.core.store, id, &inode)?;
        let name_is_stable = super::lookup::name_is_stable(directory, &attributes, &place.name);
        Ok(Found { attributes, name_is_stable })
    }
}

/// A new file with the rows that the old one has now.
fn link_by_copy(
    core: &Core, id: InodeId, inode: &Inode, place: &Place, (role, class): (Role, FileClass),
) -> Result<Found, FsError> {
    let turn = Arc::clone(core.state().nodes.entry(id).or_default().append.get_or_insert_default());
    let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let old = inode.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
    let object = core.state().metadata.new_object();
    seal::copy(&core.store, old, object)?;
    let stat = core.store.stat_object(old)?;
    let file = core.store.open_object(object, kvfs_storage::store::disk::Access::ReadWrite)?;
    file.set_modified(stat.mtime)?;
    let mut state = core.state_to_change()?;
    let role = match (role, class) {
        (_, FileClass::Plain) => Role::Plain,
        (Role::Tail { start, .. }, _) => Role::Tail { start, directory: place.parent },
        (role, _) => role,
    };
    let now = Time::now();
    let copy = Inode { links: 1, ctime: now, atime: now, ..inode.clone() };
    core.insert_append(&mut state, place, &copy, (object, role))?;
    let entry = state.entry(place.parent, &place.name)?.ok_or(FsError::NotFound)?;
    match role {
        Role::Plain => drop(state.unsettled.insert(entry.inode, object)),
        // Or soon will be: the next commit looks whether it is full.
        Role::Tail { .. } => drop(state.full_tails.insert(entry.inode)),
        _ => {}
    }
    let attributes = state.attributes(&core.store, entry.inode)?;
    let node = state.nodes.entry(entry.inode).or_default();
    node.lookups += 1;
    node.found_in = Some(place.parent);
    Ok(Found { attributes, name_is_stable: false })
}
