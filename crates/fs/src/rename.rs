//! rename(2): names move, and a temporary name becomes a page.

use super::attributes::Place;
use super::classify::{self, FileClass};
use super::{FileSystem, FsError, Invalidation, check_new, views};
use crate::core::Core;
use crate::core::guard::StateGuard;
use crate::core::state::State;
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{DirectoryClass, Entry, Inode, InodeId, Kind, Role, Time};

impl FileSystem {
    /// Renames; `flags` are those of renameat2(2). Where the file became another inode, the old
    /// one is returned: the kernel moves its own entry to the new name, and must be told to forget
    /// what it knows of that inode before it hears that the rename is done.
    pub fn rename(&self, from: &Place, to: &Place, flags: u32) -> Result<Option<InodeId>, FsError> {
        check_new(to)?;
        if views::is_virtual_name(self, from)? {
            return Err(FsError::NotPermitted);
        }
        if flags == libc::RENAME_EXCHANGE {
            exchange(&self.core, from, to)?;
            return Ok(None);
        }
        if flags & !libc::RENAME_NOREPLACE != 0 {
            return Err(FsError::Invalid);
        }
        self.pacing().throttle()?;
        self.publishing().publish_before(to)?;
        let replaced = self.core.state().entry(to.parent, &to.name)?;
        if let Some(directory) = replaced.filter(|entry| entry.file_type == libc::S_IFDIR) {
            // A page whose writer is done makes it one that is not empty.
            self.publishing().publish_all(Some(directory.inode));
        }
        let mut state = self.core.state_to_change()?;
        let entry = state.entry(from.parent, &from.name)?.ok_or(FsError::NotFound)?;
        let target = state.entry(to.parent, &to.name)?;
        if target.is_some() && flags & libc::RENAME_NOREPLACE != 0 {
            return Err(FsError::Exists);
        }
        if target.is_some_and(|target| target.inode == entry.inode) {
            return Ok(None);
        }
        let inode = state.inode(entry.inode)?;
        check_replaceable(&state, &inode, target)?;
        if inode.is_directory() {
            let orphans = rename_directory(&mut state, (from, to), (entry, inode), target)?;
            self.core.hits.areas.forget();
            drop(state);
            for orphan in orphans {
                self.core.invalidate(Invalidation::Names(orphan));
            }
            return Ok(None);
        }
        let (_, directory) = state.directory(to.parent)?;
        let class = self.core.class_in(&mut state, directory, to);
        let (_, source_class) = state.directory(from.parent)?;
        let role = inode.file().map(|file| file.role);
        match (role, class) {
            (_, FileClass::Reserved) => return Err(FsError::NotPermitted),
            (Some(Role::Plain), class)
                if class != FileClass::Plain
                    && inode.links > 1
                    && !classify::changes_by_itself(source_class) =>
            {
                // The kernel takes the new name for the file that it has just moved, and keeps names of `files/`: what
                // is sealed would be a file that can be written to through its other names.
                return Err(FsError::CrossDevice);
            }
            (Some(Role::Plain), class) if class.is_sealed() => {
                drop(state);
                self.publishing().rename(entry.inode, from, to)?;
            }
            (Some(Role::Plain), FileClass::Tail(start)) => {
                drop(state);
                let role = Role::Tail { start, directory: to.parent };
                self.publishing().replace_append(entry.inode, (from, to), role)?;
            }
            (Some(Role::Plain), FileClass::Tokens) => {
                drop(state);
                self.publishing().replace_append(entry.inode, (from, to), Role::Tokens)?;
            }
            _ => {
                move_file(&self.core, state, (from, to), (entry, inode), class)?;
                return Ok(None);
            }
        }
        Ok(Some(entry.inode))
    }
}

/// Two directories change names (`RENAME_EXCHANGE`): a sequence is replaced as a whole by another
/// one that was made beside it. Nothing below them may mean something else afterwards.
fn exchange(core: &Core, from: &Place, to: &Place) -> Result<(), FsError> {
    let mut state = core.state_to_change()?;
    let mut found = Vec::new();
    for place in [from, to] {
        let entry = state.entry(place.parent, &place.name)?.ok_or(FsError::NotFound)?;
        found.push((entry, state.inode(entry.inode)?));
    }
    let classes = found.iter().map(|(_, inode)| match &inode.kind {
        Kind::Directory { class, .. } => Some(*class),
        _ => None,
    });
    let classes: Vec<_> = classes.collect();
    let is_same_kind = classes[0].is_some() && classes[0] == classes[1];
    if !is_same_kind || from.parent != to.parent || from.parent == InodeId::ROOT {
        return Err(FsError::Invalid);
    }
    for ((entry, mut inode), place) in found.into_iter().zip([to, from]) {
        if let Kind::Directory { name, .. } = &mut inode.kind {
            name.clone_from(&place.name);
        }
        inode.ctime = Time::now();
        state.metadata.put_entry(Life::Durable, place.parent, &place.name, entry);
        state.put_inode(entry.inode, &inode);
    }
    state.models.clear();
    state.touch_directory(from.parent, 0)
}

/// Moves a name whose file stays what it is.
fn move_file<'a>(
    core: &'a Core, mut state: StateGuard<'a>, (from, to): (&Place, &Place),
    (entry, mut inode): (Entry, Inode), class: FileClass,
) -> Result<(), FsError> {
    let id = entry.inode;
    check_role_fits(core, &mut state, &inode, to, class)?;
    if state.metadata.held_back.contains(id) {
        // Under another name it is a file like others.
        state.make_durable(id)?;
        inode = state.inode(id)?;
    }
    if inode.file().is_some_and(|file| file.role == Role::Plain) {
        state = core.wait_for_release(state, id);
        core.settle_if_at_rest(&mut state, id)?;
        inode = state.inode(id)?;
    }
    let target = state.entry(to.parent, &to.name)?;
    if let Some(target) = target {
        // The old file must not be lost to a crash before the new one is durable.
        state.expose(id, &mut inode)?;
        let mut replaced = state.inode(target.inode)?;
        state.remove_name(to, target.inode);
        state.drop_link(target.inode, &mut replaced)?;
    }
    state.remove_name(from, id);
    let fresh = state.fresh.contains_key(&id);
    let life = if fresh { Life::Volatile } else { Life::Durable };
    if fresh {
        state.fresh.insert(id, to.clone());
    }
    state.metadata.put_entry(life, to.parent, &to.name, entry);
    inode.ctime = Time::now();
    if let Some(file) = inode.file_mut() {
        match (&mut file.role, class) {
            (Role::Tail { directory, .. }, FileClass::Tail(_)) => *directory = to.parent,
            (role, FileClass::Plain) if role.is_append_only() => *role = Role::Plain,
            _ => {}
        }
    }
    if let Some(node) = state.nodes.get_mut(&id) {
        node.found_in = Some(to.parent);
    }
    state.put_inode(id, &inode);
    state.models.remove(&from.parent);
    state.models.remove(&to.parent);
    state.touch_directory(from.parent, 0)?;
    if to.parent != from.parent {
        state.touch_directory(to.parent, 0)?;
    }
    Ok(())
}

/// A sealed or append-only file may only stand where it means the same; under an ordinary
/// name it is an ordinary file, immutable if it was sealed.
pub(super) fn check_role_fits(
    core: &Core, state: &mut State, inode: &Inode, to: &Place, class: FileClass,
) -> Result<(), FsError> {
    let role = inode.file().map(|file| file.role);
    if role.is_none() && classify::is_regular_only(state.directory(to.parent)?.1, &to.name) {
        return Err(FsError::NotPermitted);
    }
    let fits = match (role, class) {
        (_, FileClass::Plain)
        | (Some(Role::Manifest), FileClass::Manifest)
        | (Some(Role::Tokens), FileClass::Tokens) => true,
        (Some(Role::Tail { start, .. }), FileClass::Tail(there)) => start == there,
        (Some(Role::Page(page)), FileClass::Page(start) | FileClass::State(start)) => {
            let is_state = matches!(class, FileClass::State(_));
            let (_, directory) = state.directory(to.parent)?;
            let model = core.model_of(state, to.parent).map_err(|_| FsError::NotPermitted)?;
            page.start == start
                && page.is_state() == is_state
                && directory == DirectoryClass::Layer(page.layer)
                && model.identity.0 == page.model
        }
        _ => false,
    };
    if fits { Ok(()) } else { Err(FsError::NotPermitted) }
}

fn check_replaceable(state: &State, inode: &Inode, target: Option<Entry>) -> Result<(), FsError> {
    let Some(target) = target else {
        return Ok(());
    };
    match (inode.is_directory(), target.file_type == libc::S_IFDIR) {
        (true, false) => Err(FsError::NotDirectory),
        (false, true) => Err(FsError::IsDirectory),
        (true, true) => super::remove::check_empty(state, target.inode),
        (false, false) => Ok(()),
    }
}

/// Moves a directory. What stands below it must mean the same afterwards: a layer stays that
/// layer, a sequence stays in its model. Elsewhere `mv` copies, and every page is checked. Returns the
/// files being written in place that lost the names to come with a directory that was replaced.
fn rename_directory(
    state: &mut State, (from, to): (&Place, &Place), (entry, mut inode): (Entry, Inode),
    target: Option<Entry>,
) -> Result<Vec<InodeId>, FsError> {
    let id = entry.inode;
    let (_, parent_class) = state.directory(to.parent)?;
    let there = classify::directory(parent_class, &to.name).ok_or(FsError::NotPermitted)?;
    let Kind::Directory { class, parent, name } = &mut inode.kind else {
        return Err(FsError::NotDirectory);
    };
    if from.parent == InodeId::ROOT {
        return Err(FsError::NotPermitted);
    }
    let same_model = !matches!(
        there,
        DirectoryClass::Layer(_) | DirectoryClass::Sequence | DirectoryClass::Sequences
    ) || model_of(state, from.parent) == model_of(state, to.parent);
    if (*class != there || !same_model) && super::remove::check_empty(state, id).is_err() {
        return Err(FsError::CrossDevice);
    }
    *class = there;
    *parent = to.parent;
    name.clone_from(&to.name);
    inode.ctime = Time::now();
    let mut orphans = Vec::new();
    if let Some(target) = target {
        orphans = state.orphan_pending(target.inode)?;
        let replaced = state.inode(target.inode)?;
        state.touch_directory(to.parent, -1)?;
        state.remove_directory_inode(target.inode, &replaced)?;
    }
    state.metadata.remove_entry(Life::Durable, from.parent, &from.name);
    state.metadata.put_entry(Life::Durable, to.parent, &to.name, entry);
    state.put_inode(id, &inode);
    state.models.clear();
    let moved = i32::from(from.parent != to.parent);
    state.touch_directory(from.parent, -moved)?;
    state.touch_directory(to.parent, moved)?;
    Ok(orphans)
}

/// The model directory at or above a directory.
fn model_of(state: &State, directory: InodeId) -> Option<InodeId> {
    crate::core::models::model_directory(state, directory).ok()
}
