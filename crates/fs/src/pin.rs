//! Pinning: a file with the attribute `user.kvfs.pin` never leaves the disk or memory to make room,
//! nor is it encoded.
//!
//! The pin is kept as one of the file's extended attributes, so it is durable, and is part of the
//! names in the remote; it is not listed. The RAM tier, which chooses what leaves without asking
//! for records, is told of each.

use super::extended::PIN;
use super::tiers::Tiers;
use super::{FileSystem, FsError, held_back};
use crate::core::Core;
use crate::core::state::State;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::metadata::Attribute;
use kvfs_storage::store::record::{InodeId, RemoteState, Time};

/// The value of a pin.
const PINNED: &[u8] = b"1";
const NOT_PINNED: &[u8] = b"0";

/// Pins of files.
#[derive(Clone, Copy, Debug)]
pub struct Pins<'a> {
    core: &'a Core,
    tiers: Option<&'a Tiers>,
}

impl FileSystem {
    /// Pins of files.
    pub fn pins(&self) -> Pins<'_> {
        Pins { core: &self.core, tiers: self.tiers.as_ref() }
    }
}

impl Pins<'_> {
    /// Pins a file ("1") or takes its pin away ("0").
    pub(super) fn set(&self, id: InodeId, value: &[u8]) -> Result<(), FsError> {
        match value {
            PINNED => self.add(id),
            NOT_PINNED => match self.remove(id) {
                Err(FsError::NoAttribute) => Ok(()),
                outcome => outcome,
            },
            _ => Err(FsError::Invalid),
        }
    }

    fn add(&self, id: InodeId) -> Result<(), FsError> {
        let mut state = self.core.state_to_change()?;
        if state.inode(id)?.file().is_none() {
            return Err(FsError::Unsupported);
        }
        // What somebody still writes is on the disk as soon as it is anywhere.
        if !state.unsettled.contains_key(id) {
            held_back::write_to_disk(self.core, self.tiers, &mut state, id)?;
        }
        let mut inode = state.inode(id)?;
        let life = state.metadata.life(id);
        state.metadata.put_attribute(life, id, PIN, PINNED);
        inode.ctime = Time::now();
        state.put_inode(id, &inode);
        if let Some(tiers) = self.tiers {
            tiers.wishes.withdraw(id);
        }
        self.keep_in_memory(id, true);
        Ok(())
    }

    /// Takes a pin away.
    pub(super) fn remove(&self, id: InodeId) -> Result<(), FsError> {
        let mut state = self.core.state_to_change()?;
        if !state.is_pinned(id)? {
            return Err(FsError::NoAttribute);
        }
        let mut inode = state.inode(id)?;
        let life = state.metadata.life(id);
        state.metadata.remove_attribute(life, id, PIN);
        inode.ctime = Time::now();
        state.put_inode(id, &inode);
        self.keep_in_memory(id, false);
        if let (Some(tiers), Some(file)) = (self.tiers, inode.file())
            && let Some(object) = file.object
            && file.is_settled()
        {
            let copy = state.metadata.remote_copy(object)?;
            let is_named = copy.is_some_and(|copy| copy.state == RemoteState::Named);
            if is_named {
                tiers.copies.allow_leaving(object, id, file.size);
            } else if tiers.exchange.is_none() {
                tiers.copies.note_raw(object, id, file.size);
            }
        }
        Ok(())
    }

    /// Looks for pinned files, beside the mount: memory is empty when it begins.
    pub fn find(&self) -> Result<(), StoreError> {
        if self.core.store.ram.is_none() {
            return Ok(());
        }
        let snapshot = self.core.state().metadata.snapshot()?;
        snapshot.for_each_named(b'X', |inode, name| {
            if name == PIN {
                self.keep_in_memory(InodeId(inode), true);
            }
        })
    }

    /// A file has taken over these attributes.
    pub(super) fn note_attributes(&self, id: InodeId, attributes: &[Attribute]) {
        if attributes.iter().any(|(name, _)| name == PIN) {
            self.keep_in_memory(id, true);
        }
    }

    fn keep_in_memory(&self, id: InodeId, kept: bool) {
        if let Some(ram) = &self.core.store.ram {
            ram.keep(id, kept);
        }
    }
}

impl State {
    /// Whether a file stays where it is when room is needed.
    pub(crate) fn is_pinned(&self, id: InodeId) -> Result<bool, StoreError> {
        Ok(self.metadata.attribute(id, PIN)?.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::Unmounted;

    #[test]
    fn a_file_that_is_pinned_while_it_is_written_has_its_bytes_and_its_pin_after_a_crash() {
        for is_pinned_first in [true, false] {
            let unmounted = Unmounted::new();
            let fs = &unmounted.fs;
            let (id, handle) = unmounted.open_new("file");
            let pin = || fs.pins().set(id, PINNED).unwrap();
            let write = || fs.write(handle, 0, b"bytes", false).unwrap();
            if is_pinned_first {
                pin();
                write();
            } else {
                write();
                pin();
            }
            fs.sync_file(handle).unwrap();
            let unmounted = unmounted.after_crash();
            assert_eq!(unmounted.size_of("file"), Some(5));
            let state = unmounted.fs.core.state();
            assert!(!state.inode(id).unwrap().file().unwrap().unsettled);
            assert!(state.is_pinned(id).unwrap());
        }
    }
}
