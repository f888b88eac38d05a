//! Bytes that pass through the daemon: everything without passthrough, and always what the kernel
//! does not pass through (fallocate, holes, copies between files, rows, views).

use super::postponed::with_room;
use super::{FileSystem, FsError};
use crate::core::Core;
use crate::core::handle::Served;
use crate::core::recalled;
use kvfs_storage::store::commit::is_full;
use kvfs_storage::store::disk::{Access, Allocation, Seek, seek_without_holes};
use kvfs_storage::store::record::InodeId;

/// Where and how bytes are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteMode {
    /// In the file; of no account where bytes are appended.
    pub(super) offset: u64,
    /// At the end, wherever that is by now.
    pub(super) appends: bool,
    /// Whether the thread may wait: for another writer, or for a large page to be made.
    pub(super) may_wait: bool,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// All bytes were written.
    Done,
    /// Nothing was: it takes a thread that may wait.
    MustWait,
}

impl FileSystem {
    /// Reads for a handle into `buffer`; short only at the end of the file.
    pub fn read(&self, handle: u64, offset: u64, buffer: &mut [u8]) -> Result<usize, FsError> {
        let (id, _, served) = self.core.served(handle)?;
        match served {
            Served::File(file) | Served::Append(file) => Ok(file.read_at(buffer, offset)?),
            Served::Passthrough => {
                Ok(self.core.open_current(id, Access::Read)?.read_at(buffer, offset)?)
            }
            Served::Text(text) => Ok(copy_text(&text, offset, buffer)),
            Served::History(history) => history.read(&self.core, offset, buffer),
            Served::Query(query) => self.virtual_directories().answer(&query, offset, buffer),
            Served::Settings(dialogue) => Ok(dialogue.answer(self, offset, buffer)),
            Served::Batch(batch) => batch.answer(self, offset, buffer),
            Served::Slot(slot) => self.slots().read(&slot, offset, buffer),
            Served::Before(file) => Ok(file.ok_or(FsError::Lost)?.read_at(buffer, offset)?),
            Served::Draft(_) | Served::SlotDraft(_) => Err(FsError::BadHandle),
        }
    }

    /// Writes for a handle. `appends` says that it was opened with `O_APPEND`. May wait, for another
    /// writer or until a large page is made.
    pub fn write(
        &self, handle: u64, offset: u64, bytes: &[u8], appends: bool,
    ) -> Result<(), FsError> {
        let mode = WriteMode { offset, appends, may_wait: true };
        write_as(self, handle, bytes, mode).map(drop)
    }

    /// The same where it need not wait.
    pub fn write_at_once(
        &self, handle: u64, offset: u64, bytes: &[u8], appends: bool,
    ) -> Result<WriteOutcome, FsError> {
        write_as(self, handle, bytes, WriteMode { offset, appends, may_wait: false })
    }

    /// fallocate(2)
    pub fn allocate(&self, handle: u64, allocation: Allocation) -> Result<(), FsError> {
        let (id, _, served) = self.core.served(handle)?;
        if matches!(served, Served::Before(_)) {
            return Err(FsError::Lost);
        }
        if !matches!(served, Served::File(_) | Served::Passthrough) {
            return Err(FsError::Unsupported);
        }
        if allocation.mode & !libc::FALLOC_FL_KEEP_SIZE != 0 {
            // Bytes go, or others come in their place.
            self.blocks.forget_file(id);
        }
        let file = self.core.open_current(id, Access::ReadWrite)?;
        Ok(with_room(self, is_full, || file.allocate(allocation))?)
    }

    /// `SEEK_DATA` and `SEEK_HOLE`
    pub fn seek(&self, handle: u64, offset: i64, seek: Seek) -> Result<u64, FsError> {
        let (id, _, served) = self.core.served(handle)?;
        match served {
            Served::Text(_)
            | Served::History(_)
            | Served::Query(_)
            | Served::Settings(_)
            | Served::Batch(_)
            | Served::Slot(_)
            | Served::Draft(_)
            | Served::SlotDraft(_) => Err(FsError::Invalid),
            Served::Before(file) => Ok(file.ok_or(FsError::Lost)?.seek(offset, seek)?),
            Served::File(file) | Served::Append(file) => Ok(if has_unseen_writes(&self.core, id) {
                seek_without_holes(offset, seek, file.stat()?.length)?
            } else {
                file.seek(offset, seek)?
            }),
            Served::Passthrough => {
                Ok(self.core.open_current(id, Access::Read)?.seek(offset, seek)?)
            }
        }
    }

    /// `copy_file_range(2)`; returns the bytes copied.
    pub fn copy_range(
        &self, (from, from_offset): (u64, u64), (to, to_offset): (u64, u64), length: u64,
    ) -> Result<u64, FsError> {
        let (source, _, source_served) = self.core.served(from)?;
        let (target, writes, target_served) = self.core.served(to)?;
        if !writes {
            return Err(FsError::BadHandle);
        }
        if !matches!(target_served, Served::File(_) | Served::Passthrough) {
            // The kernel falls back to reads and writes, which append.
            return Err(FsError::CrossDevice);
        }
        if !matches!(source_served, Served::File(_) | Served::Append(_) | Served::Passthrough) {
            return Err(FsError::CrossDevice);
        }
        let target = self.core.open_current(target, Access::ReadWrite)?;
        let source = self.core.open_current(source, Access::Read)?;
        Ok(source.copy_to(from_offset, target.as_ref(), to_offset, length)?)
    }
}

fn write_as(
    fs: &FileSystem, handle: u64, bytes: &[u8], mode: WriteMode,
) -> Result<WriteOutcome, FsError> {
    let (id, writes, served) = fs.core.served(handle)?;
    if !writes {
        return Err(FsError::BadHandle);
    }
    match served {
        Served::File(file)
            if !mode.may_wait && file.write_waits(mode.offset, bytes.len() as u64) =>
        {
            return Ok(WriteOutcome::MustWait);
        }
        Served::File(file) => file.write_all_at(bytes, mode.offset)?,
        Served::Append(file) => {
            return fs.publishing().append(id, file.as_ref(), bytes, mode);
        }
        Served::Passthrough => {
            fs.core.open_current(id, Access::ReadWrite)?.write_all_at(bytes, mode.offset)?;
        }
        Served::Text(_) | Served::History(_) | Served::Slot(_) => {
            return Err(FsError::NotPermitted);
        }
        Served::Before(_) => {
            recalled::note_refused_write(&fs.core, id);
            return Err(FsError::Lost);
        }
        Served::Query(query) => query.ask(bytes, mode.offset)?,
        Served::Settings(dialogue) => dialogue.ask(bytes, mode.offset)?,
        Served::Batch(batch) => batch.ask(bytes)?,
        Served::Draft(draft) => draft.write(mode.offset, bytes)?,
        Served::SlotDraft(draft) => draft.write(mode.offset, bytes)?,
    }
    Ok(WriteOutcome::Done)
}

/// Whether the kernel may keep bytes of a file that somebody has written to a mapping, and the daemon not know of them:
/// there may be no hole where it sees one.
fn has_unseen_writes(core: &Core, id: InodeId) -> bool {
    core.state().nodes.get(&id).is_some_and(|node| node.writers > 0)
}

/// Copies what a text has from an offset on; returns how much.
pub(super) fn copy_text(text: &[u8], offset: u64, buffer: &mut [u8]) -> usize {
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
    let count = buffer.len().min(text.len() - start);
    buffer[..count].copy_from_slice(&text[start..start + count]);
    count
}
