//! What is asked of everything below a directory: to be pinned, to move to a tier, or to leave before others since nobody
//! goes on with it.
//!
//! Whoever sets `user.kvfs.pin`, `user.kvfs.tier` or `user.kvfs.hint` of a directory, a sequence or a prefix
//! gives an *errand*. It is noted at once, and a thread of its own carries it out, some names at a time and by turns with the
//! errands of others (`walk`): nobody waits for a directory with a hundred thousand sequences. `.moving` of what
//! was asked says `walking` meanwhile. Each file gets what its owner could have asked of it by its path, so what belongs to others stays
//! as it is. An errand is about the files that it meets: nothing is kept of it, and the end of the mount is its end.
//!
//! A prefix is the pages from the first token to its end, in those sequences that belong to who asks. Of
//! those of others nothing is done, and where no other has it, the answer is EPERM.

#[cfg(test)]
mod tests;
mod walk;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crossbeam_channel::Sender;

use crate::core::state::State;
use crate::extended::{PIN, TIER};
use crate::prefixes::{Shares, prefix_owned_by};
use crate::residency::Residency;
use crate::{Caller, FileSystem, FsError};
use kvfs_storage::store::record::{Inode, InodeId};
use kvfs_storage::tier::counters::Tier;
pub(crate) use walk::End;
use walk::Task;

/// What a client will do with a file. Never stored.
pub(crate) const HINT: &[u8] = b"user.kvfs.hint";
/// Nobody will go on with it.
pub(crate) const FINISHED: &[u8] = b"finished";
/// Somebody will: that is what is thought of everything that nobody calls finished.
const WAITING: &[u8] = b"waiting";

/// Errands that one user may have under way, and all users together.
const ERRANDS_OF_EACH: u64 = 64;
const ERRANDS_OF_ALL: u64 = 1024;

/// What is done to each file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Errand {
    Pin(bool),
    Move(Tier),
    Finish(bool),
}

impl std::fmt::Display for Errand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Errand::Pin(true) => f.write_str("pinning what is below a directory"),
            Errand::Pin(false) => f.write_str("unpinning what is below a directory"),
            Errand::Move(tier) => {
                write!(f, "moving what is below a directory to the tier {}", tier.name())
            }
            Errand::Finish(true) => f.write_str("noting that a directory is finished"),
            Errand::Finish(false) => f.write_str("noting that a directory is waited for"),
        }
    }
}

impl Errand {
    /// What an attribute asks for; nothing if it is none of these.
    fn of(name: &[u8], value: &[u8]) -> Result<Option<Errand>, FsError> {
        let tiers = [Tier::Ram, Tier::Ssd, Tier::Remote];
        let asked = match name {
            PIN if value == b"1" || value == b"0" => Errand::Pin(value == b"1"),
            TIER => {
                let tier = tiers.into_iter().find(|tier| tier.name().as_bytes() == value);
                Errand::Move(tier.ok_or(FsError::Invalid)?)
            }
            HINT if value == FINISHED || value == WAITING => Errand::Finish(value == FINISHED),
            PIN | HINT => return Err(FsError::Invalid),
            _ => return Ok(None),
        };
        Ok(Some(asked))
    }

    /// Whether the mount can do it at all.
    fn check(self, fs: &FileSystem) -> Result<(), FsError> {
        let is_possible = match self {
            Errand::Move(Tier::Ram) => fs.core.store.ram.is_some(),
            Errand::Move(Tier::Remote) => {
                fs.tiers.as_ref().is_some_and(|tiers| tiers.exchange.is_some())
            }
            Errand::Move(Tier::Ssd) | Errand::Pin(_) | Errand::Finish(_) => true,
        };
        if is_possible { Ok(()) } else { Err(FsError::Unsupported) }
    }
}

/// The errands of a mount.
#[derive(Debug)]
pub struct Errands {
    held: Mutex<Held>,
    shares: Arc<Shares>,
    way: OnceLock<Sender<()>>,
}

#[derive(Debug, Default)]
struct Held {
    waiting: VecDeque<Task>,
    /// What was asked, of errands that wait or are carried out; as many as there are errands.
    under_way: Vec<InodeId>,
}

impl Default for Errands {
    fn default() -> Errands {
        let shares = Shares::new(ERRANDS_OF_EACH, ERRANDS_OF_ALL);
        Errands { held: Mutex::default(), shares, way: OnceLock::new() }
    }
}

impl Errands {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who is told that there is something to do.
    pub fn wake_through(&self, way: Sender<()>) {
        let _ = self.way.set(way);
    }

    /// Whether something that was asked of a directory is not done yet.
    pub(crate) fn are_under_way(&self, id: InodeId) -> bool {
        self.held().under_way.contains(&id)
    }

    /// Whether nothing is left to do.
    pub(crate) fn are_done(&self) -> bool {
        self.held().under_way.is_empty()
    }

    /// Carries out a part of the next errand; whether there is more to do.
    pub fn step(&self, fs: &FileSystem) -> bool {
        let Some(mut task) = self.held().waiting.pop_front() else { return false };
        let outcome = task.advance(fs);
        let mut held = self.held();
        if matches!(outcome, Ok(true)) {
            held.waiting.push_back(task);
            return true;
        }
        if let Err(error) = outcome {
            log::error!("{} ended early: {error}", task.errand);
        }
        if let Some(at) = held.under_way.iter().position(|id| *id == task.asked) {
            held.under_way.swap_remove(at);
        }
        !held.waiting.is_empty()
    }

    fn add(&self, task: Task) {
        let mut held = self.held();
        held.under_way.push(task.asked);
        held.waiting.push_back(task);
        drop(held);
        if let Some(way) = self.way.get() {
            // One that waits to be heard is enough.
            let _ = way.try_send(());
        }
    }
}

/// Takes what somebody asks of a directory, a sequence, a prefix, or of one file if that is a hint. False if the attribute is
/// none of these.
pub(crate) fn ask_below(
    fs: &FileSystem, id: InodeId, (name, value): (&[u8], &[u8]), caller: Caller,
) -> Result<bool, FsError> {
    if ![PIN, TIER, HINT].contains(&name) {
        return Ok(false);
    }
    if crate::is_virtual(id) {
        let errand = Errand::of(name, value)?.ok_or(FsError::Unsupported)?;
        let places = prefix_owned_by(fs, id, caller)?;
        return begin(fs, id, errand, caller, |task| task.enter_prefix(fs, &places));
    }
    let (inode, object) = {
        let state = fs.core.state();
        let inode = state.inode(id)?;
        let object = inode.file().and_then(|file| state.current_object(id, file));
        (inode, object)
    };
    if !inode.is_directory() {
        if name != HINT {
            return Ok(false);
        }
        inode.file().ok_or(FsError::Unsupported)?;
        let errand = Errand::of(name, value)?.ok_or(FsError::Invalid)?;
        check_owner(&inode, caller)?;
        if let (Some(_), Errand::Finish(is_finished)) = (object, errand) {
            finish(fs.residency(), &fs.core.state(), (id, &inode), is_finished);
        }
        return Ok(true);
    }
    let errand = Errand::of(name, value)?.ok_or(FsError::Invalid)?;
    check_owner(&inode, caller)?;
    begin(fs, id, errand, caller, |task| {
        task.enter(id);
        Ok(())
    })
}

fn begin(
    fs: &FileSystem, asked: InodeId, errand: Errand, caller: Caller,
    enter: impl FnOnce(&mut Task) -> Result<(), FsError>,
) -> Result<bool, FsError> {
    errand.check(fs)?;
    let share = fs.errands.shares.take(caller.uid, 1).ok_or(FsError::TryAgain)?;
    let mut task = Task::new((asked, errand), caller, share);
    enter(&mut task)?;
    fs.errands.add(task);
    Ok(true)
}

/// Whose a directory is may ask for everything below it, as far as that is his too.
fn check_owner(inode: &Inode, caller: Caller) -> Result<(), FsError> {
    if [0, inode.uid].contains(&caller.uid) { Ok(()) } else { Err(FsError::NotPermitted) }
}

/// Notes that nobody goes on with a file, or that somebody does. What has several names is not for one of them to end.
fn finish(
    residency: Residency<'_>, state: &State, (id, inode): (InodeId, &Inode), is_finished: bool,
) {
    let object = inode.file().and_then(|file| state.current_object(id, file));
    let Some(object) = object.filter(|_| !is_finished || inode.links <= 1) else { return };
    if let Some(ram) = &residency.core.store.ram {
        ram.finish(object, is_finished);
    }
    if let Some(tiers) = residency.tiers {
        tiers.copies.finish(object, is_finished);
    }
}

/// A file gets another name: whoever has given it that goes on with it.
pub(crate) fn note_shared(residency: Residency<'_>, state: &State, file: (InodeId, &Inode)) {
    finish(residency, state, file, false);
}

/// What was said of a file, if a tier still goes by it.
pub(crate) fn hint_of(fs: &FileSystem, id: InodeId) -> Result<Vec<u8>, FsError> {
    let state = fs.core.state();
    let inode = state.inode(id)?;
    let object = inode.file().and_then(|file| state.current_object(id, file));
    let object = object.ok_or(FsError::NoAttribute)?;
    let in_memory = fs.core.store.ram.as_ref().is_some_and(|ram| ram.is_finished(object));
    let on_disk = fs.tiers.as_ref().is_some_and(|tiers| {
        tiers.copies.disk().is_finished(object) || tiers.copies.encoded().is_finished(object)
    });
    if in_memory || on_disk { Ok(FINISHED.to_vec()) } else { Err(FsError::NoAttribute) }
}
