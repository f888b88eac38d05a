//! The tier goes on with another daemon: its tmpfs stays as long as a descriptor of it is open, and the next program is
//! told what lies there.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::copies::{Copies, Copy, CopyState};
use super::place::{RamPlace, SharedDirectory};
use super::{Held, RamTier};
use crate::store::disk::{Disk, DiskPath};
use crate::store::local_disk::LocalDisk;
use crate::store::record::{InodeId, ObjectId};
use crate::sync::{Mutex, MutexGuard};
use crate::tier::counters::Counters;
use crate::tier::replacement::Replacement;
use crate::tier::stay::Stay;

/// What a tier is, for another program in the same process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRam {
    /// The descriptor of the directory.
    root: i32,
    /// The directory that everybody's tmpfs has it in, and the descriptor of its lock, where it has no tmpfs of its own.
    shared: Option<(PathBuf, i32)>,
    /// The budget that its tmpfs has room for.
    place_bytes: u64,
    /// Those that would leave first come first.
    copies: Vec<(ObjectId, LiveCopy)>,
    /// Those whose bytes are still coming: whoever brings them ends with this program.
    arriving: Vec<ObjectId>,
    kept: BTreeSet<InodeId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LiveCopy {
    bytes: u64,
    is_dirty: bool,
    is_doomed: bool,
    is_finished: bool,
    version: u64,
    inode: Option<InodeId>,
    /// Since it came, and since it was last used, if it was.
    age: Duration,
    idle: Option<Duration>,
}

/// A tier that nobody changes until this is dropped.
#[derive(Debug)]
pub struct Frozen<'a> {
    _held: MutexGuard<'a, Held>,
    live: LiveRam,
    /// They stay open for the next program.
    _descriptors: Vec<OwnedFd>,
}

impl Frozen<'_> {
    /// What the next program goes on with.
    pub fn live(&self) -> &LiveRam {
        &self.live
    }
}

impl RamTier {
    /// Keeps the tier as it is.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn freeze(&self) -> io::Result<Frozen<'_>> {
        let held = self.held();
        let root = kvfs_os::to_be_inherited(&self.disk)?;
        let mut live = LiveRam {
            root: root.as_raw_fd(),
            shared: None,
            place_bytes: held.place_bytes,
            copies: held.live_copies(),
            arriving: held.arriving(),
            kept: held.kept.clone(),
        };
        let mut descriptors = vec![root];
        if let RamPlace::Shared(directory) = &self.place {
            let lock = kvfs_os::to_be_inherited(directory.lock())?;
            live.shared = Some((directory.path().to_owned(), lock.as_raw_fd()));
            descriptors.push(lock);
        }
        Ok(Frozen { _held: held, live, _descriptors: descriptors })
    }

    /// Copies that the disk does not have, and the files that they belong to.
    pub fn dirty(&self) -> Vec<(ObjectId, Option<InodeId>)> {
        let held = self.held();
        let dirty = held.copies.iter().filter(|(_, copy)| copy.state == CopyState::Dirty);
        dirty.map(|(object, copy)| (*object, copy.inode)).collect()
    }

    /// Goes on with the tier of the program before. What it was bringing in has not come.
    ///
    /// # Errors
    /// What it has left is not there.
    pub fn go_on(live: LiveRam, budget_bytes: u64, counters: Counters) -> io::Result<RamTier> {
        let disk = LocalDisk::at(kvfs_os::inherited(live.root)?);
        let place = match live.shared {
            None => RamPlace::Tmpfs,
            Some((path, lock)) => {
                RamPlace::Shared(SharedDirectory::left(path, kvfs_os::inherited(lock)?)?)
            }
        };
        let mut replacement = Replacement::new(budget_bytes);
        let mut copies = Copies::default();
        for (object, live) in live.copies {
            if live.is_doomed && disk.stat(&DiskPath::Ram(object)).is_err() {
                // Its file was not made yet.
                continue;
            }
            replacement.insert_in_order(object, live.bytes);
            replacement.finish(object, live.is_finished);
            copies.insert(object, Copy::from(live));
        }
        for object in live.arriving {
            match disk.remove(&DiskPath::Ram(object)) {
                // Its file was not made yet.
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    log::warn!("object {object} could not be removed from memory: {error}");
                }
                _ => {}
            }
        }
        let held = Held {
            copies,
            place_bytes: live.place_bytes,
            replacement,
            kept: live.kept,
            in_use: BTreeSet::new(),
        };
        Ok(RamTier {
            disk,
            place,
            budget_bytes: AtomicU64::new(budget_bytes),
            too_large: OnceLock::new(),
            held: Mutex::new(held),
            let_go: OnceLock::new(),
            events: OnceLock::new(),
            counters,
        })
    }
}

impl Held {
    /// All that have come, those first that would leave first.
    fn live_copies(&self) -> Vec<(ObjectId, LiveCopy)> {
        let live = |object: ObjectId| {
            let copy = self.copies.get(&object)?;
            let is_there = copy.state != CopyState::Arriving;
            is_there.then(|| (object, LiveCopy::of(copy, self.replacement.is_finished(object))))
        };
        let resident = self.replacement.in_order().filter_map(live);
        let others = self.copies.keys().copied();
        let others = others.filter(|object| !self.replacement.is_resident(*object));
        resident.chain(others.filter_map(live)).collect()
    }

    fn arriving(&self) -> Vec<ObjectId> {
        let arriving = self.copies.iter().filter(|(_, copy)| copy.state == CopyState::Arriving);
        arriving.map(|(object, _)| *object).collect()
    }
}

impl LiveCopy {
    fn of(copy: &Copy, is_finished: bool) -> LiveCopy {
        LiveCopy {
            bytes: copy.bytes,
            is_dirty: copy.state == CopyState::Dirty,
            is_doomed: copy.state == CopyState::Doomed,
            is_finished,
            version: copy.version,
            inode: copy.inode,
            age: copy.stay.age(),
            idle: copy.stay.is_used().then(|| copy.stay.idle()),
        }
    }
}

impl From<LiveCopy> for Copy {
    fn from(live: LiveCopy) -> Copy {
        let state = match (live.is_doomed, live.is_dirty) {
            (true, _) => CopyState::Doomed,
            (false, true) => CopyState::Dirty,
            (false, false) => CopyState::Clean,
        };
        let stay = Stay::since(live.age, live.idle);
        let LiveCopy { bytes, version, inode, .. } = live;
        Copy { bytes, state, version, inode, pinned: false, stay }
    }
}
