//! Finding an inode by name, and how long the kernel may hold what it found.

use super::attributes::{Attributes, Caller, Found, Place};
use super::damage::shown_if_lost;
use super::hits::Area;
use super::{FileSystem, FsError, batch, classify, prefixes, views};
use crate::core::Core;
use crate::core::happened;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::record::{DirectoryClass, InodeId};

/// What a lookup found. That a name is absent is an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The name is there.
    Found(Found),
    /// It is not.
    Absent {
        /// The kernel may remember that until it makes the name itself.
        stable: bool,
    },
}

impl FileSystem {
    /// Finds a name; a found inode is held until the kernel forgets it.
    pub fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Lookup, FsError> {
        if let Some(attributes) = views::lookup(self, parent, name)? {
            let name_is_stable = views::name_is_stable(attributes.inode);
            return Ok(Lookup::Found(Found { attributes, name_is_stable }));
        }
        if let Some(found) = self.virtual_directories().lookup(parent, name)? {
            return Ok(found);
        }
        super::check_name(name)?;
        // A page whose writer is done but whose release has not arrived yet is sealed first.
        let place = Place { parent, name: name.to_vec() };
        if self.core.state().is_pending(parent, name) {
            self.publishing().publish(&place)?;
        }
        let first = lookup_stored(&self.core, parent, name)?;
        if matches!(first, Lookup::Absent { stable: false }) && self.publishing().publish(&place)? {
            return lookup_stored(&self.core, parent, name);
        }
        Ok(first)
    }

    /// Finds a name for a user, who is not shown all that is virtual.
    pub fn lookup_for(&self, place: &Place, caller: Caller) -> Result<Lookup, FsError> {
        views::check_lookup(place, caller)?;
        let mut found = self.lookup(place.parent, &place.name)?;
        let Lookup::Found(Found { attributes, .. }) = &mut found else { return Ok(found) };
        if batch::is_batch(attributes.inode) {
            attributes.inode = batch::inode_of(caller.uid);
        }
        let is_shown = self.virtual_directories().shows(attributes, caller)?;
        Ok(if is_shown { found } else { Lookup::Absent { stable: false } })
    }

    /// The kernel drops `count` references to an inode.
    pub fn forget(&self, inode: InodeId, count: u64) -> bool {
        if prefixes::is_virtual(inode) {
            self.prefixes.numbers().forget(inode, count);
            return false;
        }
        let mut state = self.core.state();
        let known = state.nodes.get(&inode).map_or(0, |node| node.lookups);
        if let Some(node) = state.nodes.get_mut(&inode) {
            node.lookups = known.saturating_sub(count);
        }
        if (1..=count).contains(&known) {
            self.core.before.note_given_back(inode);
        }
        if let Err(error) = state.drop_node_if_idle(inode) {
            log::error!("forgetting inode {}: {error}", inode.0);
        }
        count > known
    }

    /// What `stat` shows.
    pub fn attributes(&self, inode: InodeId) -> Result<Attributes, FsError> {
        if views::is_view(inode) {
            return Ok(views::attributes(self, inode));
        }
        if prefixes::is_virtual(inode) {
            return self.virtual_directories().attributes(inode);
        }
        let state = self.core.state();
        state.check_current(inode)?;
        let shown = state.attributes(&self.core.store, inode);
        let mut attributes = shown.or_else(|error| shown_if_lost(&state, inode, error))?;
        attributes.is_at_rest &= attributes.links > 0;
        Ok(attributes)
    }

    /// Target of a symbolic link.
    pub fn read_link(&self, inode: InodeId) -> Result<Vec<u8>, FsError> {
        match self.core.state().inode(inode)?.kind {
            kvfs_storage::store::record::Kind::Symlink { target } => Ok(target),
            _ => Err(FsError::Invalid),
        }
    }
}

fn lookup_stored(core: &Core, parent: InodeId, name: &[u8]) -> Result<Lookup, FsError> {
    let mut state = core.state();
    let (_, class) = state.directory(parent)?;
    let area = match class {
        DirectoryClass::Plain => core.hits.areas.of(&state, Some(parent)),
        _ => Area::Elsewhere,
    };
    let count = |is_there: bool| {
        if let Area::Directory(_) = area {
            core.hits.note_names(area, [u64::from(is_there), u64::from(!is_there)]);
            core.observer.looked_up(is_there);
        }
    };
    let Some(entry) = state.entry(parent, name)? else {
        count(false);
        // There the daemon makes names without being asked to.
        let unstable = matches!(
            class,
            DirectoryClass::Layer(_) | DirectoryClass::Model | DirectoryClass::Sequences
        );
        return Ok(Lookup::Absent { stable: !unstable });
    };
    if state.damaged.contains_key(&entry.inode) {
        let place = Place { parent, name: name.to_vec() };
        if state.drop_damaged(&place, entry.inode)? {
            let event = Event::new(What::Deleted, "no copy of it was what was written");
            happened::note_at(core, &state, &place, event.of(entry.inode));
            count(false);
            return Ok(Lookup::Absent { stable: false });
        }
    }
    count(true);
    let shown = state.attributes(&core.store, entry.inode);
    let attributes = shown.or_else(|error| shown_if_lost(&state, entry.inode, error))?;
    let node = state.nodes.entry(entry.inode).or_default();
    node.lookups += 1;
    node.found_in = Some(parent);
    let name_is_stable =
        name_is_stable(class, &attributes, name) && !state.is_pending(parent, name);
    Ok(Lookup::Found(Found { attributes, name_is_stable }))
}

/// A name may be cached unless the file behind it can be replaced by publishing: in a model's
/// tree only directories and sealed files stay what they are.
pub(super) fn name_is_stable(class: DirectoryClass, attributes: &Attributes, name: &[u8]) -> bool {
    !classify::changes_by_itself(class)
        || attributes.file_type != libc::S_IFREG
        // A state may be an ordinary file, and the manifest that tells is not looked at here.
        || classify::file(class, name).in_model(false).is_sealed()
}
