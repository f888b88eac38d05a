//! Leaving the disk, once the remote can be relied on.
//!
//! The last step of [`super::demotion`]: the record says that the disk's copy does not count any
//! more, that becomes durable, and only then the file goes, unless somebody came to use it.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use super::demotion::Demotion;
use super::residency::ssd_used_bytes;
use super::tiers::Tiers;
use super::{FileSystem, FsError};
use crate::core::Core;
use crate::core::happened;
use crate::core::idle::{is_idle, lets_go};
use kvfs_os::{Share, in_background};
use kvfs_storage::store::disk::DiskPath;
use kvfs_storage::store::record::{EncodedCopy, InodeId, ObjectId, RemoteState, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::replacement::Before;

/// Objects that leave between two commits.
const LEAVING_BATCH: usize = 256;
/// Of them, those that the remote is asked for at a time; opens find most of its calls free.
const CONFIRMED_AT_ONCE: usize = 3;
/// Searches for objects that may leave, each of which passes over what is in use.
const SEARCHES_MAX: usize = 8;

/// An object whose copies on the disk do not count any more once that is durable.
struct Leaving {
    id: InodeId,
    object: ObjectId,
    bytes: u64,
    encoded: Option<EncodedCopy>,
}

impl Demotion<'_> {
    /// Lets objects leave the disk while it holds more than it should; how many left.
    pub(super) fn make_room_on_disk(&self) -> Result<usize, FsError> {
        let mut passed_over = HashSet::new();
        let mut left = 0;
        for _ in 0..SEARCHES_MAX {
            let excess =
                self.tiers.copies.disk().excess_bytes(ssd_used_bytes(self.core, Some(self.tiers)));
            if excess == 0 || self.tiers.is_closing() {
                break;
            }
            let next = self.tiers.copies.disk().next_to_leave(excess, LEAVING_BATCH, &passed_over);
            if next.is_empty() {
                break;
            }
            let stay = |object: &ObjectId| self.tiers.copies.disk().stay(*object);
            let stays: HashMap<_, _> =
                next.iter().filter_map(|(object, _)| Some((*object, stay(object)?))).collect();
            let gone = self.leave_disk(&next)?;
            let disk = self.tiers.copies.disk();
            happened::note_left((self.core, disk), &next, &gone, "the disk needed room");
            left += gone.len();
            for stay in gone.iter().filter_map(|object| stays.get(object)) {
                self.tiers.counters.evicted_for_room(Tier::Ssd, stay);
            }
            passed_over.extend(next.iter().map(|(object, _)| *object));
            for object in gone {
                passed_over.remove(&object);
            }
        }
        Ok(left)
    }

    /// Removes the disk's copies of those of these objects that may go; which went.
    pub(super) fn leave_disk(
        &self, objects: &[(ObjectId, InodeId)],
    ) -> Result<Vec<ObjectId>, FsError> {
        if objects.is_empty() {
            return Ok(Vec::new());
        }
        // What was verified there once is worth nothing if the place was emptied since.
        if let Some(exchange) = &self.tiers.exchange {
            exchange.remote().check_place().map_err(FsError::Remote)?;
        }
        let objects = confirm_remote(self.core, self.tiers, objects)?;
        let mut marked = Vec::new();
        for (object, id) in objects {
            marked.extend(self.mark_leaving(id, object)?);
        }
        if marked.is_empty() {
            return Ok(Vec::new());
        }
        if let Err(error) = self.commits.commit() {
            let mut state = self.core.state();
            for Leaving { object, encoded, .. } in marked {
                let copy = state.metadata.remote_copy(object)?;
                if let Some(copy) = copy.filter(|copy| copy.state == RemoteState::Only) {
                    state.metadata.set_remote_state(object, copy, RemoteState::Named);
                    if let Some(encoded) = encoded {
                        state.metadata.put_encoded_copy(object, &encoded);
                    }
                }
            }
            return Err(error);
        }
        let mut gone = Vec::new();
        for Leaving { id, object, bytes, .. } in marked {
            if self.remove_left((id, object), bytes)? {
                gone.push(object);
            }
        }
        Ok(gone)
    }

    /// Removes the disk's copies of an object, which by now are known not to count. If somebody came
    /// to use the raw file meanwhile, that one counts again. Whether it went.
    pub(super) fn remove_left(
        &self, (id, object): (InodeId, ObjectId), bytes: u64,
    ) -> Result<bool, FsError> {
        let mut state = self.core.state();
        // Somebody may be changing the file by now: then its bytes are the only ones.
        let copy = state.metadata.remote_copy(object)?;
        let Some(copy) = copy.filter(|copy| copy.state == RemoteState::Only) else {
            return Ok(false);
        };
        self.core.store.remove_encoded(object)?;
        self.tiers.copies.note_encoded_gone(object);
        let has_raw = self.core.store.disk.stat(&DiskPath::Object(object)).is_ok();
        if has_raw && !is_idle(self.core, &state, id, object) {
            state.metadata.set_remote_state(object, copy, RemoteState::Named);
            self.tiers.copies.allow_leaving(object, id, bytes);
            self.tiers.counters.skipped(Tier::Ssd, "in_use");
            return Ok(false);
        }
        let unlinked = self.core.store.unlink_object(object)?;
        self.tiers.copies.note_left(object, bytes);
        // Here and not later: a scan may bring it back at once, and would see it leave again.
        if self.core.store.ram.as_ref().is_none_or(|ram| !ram.holds(object)) {
            self.tiers.wishes.withdraw(id);
        }
        drop(state);
        unlinked.free();
        self.core.invalidate(super::Invalidation::Inode(id));
        Ok(true)
    }

    /// Records that the disk's copies do not count, if nobody uses them.
    fn mark_leaving(&self, id: InodeId, object: ObjectId) -> Result<Option<Leaving>, FsError> {
        let let_go = lets_go(self.core, id);
        let mut state = self.core.state_to_change()?;
        let Some(copy) = state.metadata.remote_copy(object)? else {
            return Ok(None);
        };
        let Some(inode) = state.metadata.inode(id)? else {
            return Ok(None);
        };
        if state.is_pinned(id)? || state.metadata.positions.contains(&id) {
            self.tiers.copies.forbid_leaving(object);
            return Ok(None);
        }
        let file = inode.file().filter(|file| {
            file.object == Some(object) && file.is_settled() && file.role != Role::Manifest
        });
        let Some(bytes) = file.map(|file| file.size) else {
            return Ok(None);
        };
        if copy.state != RemoteState::Named {
            return Ok(None);
        }
        if !let_go || !is_idle(self.core, &state, id, object) {
            self.tiers.counters.skipped(Tier::Ssd, "in_use");
            return Ok(None);
        }
        state.metadata.set_remote_state(object, copy, RemoteState::Only);
        let encoded = state.metadata.forget_encoded_copy(object)?;
        Ok(Some(Leaving { id, object, bytes, encoded }))
    }
}

/// What would leave each tier before a file: lines `TIER FILES BYTES`, with `more` behind them where not all were looked at.
pub(super) fn rank(fs: &FileSystem, id: InodeId) -> Result<String, FsError> {
    let object = {
        let state = fs.core.state();
        let inode = state.inode(id)?;
        let object = inode.file().and_then(|file| state.current_object(id, file));
        // What is pinned leaves for nobody.
        object.filter(|_| !state.is_pinned(id).unwrap_or(false)).ok_or(FsError::NoAttribute)?
    };
    let of_memory = fs.core.store.ram.as_ref().and_then(|ram| ram.before(object));
    let of_disk = fs.tiers.as_ref().and_then(|tiers| tiers.copies.disk().before(object));
    let mut text = String::new();
    for (tier, before) in [(Tier::Ram, of_memory), (Tier::Ssd, of_disk)] {
        let Some(Before { objects, bytes, has_more }) = before else { continue };
        let more = if has_more { " more" } else { "" };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{} {objects} {bytes}{more}", tier.name());
    }
    if text.is_empty() { Err(FsError::NoAttribute) } else { Ok(text) }
}

/// Those of some objects that the remote has, whole, if it is asked now. The others count as not uploaded, and are again.
fn confirm_remote(
    core: &Core, tiers: &Tiers, objects: &[(ObjectId, InodeId)],
) -> Result<Vec<(ObjectId, InodeId)>, FsError> {
    let Some(exchange) = &tiers.exchange else {
        return Ok(objects.to_vec());
    };
    let mut copies = Vec::new();
    for &(object, id) in objects {
        let copy = core.state().metadata.remote_copy(object)?;
        copies.extend(copy.map(|copy| ((object, id), copy)));
    }
    let outcomes =
        in_background(CONFIRMED_AT_ONCE, Share::Quarter, &copies, |(_, copy)| exchange.has(copy));
    let mut there = Vec::new();
    for (((object, id), _), outcome) in copies.into_iter().zip(outcomes) {
        let why = match outcome {
            Ok(true) => {
                there.push((object, id));
                continue;
            }
            Ok(false) => "is gone or of another length".to_owned(),
            Err(error) if error.is_outage() => return Err(FsError::Remote(error)),
            // One that cannot be looked at must not keep the others on the disk.
            Err(error) => format!("cannot be looked at ({error})"),
        };
        let mut state = core.state_to_change()?;
        let now = state.metadata.remote_copy(object)?;
        if now.is_some_and(|copy| copy.state == RemoteState::Named) {
            tiers.forget_upload(&mut state, (id, object))?;
            drop(state);
            core.observer.failed(&format!(
                "object {object}: its copy in the remote {why}, and is made again from the disk's"
            ));
        }
    }
    Ok(there)
}
