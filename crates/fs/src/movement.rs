//! Moving one file on request: whoever sets `user.kvfs.tier` asks for a tier.
//!
//! Towards this machine the move is done when the call returns. Away from it, it is a *wish*: the
//! mover grants it once the remote has the object verified and named and nobody uses the file,
//! however much room there is. A wish ends when it is granted, when the file is opened for writing
//! or removed, or when the file is asked back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::demotion::{Commits, Demotion};
use super::residency::Residency;
use super::tiers::Tiers;
use super::upload::MOVING_BYTES_MAX;
use super::verify::Verify;
use super::whereabouts::Whereabouts;
use super::{FileSystem, FsError};
use crate::core::persist::is_read_by_commits;
use crate::core::state::State;
use crate::core::waits::Awaited;
use crate::core::{Core, happened};
use kvfs_storage::store::disk::copy_all;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::record::{FileRecord, InodeId, ObjectId, RemoteState, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::ram::RamTier;
use kvfs_storage::tier::remote::State as RemoteHealth;
use kvfs_storage::tier::what_if::Happened;

/// Wishes that may wait: with pages of 4 MiB half a terabyte, in memory some 10 MiB.
const WISHES_MAX: usize = 1 << 17;
/// Wishes looked at without letting go of the state; as many leave between two commits.
const BATCH: usize = 256;

/// Files that are to leave the disk, and the objects that they had when somebody asked.
#[derive(Debug, Default)]
pub(super) struct Wishes(Mutex<BTreeMap<InodeId, ObjectId>>);

impl Wishes {
    fn held(&self) -> MutexGuard<'_, BTreeMap<InodeId, ObjectId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the file is to leave. False if too many wait.
    fn add(&self, id: InodeId, object: ObjectId) -> bool {
        let mut held = self.held();
        let has_room = held.len() < WISHES_MAX || held.contains_key(&id);
        if has_room {
            held.insert(id, object);
        }
        has_room
    }

    /// The file stays. Whether it was to leave.
    pub(super) fn withdraw(&self, id: InodeId) -> bool {
        self.held().remove(&id).is_some()
    }

    /// Files that are to leave.
    pub(super) fn count(&self) -> usize {
        self.held().len()
    }

    fn is_waiting(&self, id: InodeId) -> bool {
        self.held().contains_key(&id)
    }

    fn after(&self, last: InodeId, count: usize) -> Vec<(InodeId, ObjectId)> {
        let from = InodeId(last.0.saturating_add(1));
        self.held().range(from..).take(count).map(|(id, object)| (*id, *object)).collect()
    }
}

/// How far a file is on its way to the remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// The remote does not have it yet.
    Uploading,
    /// No manifest names it there yet.
    Naming,
    /// The disk's copy, or that in memory, may go once nobody uses it.
    MayLeave,
    /// It is not what was asked for any more.
    Gone,
}

/// A file that can move.
#[derive(Clone, Copy)]
struct Movable {
    id: InodeId,
    role: Role,
    object: ObjectId,
}

impl Tiers {
    /// Files that are to leave, and their objects.
    pub(super) fn wishes_so_far(&self) -> Vec<(InodeId, ObjectId)> {
        self.wishes.after(InodeId(0), WISHES_MAX)
    }

    /// Goes on with those of the daemon before.
    pub(super) fn go_on_with(&self, wishes: Vec<(InodeId, ObjectId)>) {
        self.wishes.held().extend(wishes);
    }
}

impl FileSystem {
    /// Whether setting an attribute has to wait, and for what. To leave takes a word, to come back
    /// takes the bytes.
    pub fn attribute_waits(&self, id: InodeId, name: &[u8], value: &[u8]) -> Option<Awaited> {
        if name != super::extended::TIER {
            return None;
        }
        let comes_back = value != Tier::Remote.name().as_bytes() && self.waits_for_remote(id);
        Some(if comes_back { Awaited::Remote } else { Awaited::Local })
    }

    pub(super) fn movement(&self) -> Movement<'_> {
        let verify = self.choices.verify();
        Movement { core: &self.core, residency: self.residency(), commits: self, verify }
    }
}

/// What moves a file to the tier that somebody asks for.
#[derive(Clone, Copy)]
pub(super) struct Movement<'a> {
    core: &'a Core,
    residency: Residency<'a>,
    commits: &'a dyn Commits,
    verify: Verify,
}

impl Movement<'_> {
    /// Moves a file to the tier that `word` names, or notes that it is to move there.
    pub(super) fn set_tier(&self, id: InodeId, word: &[u8]) -> Result<(), FsError> {
        let tiers = [Tier::Ram, Tier::Ssd, Tier::Remote];
        let tier = tiers.into_iter().find(|tier| tier.name().as_bytes() == word);
        match tier.ok_or(FsError::Invalid)? {
            Tier::Remote => self.wish_away(id),
            Tier::Ssd => self.bring_to_disk(self.movable(id)?),
            Tier::Ram => self.bring_to_memory(self.movable(id)?),
        }
    }

    /// What a file that is to leave waits for.
    pub(super) fn waits_for(&self, id: InodeId) -> Result<&'static str, FsError> {
        let tiers = self.residency.tiers.ok_or(FsError::NoAttribute)?;
        let object = tiers.wishes.held().get(&id).copied().ok_or(FsError::NoAttribute)?;
        let (progress, found, is_given_up) = {
            let state = self.core.state();
            let is_given_up = state.metadata.arrivals.given_up().has(id, object);
            (
                progress(&state, id, object)?,
                self.residency.whereabouts(&state, object)?,
                is_given_up,
            )
        };
        let health = tiers.exchange.as_ref().map(|exchange| exchange.remote().state());
        let is_down = matches!(health, Some(RemoteHealth::Down { .. }));
        match progress {
            // It has left already; the mover notes that in a moment.
            _ if found.is_remote() => Err(FsError::NoAttribute),
            Progress::Gone => Err(FsError::NoAttribute),
            // Not while nobody knows what it still has, either.
            _ if is_down => Ok("remote_down"),
            Progress::MayLeave => Ok("in_use"),
            Progress::Uploading if is_given_up => Ok("not_uploaded"),
            // It answers, and is full, or refuses all that is sent.
            Progress::Uploading | Progress::Naming if tiers.trouble().is_some() => {
                Ok("not_uploaded")
            }
            Progress::Uploading => Ok("uploading"),
            Progress::Naming => Ok("naming"),
        }
    }

    fn movable(&self, id: InodeId) -> Result<Movable, FsError> {
        let state = self.core.state();
        let inode = state.inode(id)?;
        let file = inode.file().ok_or(FsError::Unsupported)?;
        if file.role.is_append_only() {
            return Err(FsError::Unsupported);
        }
        let object = state.current_object(id, file).ok_or(FsError::Unsupported)?;
        Ok(Movable { id, role: file.role, object })
    }

    fn wish_away(&self, id: InodeId) -> Result<(), FsError> {
        let tiers = self.residency.tiers.filter(|tiers| tiers.exchange.is_some());
        let tiers = tiers.ok_or(FsError::Unsupported)?;
        let Movable { role, object, .. } = self.movable(id)?;
        let mut state = self.core.state_to_change()?;
        let inode = state.inode(id)?;
        let file = inode.file().ok_or(FsError::Unsupported)?;
        if role == Role::Manifest || state.metadata.positions.contains(&id) {
            return Err(FsError::Unsupported);
        }
        if state.is_pinned(id)? {
            return Err(FsError::NotPermitted);
        }
        if file.object != Some(object) || !file.is_settled() || state.unsettled.contains_key(id) {
            return Err(FsError::InUse);
        }
        if self.residency.whereabouts(&state, object)?.is_remote() {
            return Ok(());
        }
        let is_durable = !state.metadata.publishes(object) && !state.metadata.is_committing(object);
        let checksum = state.metadata.object(object)?.and_then(|record| record.checksum);
        let has_none =
            is_durable && checksum.is_none() && is_read_by_commits(file.size, file.blocks);
        if file.size > MOVING_BYTES_MAX || has_none {
            return Err(FsError::TooLarge);
        }
        if !tiers.wishes.add(id, object) {
            return Err(FsError::TryAgain);
        }
        let has_arrived = state.metadata.remote_copy(object)?.is_some();
        // One that is on its way would be uploaded twice.
        if !has_arrived && !state.metadata.arrivals.has(id) {
            state.metadata.note_arrival(id)?;
        }
        Ok(())
    }

    fn bring_to_disk(&self, file: Movable) -> Result<(), FsError> {
        let Movable { id, role, object } = file;
        if let Some(tiers) = self.residency.tiers {
            tiers.wishes.withdraw(id);
        }
        let in_memory = self.core.store.ram.as_ref().filter(|ram| ram.holds(object));
        if let Some(ram) = in_memory {
            if ram.dirty_version(object).is_some() {
                self.core.state_to_change()?.make_durable(id)?;
                self.commits.commit()?;
            }
            if !ram.let_leave(object) {
                // The remote has it, and will have its name in a moment.
                let is_named = ram.dirty_version(object).is_none();
                return Err(if is_named { FsError::InUse } else { FsError::TryAgain });
            }
        }
        let found = self.residency.whereabouts(&self.core.state(), object)?;
        match found {
            Whereabouts::Memory | Whereabouts::Disk => return Ok(()),
            // Encoded is good enough for what was asked out of memory.
            Whereabouts::Encoded(_) if in_memory.is_some() => return Ok(()),
            Whereabouts::Encoded(_) => {
                return self.residency.with_resident(self.verify, id, || Ok(()));
            }
            Whereabouts::Remote(_) | Whereabouts::Nowhere => {}
        }
        self.residency.check_reachable(found)?;
        if let Some(tiers) = self.residency.tiers {
            // Whoever asks for this is not spared a write.
            tiers.writes.note_asked(object);
        }
        self.residency.open_resident((id, role), object)?;
        // With the disk full, memory took it.
        let found = self.residency.whereabouts(&self.core.state(), object)?;
        if found == Whereabouts::Memory { Err(FsError::NoRoom) } else { Ok(()) }
    }

    fn bring_to_memory(&self, file: Movable) -> Result<(), FsError> {
        let Movable { id, role, object } = file;
        let ram = self.core.store.ram.as_ref().ok_or(FsError::Unsupported)?;
        if let Some(tiers) = self.residency.tiers {
            tiers.wishes.withdraw(id);
        }
        let found = self.residency.whereabouts(&self.core.state(), object)?;
        self.residency.check_reachable(found)?;
        let (source, _) = self.residency.open_resident((id, role), object)?;
        if ram.holds(object) {
            return Ok(());
        }
        let length = source.stat()?.length;
        let target = ram.receive(object, length)?.ok_or(FsError::NoRoom)?;
        let copied = copy_all(source.as_ref(), target.as_ref());
        // A descriptor for writing would make it a file that somebody changes.
        drop(target);
        let outcome = match copied {
            Ok(copied) if copied == length => self.take_into_memory(ram, file),
            Ok(_) => Err(FsError::InUse),
            Err(error) => Err(error.into()),
        };
        match outcome {
            Ok(()) => {
                ram.count_promotion(length);
                self.core.sample.note(object, Happened::Promoted, length);
                let event = Event::new(What::Promoted, "somebody asked for it");
                happened::note_move(self.core, id, event);
            }
            Err(_) => ram.give_up(object),
        }
        outcome
    }

    /// From now on the copy in memory is the one that is opened, unless somebody who has the
    /// disk's copy could change it.
    fn take_into_memory(&self, ram: &Arc<RamTier>, file: Movable) -> Result<(), FsError> {
        let Movable { id, role, object } = file;
        let state = self.core.state();
        let inode = state.inode(id)?;
        let record = inode.file().filter(|file| file.object == Some(object) && file.is_settled());
        let is_open = state.nodes.get(&id).is_some_and(|node| node.handles() > 0);
        let is_changing = state.unsettled.contains_key(id) || state.sealing.contains(&id);
        if record.is_none() || is_changing || (is_open && !role.is_sealed()) {
            return Err(FsError::InUse);
        }
        ram.arrived(object, id)?.map(drop).ok_or(FsError::InUse)
    }

    /// Lets the files leave that are to and may; how many left.
    pub(super) fn grant_wishes(&self, tiers: &Tiers) -> Result<usize, FsError> {
        let (mut last, mut granted) = (InodeId(0), 0);
        while !tiers.is_closing() {
            let batch = tiers.wishes.after(last, BATCH);
            let Some((end, _)) = batch.last() else {
                break;
            };
            last = *end;
            let mut ready = Vec::new();
            for (id, object) in batch {
                let progress = progress(&self.core.state(), id, object)?;
                match progress {
                    Progress::MayLeave => ready.push((object, id)),
                    Progress::Gone => drop(tiers.wishes.withdraw(id)),
                    Progress::Uploading | Progress::Naming => {}
                }
            }
            let gone =
                Demotion { core: self.core, tiers, commits: self.commits }.leave_disk(&ready)?;
            let disk = tiers.copies.disk();
            happened::note_left((self.core, disk), &ready, &gone, "somebody asked for it");
            for _ in gone {
                tiers.counters.evicted(Tier::Ssd, "asked");
                granted += 1;
            }
            // Those that had left before, or have a copy in memory.
            for (object, id) in ready {
                granted += usize::from(self.has_gone(object)? && tiers.wishes.withdraw(id));
            }
        }
        Ok(granted)
    }

    /// Whether only the remote has an object, after its copy in memory was asked to go too.
    fn has_gone(&self, object: ObjectId) -> Result<bool, FsError> {
        let left_disk = self.core.state().metadata.is_only_remote(object)?;
        Ok(left_disk && self.core.store.ram.as_ref().is_none_or(|ram| ram.let_leave(object)))
    }

    /// Whether a file that is to leave is among those that wait.
    pub(super) fn withdraw_wish(&self, id: InodeId) -> Result<(), FsError> {
        let tiers = self.residency.tiers.filter(|tiers| tiers.wishes.is_waiting(id));
        let tiers = tiers.ok_or(FsError::NoAttribute)?;
        tiers.wishes.withdraw(id);
        Ok(())
    }
}

fn progress(state: &State, id: InodeId, object: ObjectId) -> Result<Progress, FsError> {
    let inode = state.metadata.inode(id)?.filter(|inode| inode.links > 0);
    let file = inode
        .as_ref()
        .and_then(|inode| inode.file())
        .filter(|file| file.object == Some(object) && FileRecord::is_settled(file));
    if file.is_none() || state.unsettled.contains_key(id) {
        return Ok(Progress::Gone);
    }
    Ok(match state.metadata.remote_copy(object)?.map(|copy| copy.state) {
        None => Progress::Uploading,
        Some(RemoteState::Held) => Progress::Naming,
        Some(RemoteState::Named | RemoteState::Only) => Progress::MayLeave,
    })
}
