//! Copying what came to rest to the remote, and reading it back.
//!
//! The first two steps of [`super::demotion`]: an object that both have taken is `Held`.

use std::io;
use std::time::{Duration, Instant};

use super::demotion::{Demotion, Mover};
use super::residency::item;
use super::{FsError, held_back, share};
use crate::core::failures::note_failure;
use crate::core::persist::is_read_by_commits;
use crate::core::state::State;
use kvfs_os::in_background;
use kvfs_storage::store::record::{FileRecord, InodeId, ObjectId, RemoteCopy, RemoteState};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::exchange::{Exchange, Item, Uploaded};
use kvfs_storage::tier::remote::RemoteError;
use kvfs_storage::tier::ssd::LEAVING_BYTES_MAX;

/// Files uploaded between two looks at everything else: with pages of 4 MiB 256 MiB.
const BATCH: usize = 64;
/// Uploads of a batch begin within so long: what a slow remote has got is verified and named, and leaves a full disk, before
/// it gets the rest.
const BATCH_BEGINS_WITHIN: Duration = Duration::from_secs(5);
/// Files that a commit will make durable in a moment, looked at while holding the state.
const PASSED_OVER_MAX: usize = 1024;
/// Uploads that are read back before the place is looked at once more.
const VERIFIED_AT_ONCE: usize = 8;
/// Uploads at a time; of the remote's eight calls, opens find at least half free.
const UPLOADS: usize = 3;
/// Larger files never move: a fetch of gigabytes at open would look like a hang.
pub(super) const MOVING_BYTES_MAX: u64 = LEAVING_BYTES_MAX;

impl Demotion<'_> {
    /// Puts a batch of objects into the remote; how many.
    pub(super) fn upload_batch(
        &self, exchange: &Exchange, mover: &mut Mover,
    ) -> Result<usize, FsError> {
        let batch = self.take_arrivals()?;
        if batch.is_empty() {
            return Ok(0);
        }
        let begin = Instant::now();
        let outcomes = in_background(UPLOADS, share::of_moving(self), &batch, |(_, item)| {
            let is_begun = !self.tiers.is_closing() && begin.elapsed() < BATCH_BEGINS_WITHIN;
            is_begun.then(|| exchange.upload(&self.core.store, item))
        });
        let mut failure = None;
        let count = batch.len();
        for ((id, item), outcome) in batch.into_iter().zip(outcomes) {
            let Some(outcome) = outcome else {
                self.core.state().metadata.arrivals.put_back(id);
                continue;
            };
            match outcome {
                Ok(uploaded) => mover.uploaded.push_back((id, uploaded)),
                Err(error) => {
                    self.tiers.counters.failed(Tier::Ssd, Tier::Remote, error.label());
                    failure = self.not_uploaded(id, &item, error).or(failure);
                }
            }
        }
        failure.map_or(Ok(count), |error| Err(FsError::Remote(error)))
    }

    /// Without a remote, what came to rest may be encoded. Whether there is more.
    pub(super) fn note_raw(&self) -> Result<bool, FsError> {
        let batch = self.take_arrivals()?;
        for (id, item) in &batch {
            self.tiers.copies.note_raw(item.object, *id, item.length);
        }
        Ok(batch.len() == BATCH)
    }

    /// Files that came to rest, whose bytes are durable, and which the remote does not have.
    fn take_arrivals(&self) -> Result<Vec<(InodeId, Item)>, FsError> {
        let mut state = self.core.state();
        let (mut batch, mut later, mut unhashed) = (Vec::new(), Vec::new(), Vec::new());
        while batch.len() < BATCH
            && later.len() < PASSED_OVER_MAX
            && let Some(id) = state.metadata.arrivals.take()
        {
            match candidate(&state, id)? {
                Candidate::Ready(item) => batch.push((id, item)),
                Candidate::NotYet => later.push(id),
                Candidate::Unhashed(object) => unhashed.push((id, object)),
                Candidate::Never => {}
            }
        }
        for id in later {
            state.metadata.arrivals.put_back(id);
        }
        drop(state);
        for (id, object) in unhashed {
            if !self.tiers.is_closing() && self.core.checksum_large(object, MOVING_BYTES_MAX)? {
                self.core.state().metadata.note_arrival(id)?;
            }
        }
        Ok(batch)
    }

    /// An object could not be uploaded: it is tried again, or given up if that cannot help. Returns the
    /// error if everything else has to wait as well.
    fn not_uploaded(&self, id: InodeId, item: &Item, error: RemoteError) -> Option<RemoteError> {
        match &error {
            // Somebody changed or removed the file meanwhile; it will arrive again.
            RemoteError::Local(cause) if cause.kind() == io::ErrorKind::NotFound => None,
            RemoteError::Local(cause) if cause.kind() == io::ErrorKind::InvalidData => {
                let mut state = self.core.state();
                // What is rewritten in place while it is read has other bytes, and no damage.
                let is_damaged = is_still(&state, id, item);
                state.metadata.arrivals.give_up(id, item.object, error.to_string());
                drop(state);
                if is_damaged {
                    log::warn!("object {} was not uploaded: {error}", item.object);
                    self.note_given_up(id, item, &error);
                }
                None
            }
            RemoteError::Corrupt(_) | RemoteError::Other(_) => {
                self.core
                    .observer
                    .failed(&format!("object {} was not uploaded: {error}", item.object));
                self.core.state().metadata.arrivals.give_up(id, item.object, error.to_string());
                self.note_given_up(id, item, &error);
                None
            }
            _ => {
                if let Err(error) = self.core.state().metadata.note_arrival(id) {
                    log::warn!("inode {} was not uploaded: {error}", id.0);
                }
                Some(error)
            }
        }
    }

    fn note_given_up(&self, id: InodeId, item: &Item, error: &RemoteError) {
        let why = format!("was not uploaded: {error}");
        note_failure(self.core, ("upload", error.label()), (id, Some(item.length)), why);
    }

    /// Reads back what was uploaded long enough ago, and notes what is right.
    pub(super) fn verify_due(&self, exchange: &Exchange, mover: &mut Mover) -> Result<(), FsError> {
        let is_due = |(_, uploaded): &(InodeId, Uploaded)| uploaded.due_in().is_zero();
        while mover.uploaded.front().is_some_and(is_due) && !self.tiers.is_closing() {
            let count =
                mover.uploaded.iter().take(VERIFIED_AT_ONCE).take_while(|due| is_due(due)).count();
            let due: Vec<(InodeId, Uploaded)> = mover.uploaded.drain(..count).collect();
            let outcomes =
                due.iter().map(|(_, uploaded)| exchange.verify(&self.core.store, uploaded));
            let outcomes: Vec<_> = outcomes.collect();
            // All of that may have been in a place that only looks like the remote.
            let is_there = exchange.remote().check_place();
            let mut failure = None;
            for ((id, uploaded), outcome) in due.into_iter().zip(outcomes) {
                match outcome.and_then(|()| is_there.clone()) {
                    Ok(()) => self.note_verified(mover, id, &uploaded)?,
                    Err(error) => {
                        self.tiers.counters.failed(Tier::Ssd, Tier::Remote, error.label());
                        failure = self.not_uploaded(id, &uploaded.item, error).or(failure);
                    }
                }
            }
            if let Some(error) = failure {
                return Err(FsError::Remote(error));
            }
        }
        Ok(())
    }

    fn note_verified(
        &self, mover: &mut Mover, id: InodeId, uploaded: &Uploaded,
    ) -> Result<(), FsError> {
        let object = uploaded.item.object;
        let mut state = self.core.state_to_change()?;
        let record = state.metadata.object(object)?;
        // What somebody changed or deleted meanwhile is garbage in the remote.
        let is_same = record.and_then(|record| record.checksum) == Some(uploaded.item.checksum.0);
        // A copy that is relied on is not to count for less because it was uploaded once more: it may be the only one.
        let known = state.metadata.remote_copy(object)?;
        let is_relied_on = known.is_some_and(|copy| copy.state != RemoteState::Held);
        if self.tiers.is_closing() || !is_same || is_relied_on {
            return Ok(());
        }
        let copy = RemoteCopy {
            content: uploaded.blob.content.0,
            encoding: uploaded.blob.encoding,
            stored_bytes: uploaded.stored_bytes,
            state: RemoteState::Held,
        };
        if !held_back::keep_in_remote(self.tiers, &mut state, (id, object), &copy)? {
            state.metadata.put_remote_copy(object, &copy);
            drop(state);
            self.tiers.copies.note_remote_copy(object, &copy);
            self.tiers.counters.moved(Tier::Ssd, Tier::Remote, uploaded.item.length);
        }
        mover.unnamed.insert((id, object));
        let since = uploaded.held.since;
        mover.oldest = Some(mover.oldest.map_or(since, |oldest| oldest.or_earlier(since)));
        Ok(())
    }
}

/// Whether a file that was to be uploaded is what it was then, as far as anybody knows.
fn is_still(state: &State, id: InodeId, item: &Item) -> bool {
    let is_same = |now: &Item| (now.object, now.checksum) == (item.object, item.checksum);
    candidate(state, id).is_ok_and(|now| matches!(now, Candidate::Ready(now) if is_same(&now)))
}

/// Whether a file is to be uploaded.
enum Candidate {
    Ready(Item),
    /// Its bytes are not durable yet.
    NotYet,
    /// It is so large, or has such holes, that no commit gave it a checksum.
    Unhashed(ObjectId),
    /// Not as it is now; if it changes, it arrives again.
    Never,
}

fn candidate(state: &State, id: InodeId) -> Result<Candidate, FsError> {
    let inode = state.metadata.inode(id)?;
    let file = inode.as_ref().filter(|inode| inode.links > 0).and_then(|inode| inode.file());
    let Some(file) = file.filter(|file| FileRecord::is_settled(file)) else {
        return Ok(Candidate::Never);
    };
    let Some(object) = file.object.filter(|_| !state.unsettled.contains_key(id)) else {
        return Ok(Candidate::Never);
    };
    if state.metadata.publishes(object) || state.metadata.is_committing(object) {
        return Ok(Candidate::NotYet);
    }
    // A copy that is not known to be named is put, or found, and verified anew.
    let copy = state.metadata.remote_copy(object)?;
    let is_named = copy.is_some_and(|copy| copy.state != RemoteState::Held);
    if is_named || file.size > MOVING_BYTES_MAX {
        return Ok(Candidate::Never);
    }
    Ok(match item(state, file.role, object)? {
        Some(item) => Candidate::Ready(item),
        None if !is_read_by_commits(file.size, file.blocks) => Candidate::Unhashed(object),
        None => Candidate::Never,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted};

    /// Larger than what is put into packs.
    static BYTES: [u8; 70_000] = [7; 70_000];

    #[test]
    fn what_is_rewritten_meanwhile_is_not_told_to_be_damaged() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let id = unmounted.write(FILES, "file", &BYTES);
        fs.commit().unwrap();
        let Candidate::Ready(item) = candidate(&fs.core.state(), id).unwrap() else { panic!() };
        let is_same = || is_still(&fs.core.state(), id, &item);
        assert!(is_same());
        let opened = fs.open_file(id, libc::O_WRONLY).unwrap();
        fs.write(opened.handle, 0, b"bytes", false).unwrap();
        assert!(!is_same());
        fs.flush(opened.handle).unwrap();
        fs.release(opened.handle).unwrap();
        assert!(!is_same());
        fs.commit().unwrap();
        assert!(!is_same());
    }
}
