//! Pages that the disk is spared: while its [budget for writes](kvfs_storage::tier::writes) is used up, a new page stays
//! in memory until the remote has it, and then counts as one that only the remote has.
//!
//! ```text
//! held back   records are volatile, as those of a file that is still being written; a crash forgets it
//! kept        the remote has it, verified: the record says `Only`; memory keeps it all the same
//! named       a manifest names it there: memory may let it go
//! ```
//!
//! The disk takes it after all if somebody syncs, if the remote does not take it in [`HELD_BACK_MAX`], or if there is no
//! room in memory. Nobody waits for any of that.

use std::time::Duration;

use super::residency::Residency;
use super::tiers::Tiers;
use super::{FileSystem, FsError};
use crate::core::Core;
use crate::core::state::State;
use crate::insert::Verified;
use kvfs_storage::store::layer::Layer;
use kvfs_storage::store::metadata::held_back;
use kvfs_storage::store::record::{
    InodeId, ObjectId, ObjectRecord, RemoteCopy, Role, Time, Totals, WritesLeft,
};
use kvfs_storage::store::{database, keys};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::remote::State as RemoteHealth;

/// Longest time for which a page is held back; until then a crash forgets it. An object store that is used for the
/// first time is looked at again after a minute before it is believed to keep what it got.
pub(super) const HELD_BACK_MAX: Duration = Duration::from_secs(90);
/// Part of the memory that pages held back may have: what is in the remote, or on the disk, needs room as well.
const MEMORY_PART: u64 = 2;
/// Pages that are let go before others may have the state.
const AT_A_TIME: usize = 256;

/// Whether the disk is to be written to only where it must, since the remote takes what it does not.
pub(super) fn is_disk_spared(tiers: &Tiers) -> bool {
    tiers.writes.is_used_up()
        && !tiers.is_closing()
        && tiers.trouble().is_none()
        && tiers
            .exchange
            .as_ref()
            .is_some_and(|exchange| matches!(exchange.remote().state(), RemoteHealth::Up { .. }))
}

/// Whether a new page under a new name is held back.
pub(super) fn may_hold_back(
    residency: Residency<'_>, state: &State, object: ObjectId, verified: &Verified,
) -> bool {
    let ram = residency.core.store.ram.as_ref();
    let (Some(tiers), Some(ram)) = (residency.tiers, ram) else { return false };
    matches!(verified.role, Role::Page(_))
        && tiers.writes.day_bytes().is_some()
        && ram.dirty_version(object).is_some()
        // A commit came before its name: the disk has it, or gets it.
        && matches!(state.metadata.object(object), Ok(None))
        && state.metadata.held_back.bytes().saturating_add(verified.length)
            <= ram.budget_bytes() / MEMORY_PART
        && is_disk_spared(tiers)
}

/// Makes every change so far durable, of pages that are held back as well: for whoever asks for just that.
///
/// # Errors
/// As [`FileSystem::commit`].
pub fn make_all_durable(fs: &FileSystem) -> Result<(), FsError> {
    let_go(fs, Duration::ZERO)?;
    fs.commit()
}

/// The next commit writes those pages to the disk that the remote does not take.
pub(super) fn let_overdue_go(fs: &FileSystem) -> Result<(), FsError> {
    let Some(tiers) = &fs.tiers else { return Ok(()) };
    if fs.core.state().metadata.held_back.is_empty() {
        return Ok(());
    }
    let is_taken = tiers.trouble().is_none() && !tiers.is_closing();
    let_go(fs, if is_taken { HELD_BACK_MAX } else { Duration::ZERO })
}

fn let_go(fs: &FileSystem, age: Duration) -> Result<(), FsError> {
    loop {
        let mut state = fs.core.state();
        let some = state.metadata.held_back.older_than(age, AT_A_TIME);
        if some.is_empty() {
            return Ok(());
        }
        for id in some {
            state.make_durable(id)?;
        }
    }
}

/// The remote has a page that was held back: the next commit says that only the remote has it. Whether it was one.
pub(super) fn keep_in_remote(
    tiers: &Tiers, state: &mut State, (id, object): (InodeId, ObjectId), copy: &RemoteCopy,
) -> Result<bool, FsError> {
    if !state.metadata.held_back.contains(id) {
        return Ok(false);
    }
    let length = state.metadata.object(object)?.map_or(0, |record| record.length);
    state.make_durable(id)?;
    held_back::keep_in_remote(&mut state.metadata, object, copy);
    tiers.copies.note_remote_copy(object, copy);
    tiers.copies.note_left(object, length);
    tiers.counters.moved(Tier::Ram, Tier::Remote, length);
    Ok(true)
}

/// A manifest in the remote names an object that only the remote has.
pub(super) fn note_named(core: &Core, object: ObjectId) {
    if let Some(ram) = &core.store.ram
        && let Some(version) = ram.dirty_version(object)
    {
        ram.make_clean(object, version);
    }
}

/// Bytes that a commit writes to the disk: of each object as many as it has more than at the last commit.
pub(super) fn bytes_to_write(fs: &FileSystem, frozen: &Layer) -> u64 {
    if fs.tiers.as_ref().is_none_or(|tiers| tiers.writes.day_bytes().is_none()) {
        return 0;
    }
    let Ok(before) = fs.core.state().metadata.snapshot() else { return 0 };
    let mut bytes = 0;
    for object in &frozen.publish {
        let key = keys::object(*object);
        let Some(Some(record)) = frozen.records.get(&key) else { continue };
        let length = database::decode::<ObjectRecord>(record).map_or(0, |record| record.length);
        let known = before.get::<ObjectRecord>(&key).ok().flatten();
        bytes += length.saturating_sub(known.map_or(0, |known| known.length));
    }
    bytes
}

/// What the store holds, pages that are held back included.
pub(super) fn totals(state: &State) -> Totals {
    let held_back = &state.metadata.held_back;
    let (pages, bytes) = (held_back.len() as u64, held_back.bytes());
    let Totals { objects, pages: sealed, bytes: stored } = state.metadata.totals;
    Totals { objects: objects + pages, pages: sealed + pages, bytes: stored + bytes }
}

/// A file that is to stay on the disk: the next commit writes it there, if memory has it and the disk does not. It goes to the
/// remote, or is found there, once more.
pub(super) fn write_to_disk(
    core: &Core, tiers: Option<&Tiers>, state: &mut State, id: InodeId,
) -> Result<(), FsError> {
    state.make_durable(id)?;
    let object = state.inode(id)?.file().and_then(|file| file.object);
    let (Some(object), Some(tiers), Some(ram)) = (object, tiers, &core.store.ram) else {
        return Ok(());
    };
    if ram.holds(object) && state.metadata.is_only_remote(object)? {
        ram.make_dirty(object);
        tiers.forget_upload(state, (id, object))?;
    }
    Ok(())
}

/// How many pages are held back, and their bytes.
pub(super) fn held(fs: &FileSystem) -> (usize, u64) {
    let state = fs.core.state();
    (state.metadata.held_back.len(), state.metadata.held_back.bytes())
}

/// So many bytes were written to the disk.
pub(super) fn note_written(fs: &FileSystem, bytes: u64) {
    if let Some(tiers) = &fs.tiers {
        tiers.writes.note(bytes);
    }
}

/// What is left of the budget goes on record, as part of the next commit.
pub(super) fn record_left(fs: &FileSystem, state: &mut State) {
    let left = fs.tiers.as_ref().and_then(|tiers| tiers.writes.left_at(Time::now().seconds));
    if let Some(left) = left {
        state.metadata.put_single(&left);
    }
}

/// The budget goes on where that of the last mount ended.
pub(super) fn resume(tiers: &Tiers, state: &State) {
    match state.metadata.single::<WritesLeft>() {
        Ok(Some(known)) => tiers.writes.resume(&known, Time::now().seconds),
        Ok(None) => {}
        Err(error) => log::warn!("the budget for writes begins anew: {error}"),
    }
}
