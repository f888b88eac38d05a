//! Cold objects in fewer bytes on the disk.
//!
//! While the disk holds more than it should, the coldest raw files are replaced by encoded ones, pages
//! of some models by new versions with fewer bits ([`super::lossy`]); only when that is not enough do objects leave for the remote ([`super::leave`]). A crash anywhere
//! leaves at least one copy that was compared:
//!
//! ```text
//! encode     staging/ID.z is durable, was read back and compared
//! record     EncodedCopy; objects/ab/ID.z, its directory synced, all committed
//! drop       the raw file goes, if nobody uses it
//! ```
//!
//! Where the raw file is there, it is the object. Where it is missing, the encoded copy is decoded
//! ([`super::decode`]). It stays then, so that dropping the raw file again costs nothing. With a
//! remote only objects that it has verified and named are encoded, so each is uploaded once, from its
//! raw file.

use std::collections::{BTreeSet, HashSet};
use std::io;

use super::demotion::Demotion;
use super::lossy::LossyModels;
use super::residency::{item, ssd_used_bytes};
use super::share::on_each;
use super::{FileSystem, FsError, held_back};
use crate::core::failures::{Cause, note_failure};
use crate::core::happened;
use crate::core::idle::{is_idle, lets_go};
use crate::core::state::State;
use kvfs_storage::store::disk::{DiskDirectory, DiskPath, shard};
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::record::{EncodedCopy, Inode, InodeId, ObjectId, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::encoded::pack;
use kvfs_storage::tier::encoding::Lossless;
use kvfs_storage::tier::exchange::Item;

/// Files encoded between two commits: with pages of 4 MiB 128 MiB.
const BATCH: usize = 32;
/// Searches for raw files to replace, each of which passes over what is in use.
const SEARCHES_MAX: usize = 8;
/// The cause of failures to encode what is damaged.
pub(super) const NOT_ENCODED: Cause = ("encode", "damaged");

impl Demotion<'_> {
    /// Replaces raw files by encoded ones while the disk holds more than it should; how many.
    pub(super) fn encode_cold(&self, models: &mut LossyModels) -> Result<usize, FsError> {
        self.remove_encoded_garbage()?;
        if held_back::is_disk_spared(self.tiers) {
            // It is the turn of the remote, which costs no write.
            return Ok(0);
        }
        let mut passed_over = HashSet::new();
        let mut replaced = 0;
        for _ in 0..SEARCHES_MAX {
            let excess =
                self.tiers.copies.disk().excess_bytes(ssd_used_bytes(self.core, Some(self.tiers)));
            if excess == 0 || self.tiers.is_closing() {
                break;
            }
            let next = self.tiers.copies.encoded().next(excess, BATCH, &passed_over);
            if next.is_empty() {
                break;
            }
            let (rounded, others) = self.make_lossy(models, &next)?;
            replaced += rounded;
            self.encode_batch(&others)?;
            for &(object, id) in &next {
                if self.drop_raw(id, object)? {
                    replaced += 1;
                } else {
                    passed_over.insert(object);
                }
            }
        }
        Ok(replaced)
    }

    /// Makes encoded copies of those of these objects that have none, durably.
    fn encode_batch(&self, objects: &[(ObjectId, InodeId)]) -> Result<(), FsError> {
        let (mut items, mut shards) = (Vec::new(), BTreeSet::new());
        for &(object, id) in objects {
            {
                let state = self.core.state();
                let is_new = state.metadata.encoded_copy(object)?.is_none();
                if state.is_pinned(id)?
                    || (is_new && self.tiers.copies.encoded().encoding().is_none())
                {
                    self.tiers.copies.forbid_encoding(object);
                    continue;
                }
                // Older copies too: an attempt that failed may have left them unsynced.
                shards.insert(shard(object));
                if !is_new {
                    continue;
                }
            }
            let let_go = lets_go(self.core, id);
            let state = self.core.state();
            // What is in use would stay as it is, and the copy would take space.
            if let_go && is_idle(self.core, &state, id, object) {
                items.extend(to_encode(&state, id, object)?.map(|item| (id, item)));
            }
        }
        if shards.is_empty() {
            return Ok(());
        }
        let lossless = self.tiers.copies.encoded().encoding().unwrap_or(Lossless::Raw);
        let packed = on_each(self, &items, |(_, item)| pack(&self.core.store, item, lossless));
        for ((id, item), outcome) in packed {
            match outcome {
                Ok(Some(copy)) => self.note_encoded(item, &copy)?,
                Ok(None) => self.tiers.copies.forbid_encoding(item.object),
                // Somebody changed or removed the file meanwhile, or memory alone has it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    self.core.observer.failed(&format!("{error}: it was not encoded"));
                    let why = format!("was not encoded: {error}");
                    note_failure(self.core, NOT_ENCODED, (*id, Some(item.length)), why);
                    self.tiers.copies.forbid_encoding(item.object);
                }
                Err(error) => return Err(error.into()),
            }
        }
        for directory in shards.into_iter().map(DiskDirectory::ObjectShard) {
            self.core.store.disk.sync_directory(directory)?;
        }
        self.commits.commit()
    }

    /// Gives an encoded copy its place and its record, if the object is still the same.
    pub(super) fn note_encoded(&self, item: &Item, copy: &EncodedCopy) -> Result<(), FsError> {
        let object = item.object;
        let mut state = self.core.state_to_change()?;
        let record = state.metadata.object(object)?;
        let is_same = record.and_then(|record| record.checksum) == Some(item.checksum.0);
        if self.tiers.is_closing() || !is_same {
            self.core.store.disk.remove(&DiskPath::Encoding(object))?;
            return Ok(());
        }
        // The record first: the sweep takes a file without one for garbage.
        state.metadata.put_encoded_copy(object, copy);
        let renamed =
            self.core.store.disk.rename(&DiskPath::Encoding(object), &DiskPath::Encoded(object));
        if let Err(error) = renamed {
            state.metadata.forget_encoded_copy(object)?;
            return Err(error.into());
        }
        // A commit may have noted another name since the copy was begun.
        self.core.store.carry_note(&DiskPath::Object(object), &DiskPath::Encoded(object));
        self.tiers.copies.note_encoded(object, item.length, copy, false);
        self.tiers.writes.note(copy.stored_bytes);
        self.tiers.counters.moved(Tier::Ssd, Tier::Ssd, item.length);
        Ok(())
    }

    /// Removes the raw file of an object whose encoded copy is durable, if nobody uses it.
    fn drop_raw(&self, id: InodeId, object: ObjectId) -> Result<bool, FsError> {
        if self.core.state().metadata.encoded_copy(object)?.is_none() {
            return Ok(false);
        }
        let let_go = lets_go(self.core, id);
        let state = self.core.state();
        let Some(copy) = state.metadata.encoded_copy(object)? else {
            return Ok(false);
        };
        let stat = self.core.store.disk.stat(&DiskPath::Encoded(object));
        let is_there = stat.is_ok_and(|stat| stat.length == copy.stored_bytes);
        if self.tiers.is_closing() || !is_there || state.is_pinned(id)? {
            return Ok(false);
        }
        if !let_go || !is_at_rest(&state, id, object)? || !is_idle(self.core, &state, id, object) {
            self.tiers.counters.skipped(Tier::Ssd, "in_use");
            return Ok(false);
        }
        let unlinked = self.core.store.unlink_object(object)?;
        self.tiers.copies.note_raw_gone(object, id);
        drop(state);
        unlinked.free();
        self.tiers.counters.evicted(Tier::Ssd, "encoded");
        let uses = self.tiers.copies.encoded().uses(object);
        let event = Event { uses, ..Event::new(What::Encoded, "the disk needed room") };
        happened::note_move(self.core, id, event);
        Ok(true)
    }

    /// Removes encoded copies of objects that changed: what is not on record any more.
    pub(super) fn remove_encoded_garbage(&self) -> Result<(), FsError> {
        let garbage = self.tiers.copies.take_garbage();
        if garbage.is_empty() {
            return Ok(());
        }
        // Until then a crash would bring their records back.
        self.commits.commit()?;
        for object in garbage {
            let state = self.core.state();
            if state.metadata.encoded_copy(object)?.is_none() {
                self.core.store.remove_encoded(object)?;
            }
        }
        Ok(())
    }

    /// Notes what a mount finds of an encoded copy: whether it is there, and the raw file too.
    pub(super) fn survey_encoded(&self, (id, object): (InodeId, ObjectId)) -> Result<(), FsError> {
        let mut state = self.core.state();
        let copy = state.metadata.encoded_copy(object)?;
        let record = state.metadata.object(object)?;
        let (Some(copy), Some(record)) = (copy, record) else {
            return Ok(());
        };
        let has_raw = self.core.store.disk.stat(&DiskPath::Object(object)).is_ok();
        if self.core.store.disk.stat(&DiskPath::Encoded(object)).is_ok() {
            self.tiers.copies.note_encoded(object, record.length, &copy, !has_raw);
            if has_raw {
                self.tiers.copies.note_raw(object, id, record.length);
            }
        } else if has_raw {
            // A crash came before the file had its place.
            state.metadata.forget_encoded_copy(object)?;
        }
        Ok(())
    }

    /// An encoded copy of no file: a crash came before the version that it holds took its place.
    pub(super) fn forget_lone_copy(&self, object: ObjectId) -> Result<(), FsError> {
        let mut state = self.core.state();
        if state.metadata.object(object)?.is_none()
            && state.metadata.forget_encoded_copy(object)?.is_some()
        {
            self.tiers.copies.discard_encoded(object);
        }
        Ok(())
    }
}

/// Whether objects of the store have copies beside their raw files. Encoded ones are read whatever
/// the mount was told, and what changes is not what the remote has.
pub fn has_other_copies(fs: &FileSystem) -> Result<bool, FsError> {
    let metadata = &fs.core.state().metadata;
    Ok(metadata.has_encoded_copies()? || metadata.has_remote_copies()?)
}

/// Whether an object is a file's that nobody is changing, which may be stored as one likes.
fn is_at_rest(state: &State, id: InodeId, object: ObjectId) -> Result<bool, FsError> {
    let inode = state.metadata.inode(id)?;
    let file = inode.as_ref().and_then(Inode::file).filter(|file| file.object == Some(object));
    let is_settled = |file: &&_| kvfs_storage::store::record::FileRecord::is_settled(file);
    let file = file.filter(is_settled).filter(|file| file.role != Role::Manifest);
    Ok(file.is_some() && !state.unsettled.contains_key(id))
}

/// What is to be encoded of a file, if its bytes are at rest and durable.
fn to_encode(state: &State, id: InodeId, object: ObjectId) -> Result<Option<Item>, FsError> {
    let is_durable = !state.metadata.publishes(object) && !state.metadata.is_committing(object);
    let inode = state.metadata.inode(id)?;
    match inode.as_ref().and_then(Inode::file) {
        Some(file) if is_durable && is_at_rest(state, id, object)? => {
            item(state, file.role, object)
        }
        _ => Ok(None),
    }
}
