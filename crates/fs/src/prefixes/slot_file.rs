//! An open slot of references as a file in memory: the kernel reads it like any backing file, without the
//! daemon.
//!
//! An engine reads all of a slot, and of one with references most is zeros in the place of rows. Through
//! the daemon they cost four times what the engine's own memory takes to be filled; holes of a file are
//! read as fast as memory is cleared, and need none. What is written are the references, the tokens, and
//! the rows of the last page if it is not whole.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::slot::{OpenSlot, Slots, Stretch};
use crate::{FsError, descriptors};
use kvfs_storage::store::disk::DiskFile;
use kvfs_storage::store::local_disk::anonymous_file;
use kvfs_storage::store::record::InodeId;

/// Memory of all of them: a conversation of 32,768 tokens of a model with 32 layers of 8 heads takes 40 MiB,
/// and as much as its last page. The daemon serves what does not fit.
const MEMORY_BYTES_MAX: u64 = 1 << 30;
/// What is written takes whole OS pages.
const OS_PAGE_BYTES: u64 = 4096;
/// Rows are gathered in pieces.
const PIECE_BYTES: usize = 1 << 20;

/// The files of a mount.
#[derive(Debug, Default)]
pub(super) struct SlotFiles {
    /// Opens of one slot have one: the kernel takes no other meanwhile.
    by_inode: Mutex<HashMap<InodeId, Weak<SlotFile>>>,
    used_bytes: Arc<AtomicU64>,
}

/// A slot in memory.
#[derive(Debug)]
pub(super) struct SlotFile {
    pub(super) file: Arc<dyn DiskFile>,
    _room: Room,
}

/// Memory that is taken until this is dropped.
#[derive(Debug)]
struct Room {
    bytes: u64,
    used_bytes: Arc<AtomicU64>,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl SlotFiles {
    fn files(&self) -> MutexGuard<'_, HashMap<InodeId, Weak<SlotFile>>> {
        self.by_inode.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: InodeId) -> Option<Arc<SlotFile>> {
        self.files().get(&id).and_then(Weak::upgrade)
    }

    fn take_room(&self, bytes: u64) -> Option<Room> {
        let used_bytes = Arc::clone(&self.used_bytes);
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= MEMORY_BYTES_MAX);
        used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Room { bytes, used_bytes })
    }

    /// What somebody else has made meanwhile counts.
    fn put(&self, id: InodeId, made: SlotFile) -> Arc<SlotFile> {
        let mut files = self.files();
        files.retain(|_, file| file.strong_count() > 0);
        let made = Arc::new(made);
        let file = files.entry(id).or_insert_with(|| Arc::downgrade(&made));
        file.upgrade().unwrap_or(made)
    }
}

impl Slots<'_> {
    /// A slot of references for the kernel to read; nothing where the daemon has to serve it.
    pub(super) fn in_memory(
        &self, id: InodeId, slot: &OpenSlot,
    ) -> Result<Option<Arc<SlotFile>>, FsError> {
        if !self.core.is_passthrough() || !slot.is_of_references() {
            return Ok(None);
        }
        let files = self.slot_files;
        let found = files.find(id);
        if found.is_some() {
            return Ok(found);
        }
        let Some(room) = files.take_room(memory_bytes(slot)) else { return Ok(files.find(id)) };
        descriptors::check(self.core)?;
        let file = anonymous_file(c"kvfs slot")?;
        self.write_out(slot, file.as_ref())?;
        Ok(Some(files.put(id, SlotFile { file, _room: room })))
    }

    fn write_out(&self, slot: &OpenSlot, to: &dyn DiskFile) -> Result<(), FsError> {
        to.set_length(slot.length())?;
        let mut buffer = Vec::new();
        for (at, stretch) in slot.stretches(0) {
            let (Stretch::AtHand(length) | Stretch::Rows(length)) = stretch else { continue };
            let end = at + length;
            let mut at = at;
            while at < end {
                let count = usize::try_from(end - at).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
                buffer.resize(count, 0);
                if self.read(slot, at, &mut buffer)? < count {
                    return Err(FsError::Stale);
                }
                to.write_all_at(&buffer, at)?;
                at += count as u64;
            }
        }
        Ok(())
    }
}

/// At most what is written takes.
fn memory_bytes(slot: &OpenSlot) -> u64 {
    let bytes = |stretch| match stretch {
        Stretch::Zeros(_) => 0,
        Stretch::AtHand(length) | Stretch::Rows(length) => length + 2 * OS_PAGE_BYTES,
    };
    slot.stretches(0).map(|(_, stretch)| bytes(stretch)).sum()
}
