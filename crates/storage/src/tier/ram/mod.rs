//! The RAM tier: files on a tmpfs of the daemon's own, within a strict budget.
//!
//! New pages are written here, into space that the daemon has allocated: the client can neither run
//! out of it nor be charged for it by its memory control group. The next commit copies them to the
//! disk; until then a copy is *dirty* and the only one. Clean copies leave when room is needed and
//! nobody has them open or mapped; otherwise unlinking would free nothing, so they count as pinned.
//!
//! Where the tmpfs is, `place.rs` says; how the budget changes, `resize.rs`; what is there, `copies.rs`; how another daemon
//! goes on with it, `live.rs`.

mod copies;
mod live;
mod place;
mod resize;

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};

pub use live::{Frozen, LiveRam};
pub use place::RamPlace;
pub use resize::Shrunk;

use super::counters::{Counters, Tier};
use super::replacement::{Before, Replacement};
use super::stay::Stay;
use crate::store::disk::{Access, Allocation, Disk, DiskFile, DiskPath, FileStat};
use crate::store::event::{Event, What};
use crate::store::events::Events;
use crate::store::local_disk::LocalDisk;
use crate::store::record::{InodeId, ObjectId};
use crate::sync::{Mutex, MutexGuard};
use copies::{Copies, Copy, CopyState};

/// What the tier holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RamUse {
    /// Bytes allocated.
    pub used_bytes: u64,
    /// Of them, what is not on the disk yet.
    pub dirty_bytes: u64,
    /// Of them, what somebody had open or mapped when room was last needed.
    pub pinned_bytes: u64,
    /// Copies.
    pub objects: u64,
}

/// Copies that one search for room probes in vain, a few microseconds each; the next one passes over them.
const IN_USE_PROBED_MAX: usize = 64;

/// The tier.
#[derive(Debug)]
pub struct RamTier {
    disk: LocalDisk,
    place: RamPlace,
    /// Changed under the lock of `held`.
    budget_bytes: AtomicU64,
    /// Asks for what exceeds a smaller budget to be evicted.
    too_large: OnceLock<Wanted>,
    held: Mutex<Held>,
    let_go: OnceLock<LetGo>,
    events: OnceLock<Arc<Events>>,
    counters: Counters,
}

/// Wakes whoever makes a tier [smaller](RamTier::shrink).
#[derive(Clone)]
pub struct Wanted(pub Arc<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Wanted {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Wanted")
    }
}

/// Makes the kernel forget a backing file that it keeps for the next open; whether it did.
#[derive(Clone)]
pub struct LetGo(pub Arc<dyn Fn(InodeId) -> bool + Send + Sync>);

impl std::fmt::Debug for LetGo {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("LetGo")
    }
}

#[derive(Debug)]
struct Held {
    copies: Copies,
    /// The budget that the tmpfs has room for.
    place_bytes: u64,
    replacement: Replacement,
    /// Files that never leave to make room.
    kept: BTreeSet<InodeId>,
    /// What the searches before found in use, if they had to end before they had seen what they wanted.
    in_use: BTreeSet<ObjectId>,
}

impl RamTier {
    /// A tier of `budget_bytes`.
    pub fn open(budget_bytes: u64, counters: Counters) -> io::Result<RamTier> {
        let (disk, place) = place::open(budget_bytes)?;
        let held = Held {
            copies: Copies::default(),
            place_bytes: budget_bytes,
            replacement: Replacement::new(budget_bytes),
            kept: BTreeSet::new(),
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

    /// Where the copies are.
    pub fn place(&self) -> &RamPlace {
        &self.place
    }

    /// Most bytes that it holds.
    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes.load(Ordering::Relaxed)
    }

    /// How the kernel is made to forget a backing file.
    pub fn on_eviction(&self, let_go: LetGo) {
        let _ = self.let_go.set(let_go);
    }

    /// Where it is told which copies left.
    pub fn tell(&self, events: Arc<Events>) {
        let _ = self.events.set(events);
    }

    /// Makes the file of a new object of up to `bytes`, allocated, empty and dirty. `None` if there
    /// is no room.
    pub fn create(
        &self, object: ObjectId, bytes: u64, access: Access,
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        self.make(object, bytes, access, CopyState::Dirty)
    }

    /// Makes a file for the bytes of an object that another tier has. Nobody sees it until they
    /// [have arrived](Self::arrived); otherwise it must be [given up](Self::give_up).
    pub fn receive(&self, object: ObjectId, bytes: u64) -> io::Result<Option<Box<dyn DiskFile>>> {
        self.make(object, bytes, Access::ReadWrite, CopyState::Arriving)
    }

    /// The bytes of a copy are complete, and another tier has them too: from now on it may leave
    /// again, so here it is, open. `None` if they are not those of the object any more, since
    /// somebody began to change it; then, and upon an error, it must be [given up](Self::give_up).
    pub fn arrived(
        &self, object: ObjectId, inode: InodeId,
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        let mut held = self.held();
        let copy = held.copies.change(object).filter(|copy| copy.state == CopyState::Arriving);
        let Some(mut copy) = copy.filter(|copy| copy.version == 0) else {
            return Ok(None);
        };
        let file = self.disk.open(&DiskPath::Ram(object), Access::Read)?;
        copy.state = CopyState::Clean;
        copy.inode = Some(inode);
        Ok(Some(file))
    }

    /// The bytes of a copy did not arrive.
    pub fn give_up(&self, object: ObjectId) {
        let mut held = self.held();
        let arriving = held.copies.get(&object).map(|copy| copy.state);
        if matches!(arriving, Some(CopyState::Arriving | CopyState::Doomed)) {
            held.replacement.remove(object);
            self.drop_file(&mut held, object);
        }
    }

    fn make(
        &self, object: ObjectId, bytes: u64, access: Access, state: CopyState,
    ) -> io::Result<Option<Box<dyn DiskFile>>> {
        if !self.reserve(object, bytes, state) {
            return Ok(None);
        }
        let outcome = self.make_file(object, bytes, access);
        if outcome.is_err() {
            let _ = self.disk.remove(&DiskPath::Ram(object));
            let mut held = self.held();
            held.replacement.remove(object);
            held.copies.remove(object);
        }
        outcome.map(Some)
    }

    fn make_file(
        &self, object: ObjectId, bytes: u64, access: Access,
    ) -> io::Result<Box<dyn DiskFile>> {
        let path = DiskPath::Ram(object);
        let file = self.disk.create(&path)?;
        let mode = libc::FALLOC_FL_KEEP_SIZE;
        if bytes > 0 {
            // fallocate(2) refuses to do nothing.
            file.allocate(Allocation { mode, offset: 0, length: bytes })?;
        }
        // The descriptor for writing must be gone before the file is at rest.
        if access == Access::ReadWrite { Ok(file) } else { self.disk.open(&path, access) }
    }

    /// Opens the copy of an object, if there is one. That is no [use](Self::used): what is sealed, flushed,
    /// uploaded or compared is opened as well.
    pub fn open_copy(
        &self, object: ObjectId, access: Access,
    ) -> Option<io::Result<Box<dyn DiskFile>>> {
        let held = self.held();
        held.visible(object)?;
        Some(self.disk.open(&DiskPath::Ram(object), access))
    }

    /// A client opens the object, which matters here if there is a copy, or was one. One that comes in because of that
    /// is told of by its coming.
    pub fn used(&self, object: ObjectId) {
        let mut held = self.held();
        let Held { copies, replacement, .. } = &mut *held;
        if let Some(mut copy) = copies.change(object).filter(|copy| copy.is_visible()) {
            copy.stay.note_use();
            replacement.access(object, copy.bytes);
        } else if replacement.has_left(object) {
            self.counters.opened_after_leaving(Tier::Ram);
        }
    }

    /// `fstat` of the copy of an object, if there is one.
    pub fn stat(&self, object: ObjectId) -> Option<io::Result<FileStat>> {
        let held = self.held();
        held.visible(object).map(|_| self.disk.stat(&DiskPath::Ram(object)))
    }

    /// The copy belongs to a file that the kernel knows under this number.
    pub fn set_owner(&self, object: ObjectId, inode: InodeId) {
        if let Some(mut copy) = self.held().copies.change(object) {
            copy.inode = Some(inode);
        }
    }

    /// Somebody may write to the copy from now on: what the disk has is not the same any more.
    pub fn make_dirty(&self, object: ObjectId) {
        if let Some(mut copy) = self.held().copies.change(object) {
            copy.state = match copy.state {
                // What arrives is out of date.
                CopyState::Arriving | CopyState::Doomed => CopyState::Doomed,
                CopyState::Dirty | CopyState::Clean => CopyState::Dirty,
            };
            copy.version += 1;
        }
    }

    /// Nobody writes to the copy any more. What is being written to the disk right now, as after an
    /// fsync of a file that somebody else went on writing, may lack its last bytes.
    pub fn note_at_rest(&self, object: ObjectId) {
        let mut held = self.held();
        let copy = held.copies.change(object).filter(|copy| copy.state == CopyState::Dirty);
        if let Some(mut copy) = copy {
            copy.version += 1;
        }
    }

    /// Drops a copy that another tier has too, unless somebody has it open or mapped.
    pub fn drop_clean(&self, object: ObjectId) {
        let mut held = self.held();
        if held.copies.get(&object).is_some_and(|copy| copy.state == CopyState::Clean) {
            self.drop_unused(&mut held, object);
        }
    }

    /// The version of a copy that the disk does not have.
    pub fn dirty_version(&self, object: ObjectId) -> Option<u64> {
        let held = self.held();
        let copy = held.copies.get(&object).filter(|copy| copy.state == CopyState::Dirty)?;
        Some(copy.version)
    }

    /// The disk has this version of a copy.
    pub fn make_clean(&self, object: ObjectId, version: u64) {
        let mut held = self.held();
        let copy = held.copies.change(object).filter(|copy| copy.version == version);
        if let Some(mut copy) = copy.filter(|copy| copy.state == CopyState::Dirty) {
            copy.state = CopyState::Clean;
        }
    }

    /// `bytes` of a copy were written to the disk.
    pub fn count_flush(&self, bytes: u64) {
        self.counters.moved(Tier::Ram, Tier::Ssd, bytes);
    }

    /// `bytes` of a copy came from the disk.
    pub fn count_promotion(&self, bytes: u64) {
        self.counters.moved(Tier::Ssd, Tier::Ram, bytes);
    }

    /// Whether the copies of a file are to stay when room is needed.
    pub fn keep(&self, inode: InodeId, kept: bool) {
        let mut held = self.held();
        if kept {
            held.kept.insert(inode);
        } else {
            held.kept.remove(&inode);
        }
    }

    /// Whether a copy is to leave before others when room is needed, until it is used.
    pub fn finish(&self, object: ObjectId, is_finished: bool) {
        self.held().replacement.finish(object, is_finished);
    }

    /// Whether it is.
    pub fn is_finished(&self, object: ObjectId) -> bool {
        self.held().replacement.is_finished(object)
    }

    /// Lets a clean copy go that nobody has open or mapped. Whether there is none any more.
    pub fn let_leave(&self, object: ObjectId) -> bool {
        let mut held = self.held();
        let Some(copy) = held.copies.get(&object) else {
            return true;
        };
        let (state, inode) = (copy.state, copy.inode);
        if state != CopyState::Clean || !self.is_unused(object, inode) {
            return false;
        }
        held.replacement.evicted(object);
        self.tell_evicted(&held, object, "somebody asked for it");
        self.drop_file(&mut held, object);
        self.counters.evicted(Tier::Ram, "asked");
        true
    }

    /// The object is unreferenced now. Whether there was a copy.
    pub fn remove(&self, object: ObjectId) -> bool {
        let mut held = self.held();
        let Some(mut copy) = held.copies.change(object) else {
            return false;
        };
        copy.state = CopyState::Doomed;
        drop(copy);
        self.drop_unused(&mut held, object);
        true
    }

    /// Frees what [was removed](Self::remove) while somebody still had it open or mapped.
    pub fn tidy(&self) {
        self.drop_doomed(&mut self.held());
    }

    /// What it holds.
    pub fn usage(&self) -> RamUse {
        self.held().copies.usage()
    }

    /// What would leave before the copy of an object, if there is one that may.
    pub fn before(&self, object: ObjectId) -> Option<Before> {
        let held = self.held();
        held.visible(object).and_then(|_| held.replacement.before(object))
    }

    /// Whether there is a copy.
    pub fn holds(&self, object: ObjectId) -> bool {
        self.held().visible(object).is_some()
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a new copy, making room for it. Whether there is room.
    fn reserve(&self, object: ObjectId, bytes: u64, state: CopyState) -> bool {
        let mut held = self.held();
        let budget_bytes = self.budget_bytes();
        // Where the budget was made smaller, making room takes long, and a thread of its own does it.
        if bytes > budget_bytes || held.used_bytes() > budget_bytes {
            return false;
        }
        if held.copies.contains_key(&object) {
            return false;
        }
        if held.used_bytes() + bytes > budget_bytes {
            let wanted = held.replacement.resident_bytes().saturating_add(bytes);
            let wanted = wanted.saturating_sub(budget_bytes);
            self.evict(&mut held, wanted, usize::MAX);
        }
        if held.used_bytes() + bytes > budget_bytes {
            return false;
        }
        held.replacement.insert(object, bytes);
        let stay = Stay::begin();
        let copy = Copy { bytes, state, version: 0, inode: None, pinned: false, stay };
        held.copies.insert(object, copy);
        true
    }

    /// Lets copies of so many bytes go, but so many copies at most; how many went.
    fn evict(&self, held: &mut Held, wanted: u64, most: usize) -> usize {
        self.drop_doomed(held);
        let Held { copies, replacement, kept, in_use, .. } = held;
        let (mut probes, mut has_ended) = (0, true);
        let victims = replacement.first_to_leave_while(wanted, most, |object| {
            let Some(mut copy) = copies.change(object) else {
                return Some(false);
            };
            copy.pinned = copy.state != CopyState::Clean;
            if copy.pinned {
                self.counters.skipped(Tier::Ram, "dirty");
            } else if copy.inode.is_some_and(|inode| kept.contains(&inode)) {
                copy.pinned = true;
                self.counters.skipped(Tier::Ram, "kept");
            } else if in_use.contains(&object) {
                copy.pinned = true;
                self.counters.skipped(Tier::Ram, "in_use");
            } else if probes == IN_USE_PROBED_MAX {
                has_ended = false;
                return None;
            } else if !self.is_unused(object, copy.inode) {
                probes += 1;
                in_use.insert(object);
                copy.pinned = true;
                self.counters.skipped(Tier::Ram, "in_use");
            }
            Some(copy.pinned)
        });
        if has_ended {
            in_use.clear();
        }
        for victim in &victims {
            held.replacement.evicted(victim.object);
            self.tell_evicted(held, victim.object, "memory needed room");
            if let Some(copy) = held.copies.get(&victim.object) {
                self.counters.evicted_for_room(Tier::Ram, &copy.stay);
            }
            self.drop_file(held, victim.object);
        }
        victims.len()
    }

    fn drop_doomed(&self, held: &mut Held) {
        let copies = held.copies.iter().filter(|(_, copy)| copy.state == CopyState::Doomed);
        let doomed: Vec<ObjectId> = copies.map(|(object, _)| *object).collect();
        for object in doomed {
            self.drop_unused(held, object);
        }
    }

    fn drop_unused(&self, held: &mut Held, object: ObjectId) {
        let inode = held.copies.get(&object).and_then(|copy| copy.inode);
        if self.is_unused(object, inode) {
            held.replacement.remove(object);
            self.drop_file(held, object);
        }
    }

    /// Nobody has the copy open or mapped, and nobody can: opening it takes the lock.
    fn is_unused(&self, object: ObjectId, inode: Option<InodeId>) -> bool {
        if let (Some(inode), Some(LetGo(let_go))) = (inode, self.let_go.get())
            && !let_go(inode)
        {
            return false;
        }
        let file = self.disk.open(&DiskPath::Ram(object), Access::Read);
        file.and_then(|file| file.is_unused()).unwrap_or(false)
    }

    fn tell_evicted(&self, held: &Held, object: ObjectId, reason: &str) {
        let Some((events, copy)) = self.events.get().zip(held.copies.get(&object)) else { return };
        let event = Event::new(What::Evicted, reason).with_bytes(copy.bytes);
        let (inode, used) = (copy.inode, copy.stay.last_use());
        events.note(Event { inode, used, uses: held.replacement.uses(object), ..event });
    }

    fn drop_file(&self, held: &mut Held, object: ObjectId) {
        if let Err(error) = self.disk.remove(&DiskPath::Ram(object)) {
            log::warn!("object {object} could not be removed from memory: {error}");
        }
        held.copies.remove(object);
    }
}

impl Held {
    /// A copy that may be opened.
    fn visible(&self, object: ObjectId) -> Option<&Copy> {
        self.copies.get(&object).filter(|copy| copy.is_visible())
    }

    fn used_bytes(&self) -> u64 {
        self.copies.usage().used_bytes
    }
}
