//! Copies that are not what was written: telling of them, and what becomes of a raw one while there is
//! another that may be good.

pub(crate) mod known;

use super::FsError;
use super::attributes::Attributes;
use super::residency::Residency;
use crate::core::state::State;
use crate::core::{Core, happened};
use kvfs_storage::store::disk::FileStat;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::quarantine::Take;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId, RemoteState, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::remote::RemoteError;

/// Whether a file that has a name has lost its bytes, as the answer of the disk says: it is on record, and nowhere.
pub(super) fn is_lost(inode: &Inode, error: &std::io::Error) -> bool {
    inode.links > 0 && error.kind() == std::io::ErrorKind::NotFound
}

/// What `stat` shows of a file whose bytes are lost: what is on record. Its name can be opened, which fails and is
/// told of, and removed.
pub(super) fn shown_if_lost(
    state: &State, id: InodeId, error: FsError,
) -> Result<Attributes, FsError> {
    let inode = state.inode(id)?;
    match &error {
        FsError::Io(cause) if is_lost(&inode, cause) => {
            Ok(Attributes { is_at_rest: false, ..Attributes::of_record(id, &inode) })
        }
        _ => Err(error),
    }
}

/// Whether an inode is a tail or token file whose file is not in the store. Nothing else has a copy of those.
pub(super) fn has_lost_rows(core: &Core, inode: &Inode) -> bool {
    let rows = inode.file().filter(|file| file.role.is_append_only());
    let object = rows.and_then(|file| file.object);
    let found = object.map(|object| core.store.stat_object(object));
    found.is_some_and(|found| found.is_err_and(|error| is_lost(inode, &error)))
}

impl Residency<'_> {
    /// Tells that the file of a tail, or of token ids, is not in the store.
    pub(super) fn tell_of_lost_rows(&self, id: InodeId, object: ObjectId) -> FsError {
        let why = "its file in the store is missing: run kvfs fsck";
        let error = self.corrupt(id, object, Tier::Ssd, why);
        self.note_damage(id, object, true);
        error
    }

    /// Tells that the bytes that a tier stored are not what they should be; once of a file that is known to be damaged.
    pub(super) fn corrupt(&self, id: InodeId, object: ObjectId, tier: Tier, why: &str) -> FsError {
        let (path, bytes, was_known) = {
            let state = self.core.state();
            let inode = state.inode(id).ok();
            let bytes = inode.as_ref().and_then(Inode::file).map(|file| file.size);
            (state.any_path(id), bytes, state.is_known_damaged(id))
        };
        let name = path.clone().unwrap_or_else(|| format!("inode {}", id.0));
        self.core.observer.corrupt(tier, &format!("{name}: object {object}: {why}"));
        // Whoever opens it again and again tells nothing new, and would push out what else was lost.
        if !was_known {
            let event = Event::new(What::Damaged, why).of(id).at(path);
            self.core.store.events.note(Event { bytes, ..event });
        }
        FsError::Corrupt
    }

    /// Brings another copy of an object here whose own cannot be used, which had this `stat` if it had any. False if there is
    /// none.
    pub(super) fn replace(
        &self, file: (InodeId, Role), object: ObjectId, damaged: Option<&FileStat>,
    ) -> Result<bool, FsError> {
        match damaged {
            Some(stat) => self.replace_damaged(file, object, stat),
            None => Ok(self.fetch(file, object)?.has_other()),
        }
    }

    /// The copy that had this `stat` is damaged: it makes room for the encoded one or the remote's,
    /// and is kept in quarantine. False if there is neither.
    pub(super) fn replace_damaged(
        &self, (id, role): (InodeId, Role), object: ObjectId, damaged: &FileStat,
    ) -> Result<bool, FsError> {
        let Some(tiers) = self.tiers else {
            return Ok(false);
        };
        if self.core.store.is_read_only() || !self.has_other_copy(object)? {
            return Ok(false);
        }
        let work = || {
            let outcome = self.remove_damaged(id, object, damaged).map(|()| None);
            outcome.map_err(|error| RemoteError::local(std::io::Error::other(error)))
        };
        tiers.share(object, work).map_err(FsError::Remote)?;
        Ok(self.fetch((id, role), object)?.has_other())
    }

    pub(super) fn has_other_copy(&self, object: ObjectId) -> Result<bool, FsError> {
        let state = self.core.state();
        let is_encoded = state.metadata.encoded_copy(object)?.is_some();
        Ok(is_encoded || state.metadata.remote_copy(object)?.is_some())
    }

    fn remove_damaged(
        &self, id: InodeId, object: ObjectId, damaged: &FileStat,
    ) -> Result<(), FsError> {
        // Somebody else may have found it as well, and replaced it by now.
        match self.core.store.stat_object(object) {
            Ok(stat) if stat.is_same_content(damaged) => {}
            _ => return Ok(()),
        }
        let why = format!("object {object}: the local copy is damaged");
        log::warn!("{why}");
        happened::keep_damaged(self.core, id, object, Take::Copy, &why);
        let mut state = self.core.state_to_change()?;
        let remote = state.metadata.remote_copy(object)?;
        let is_encoded = state.metadata.encoded_copy(object)?.is_some();
        let has_other = is_encoded || remote.is_some();
        let Some(tiers) = self.tiers.filter(|_| has_other) else {
            return Ok(());
        };
        if state.unsettled.contains_key(id) {
            return Ok(());
        }
        self.core.store.remove_raw(object)?;
        if is_encoded {
            tiers.copies.note_raw_gone(object, id);
        } else if let Some(copy) = remote
            && copy.state == RemoteState::Named
        {
            state.metadata.set_remote_state(object, copy, RemoteState::Only);
            let length = state.metadata.object(object)?.map_or(0, |record| record.length);
            tiers.copies.note_left(object, length);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
