//! The group commit: everything that happened so far becomes durable at once.
//!
//! Whoever needs durability commits. Callers wait for their turn (`durable`); the one that gets it commits for
//! all that came before, so a burst of fsyncs costs few disk flushes. A timer commits for those who never ask.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::damage::known;
use super::discarded::{remove_discarded, remove_present};
use super::health::Refusal;
use super::postponed::{keep_room, remove_files_of, with_room_noted};
use super::tiers::lacking_in_remote;
use super::{FileSystem, FsError, held_back};
use crate::core::failures::note_failure_of_all;
use crate::core::orphan::make_room;
use crate::core::state::{CommitFailure, State};
use crate::core::{Core, happened, recalled};
use kvfs_storage::store::StoreError;
use kvfs_storage::store::commit::{is_full, may_pass};
use kvfs_storage::store::database::Writer;
use kvfs_storage::store::layer::Layer;
use kvfs_storage::store::metadata::reopening::{go_on_with, reopen};

impl FileSystem {
    /// Makes every change so far durable.
    pub fn commit(&self) -> Result<(), FsError> {
        if self.core.store.is_read_only() {
            // What recovery found out about files is true again at the next mount.
            return Ok(());
        }
        let outcome = with_room_noted(self, found_no_room, || commit_changes(self));
        let mut state = self.core.state();
        match &outcome {
            // Others may have failed with what came after this.
            Ok(()) if state.metadata.uncommitted() == 0 => state.commit_failure = None,
            // It failed before there was anything to conclude.
            Err(error) if state.commit_failure.is_none() => {
                let failure = CommitFailure { why: error.to_string(), lacks_room: false };
                state.commit_failure = Some(failure);
            }
            _ => {}
        }
        drop(state);
        if let Err(error) = &outcome
            && !matches!(error, FsError::ReadOnly)
        {
            let why = format!("changes could not be made durable: {error}");
            note_failure_of_all(&self.core, ("commit", ""), (0, None), why);
        }
        outcome
    }

    /// The last commit of a mount.
    pub fn commit_and_close(&self) -> Result<(), FsError> {
        if self.core.store.is_read_only() {
            return Ok(());
        }
        self.core.drop_spares();
        self.core.let_go()?;
        self.indexer().update()?;
        happened::take_events(&self.core);
        held_back::make_all_durable(self)?;
        if let Some(tiers) = &self.tiers {
            self.demotion(tiers).remove_encoded_garbage()?;
        }
        remove_discarded(self);
        self.core.store.sync_removals()?;
        self.core.store.packs.end()?;
        if self.left_by_crash.is_swept() {
            self.core.state().metadata.put_epoch(true);
            self.commit()?;
        }
        let lacking = lacking_in_remote(&self.core, self.tiers.as_ref());
        if lacking.files > 0 {
            log::warn!("the remote does not have {} files, {} bytes", lacking.files, lacking.bytes);
        }
        Ok(())
    }
}

/// After the attempt: the layer is the base now, or goes back to be tried again.
fn conclude(
    fs: &FileSystem, outcome: Result<(), StoreError>, reached: Reached,
) -> Result<(), FsError> {
    if let Err(error) = outcome {
        let error = conclude_failure(&fs.core, error, reached);
        // Otherwise a disk that is full of what was removed before its commit would stay full.
        remove_present(fs);
        return Err(error);
    }
    let mut state = fs.core.state();
    // Freeing a layer of many records takes as long as many requests.
    let layer = state.metadata.frozen();
    state.metadata.thaw_committed()?;
    state.commit_failure = None;
    drop(state);
    if let Some(layer) = layer {
        remove_files_of(fs, &layer);
    }
    keep_room(fs);
    if let Err(error) = fs.core.store.packs.write_dead() {
        log::debug!("the packs do not say yet what is not valid: {error}");
    }
    Ok(())
}

/// How far a commit got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reached {
    /// Nothing was begun: room on the disk is looked for.
    Room,
    /// Bytes of files are made durable.
    Files,
    /// The database writes.
    Database,
}

/// The layer goes back to be tried again, unless the disk failed in a way after which nothing can be promised.
/// Returns what whoever asked for the commit is told.
fn conclude_failure(core: &Core, error: StoreError, reached: Reached) -> FsError {
    let had_no_room =
        core.state().commit_failure.as_ref().is_some_and(|failure| failure.lacks_room);
    // It refuses everything since it found no room, and could not be opened anew then.
    let error = if error.is_after_a_failure() && had_no_room { no_room() } else { error };
    let is_full = matches!(&error, StoreError::Io(error) if is_full(error));
    let replacement = (reached == Reached::Database && is_full).then(|| reopen(&core.store));
    let mut state = core.state();
    if let Some(Ok(_)) = &replacement {
        log::warn!("meta.redb found no room and was opened anew: the commit is tried again");
    }
    let replacement = replacement.transpose().unwrap_or_else(|error| {
        log::error!("meta.redb cannot be opened anew after it found no room: {error}");
        None
    });
    let replaced = replacement.map(|new| go_on_with(&mut state.metadata, new));
    state.metadata.thaw_failed(reached == Reached::Database && replaced.is_none());
    if !error.is_after_a_failure() || state.commit_failure.is_none() {
        let lacks_room = is_full && reached != Reached::Files;
        state.commit_failure = Some(CommitFailure { why: error.to_string(), lacks_room });
    }
    if !matches!(&error, StoreError::Io(error) if may_pass(error)) {
        // After a failed fsync nobody knows what the disk holds: no further promises.
        state.refusal = Some(Refusal::DiskFailed);
        core.observer.failed(&format!("the store is read-only from now on: {error}"));
    }
    drop(state);
    // After its first failure the database refuses everything; who met that one was told of it.
    if error.is_after_a_failure() { FsError::ReadOnly } else { error.into() }
}

/// Whether a commit met a disk without room.
fn found_no_room(error: &FsError) -> bool {
    matches!(error, FsError::Store(StoreError::Io(error)) if is_full(error))
}

fn no_room() -> StoreError {
    StoreError::Io(io::Error::from_raw_os_error(libc::ENOSPC))
}

/// Makes every change so far durable, where anything can be.
fn commit_changes(fs: &FileSystem) -> Result<(), FsError> {
    fs.publishing().publish_all(None);
    fs.publishing().seal_full_tails();
    held_back::let_overdue_go(fs)?;
    make_room(&fs.core)?;
    known::record(&fs.core);
    let has_changes = fs.core.state().metadata.uncommitted() > 0;
    // What was closed before now is in no generation before it has settled: whoever waits for the commit of others, which has
    // looked for such files already, would be told that it is durable. A mapping may have gone away unnoticed as well.
    fs.core.settle_idle()?;
    if !has_changes {
        remove_present(fs);
        keep_room(fs);
        // The next changes are to know of a disk that others have filled.
        fs.backlog.look_for_room(&fs.core.store);
    }
    let wanted = {
        let state = fs.core.state();
        state.metadata.generation - u64::from(state.metadata.uncommitted() == 0)
    };
    let Some(turn) = fs.durable.begin(wanted) else { return Ok(()) };
    if has_changes {
        // More have come while others committed. The disk would write their bytes, too.
        remove_present(fs);
    }
    let Some((frozen, writer, generation)) = freeze(fs)? else { return Ok(()) };
    keep_room(fs);
    let room = match with_room_noted(fs, is_full, || fs.core.store.fill_reserve()) {
        // That is what the reserve is for.
        Err(_) if frozen.makes_room() => Ok(()),
        outcome => outcome,
    };
    fs.backlog.look_for_room(&fs.core.store);
    let reached = Cell::new(Reached::Room);
    let write = AssertUnwindSafe(|| {
        room?;
        reached.set(Reached::Files);
        let bytes = held_back::bytes_to_write(fs, &frozen);
        let checksums = fs.core.persist(&frozen)?;
        held_back::note_written(fs, bytes);
        // The last reference outside of the state: amending does not copy the layer.
        drop(frozen);
        fs.core.amend(&checksums).map_or(Ok(()), |layer| {
            fs.core.describe(&layer);
            reached.set(Reached::Database);
            writer.write(&layer)
        })
    });
    // A commit that ended in the middle would leave its layer frozen, and none could come after it.
    let panicked = |_| Err(StoreError::Io(io::Error::other("a fault of kvfs ended the commit")));
    let outcome = catch_unwind(write).unwrap_or_else(panicked);
    conclude(fs, outcome, reached.get())?;
    turn.reach(generation);
    Ok(())
}

/// What a commit is to write, and the generation that is durable then; nothing if nothing is to be written.
fn freeze(fs: &FileSystem) -> Result<Option<(Arc<Layer>, Writer, u64)>, FsError> {
    let mut state = fs.core.state_to_change()?;
    if state.metadata.uncommitted() > 0 {
        if let Some(now) = fs.retention.believed_time() {
            state.metadata.put_clock(now);
        }
        held_back::record_left(fs, &mut state);
        fs.core.store.events.write_to(&mut state.metadata);
    }
    let Some(frozen) = state.metadata.freeze() else {
        return is_concluded(&mut state).map(|()| None);
    };
    recalled::note_unfinished(&fs.core.store, &mut state);
    let (writer, generation) = (state.metadata.writer(), state.metadata.generation - 1);
    Ok(Some((frozen, writer, generation)))
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::unmounted::{FILES, Unmounted};
    use kvfs_storage::store::disk::Access;

    #[test]
    fn who_waits_for_the_commit_of_others_finds_durable_what_was_closed_before() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        // A file that was closed and mapped still; its mapping ends unnoticed.
        let (id, handle) = unmounted.open_new("closed");
        fs.write(handle, 0, b"bytes", false).unwrap();
        let object = fs.core.state().unsettled.get(id).copied().unwrap();
        let mapping = fs.core.store.open_object(object, Access::ReadWrite).unwrap();
        fs.flush(handle).unwrap();
        fs.release(handle).unwrap();
        let is_settled = || !fs.core.state().unsettled.contains_key(id);
        assert!(!is_settled());
        unmounted.write(FILES, "another", b"bytes");
        // Another commit has begun, and has looked for files at rest.
        let turn = fs.durable.hold();
        drop(mapping);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| fs.commit());
            let end = Instant::now() + Duration::from_secs(2);
            while !is_settled() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (frozen, writer, generation) = freeze(fs).unwrap().unwrap();
            let checksums = fs.core.persist(&frozen).unwrap();
            drop(frozen);
            let layer = fs.core.amend(&checksums).unwrap();
            writer.write(&layer).unwrap();
            drop(layer);
            conclude(fs, Ok(()), Reached::Database).unwrap();
            turn.reach(generation);
            waiting.join().unwrap().unwrap();
        });
        assert!(is_settled(), "it is in no commit");
        assert_eq!(fs.core.state().metadata.uncommitted(), 0);
    }
}
