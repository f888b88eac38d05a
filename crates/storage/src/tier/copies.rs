//! Where the bytes of objects are, beside their raw files: what the remote has, what the disk has encoded, and what
//! may leave or be encoded to make room.
//!
//! Each event has one method, which changes every view of it; whoever asks reads the views
//! ([`Copies::disk`], [`Copies::encoded`]) and cannot change them. Records in `meta.redb` say the same
//! durably, and are changed first.

use std::collections::BTreeSet;

use super::encoded::EncodedCopies;
use super::encoding::ColdEncoding;
use super::ssd::SsdTier;
use crate::store::record::{EncodedCopy, InodeId, ObjectId, RemoteCopy};

/// The views, and the events that change them.
#[derive(Debug)]
pub struct Copies {
    disk: SsdTier,
    encoded: EncodedCopies,
}

impl Copies {
    /// Views that know of no object yet.
    pub fn new(disk: SsdTier, encoded: EncodedCopies) -> Copies {
        Copies { disk, encoded }
    }

    /// What the disk may let go, and what only the remote has.
    pub fn disk(&self) -> &SsdTier {
        &self.disk
    }

    /// What the disk has encoded, and what may be.
    pub fn encoded(&self) -> &EncodedCopies {
        &self.encoded
    }

    /// The budget of the disk changes.
    pub fn set_budget(&self, budget_bytes: Option<u64>) {
        self.disk.set_budget(budget_bytes);
        self.encoded.set_budget(budget_bytes);
    }

    /// Copies on the disk are encoded otherwise from now on; what stayed raw is tried again.
    pub fn set_cold(&self, cold: ColdEncoding) {
        self.encoded.set_cold(cold);
        self.encoded.reconsider();
    }

    /// Somebody opened the object. Whether it had left the disk.
    pub fn note_use(&self, object: ObjectId, bytes: u64) -> bool {
        self.encoded.used(object, bytes);
        self.disk.used(object, bytes)
    }

    /// Nobody will go on with the object, as somebody has said: it leaves, and is encoded, before others until it is
    /// used. With `is_finished` false that is taken back.
    pub fn finish(&self, object: ObjectId, is_finished: bool) {
        self.disk.finish(object, is_finished);
        self.encoded.finish(object, is_finished);
    }

    /// The object belongs to another file from now on.
    pub fn set_owner(&self, object: ObjectId, owner: InodeId) {
        self.disk.set_owner(object, owner);
        self.encoded.set_owner(object, owner);
    }

    /// The remote has a verified copy.
    pub fn note_remote_copy(&self, object: ObjectId, copy: &RemoteCopy) {
        self.disk.record_remote_copy(object, copy);
    }

    /// The remote relies on nobody else to keep its copy, and the disk has the object raw: it may leave, or be
    /// encoded.
    pub fn allow_leaving(&self, object: ObjectId, owner: InodeId, bytes: u64) {
        self.disk.allow_leaving(object, owner, bytes);
        self.encoded.record_raw(object, owner, bytes);
    }

    /// The disk has the object raw, which may be encoded; no remote has it, or it is not to leave.
    pub fn note_raw(&self, object: ObjectId, owner: InodeId, bytes: u64) {
        self.encoded.record_raw(object, owner, bytes);
    }

    /// It is not to leave to make room.
    pub fn forbid_leaving(&self, object: ObjectId) {
        self.disk.forbid_leaving(object);
    }

    /// It stays raw: encoding it frees too little, or somebody wants it so.
    pub fn forbid_encoding(&self, object: ObjectId) {
        self.encoded.forbid(object);
    }

    /// The disk has an encoded copy of an object of `bytes`, with or without its raw file.
    pub fn note_encoded(&self, object: ObjectId, bytes: u64, copy: &EncodedCopy, is_only: bool) {
        self.encoded.record_copy(object, bytes, copy, is_only);
    }

    /// The raw file of an object with an encoded copy is gone.
    pub fn note_raw_gone(&self, object: ObjectId, owner: InodeId) {
        self.encoded.set_only(object, owner, true);
    }

    /// The raw file of an object with an encoded copy is back.
    pub fn note_raw_back(&self, object: ObjectId, owner: InodeId) {
        self.encoded.set_only(object, owner, false);
    }

    /// The encoded copy does not count any more; its file is to be removed.
    pub fn discard_encoded(&self, object: ObjectId) {
        self.encoded.forget(object);
        self.encoded.mark_garbage(object);
    }

    /// The encoded copy and its file are gone.
    pub fn note_encoded_gone(&self, object: ObjectId) {
        self.encoded.forget(object);
    }

    /// The disk has the object in no form any more, the remote does.
    pub fn note_left(&self, object: ObjectId, bytes: u64) {
        self.encoded.forget(object);
        self.disk.record_leaving(object, bytes);
    }

    /// No remote copy counts any more; what the disk has stays.
    pub fn forget_remote_copy(&self, object: ObjectId) {
        self.disk.forget(object);
    }

    /// The object was deleted, or is changing: no copy counts any more.
    pub fn forget(&self, object: ObjectId) {
        self.disk.forget(object);
        self.encoded.forget(object);
    }

    /// Files of encoded copies that do not count, told once.
    pub fn take_garbage(&self) -> BTreeSet<ObjectId> {
        self.encoded.take_garbage()
    }

    /// What is to be encoded, and how, has changed: what stayed raw is tried again.
    pub fn reconsider_encoding(&self) {
        self.encoded.reconsider();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::tier::encoding::{ColdEncoding, Encoding, ZstdLevel};

    const BYTES: u64 = 1 << 20;
    const OWNER: InodeId = InodeId(7);

    /// Compares what the views tell of one object with letters: it may leave (l) or be encoded (e), it is encoded (Z),
    /// in no other form on the disk (z), in the remote (R), nowhere else (r).
    fn check(copies: &Copies, letters: &str) {
        let (encoded, remote) = (copies.encoded().usage(), copies.disk().remote_use());
        assert_eq!(encoded.only_bytes, encoded.only_objects * BYTES);
        assert_eq!(remote.only_bytes, remote.only_objects * BYTES);
        let told = [
            ('l', !copies.disk().next_to_leave(1, 1, &HashSet::new()).is_empty()),
            ('e', !copies.encoded().next(1, 1, &HashSet::new()).is_empty()),
            ('R', remote.objects > 0),
            ('r', remote.only_objects > 0),
            ('Z', encoded.objects > 0),
            ('z', encoded.only_objects > 0),
        ];
        let told: String =
            told.iter().filter(|(_, is_so)| *is_so).map(|(letter, _)| *letter).collect();
        assert_eq!(told, letters);
    }

    fn copies() -> Copies {
        let encoded = EncodedCopies::new(ColdEncoding::Zstd(ZstdLevel::DEFAULT), Some(1 << 30));
        Copies::new(SsdTier::new(Some(1 << 30)), encoded)
    }

    fn remote_copy() -> RemoteCopy {
        let state = crate::store::record::RemoteState::Held;
        RemoteCopy { content: [7; 32], encoding: Encoding::Raw, stored_bytes: 900, state }
    }

    const ENCODED: EncodedCopy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 1000 };

    #[test]
    fn an_object_goes_through_every_place_and_comes_back() {
        let (copies, object) = (copies(), ObjectId(1));
        check(&copies, "");
        copies.note_remote_copy(object, &remote_copy());
        check(&copies, "R");
        copies.allow_leaving(object, OWNER, BYTES);
        check(&copies, "leR");
        copies.note_encoded(object, BYTES, &ENCODED, false);
        check(&copies, "leRZ");
        copies.note_raw_gone(object, OWNER);
        check(&copies, "lRZz");
        copies.note_left(object, BYTES);
        check(&copies, "Rr");
        copies.allow_leaving(object, OWNER, BYTES);
        check(&copies, "leR");
        copies.forbid_encoding(object);
        copies.forbid_leaving(object);
        check(&copies, "R");
        copies.reconsider_encoding();
        check(&copies, "eR");
        copies.forget(object);
        check(&copies, "");
        assert_eq!(copies.take_garbage(), BTreeSet::new());
    }

    #[test]
    fn a_copy_that_does_not_count_is_counted_nowhere() {
        let (copies, object) = (copies(), ObjectId(1));
        copies.note_raw(object, OWNER, BYTES);
        copies.note_encoded(object, BYTES, &ENCODED, false);
        copies.discard_encoded(object);
        copies.note_raw(object, OWNER, BYTES);
        check(&copies, "e");
        assert_eq!(copies.take_garbage(), BTreeSet::from([object]));
        copies.note_encoded(object, BYTES, &ENCODED, true);
        check(&copies, "eZz");
        copies.note_raw_back(object, OWNER);
        check(&copies, "eZ");
        copies.note_encoded_gone(object);
        check(&copies, "");
        copies.note_remote_copy(object, &remote_copy());
        copies.allow_leaving(object, OWNER, BYTES);
        copies.forget_remote_copy(object);
        check(&copies, "e");
    }

    /// Which object leaves first, which is encoded first, and the files that these are said to belong to.
    fn first(copies: &Copies) -> [Vec<(ObjectId, InodeId)>; 2] {
        let none = HashSet::new();
        [copies.disk().next_to_leave(1, 1, &none), copies.encoded().next(1, 1, &none)]
    }

    fn two_that_may_leave() -> (Copies, [ObjectId; 2]) {
        let (copies, objects) = (copies(), [ObjectId(1), ObjectId(2)]);
        for object in objects {
            copies.note_remote_copy(object, &remote_copy());
            copies.allow_leaving(object, OWNER, BYTES);
        }
        (copies, objects)
    }

    #[test]
    fn what_was_opened_last_goes_last() {
        let (copies, objects) = two_that_may_leave();
        let goes = |object| [vec![(object, OWNER)], vec![(object, OWNER)]];
        assert_eq!(first(&copies), goes(objects[1]), "the end of what came in a row");
        copies.note_use(objects[1], BYTES);
        assert_eq!(first(&copies), goes(objects[0]));
    }

    #[test]
    fn what_is_finished_goes_first_until_it_is_used() {
        let (copies, objects) = two_that_may_leave();
        let goes = |object| [vec![(object, OWNER)], vec![(object, OWNER)]];
        copies.finish(objects[0], true);
        assert!(copies.disk().is_finished(objects[0]) && copies.encoded().is_finished(objects[0]));
        assert_eq!(first(&copies), goes(objects[0]));
        copies.finish(objects[0], false);
        assert_eq!(first(&copies), goes(objects[1]));
        copies.finish(objects[0], true);
        copies.note_use(objects[1], BYTES);
        copies.note_use(objects[0], BYTES);
        assert_eq!(first(&copies), goes(objects[1]), "both were used since");
    }

    #[test]
    fn an_object_belongs_to_the_file_that_it_was_given_to_last() {
        let copies = copies();
        copies.note_remote_copy(ObjectId(1), &remote_copy());
        copies.allow_leaving(ObjectId(1), OWNER, BYTES);
        copies.set_owner(ObjectId(1), InodeId(8));
        let moved = vec![(ObjectId(1), InodeId(8))];
        assert_eq!(first(&copies), [moved.clone(), moved]);
    }

    #[test]
    fn settings_may_change_and_what_stayed_raw_is_tried_again() {
        let copies = copies();
        copies.set_budget(Some(5));
        assert_eq!(copies.disk().budget_bytes(), Some(5));
        copies.note_raw(ObjectId(1), OWNER, BYTES);
        copies.forbid_encoding(ObjectId(1));
        check(&copies, "");
        copies.set_cold(ColdEncoding::None);
        assert!(copies.encoded().encoding().is_none());
        check(&copies, "e");
    }
}
