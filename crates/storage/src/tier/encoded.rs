//! Encoded copies on the SSD: which objects the disk has in fewer bytes, and which should be next.
//!
//! An encoded copy lies beside the place of the raw file and is on record. Where both are there,
//! the raw one is opened; dropping it then costs nothing, since the encoded one never went. The
//! order in which raw files are replaced is that of the other tiers, [`Replacement`].

mod files;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use files::{checksum_of_copy, pack, pack_blob, recognise, unpack, verify};

use super::encoding::{ColdEncoding, Lossless, ZstdLevel};
use super::replacement::Replacement;
use crate::store::record::{EncodedCopy, InodeId, ObjectId};

/// Smaller objects stay raw: encoding frees little of them, and costs a file beside them or a decoding at the next open.
const ENCODING_BYTES_MIN: u64 = 64 << 10;

/// What the disk has encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodedUse {
    /// Encoded copies.
    pub objects: u64,
    /// Their length.
    pub stored_bytes: u64,
    /// Of them, those whose raw file is gone.
    pub only_objects: u64,
    /// The logical length of those.
    pub only_bytes: u64,
}

/// The copies, and the policy for more.
#[derive(Debug)]
pub struct EncodedCopies {
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    cold: ColdEncoding,
    raw: Replacement,
    /// The files of objects in `raw`, and their length.
    owners: BTreeMap<ObjectId, (InodeId, u64)>,
    /// The same of objects that stay raw.
    staying: BTreeMap<ObjectId, (InodeId, u64)>,
    copies: BTreeMap<ObjectId, Copy>,
    usage: EncodedUse,
    garbage: BTreeSet<ObjectId>,
}

#[derive(Clone, Copy, Debug)]
struct Copy {
    bytes: u64,
    stored_bytes: u64,
    is_only: bool,
}

impl EncodedCopies {
    /// None yet; `cold` says how more are made, the budget is that of the disk.
    pub fn new(cold: ColdEncoding, budget_bytes: Option<u64>) -> EncodedCopies {
        let held = Held {
            cold,
            raw: Replacement::new(budget_bytes.unwrap_or(u64::MAX)),
            owners: BTreeMap::new(),
            staying: BTreeMap::new(),
            copies: BTreeMap::new(),
            usage: EncodedUse::default(),
            garbage: BTreeSet::new(),
        };
        EncodedCopies { held: Mutex::new(held) }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How cold objects are encoded on the disk; `None` if they stay raw.
    pub fn encoding(&self) -> Option<Lossless> {
        match self.held().cold {
            ColdEncoding::None => None,
            ColdEncoding::Zstd(level) => Some(Lossless::Zstd(level)),
            ColdEncoding::Quantised(_) => Some(Lossless::Zstd(ZstdLevel::DEFAULT)),
        }
    }

    /// Encodes otherwise from now on; what is encoded stays as it is.
    pub(super) fn set_cold(&self, cold: ColdEncoding) {
        self.held().cold = cold;
    }

    /// The budget of the disk changes.
    pub(super) fn set_budget(&self, budget_bytes: Option<u64>) {
        self.held().raw.set_budget(budget_bytes.unwrap_or(u64::MAX));
    }

    /// How often an object was used while it was raw, as far as that is remembered.
    pub fn uses(&self, object: ObjectId) -> Option<u64> {
        self.held().raw.uses(object)
    }

    /// What there is.
    pub fn usage(&self) -> EncodedUse {
        self.held().usage
    }

    /// The disk has an object raw that may be encoded instead. Whether it is, its turn decides: a
    /// model may ask for it whatever the mount was told.
    pub(super) fn record_raw(&self, object: ObjectId, owner: InodeId, bytes: u64) {
        if bytes < ENCODING_BYTES_MIN {
            return;
        }
        let mut held = self.held();
        if held.copies.get(&object).is_some_and(|copy| copy.is_only) {
            return;
        }
        held.staying.remove(&object);
        held.owners.insert(object, (owner, bytes));
        held.raw.insert(object, bytes);
    }

    /// The object belongs to another file from now on.
    pub(super) fn set_owner(&self, object: ObjectId, owner: InodeId) {
        let mut held = self.held();
        if let Some((known, _)) = held.owners.get_mut(&object) {
            *known = owner;
        }
        if let Some((known, _)) = held.staying.get_mut(&object) {
            *known = owner;
        }
    }

    /// The disk has an encoded copy of an object of `bytes`, with or without its raw file.
    pub(super) fn record_copy(
        &self, object: ObjectId, bytes: u64, copy: &EncodedCopy, is_only: bool,
    ) {
        let copy = Copy { bytes, stored_bytes: copy.stored_bytes, is_only };
        let mut held = self.held();
        held.drop_copy(object);
        held.usage.add(&copy);
        held.copies.insert(object, copy);
        held.garbage.remove(&object);
    }

    /// The raw file of an object with an encoded copy is gone, or it is back.
    pub(super) fn set_only(&self, object: ObjectId, owner: InodeId, is_only: bool) {
        let bytes = {
            let mut held = self.held();
            let Some(copy) = held.drop_copy(object) else {
                return;
            };
            let copy = Copy { is_only, ..copy };
            held.usage.add(&copy);
            held.copies.insert(object, copy);
            if is_only {
                held.raw.evicted(object);
                held.owners.remove(&object);
                return;
            }
            copy.bytes
        };
        self.record_raw(object, owner, bytes);
    }

    /// The object stays raw: encoding it frees too little, or somebody wants it so.
    pub(super) fn forbid(&self, object: ObjectId) {
        let mut held = self.held();
        held.raw.remove(object);
        if let Some(file) = held.owners.remove(&object) {
            held.staying.insert(object, file);
        }
    }

    /// What is to be encoded, and how, has changed: what stayed raw is tried again.
    pub(super) fn reconsider(&self) {
        let staying = std::mem::take(&mut self.held().staying);
        for (object, (owner, bytes)) in staying {
            self.record_raw(object, owner, bytes);
        }
    }

    /// The object was deleted, is changing or has left: no encoded copy counts any more.
    pub(super) fn forget(&self, object: ObjectId) {
        let mut held = self.held();
        held.raw.remove(object);
        held.owners.remove(&object);
        held.staying.remove(&object);
        held.drop_copy(object);
    }

    /// The file of an encoded copy is to be removed, unless it is on record again by then.
    pub(super) fn mark_garbage(&self, object: ObjectId) {
        self.held().garbage.insert(object);
    }

    /// What [`EncodedCopies::mark_garbage`] has told since the last time.
    pub(super) fn take_garbage(&self) -> BTreeSet<ObjectId> {
        std::mem::take(&mut self.held().garbage)
    }

    /// Somebody opened the object.
    pub(super) fn used(&self, object: ObjectId, bytes: u64) {
        let mut held = self.held();
        if held.owners.contains_key(&object) {
            held.raw.access(object, bytes);
        }
    }

    /// Whether the object is to be encoded before others, until it is used.
    pub(super) fn finish(&self, object: ObjectId, is_finished: bool) {
        self.held().raw.finish(object, is_finished);
    }

    /// Whether it is.
    pub fn is_finished(&self, object: ObjectId) -> bool {
        self.held().raw.is_finished(object)
    }

    /// Whether the disk has an object only encoded.
    pub fn is_only(&self, object: ObjectId) -> bool {
        let held = self.held();
        held.usage.only_objects > 0 && held.copies.get(&object).is_some_and(|copy| copy.is_only)
    }

    /// Objects of `bytes` together, but `most` at a time, whose raw files should go first, and their files,
    /// without `passed_over`.
    pub fn next(
        &self, bytes: u64, most: usize, passed_over: &HashSet<ObjectId>,
    ) -> Vec<(ObjectId, InodeId)> {
        let mut held = self.held();
        let Held { raw, owners, .. } = &mut *held;
        let victims = raw.first_to_leave(bytes, most, |object| passed_over.contains(&object));
        let owner = |object| owners.get(&object).map(|(owner, _)| (object, *owner));
        victims.into_iter().filter_map(|victim| owner(victim.object)).collect()
    }
}

impl Held {
    fn drop_copy(&mut self, object: ObjectId) -> Option<Copy> {
        let copy = self.copies.remove(&object)?;
        self.usage.objects -= 1;
        self.usage.stored_bytes -= copy.stored_bytes;
        if copy.is_only {
            self.usage.only_objects -= 1;
            self.usage.only_bytes -= copy.bytes;
        }
        Some(copy)
    }
}

impl EncodedUse {
    fn add(&mut self, copy: &Copy) {
        self.objects += 1;
        self.stored_bytes += copy.stored_bytes;
        if copy.is_only {
            self.only_objects += 1;
            self.only_bytes += copy.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::encoding::Encoding;

    #[test]
    fn what_is_there_adds_up() {
        let zstd = ColdEncoding::Zstd(ZstdLevel::DEFAULT);
        let copies = EncodedCopies::new(zstd, Some(1 << 30));
        let (object, owner, bytes) = (ObjectId(1), InodeId(7), 1 << 20);
        let copy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 1000 };
        let check = |only: u64, expected: (u64, u64)| {
            let usage = copies.usage();
            assert_eq!((usage.objects, usage.stored_bytes), expected);
            assert_eq!((usage.only_objects, usage.only_bytes), (only, only * bytes));
            assert_eq!(copies.is_only(object), only > 0);
            assert!(!copies.is_only(ObjectId(2)));
        };
        let next = || copies.next(1, 1, &HashSet::new());
        copies.record_raw(object, owner, bytes);
        copies.record_copy(ObjectId(2), bytes, &copy, false);
        copies.record_raw(ObjectId(2), owner, ENCODING_BYTES_MIN - 1);
        assert_eq!(next(), [(object, owner)]);
        copies.record_copy(object, bytes, &copy, false);
        check(0, (2, 2000));
        copies.set_only(object, owner, true);
        check(1, (2, 2000));
        assert_eq!(next(), []);
        copies.set_only(object, owner, false);
        check(0, (2, 2000));
        assert_eq!(next(), [(object, owner)]);
        copies.forbid(object);
        assert_eq!(next(), []);
        copies.forget(object);
        check(0, (1, 1000));
        copies.mark_garbage(object);
        assert_eq!(copies.take_garbage(), BTreeSet::from([object]));
        assert_eq!(copies.take_garbage(), BTreeSet::new());
    }

    #[test]
    fn what_stays_raw_is_tried_again_when_asked_for() {
        let copies = EncodedCopies::new(ColdEncoding::None, Some(1 << 30));
        assert!(copies.encoding().is_none());
        let next = || copies.next(u64::MAX, usize::MAX, &HashSet::new());
        for object in [ObjectId(1), ObjectId(2)] {
            copies.record_raw(object, InodeId(7), 1 << 20);
            copies.forbid(object);
        }
        assert_eq!(next(), []);
        copies.set_owner(ObjectId(1), InodeId(8));
        copies.forget(ObjectId(2));
        copies.reconsider();
        assert_eq!(next(), [(ObjectId(1), InodeId(8))]);
    }

    #[test]
    fn pages_that_are_rounded_elsewhere_are_compressed_here() {
        let encoding = |cold| EncodedCopies::new(cold, None).encoding();
        let level = ZstdLevel::new(7).unwrap();
        assert_eq!(encoding(ColdEncoding::Zstd(level)), Some(Lossless::Zstd(level)));
        let rounded = ColdEncoding::Quantised(super::super::encoding::Quantisation::Q8_0);
        assert_eq!(encoding(rounded), Some(Lossless::Zstd(ZstdLevel::DEFAULT)));
    }

    #[test]
    fn a_budget_may_change() {
        let copies = EncodedCopies::new(ColdEncoding::None, None);
        copies.record_raw(ObjectId(1), InodeId(7), ENCODING_BYTES_MIN);
        let too_much = || copies.held().raw.victims(0, |_| false).len();
        for (budget_bytes, expected) in [(None, 0), (Some(ENCODING_BYTES_MIN - 1), 1), (None, 0)] {
            copies.set_budget(budget_bytes);
            assert_eq!(too_much(), expected);
        }
    }
}
