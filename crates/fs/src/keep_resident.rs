//! Operations on a file whose bytes must be on this machine and stay there: writers, truncation,
//! and whoever takes the bytes over.
//!
//! A change in place takes the remote copy off the record, durably, before the first byte changes.
//! From then on the disk's copy is the only one, so it must be there, be right, and outlive a power
//! cut: it is checked as at the first open of a reader, written to the disk if only memory has it,
//! and synced.

use std::io;

use super::FsError;
use super::open::Opening;
use super::residency::{Landed, Residency};
use super::tiers::Tiers;
use super::verify::{Depth, Verify};
use crate::core::state::State;
use kvfs_storage::store::disk::{Access, DiskDirectory, DiskFile, DiskPath, copy_all, shard};
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId, ObjectRecord};
use kvfs_storage::tier::remote::RemoteError;

/// Times that a copy may be looked for on the disk after another transfer ended.
const ATTEMPTS_MAX: usize = 3;

impl Opening<'_> {
    /// Runs an operation on a file whose bytes are here, and cannot leave until it has ended.
    pub(super) fn with_resident<T>(
        &self, id: InodeId, act: impl FnOnce() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.residency.with_resident(self.choices.verify(), id, act)
    }
}

impl Residency<'_> {
    /// Marks a file as changing in place. Returns whether that must be durable first.
    pub(super) fn begin_in_place(&self, state: &mut State, id: InodeId) -> Result<bool, FsError> {
        if state.sealing.contains(&id) {
            return Err(FsError::Busy);
        }
        if state.unsettled.contains_key(id) {
            return Ok(false);
        }
        let mut inode = state.inode(id)?;
        let mtime = inode.mtime;
        let life = state.metadata.life(id);
        let file = inode.file_mut().ok_or(FsError::Invalid)?;
        let object = file.object.ok_or(FsError::Stale)?;
        if let Some(ram) = &self.core.store.ram {
            // First of all: a copy that could still leave might be the one looked at.
            ram.make_dirty(object);
        }
        let was_packed = self.core.store.packs.unpack(object)?;
        if was_packed {
            state.metadata.staged.insert(object);
            // Whoever syncs what it writes must not lose it with what is in `staging/`.
            state.metadata.publish(object);
        }
        let backing = match self.core.store.stat_object(object) {
            // The name is there; its bytes are not.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(FsError::Corrupt);
            }
            outcome => outcome?,
        };
        if backing.mtime != mtime {
            // From here on the file on the disk tells the time of the last write.
            self.core.store.open_object(object, Access::ReadWrite)?.set_modified(mtime)?;
        }
        file.unsettled = true;
        state.metadata.put_inode(life, id, &inode);
        state.unsettled.insert(id, object);
        state.known_damage.remove(&id);
        let record = state.metadata.object(object)?;
        if let Some(record) = record.filter(|record| record.checksum.is_some()) {
            let changed = ObjectRecord { checksum: None, ..record };
            state.metadata.put_object(object, &changed);
        }
        if let Some(node) = state.nodes.get_mut(&id) {
            node.verified = None;
        }
        if let Some(tiers) = self.tiers {
            state.metadata.forget_remote_copy(object)?;
            tiers.copies.forget(object);
            if state.metadata.forget_encoded_copy(object)?.is_some() {
                tiers.copies.discard_encoded(object);
            }
            tiers.wishes.withdraw(id);
        }
        let promised = record.is_some_and(|record| record.checksum.is_some());
        let staged = state.metadata.staged.contains(&object);
        let committing = state.metadata.is_committing(object);
        Ok(life == Life::Durable && (promised || committing || !staged || was_packed))
    }

    /// Runs an operation on a file whose bytes are here, and cannot leave until it has ended.
    pub(super) fn with_resident<T>(
        &self, verify: Verify, id: InodeId, act: impl FnOnce() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        let Some(tiers) = self.tiers else {
            return act();
        };
        self.core.state().nodes.entry(id).or_default().pins += 1;
        // The open file keeps a copy in memory from leaving, which knows nothing of pins.
        let outcome = self.bring(tiers, verify, id).and_then(|_file| act());
        let mut state = self.core.state();
        if let Some(node) = state.nodes.get_mut(&id) {
            node.pins -= 1;
        }
        state.drop_node_if_idle(id)?;
        outcome
    }

    fn bring(
        &self, tiers: &Tiers, verify: Verify, id: InodeId,
    ) -> Result<Option<Box<dyn DiskFile>>, FsError> {
        let (inode, object, verified) = {
            let state = self.core.state();
            let Some((inode, object)) = copied_object(&state, id)? else {
                return Ok(None);
            };
            // What was opened without a look at its bytes is not known to be right.
            let verified = state.nodes.get(&id).and_then(|node| node.verified);
            (inode, object, verified.filter(|_| verify != Verify::Never))
        };
        let (file, ..) =
            self.open_verified((id, &inode), (object, true), verified, Depth::Bytes)?;
        self.write_to_disk(tiers, (id, object), file.as_ref())?;
        drop(file);
        if let Some(ram) = &self.core.store.ram {
            // Changes are made on the disk, where the writer hears that it is full.
            ram.drop_clean(object);
        }
        Ok(Some(self.core.store.open_object(object, Access::Read)?))
    }

    /// Makes sure that the disk has an object, durably.
    pub(super) fn write_to_disk(
        &self, tiers: &Tiers, (id, object): (InodeId, ObjectId), file: &dyn DiskFile,
    ) -> Result<(), FsError> {
        let path = DiskPath::Object(object);
        for _ in 0..ATTEMPTS_MAX {
            match self.core.store.disk.open(&path, Access::Read) {
                Ok(file) => {
                    file.sync()?;
                    let directory = DiskDirectory::ObjectShard(shard(object));
                    return Ok(self.core.store.disk.sync_directory(directory)?);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
            let write = || self.copy_to_disk(tiers, (id, object), file).map_err(RemoteError::local);
            tiers.share(object, write).map_err(FsError::Remote)?;
        }
        Err(FsError::Stale)
    }

    fn copy_to_disk(
        &self, tiers: &Tiers, (id, object): (InodeId, ObjectId), file: &dyn DiskFile,
    ) -> io::Result<Landed> {
        if self.core.store.disk.stat(&DiskPath::Object(object)).is_ok() {
            return Ok(None);
        }
        let incoming = self.incoming(object)?;
        let length = copy_all(file, incoming.as_ref()).inspect_err(|_| {
            let _ = self.core.store.disk.remove(&DiskPath::Incoming(object));
        })?;
        drop(incoming);
        self.install(tiers, (id, object, length))
    }
}

/// A settled file, and its object, if it has another copy: of others the raw file is here.
fn copied_object(state: &State, id: InodeId) -> Result<Option<(Inode, ObjectId)>, FsError> {
    let Some(inode) = state.metadata.inode(id)? else {
        return Ok(None);
    };
    let object = inode.file().and_then(|file| state.current_object(id, file));
    let Some(object) = object.filter(|_| !state.unsettled.contains_key(id)) else {
        return Ok(None);
    };
    let has_copy = state.metadata.remote_copy(object)?.is_some()
        || state.metadata.encoded_copy(object)?.is_some();
    Ok(has_copy.then_some((inode, object)))
}
