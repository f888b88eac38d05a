//! Verified bytes get a name: as a new inode, or as one name more of a page that has them already.

use super::attributes::Place;
use super::publish::Publishing;
use super::tiers::Tiers;
use super::{FsError, errands, held_back};
use crate::core::Core;
use crate::core::state::State;
use crate::extended::PIN;
use kvfs_page::names;
use kvfs_storage::store::metadata::held_back::hold_back;
use kvfs_storage::store::metadata::{Attribute, Life, TokensChange};
use kvfs_storage::store::record::{
    Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind, ObjectRecord, Role, Time,
};

/// Bytes that were verified, and as what.
pub(super) struct Verified {
    pub(super) role: Role,
    pub(super) checksum: [u8; 16],
    pub(super) length: u64,
    /// A page that has the same bytes.
    pub(super) twin: Option<InodeId>,
    /// The page that has the name already, if its bytes are the same as well.
    pub(super) same: Option<InodeId>,
}

/// The file whose bytes become a page or manifest, with what the new one takes from it.
pub(super) struct Origin {
    pub(super) inode: Inode,
    pub(super) attributes: Vec<Attribute>,
    /// Somebody set its mtime and wants to see it again.
    pub(super) is_dated: bool,
    /// Somebody synced it.
    pub(super) is_synced: bool,
}

impl Publishing<'_> {
    /// Gives verified bytes a name. An identical page that is there already stays, one that
    /// stands elsewhere gets one name more.
    pub(super) fn insert_sealed(
        &self, state: &mut State, origin: &Origin, to: &Place,
        (object, verified): (ObjectId, &Verified),
    ) -> Result<(), FsError> {
        let attributes = &origin.attributes;
        let inode = Inode { links: 1, ctime: Time::now(), ..origin.inode.clone() };
        let note_attributes = |id| {
            self.retention.note_limits_of(id, attributes);
            self.pins.note_attributes(id, attributes);
        };
        let known = state.entry(to.parent, &to.name)?;
        // A crash that forgot the new page would have taken the old one.
        let may_hold_back = known.is_none()
            && !origin.is_synced
            && !attributes.iter().any(|(name, _)| name == PIN)
            && held_back::may_hold_back(self.residency, state, object, verified);
        if let Some(entry) = known {
            state.make_durable(entry.inode)?;
            let mut old = state.inode(entry.inode)?;
            let is_same = verified.same == Some(entry.inode)
                && state.has_content(&old, verified.role, verified.checksum)?;
            if old.links == 1 && is_same {
                (old.mode, old.uid, old.gid) = (inode.mode, inode.uid, inode.gid);
                (old.atime, old.mtime, old.ctime) = (inode.atime, inode.mtime, inode.ctime);
                state.put_inode(entry.inode, &old);
                state.replace_attributes(entry.inode, attributes)?;
                note_attributes(entry.inode);
                self.core.invalidate(super::Invalidation::Inode(entry.inode));
                return state.drop_object(object);
            }
            state.drop_link(entry.inode, &mut old)?;
        }
        match verified.twin {
            Some(twin) if state.share(twin, origin, verified)? => {
                state.drop_object(object)?;
                self.core.invalidate(super::Invalidation::Inode(twin));
                if let Some(shared) = state.metadata.inode(twin)? {
                    errands::note_shared(self.residency, state, (twin, &shared));
                }
                let entry = Entry { inode: twin, file_type: libc::S_IFREG };
                state.metadata.put_entry(Life::Durable, to.parent, &to.name, entry);
            }
            _ => {
                let added = (object, verified, may_hold_back);
                let id = add_sealed(self.core, self.residency.tiers, state, &inode, to, added);
                state.replace_attributes(id, attributes)?;
                note_attributes(id);
            }
        }
        state.touch_directory(to.parent, 0)?;
        if verified.role == Role::Manifest {
            state.models.remove(&to.parent);
            note_sequences(state, to.parent)?;
        }
        self.core.observer.sealed(verified.length);
        Ok(())
    }
}

/// A new inode for verified bytes, and its name.
fn add_sealed(
    core: &Core, tiers: Option<&Tiers>, state: &mut State, inode: &Inode, to: &Place,
    (object, verified, is_held_back): (ObjectId, &Verified, bool),
) -> InodeId {
    let record = FileRecord {
        role: verified.role,
        object: Some(object),
        size: verified.length,
        blocks: verified.length.div_ceil(512),
        unsettled: false,
    };
    let checksum = Some(verified.checksum);
    let length = verified.length;
    let stored = ObjectRecord { kind: stored_kind(verified.role), length, checksum, references: 1 };
    core.sample.came_to_be(object, verified.role, length);
    let id = state.metadata.new_inode();
    let inode = Inode { kind: Kind::File(record), ..inode.clone() };
    if is_held_back {
        let place = (to.parent, to.name.as_slice());
        hold_back(&mut state.metadata, place, (id, &inode), (object, &stored));
        state.fresh.insert(id, to.clone());
    } else {
        state.metadata.put_object(object, &stored);
        state.metadata.publish(object);
        if matches!(verified.role, Role::Page(_)) {
            state.metadata.note_page(&verified.checksum, id);
        }
        state.metadata.put_inode(Life::Durable, id, &inode);
        let entry = Entry { inode: id, file_type: libc::S_IFREG };
        state.metadata.put_entry(Life::Durable, to.parent, &to.name, entry);
    }
    if let Some(ram) = &core.store.ram {
        ram.note_at_rest(object);
        ram.set_owner(object, id);
    }
    if let Some(tiers) = tiers {
        tiers.copies.set_owner(object, id);
    }
    id
}

impl State {
    /// What a page or manifest takes from the file whose bytes it gets.
    pub(super) fn origin(&self, id: InodeId, inode: Inode) -> Result<Origin, FsError> {
        let attributes = self.metadata.attributes(id)?;
        let is_dated = self.nodes.get(&id).is_some_and(|node| node.wanted.is_dated);
        let is_synced = self.nodes.get(&id).is_some_and(|node| node.wanted.is_synced);
        Ok(Origin { inode, attributes, is_dated, is_synced })
    }
}

/// The index has nothing of sequences whose tokens were written before their manifest.
fn note_sequences(state: &mut State, model: InodeId) -> Result<(), FsError> {
    let Some(all) = state.entry(model, names::SEQUENCES.as_bytes())? else { return Ok(()) };
    let mut sequences = Vec::new();
    state.metadata.entries(all.inode, 0, |_, _, entry| {
        sequences.push(entry.inode);
        true
    })?;
    for sequence in sequences {
        state.metadata.tokens_changed(sequence, TokensChange::Grown);
    }
    Ok(())
}

fn stored_kind(role: Role) -> ObjectKind {
    match role {
        Role::Page(_) => ObjectKind::Page,
        Role::Manifest => ObjectKind::Manifest,
        Role::Plain | Role::Tail { .. } | Role::Tokens => ObjectKind::File,
    }
}
