//! Tails and token files: the daemon serves them and lets them only grow.
//!
//! A tail holds token rows, `K[num_kv_heads, head_dim]` then `V[num_kv_heads, v_head_dim]`, then the side row of a
//! layer that has some. The append that fills the page seals it, transposed to the manifest's layout, and opens the next
//! tail; where that fails, the row is taken back. After a crash between the two, recovery seals.

use std::sync::Arc;

use super::attributes::Place;
use super::damage::is_lost;
use super::insert::{Origin, Verified};
use super::open::Opening;
use super::opened::Opened;
use super::publish::Publishing;
use super::transfer::{WriteMode, WriteOutcome};
use super::{FsError, descriptors};
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::core::rows::{append_turn, rows_bytes};
use crate::core::waits::sealing_takes_long;
use kvfs_page::{PageError, PagePlace, names, pack_page};
use kvfs_storage::ingest::seal::{self, SealError};
use kvfs_storage::store::disk::{Access, DiskFile, read_all};
use kvfs_storage::store::metadata::TokensChange;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId, PageRecord, Role, Time};

impl Opening<'_> {
    pub(super) fn open_append(
        &self, id: InodeId, writes: bool, truncates: bool,
    ) -> Result<Opened, FsError> {
        descriptors::check(self.core)?;
        let mut state = if writes { self.core.state_to_change()? } else { self.core.state() };
        let inode = state.inode(id)?;
        let object = inode.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
        let access = if writes || truncates { Access::ReadWrite } else { Access::Read };
        let file: Arc<dyn DiskFile> = match self.core.store.open_object(object, access) {
            Err(error) if is_lost(&inode, &error) => {
                drop(state);
                return Err(self.residency.tell_of_lost_rows(id, object));
            }
            outcome => Arc::from(outcome?),
        };
        let handle = state.add_handle(Handle::new(id, writes, Served::Append(Arc::clone(&file))));
        let turn = append_turn(&mut state, id);
        drop(state);
        if truncates {
            let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let record = inode.file().ok_or(FsError::Invalid)?;
            if let Err(error) = self.core.cut_rows(record.role, file.as_ref(), 0) {
                self.publishing.release(handle)?;
                return Err(error.into());
            }
            self.core.publish_rows(record);
            self.core.note_tokens(id, TokensChange::Truncated);
        }
        Ok(Opened::uncached(handle, !writes))
    }
}

impl Publishing<'_> {
    /// Appends to a tail or token file: a descriptor without `O_APPEND` must name the end.
    pub(super) fn append(
        &self, id: InodeId, file: &dyn DiskFile, bytes: &[u8], mode: WriteMode,
    ) -> Result<WriteOutcome, FsError> {
        let mut state = self.core.state_to_change()?;
        let turn = append_turn(&mut state, id);
        drop(state);
        let _turn = match turn.try_lock() {
            Ok(turn) => turn,
            Err(_) if mode.may_wait => {
                turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
            }
            Err(_) => return Ok(WriteOutcome::MustWait),
        };
        let inode = self.core.state().inode(id)?;
        let record = inode.file().ok_or(FsError::Invalid)?.clone();
        let size = file.stat()?.length;
        if !mode.appends && mode.offset != size {
            return Err(FsError::NotPermitted);
        }
        let border = match record.role {
            role if inode.links == 0 => return Err(why_ended(self.core, role, size)),
            Role::Tail { start, directory } => Some(self.core.tail_place(directory, start)?),
            _ => None,
        };
        let end = size + bytes.len() as u64;
        if border.as_ref().is_some_and(|(_, page)| end > rows_bytes(page)) {
            return Err(FsError::CrossesPage);
        }
        if let Some((place, page)) = &border {
            check_side_rows(self.core, (place, page), end, bytes.len())?;
        }
        let full = border.filter(|(_, page)| end == rows_bytes(page));
        if !mode.may_wait && full.as_ref().is_some_and(|(_, page)| sealing_takes_long(page)) {
            return Ok(WriteOutcome::MustWait);
        }
        if let Err(error) = file.write_all_at(bytes, size) {
            // A full disk may have taken a part of it: rows are appended whole or not at all.
            self.core.cut_rows(record.role, file, size)?;
            return Err(error.into());
        }
        self.core.publish_rows(&record);
        if record.role == Role::Tokens {
            self.core.note_tokens(id, TokensChange::Grown);
        }
        if let Some((place, page)) = full {
            let sealed = self.seal_tail(id, &inode, file, (&place, &page));
            sealed.inspect_err(|_| self.core.take_back((id, record.role), file, size))?;
        }
        Ok(WriteOutcome::Done)
    }

    /// Seals a full tail and opens the next.
    pub(super) fn seal_tail(
        &self, id: InodeId, tail: &Inode, file: &dyn DiskFile, (place, page): (&Place, &PagePlace),
    ) -> Result<(), FsError> {
        let tokens = page.geometry().page_tokens();
        let rows = read_all(file, rows_bytes(page))?;
        let bytes = pack_page(page, &rows, tokens)
            .map_err(|error| self.core.report(place, SealError::Refused(error)))?;
        let [object, next] = [(); 2].map(|()| self.core.state().metadata.new_object());
        // Both files are made before anything changes: afterwards nothing may fail for want of room.
        let made = self.write_page(object, &bytes, page).and_then(|verified| {
            self.core.store.create_object(next)?;
            Ok(verified)
        });
        let verified = made.inspect_err(|_| {
            let mut state = self.core.state();
            state.metadata.remove_object(object);
            state.metadata.remove_object(next);
        })?;
        let mut state = self.core.state_to_change()?;
        let start = page.start().0;
        let name = names::format_page(page.start()).into_bytes();
        let mut sealed = tail.clone();
        sealed.mtime = Time::now();
        let origin = Origin { is_dated: false, ..state.origin(id, sealed)? };
        let to = Place { parent: place.parent, name };
        // The rows stay where they are, but where a page hid them that goes now.
        let is_alone = state.entry(to.parent, &to.name)?.is_none();
        let suspended = is_alone.then(|| state.metadata.watches.suspend(place.parent));
        let inserted = state
            .remove_source(id, place, false)
            .and_then(|()| self.insert_sealed(&mut state, &origin, &to, (object, &verified)));
        if let Some(suspended) = suspended {
            state.metadata.watches.resume(suspended);
        }
        inserted?;
        self.core.announce(&to);
        let end = start + u64::from(tokens);
        self.core.open_next_tail(&mut state, tail, (place.parent, end), next)
    }

    fn write_page(
        &self, object: ObjectId, bytes: &[u8], page: &PagePlace,
    ) -> Result<Verified, FsError> {
        let file = self.core.store.create_object(object)?;
        file.write_all_at(bytes, 0)?;
        let verified = seal::verify_file(file.as_ref(), page).map_err(|error| match error {
            SealError::Io(error) => FsError::Io(error),
            SealError::Refused(_) => FsError::Corrupt,
        })?;
        let role =
            Role::Page(PageRecord::of_page(page, verified.header.tokens, verified.digest.page));
        let checksum = verified.digest.object.0;
        let twin = self.core.find_twin(object, role, checksum)?;
        Ok(Verified { role, checksum, length: bytes.len() as u64, twin, same: None })
    }

    /// Renames an ordinary file onto the name of a tail or token file: its bytes become the
    /// content.
    pub(super) fn replace_append(
        &self, id: InodeId, (from, to): (&Place, &Place), role: Role,
    ) -> Result<(), FsError> {
        let is_full = self.core.check_rows(id, to, role)?;
        let (source, mut object, mut taken) = self.take_over(id)?;
        // Rows are added to a file of their own; memory and packs are for what does not change any more.
        let store = &self.core.store;
        let is_shut =
            store.packs.holds(object) || store.ram.as_ref().is_some_and(|ram| ram.holds(object));
        let mut copied = Ok(object);
        if taken && is_shut {
            copied = self.core.copy_object(object);
            taken = false;
        }
        let mut state = self.core.state_to_change()?;
        state.sealing.remove(&id);
        object = copied?;
        // From now on its file on the disk tells the time; a backup has set that of the record.
        self.core.store.open_object(object, Access::ReadWrite)?.set_modified(source.mtime)?;
        let attributes = state.metadata.attributes(id)?;
        state.remove_source(id, from, taken)?;
        if let Some(entry) = state.entry(to.parent, &to.name)? {
            let mut old = state.inode(entry.inode)?;
            state.drop_link(entry.inode, &mut old)?;
        }
        let inode = Inode { links: 1, ctime: Time::now(), ..source };
        // Rows will be added: from now on the disk's copy is the only one.
        state.metadata.forget_remote_copy(object)?;
        if let Some(tiers) = self.residency.tiers {
            tiers.copies.forget_remote_copy(object);
        }
        self.core.insert_append(&mut state, to, &inode, (object, role))?;
        let entry = state.entry(to.parent, &to.name)?.ok_or(FsError::NotFound)?;
        state.replace_attributes(entry.inode, &attributes)?;
        if is_full {
            // The rows have their name by now: where there is no room for the page, it comes later.
            state.full_tails.insert(entry.inode);
            drop(state);
            self.seal_full_tails();
        }
        Ok(())
    }
}

/// Bytes of a write that may end within a row: a copy is written in pieces, those of `cp` are 128 KiB and more, and
/// the kernel cuts what is longer than a request, of 128 KiB less one OS page at least.
const PIECE_BYTES_MIN: usize = 64 << 10;

/// Refuses rows that lack their part beside K and V: all that follow would be read as something else. A piece of a
/// longer write may end anywhere; until the rest has come the tail counts as one without rows.
fn check_side_rows(
    core: &Core, (place, page): (&Place, &PagePlace), end: u64, length: usize,
) -> Result<(), FsError> {
    let geometry = page.geometry();
    let (row, side) = (geometry.row_bytes(), geometry.side_row_bytes());
    if side == 0 || length >= PIECE_BYTES_MIN || end.is_multiple_of(row) {
        return Ok(());
    }
    let why = format!(
        "the tail would be {end} bytes, no whole rows of {row}: each has {side} bytes of side rows behind K and V"
    );
    Err(core.report(place, SealError::Refused(PageError::Rows(why))))
}

/// Why nothing is added to rows without a name: they are a full page by now, or were removed, and nobody would find
/// what is added.
fn why_ended(core: &Core, role: Role, size: u64) -> FsError {
    let Role::Tail { start, directory } = role else { return FsError::Stale };
    let is_there = core.state().inode(directory).is_ok_and(|directory| directory.links > 0);
    let page = is_there.then(|| core.tail_place(directory, start));
    match page {
        Some(Ok((_, page))) if size >= rows_bytes(&page) => FsError::CrossesPage,
        _ => FsError::Stale,
    }
}
