//! The group commit: everything that happened so far becomes durable at once.
//!
//! Whoever needs durability commits. Callers queue on one mutex; the first of a queue commits for
//! all that came before it took the mutex, so a burst of fsyncs costs few disk flushes. A timer
//! commits for those who never ask.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

use super::health::Refusal;
use super::state::State;
use super::{FileSystem, FsError};
use kvfs_os::side_by_side;
use kvfs_storage::ingest::seal;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::commit::{Flushed, may_pass, publish};
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::layer::Layer;
use kvfs_storage::store::record::{InodeId, ObjectId, ObjectKind, ObjectRecord};

/// Plain files up to this size get a checksum when they come to rest; reading more than this
/// back after each change would cost more than it protects. Larger ones get one when they move.
const CHECKSUM_BYTES_MAX: u64 = 1 << 30;

/// Bytes of holes in a file that a commit reads back: whoever syncs next waits for them, and who made them
/// has written nothing.
const HOLES_BYTES_MAX: u64 = 1 << 20;

/// Whether a commit gives a file of this length and so many blocks of 512 bytes its checksum. Others get one
/// when they move.
pub(super) fn is_read_by_commits(length: u64, blocks: u64) -> bool {
    length <= CHECKSUM_BYTES_MAX && length <= blocks * 512 + HOLES_BYTES_MAX
}

/// Files that a commit reads at a time for their checksums: the processors are others' as well.
const READ_AT_ONCE: usize = 2;

/// Checksums that are put into a frozen layer before others may have the state: a microsecond each.
const AMENDED_AT_A_TIME: usize = 256;

impl FileSystem {
    /// Makes every change so far durable.
    pub fn commit(&self) -> Result<(), FsError> {
        if self.store.is_read_only() {
            // What recovery found out about files is true again at the next mount.
            return Ok(());
        }
        self.publish_all_pending(None);
        self.seal_full_tails();
        let has_changes = self.state().metadata.uncommitted() > 0;
        if !has_changes {
            // A mapping may have gone away unnoticed: that alone is worth a commit.
            self.settle_idle()?;
        }
        let wanted = {
            let state = self.state();
            state.metadata.generation - u64::from(state.metadata.uncommitted() == 0)
        };
        let mut durable = self.durable_generation.lock().unwrap_or_else(PoisonError::into_inner);
        if *durable >= wanted {
            return Ok(());
        }
        if has_changes {
            self.settle_idle()?;
        }
        let (frozen, writer, generation) = {
            let mut state = self.state_to_change()?;
            if state.metadata.uncommitted() > 0
                && let Some(now) = self.retention.believed_time()
            {
                state.metadata.put_clock(now);
            }
            let Some(frozen) = state.metadata.freeze() else {
                return is_concluded(&mut state);
            };
            (frozen, state.metadata.writer(), state.metadata.generation - 1)
        };
        let write = AssertUnwindSafe(|| {
            let checksums = self.persist(&frozen)?;
            // The last reference outside of the state: amending does not copy the layer.
            drop(frozen);
            self.amend(&checksums).map_or(Ok(()), |layer| {
                self.describe(&layer);
                writer.write(&layer)
            })
        });
        // A commit that ended in the middle would leave its layer frozen, and none could come after it.
        let panicked =
            |_| Err(StoreError::Io(io::Error::other("a fault of kvfs ended the commit")));
        self.conclude(catch_unwind(write).unwrap_or_else(panicked))?;
        *durable = generation;
        Ok(())
    }

    /// The last commit of a mount.
    pub fn commit_and_close(&self) -> Result<(), FsError> {
        if self.store.is_read_only() {
            return Ok(());
        }
        self.drop_spares();
        self.let_go()?;
        self.index_prefixes()?;
        self.commit()?;
        if let Some(tiers) = &self.tiers {
            self.remove_encoded_garbage(tiers)?;
        }
        self.store.sync_removals()?;
        self.state().metadata.put_epoch(true);
        self.commit()?;
        let lacking = self.lacking_in_remote();
        if lacking.files > 0 {
            log::warn!("the remote does not have {} files, {} bytes", lacking.files, lacking.bytes);
        }
        Ok(())
    }

    /// Nobody will release or forget anything any more. Files that a mapping still changes are
    /// kept as they are, and those without names go. What a truncating writer has not closed is
    /// given up: the old version stays.
    fn let_go(&self) -> Result<(), FsError> {
        self.settle_idle()?;
        let mut state = self.state();
        let unsettled: Vec<InodeId> = state.unsettled.keys().copied().collect();
        for id in unsettled {
            let unfinished = state.nodes.get(&id).is_some_and(|node| {
                node.pending.is_some() || (node.replacement.is_some() && node.writers > 0)
            });
            if !unfinished {
                let mut inode = state.inode(id)?;
                state.expose(id, &mut inode)?;
            }
        }
        let held: Vec<InodeId> = state.nodes.keys().copied().collect();
        for id in held {
            let nameless = state.metadata.inode(id)?.is_some_and(|inode| inode.links == 0);
            if let Some(node) = state.nodes.get_mut(&id).filter(|_| nameless) {
                (node.lookups, node.readers, node.writers) = (0, 0, 0);
                state.drop_node_if_idle(id)?;
            }
        }
        Ok(())
    }

    /// Makes the bytes of a frozen layer's objects durable; returns checksums of those at rest.
    fn persist(&self, frozen: &Layer) -> Result<Vec<(ObjectId, ObjectRecord)>, StoreError> {
        let flushed = publish(&self.store, frozen.publish.iter(), |object| {
            self.state().metadata.staged.remove(&object);
        })?;
        self.note_flushed(&flushed);
        let objects: Vec<ObjectId> = frozen.publish.iter().copied().collect();
        let threads = READ_AT_ONCE.min(self.store.disk.syncs_at_once());
        let read = |object: &ObjectId| {
            let record = self.checksum_at_rest(*object, is_read_by_commits)?;
            Ok(record.map(|record| (*object, record)))
        };
        let outcomes = side_by_side(threads, &objects, read);
        outcomes.into_iter().filter_map(Result::transpose).collect()
    }

    /// What the disk has now may leave the memory, unless somebody goes on writing to it.
    fn note_flushed(&self, flushed: &[Flushed]) {
        let Some(ram) = &self.store.ram else {
            return;
        };
        let state = self.state();
        for copy in flushed {
            if !state.unsettled.is_changing(copy.object) {
                ram.make_clean(copy.object, copy.version);
            }
        }
    }

    /// Gives a file that is too large for a checksum at rest one, so that it can move. Whether it
    /// has one now.
    pub(super) fn checksum_large(
        &self, object: ObjectId, bytes_max: u64,
    ) -> Result<bool, StoreError> {
        let Ok(before) = self.store.stat_object(object) else {
            return Ok(false);
        };
        let may_read = |length, _blocks| length <= bytes_max;
        let Some(record) = self.checksum_at_rest(object, may_read)? else {
            return Ok(false);
        };
        let mut state = self.state();
        let current = state.metadata.object(object)?;
        // That took a while: somebody may have changed it and be done again.
        let is_same = current.is_some_and(|current| {
            current.checksum.is_none() && state.is_settled(object, &current)
        }) && self.store.stat_object(object)?.is_same_content(&before);
        if is_same && state.refusal.is_none() {
            state.metadata.put_object(object, &record);
        }
        Ok(is_same)
    }

    /// The record of an object with its checksum, if it is at rest, has none, and its length and blocks
    /// are such that it may be read.
    fn checksum_at_rest(
        &self, object: ObjectId, may_read: impl FnOnce(u64, u64) -> bool,
    ) -> Result<Option<ObjectRecord>, StoreError> {
        let record = {
            let state = self.state();
            let Some(record) = state.metadata.object(object)? else {
                return Ok(None);
            };
            if record.checksum.is_some() || !state.is_settled(object, &record) {
                return Ok(None);
            }
            record
        };
        let file = match self.store.open_object(object, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            outcome => outcome?,
        };
        let stat = file.stat()?;
        // A file that is not as long as its record says is not what it was when it settled.
        if stat.length != record.length || !may_read(stat.length, stat.blocks) {
            return Ok(None);
        }
        if !file.is_at_rest()? {
            return Ok(None);
        }
        let checksum = Some(seal::content_checksum(file.as_ref())?);
        Ok(Some(ObjectRecord { checksum, ..record }))
    }

    /// Puts the checksums of files that nobody opened meanwhile into the frozen layer.
    fn amend(&self, checksums: &[(ObjectId, ObjectRecord)]) -> Option<std::sync::Arc<Layer>> {
        for some in checksums.chunks(AMENDED_AT_A_TIME) {
            let mut state = self.state();
            for (object, record) in some {
                let current = state.metadata.object(*object).ok().flatten();
                let unchanged = current.is_some_and(|current| {
                    current.checksum.is_none() && state.is_settled(*object, &current)
                });
                if unchanged && !state.metadata.publishes(*object) {
                    state.metadata.amend_frozen(*object, record);
                }
            }
        }
        self.state().metadata.frozen()
    }

    /// After the attempt: the layer is the base now, or goes back to be tried again.
    fn conclude(&self, outcome: Result<(), StoreError>) -> Result<(), FsError> {
        let mut state = self.state();
        let Err(error) = outcome else {
            // Freeing a layer of many records takes as long as many requests.
            let layer = state.metadata.frozen();
            state.metadata.thaw_committed()?;
            state.commit_failure = None;
            drop(state);
            for &object in layer.iter().flat_map(|layer| &layer.removals) {
                if let Err(error) = self.store.remove_object(object) {
                    log::warn!("object {object} could not be removed: {error}");
                }
                if let Some(tiers) = &self.tiers {
                    tiers.copies.forget(object);
                }
            }
            return Ok(());
        };
        state.metadata.thaw_failed();
        state.commit_failure = Some(error.to_string());
        if !matches!(&error, StoreError::Io(error) if may_pass(error)) {
            // After a failed fsync nobody knows what the disk holds: no further promises.
            state.refusal = Some(Refusal::DiskFailed);
            self.observer.failed(&format!("the store is read-only from now on: {error}"));
        }
        // After its first failure the database refuses everything; who met that one was told of it.
        Err(if error.is_after_a_failure() { FsError::ReadOnly } else { error.into() })
    }
}

/// There is nothing to freeze. If that is because a commit before never came to its end, nothing more becomes
/// durable, and nobody may believe that it does.
fn is_concluded(state: &mut State) -> Result<(), FsError> {
    if state.metadata.frozen().is_none() {
        return Ok(());
    }
    state.refusal = Some(Refusal::DiskFailed);
    Err(FsError::ReadOnly)
}

impl State {
    /// Nobody may be writing to the object.
    fn is_settled(&self, object: ObjectId, record: &ObjectRecord) -> bool {
        record.kind != ObjectKind::Rows && !self.unsettled.is_changing(object)
    }
}
