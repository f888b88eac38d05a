//! Where the bytes of an object are: the one answer from which attributes, plans, moves and the status
//! are made, so that no two of them disagree.
//!
//! It comes from the files and the records alone, in the order in which an open looks at them. A file
//! that is there counts whatever the records say; where it is missing, a copy on record takes its place.
//! Whether the mount can reach a remote copy is another question ([`Residency::lacks_remote`]).

use std::io;

use super::FsError;
use super::residency::Residency;
use crate::core::state::State;
use kvfs_storage::store::disk::DiskPath;
use kvfs_storage::store::record::{EncodedCopy, InodeId, ObjectId, RemoteCopy};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::remote::RemoteError;

/// Files on record as damaged: far more than anybody looks at one by one, and 4 MiB of memory. What is
/// found beyond them is told in `.kvfs/errors` and by the next open.
const DAMAGED_MAX: usize = 1 << 17;

/// The nearest place that has an object's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whereabouts {
    /// Memory, clean or dirty.
    Memory,
    /// The disk, as they are read.
    Disk,
    /// The disk has them only encoded.
    Encoded(EncodedCopy),
    /// Only a remote has them.
    Remote(RemoteCopy),
    /// No copy is left.
    Nowhere,
}

impl Whereabouts {
    /// The word for it in `user.kvfs.tier`.
    pub(super) fn word(self) -> &'static str {
        match self {
            Whereabouts::Memory => Tier::Ram.name(),
            Whereabouts::Disk | Whereabouts::Encoded(_) => Tier::Ssd.name(),
            Whereabouts::Remote(_) => Tier::Remote.name(),
            Whereabouts::Nowhere => "none",
        }
    }

    /// How the bytes are encoded there, and how many they are; `None` for raw ones.
    pub(super) fn stored(self) -> Option<(&'static str, u64)> {
        match self {
            Whereabouts::Encoded(copy) => Some((copy.encoding.extension(), copy.stored_bytes)),
            Whereabouts::Remote(copy) => Some((copy.encoding.extension(), copy.stored_bytes)),
            Whereabouts::Memory | Whereabouts::Disk | Whereabouts::Nowhere => None,
        }
    }

    pub(super) fn is_remote(self) -> bool {
        matches!(self, Whereabouts::Remote(_))
    }
}

impl Residency<'_> {
    /// Where an object's bytes are.
    pub(super) fn whereabouts(
        &self, state: &State, object: ObjectId,
    ) -> Result<Whereabouts, FsError> {
        if self.core.store.ram.as_ref().is_some_and(|ram| ram.holds(object)) {
            return Ok(Whereabouts::Memory);
        }
        if is_there(self.core.store.stat_object(object))? {
            return Ok(Whereabouts::Disk);
        }
        if let Some(copy) = state.metadata.encoded_copy(object)?
            && is_there(self.core.store.disk.stat(&DiskPath::Encoded(object)))?
        {
            return Ok(Whereabouts::Encoded(copy));
        }
        let remote = state.metadata.remote_copy(object)?;
        Ok(remote.map_or(Whereabouts::Nowhere, Whereabouts::Remote))
    }

    /// Whether some objects of the store have copies in a remote, and the mount has no remote.
    pub(super) fn lacks_remote(&self, state: &State) -> bool {
        let exchange = self.tiers.and_then(|tiers| tiers.exchange.as_ref());
        exchange.is_none() && state.metadata.has_remote_copies
    }

    /// Fails where only a remote has the bytes, and the mount has none.
    pub(super) fn check_reachable(&self, found: Whereabouts) -> Result<(), FsError> {
        if !found.is_remote() || !self.lacks_remote(&self.core.state()) {
            return Ok(());
        }
        let why = "only a remote has the bytes, and the mount has none".to_owned();
        Err(FsError::Remote(RemoteError::Unreachable(why)))
    }

    /// Whether an open of a file would find its bytes, as far as is known without reading them.
    pub(super) fn can_be_had(&self, state: &State, id: InodeId) -> Result<bool, FsError> {
        if state.is_known_damaged(id) {
            return Ok(false);
        }
        // With its remote, what is on record can be had; so each page costs no look at the disk.
        if !self.lacks_remote(state) {
            return Ok(true);
        }
        let inode = state.inode(id)?;
        let object = inode.file().and_then(|file| state.current_object(id, file));
        let Some(object) = object else { return Ok(false) };
        let found = self.whereabouts(state, object)?;
        Ok(!found.is_remote() && found != Whereabouts::Nowhere)
    }

    /// A look at all copies of a file found none that is what was written, or one that is.
    pub(super) fn note_damage(&self, id: InodeId, object: ObjectId, is_damaged: bool) {
        let mut state = self.core.state();
        if !is_damaged {
            state.known_damage.remove(&id);
        } else if state.known_damage.len() < DAMAGED_MAX {
            state.known_damage.insert(id, object);
        }
    }
}

impl State {
    /// Whether the last look at a file's bytes found no good copy.
    pub(super) fn is_known_damaged(&self, id: InodeId) -> bool {
        let Some(damaged) = self.known_damage.get(&id) else { return false };
        // The kernel says some time later that it has forgotten a file that was removed.
        let inode = self.metadata.inode(id).ok().flatten().filter(|inode| inode.links > 0);
        let object = inode.as_ref().and_then(|inode| inode.file()).and_then(|file| file.object);
        object == Some(*damaged) && !self.unsettled.contains_key(id)
    }

    /// Files of which that is so; those that went or changed are forgotten.
    pub(super) fn count_known_damage(&mut self) -> usize {
        let ids: Vec<InodeId> = self.known_damage.keys().copied().collect();
        for id in ids {
            if !self.is_known_damaged(id) {
                self.known_damage.remove(&id);
            }
        }
        self.known_damage.len()
    }
}

/// Whether a look at a file found one.
fn is_there<T>(outcome: io::Result<T>) -> io::Result<bool> {
    match outcome {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
