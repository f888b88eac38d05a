//! The bytes of a frozen layer become durable, and get their checksums.

use std::io;

use crate::FsError;
use crate::core::Core;
use crate::core::pack::Packer;
use crate::core::state::State;
use kvfs_os::side_by_side;
use kvfs_storage::ingest::seal;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::commit::{Flushed, publish};
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
pub(crate) fn is_read_by_commits(length: u64, blocks: u64) -> bool {
    length <= CHECKSUM_BYTES_MAX && length <= blocks * 512 + HOLES_BYTES_MAX
}

/// Files that a commit reads at a time for their checksums: the processors are others' as well.
const READ_AT_ONCE: usize = 2;

/// Checksums that are put into a frozen layer before others may have the state: a microsecond each.
const AMENDED_AT_A_TIME: usize = 256;

impl Core {
    /// Nobody will release or forget anything any more. Files that a mapping still changes are
    /// kept as they are, and those without names go. What a truncating writer has not closed is
    /// given up: the old version stays.
    pub(crate) fn let_go(&self) -> Result<(), FsError> {
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
    pub(crate) fn persist(
        &self, frozen: &Layer,
    ) -> Result<Vec<(ObjectId, ObjectRecord)>, StoreError> {
        let packed = Packer { core: self }.pack(frozen)?;
        let others = frozen.publish.iter().filter(|object| !packed.objects.contains_key(object));
        let mut flushed = publish(&self.store, others, |object| {
            self.state().metadata.staged.remove(&object);
        })?;
        flushed.extend(packed.flushed);
        self.note_flushed(&flushed);
        let objects: Vec<ObjectId> = frozen.publish.iter().copied().collect();
        let threads = READ_AT_ONCE.min(self.store.disk.syncs_at_once());
        let read = |object: &ObjectId| {
            let record = match packed.objects.get(object) {
                Some((length, checksum)) => with_checksum(self, *object, *length, *checksum)?,
                None => self.checksum_at_rest(*object, is_read_by_commits)?,
            };
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
    pub(crate) fn checksum_large(
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
        let Some(record) = record_without_checksum(self, object)? else {
            return Ok(None);
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
    pub(crate) fn amend(
        &self, checksums: &[(ObjectId, ObjectRecord)],
    ) -> Option<std::sync::Arc<Layer>> {
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
}

/// The record of an object whose bytes were hashed on their way into a pack, as [`Core::checksum_at_rest`].
fn with_checksum(
    core: &Core, object: ObjectId, length: u64, checksum: [u8; 16],
) -> Result<Option<ObjectRecord>, StoreError> {
    let record = record_without_checksum(core, object)?.filter(|record| record.length == length);
    Ok(record.map(|record| ObjectRecord { checksum: Some(checksum), ..record }))
}

/// The record of an object that nobody writes to, if it has no checksum.
fn record_without_checksum(
    core: &Core, object: ObjectId,
) -> Result<Option<ObjectRecord>, StoreError> {
    let state = core.state();
    let record = state.metadata.object(object)?;
    let is_wanted =
        |record: &ObjectRecord| record.checksum.is_none() && state.is_settled(object, record);
    Ok(record.filter(is_wanted))
}

impl State {
    /// Nobody may be writing to the object.
    fn is_settled(&self, object: ObjectId, record: &ObjectRecord) -> bool {
        record.kind != ObjectKind::Rows && !self.unsettled.is_changing(object)
    }
}
