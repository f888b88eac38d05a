//! The SSD tier: what its budget is, what it holds, and which objects should leave it.
//!
//! Only objects that the remote has as well are listed here, verified and named there: leaving is
//! then nothing but a removal of a file. The order is that of the RAM tier, [`Replacement`].

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::replacement::{Before, Replacement};
use super::stay::Stay;
use crate::store::record::{InodeId, ObjectId, RemoteCopy};

/// Demotion begins when the objects take this share of the budget, in per cent, ...
const HIGH_PERCENT: u64 = 95;
/// ... and goes on down to this one, so that it comes in batches.
const LOW_PERCENT: u64 = 90;

/// Smaller objects stay: they take no block of their own. Everything else has to leave, for pages of short runs of tokens
/// have some ten KiB, and a disk is filled by them as by others.
pub const LEAVING_BYTES_MIN: u64 = 4 << 10;
/// Larger objects stay as well: the remote does not get them.
pub const LEAVING_BYTES_MAX: u64 = 4 << 30;

/// The budget of a disk that has none.
const NO_LIMIT: u64 = u64::MAX;

/// Bytes that should leave a disk of this budget when it holds `used_bytes`.
pub fn excess_bytes(budget_bytes: u64, used_bytes: u64) -> u64 {
    let share = |percent: u64| budget_bytes / 100 * percent;
    if used_bytes <= share(HIGH_PERCENT) { 0 } else { used_bytes - share(LOW_PERCENT) }
}

/// What the remote has of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteUse {
    /// Objects that are there.
    pub objects: u64,
    /// Their length there.
    pub stored_bytes: u64,
    /// Objects that are nowhere else on the disk.
    pub only_objects: u64,
    /// The logical length of those.
    pub only_bytes: u64,
}

/// The tier.
#[derive(Debug)]
pub struct SsdTier {
    /// Changed under the lock of `held`; [`NO_LIMIT`] without one.
    budget_bytes: AtomicU64,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    may_leave: Replacement,
    here: BTreeMap<ObjectId, Here>,
    only: BTreeMap<ObjectId, u64>,
    stored: BTreeMap<ObjectId, u64>,
    stored_bytes: u64,
    only_bytes: u64,
}

/// An object that may leave.
#[derive(Clone, Copy, Debug)]
struct Here {
    owner: InodeId,
    /// Since it may leave: since it came to the remote, came back from there, or the mount began.
    stay: Stay,
}

impl SsdTier {
    /// A tier of so many bytes, or without a limit.
    pub fn new(budget_bytes: Option<u64>) -> SsdTier {
        let budget_bytes = budget_bytes.unwrap_or(NO_LIMIT);
        let held = Held {
            may_leave: Replacement::new(budget_bytes),
            here: BTreeMap::new(),
            only: BTreeMap::new(),
            stored: BTreeMap::new(),
            stored_bytes: 0,
            only_bytes: 0,
        };
        SsdTier { budget_bytes: AtomicU64::new(budget_bytes), held: Mutex::new(held) }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Most bytes that it should hold.
    pub fn budget_bytes(&self) -> Option<u64> {
        Some(self.budget_bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes != NO_LIMIT)
    }

    /// Changes the budget. What exceeds it leaves in the next rounds of moving.
    pub(super) fn set_budget(&self, budget_bytes: Option<u64>) {
        let budget_bytes = budget_bytes.unwrap_or(NO_LIMIT);
        let mut held = self.held();
        held.may_leave.set_budget(budget_bytes);
        self.budget_bytes.store(budget_bytes, Ordering::Relaxed);
    }

    /// What the remote has.
    pub fn remote_use(&self) -> RemoteUse {
        let held = self.held();
        RemoteUse {
            objects: held.stored.len() as u64,
            stored_bytes: held.stored_bytes,
            only_objects: held.only.len() as u64,
            only_bytes: held.only_bytes,
        }
    }

    /// Some of the objects that the remote has a copy of: the next ones from a number on, and behind the last one
    /// the first.
    pub fn some_in_remote(&self, from: ObjectId, most: usize) -> Vec<ObjectId> {
        let held = self.held();
        let (behind, before) = (held.stored.range(from..), held.stored.range(..from));
        behind.chain(before).take(most).map(|(object, _)| *object).collect()
    }

    /// The remote has a verified copy of an object, which may leave if `named` is true.
    pub(super) fn record_remote_copy(&self, object: ObjectId, copy: &RemoteCopy) {
        let mut held = self.held();
        let before = held.stored.insert(object, copy.stored_bytes).unwrap_or(0);
        held.stored_bytes = held.stored_bytes + copy.stored_bytes - before;
    }

    /// The object of a file may leave: the remote relies on nobody else to keep it.
    pub(super) fn allow_leaving(&self, object: ObjectId, owner: InodeId, bytes: u64) {
        let mut held = self.held();
        held.come_back(object);
        if bytes < LEAVING_BYTES_MIN {
            return;
        }
        held.here.insert(object, Here { owner, stay: Stay::begin() });
        held.may_leave.insert(object, bytes);
    }

    /// The object belongs to another file from now on.
    pub(super) fn set_owner(&self, object: ObjectId, owner: InodeId) {
        if let Some(known) = self.held().here.get_mut(&object) {
            known.owner = owner;
        }
    }

    /// The object is not to leave to make room.
    pub(super) fn forbid_leaving(&self, object: ObjectId) {
        let mut held = self.held();
        held.may_leave.remove(object);
        held.here.remove(&object);
    }

    /// The disk does not have the object any more, the remote does.
    pub(super) fn record_leaving(&self, object: ObjectId, bytes: u64) {
        let mut held = self.held();
        held.may_leave.evicted(object);
        held.here.remove(&object);
        if held.only.insert(object, bytes).is_none() {
            held.only_bytes += bytes;
        }
    }

    /// The object was deleted, or is changing: no remote copy counts any more.
    pub(super) fn forget(&self, object: ObjectId) {
        let mut held = self.held();
        held.come_back(object);
        held.may_leave.remove(object);
        held.here.remove(&object);
        if let Some(bytes) = held.stored.remove(&object) {
            held.stored_bytes -= bytes;
        }
    }

    /// Somebody opened the object. Whether it had left.
    pub(super) fn used(&self, object: ObjectId, bytes: u64) -> bool {
        let mut held = self.held();
        let Some(here) = held.here.get_mut(&object) else {
            return held.only.contains_key(&object) && held.may_leave.has_left(object);
        };
        here.stay.note_use();
        held.may_leave.access(object, bytes);
        false
    }

    /// How long an object was here that may leave.
    pub fn stay(&self, object: ObjectId) -> Option<Stay> {
        self.held().here.get(&object).map(|here| here.stay)
    }

    /// How often it was used while it may leave, or before it left, as far as that is remembered.
    pub fn uses(&self, object: ObjectId) -> Option<u64> {
        self.held().may_leave.uses(object)
    }

    /// Whether the object is to leave before others, until it is used.
    pub(super) fn finish(&self, object: ObjectId, is_finished: bool) {
        self.held().may_leave.finish(object, is_finished);
    }

    /// Whether it is.
    pub fn is_finished(&self, object: ObjectId) -> bool {
        self.held().may_leave.is_finished(object)
    }

    /// What would leave before an object that may leave to make room. Without a budget nothing does.
    pub fn before(&self, object: ObjectId) -> Option<Before> {
        self.budget_bytes()?;
        self.held().may_leave.before(object)
    }

    /// Whether `bytes` more fit into the budget.
    pub fn has_room(&self, used_bytes: u64, bytes: u64) -> bool {
        self.budget_bytes().is_none_or(|budget| used_bytes.saturating_add(bytes) <= budget)
    }

    /// Bytes that should leave when the disk holds `used_bytes`.
    pub fn excess_bytes(&self, used_bytes: u64) -> u64 {
        self.budget_bytes().map_or(0, |budget| excess_bytes(budget, used_bytes))
    }

    /// Objects of `bytes` together, but `most` at a time, that should leave first, and their files, without
    /// `passed_over`.
    pub fn next_to_leave(
        &self, bytes: u64, most: usize, passed_over: &HashSet<ObjectId>,
    ) -> Vec<(ObjectId, InodeId)> {
        let mut held = self.held();
        let Held { may_leave, here, .. } = &mut *held;
        let victims = may_leave.first_to_leave(bytes, most, |object| passed_over.contains(&object));
        let owner = |object| here.get(&object).map(|here| (object, here.owner));
        victims.into_iter().filter_map(|victim| owner(victim.object)).collect()
    }
}

impl Held {
    fn come_back(&mut self, object: ObjectId) {
        if let Some(bytes) = self.only.remove(&object) {
            self.only_bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::record::RemoteState;
    use crate::tier::encoding::Encoding;

    #[test]
    fn all_that_the_remote_has_takes_its_turn() {
        let tier = SsdTier::new(None);
        let state = RemoteState::Named;
        let copy = RemoteCopy { content: [0; 32], encoding: Encoding::Raw, stored_bytes: 9, state };
        for number in [1, 5, 7] {
            tier.record_remote_copy(ObjectId(number), &copy);
        }
        let some = |from, most| {
            let found = tier.some_in_remote(ObjectId(from), most);
            found.into_iter().map(|object| object.0).collect::<Vec<_>>()
        };
        assert_eq!((some(0, 2), some(6, 2), some(5, 9)), (vec![1, 5], vec![7, 1], vec![5, 7, 1]));
    }

    #[test]
    fn what_leaves_before_is_told_as_it_leaves() {
        let tier = SsdTier::new(Some(1 << 20));
        for number in 1..=4 {
            tier.allow_leaving(ObjectId(number), InodeId(number), LEAVING_BYTES_MIN + number);
        }
        tier.used(ObjectId(2), LEAVING_BYTES_MIN + 2);
        tier.finish(ObjectId(3), true);
        let order = tier.next_to_leave(u64::MAX, usize::MAX, &HashSet::new());
        assert_eq!((order.len(), order[0].0), (4, ObjectId(3)));
        let mut bytes = 0;
        for (place, (object, _)) in order.iter().enumerate() {
            let expected = Before { objects: place as u64, bytes, has_more: false };
            assert_eq!(tier.before(*object), Some(expected));
            bytes += LEAVING_BYTES_MIN + object.0;
        }
        assert_eq!(tier.before(ObjectId(5)), None);
        tier.set_budget(None);
        assert_eq!(tier.before(ObjectId(1)), None);
    }

    #[test]
    fn a_budget_may_change() {
        let tier = SsdTier::new(None);
        let check = |budget: Option<u64>, excess: u64, has_room: bool| {
            assert_eq!(tier.budget_bytes(), budget);
            assert_eq!(tier.excess_bytes(1000), excess);
            assert_eq!(tier.has_room(900, 100), has_room);
        };
        check(None, 0, true);
        tier.set_budget(Some(900));
        check(Some(900), 190, false);
        tier.set_budget(Some(2000));
        check(Some(2000), 0, true);
        tier.set_budget(None);
        check(None, 0, true);
    }

    #[test]
    fn what_comes_back_counts_on_the_disk_again_however_small() {
        let tier = SsdTier::new(None);
        let copy = RemoteCopy {
            content: [7; 32],
            encoding: Encoding::Raw,
            stored_bytes: 90,
            state: RemoteState::Only,
        };
        for (object, bytes) in [(ObjectId(1), 100), (ObjectId(2), LEAVING_BYTES_MIN)] {
            tier.record_remote_copy(object, &copy);
            tier.record_leaving(object, bytes);
            assert_eq!(tier.remote_use().only_bytes, bytes);
            tier.allow_leaving(object, InodeId(7), bytes);
            assert_eq!((tier.remote_use().only_objects, tier.remote_use().only_bytes), (0, 0));
        }
        let leaving = tier.next_to_leave(u64::MAX, usize::MAX, &HashSet::new());
        assert_eq!(leaving, [(ObjectId(2), InodeId(7))], "the small one stays");
        tier.set_owner(ObjectId(2), InodeId(8));
        let leaving = tier.next_to_leave(u64::MAX, usize::MAX, &HashSet::new());
        assert_eq!(leaving, [(ObjectId(2), InodeId(8))]);
    }

    #[test]
    fn a_remote_copy_counts_once_until_it_is_forgotten() {
        let tier = SsdTier::new(None);
        let copy = |stored_bytes| RemoteCopy {
            content: [7; 32],
            encoding: Encoding::Raw,
            stored_bytes,
            state: RemoteState::Only,
        };
        let stored = || (tier.remote_use().objects, tier.remote_use().stored_bytes);
        tier.record_remote_copy(ObjectId(1), &copy(90));
        tier.record_remote_copy(ObjectId(2), &copy(7));
        tier.record_remote_copy(ObjectId(1), &copy(80));
        assert_eq!(stored(), (2, 87));
        tier.forget(ObjectId(1));
        tier.forget(ObjectId(1));
        assert_eq!(stored(), (1, 7));
        tier.forget(ObjectId(2));
        assert_eq!(stored(), (0, 0));
    }
}
