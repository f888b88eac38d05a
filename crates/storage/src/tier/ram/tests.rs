//! Copies that arrive from another tier.

use super::counters::Counters;
use super::ram::RamTier;
use crate::store::disk::Access;
use crate::store::record::{InodeId, ObjectId};

use super::ram::Shrunk;

const OBJECT: ObjectId = ObjectId(7);

#[test]
fn what_arrives_after_a_change_is_never_shown() {
    let tier = RamTier::open(1 << 20, Counters::default()).unwrap();
    let file = tier.receive(OBJECT, 4096).unwrap().unwrap();
    assert!(!tier.holds(OBJECT));
    tier.make_dirty(OBJECT);
    assert!(!tier.holds(OBJECT), "half of it may be missing");
    file.write_all_at(&[1; 4096], 0).unwrap();
    assert!(tier.arrived(OBJECT, InodeId(1)).unwrap().is_none());
    assert!(!tier.holds(OBJECT) && tier.open_copy(OBJECT, Access::Read).is_none());
    drop(file);
    assert!(tier.receive(ObjectId(8), 1 << 20).unwrap().is_some(), "its space comes back");
}

#[test]
fn an_empty_file_arrives_too() {
    let tier = RamTier::open(1 << 20, Counters::default()).unwrap();
    drop(tier.receive(OBJECT, 0).unwrap().unwrap());
    let file = tier.arrived(OBJECT, InodeId(1)).unwrap().unwrap();
    assert_eq!(file.stat().unwrap().length, 0);
}

#[test]
fn what_arrived_does_not_leave_before_whoever_waited_has_it() {
    let tier = RamTier::open(1 << 20, Counters::default()).unwrap();
    drop(tier.receive(OBJECT, 1 << 20).unwrap().unwrap());
    let landed = tier.arrived(OBJECT, InodeId(1)).unwrap().unwrap();
    assert!(tier.receive(ObjectId(8), 4096).unwrap().is_none());
    assert!(tier.holds(OBJECT));
    drop(landed);
    assert!(tier.receive(ObjectId(8), 4096).unwrap().is_some());
}

#[test]
fn a_smaller_budget_lets_copies_go_in_steps_and_takes_nothing_in_meanwhile() {
    let tier = RamTier::open(1 << 20, Counters::default()).unwrap();
    let count = 256;
    for object in 0..count {
        drop(tier.receive(ObjectId(object), 4 << 10).unwrap().unwrap());
        drop(tier.arrived(ObjectId(object), InodeId(object)).unwrap().unwrap());
    }
    assert_eq!(tier.shrink(), Shrunk::Fits);
    tier.set_budget(256 << 10).unwrap();
    assert_eq!(tier.usage().used_bytes, 1 << 20, "nobody who asks for a budget waits for it");
    assert!(tier.receive(ObjectId(count), 4096).unwrap().is_none());
    let steps = (0..100).take_while(|_| tier.shrink() == Shrunk::Freed).count();
    assert!((2..5).contains(&steps), "{steps} steps");
    assert_eq!(tier.usage().used_bytes, 256 << 10);
    tier.set_budget(512 << 10).unwrap();
    assert!(tier.receive(ObjectId(count), 256 << 10).unwrap().is_some());
}

#[test]
fn what_is_pinned_or_dirty_stays_in_a_smaller_budget() {
    let tier = RamTier::open(1 << 20, Counters::default()).unwrap();
    drop(tier.create(OBJECT, 64 << 10, Access::ReadWrite).unwrap().unwrap());
    drop(tier.receive(ObjectId(8), 64 << 10).unwrap().unwrap());
    drop(tier.arrived(ObjectId(8), InodeId(8)).unwrap().unwrap());
    tier.keep(InodeId(8), true);
    assert_eq!(tier.kept_bytes(), 64 << 10);
    tier.set_budget(0).unwrap();
    assert_eq!(tier.shrink(), Shrunk::Held);
    let version = tier.dirty_version(OBJECT).unwrap();
    tier.make_clean(OBJECT, version);
    assert_eq!(tier.shrink(), Shrunk::Freed);
    assert_eq!(tier.shrink(), Shrunk::Held);
    tier.keep(InodeId(8), false);
    assert_eq!(tier.shrink(), Shrunk::Fits);
    assert_eq!(tier.usage().used_bytes, 0);
}

#[test]
fn what_is_in_use_does_not_hide_what_is_not() {
    const IN_USE: u64 = 100;
    let tier = RamTier::open(1 << 20, Counters::default()).unwrap();
    let mut in_use = Vec::new();
    for object in 0..256 {
        drop(tier.receive(ObjectId(object), 4 << 10).unwrap().unwrap());
        let file = tier.arrived(ObjectId(object), InodeId(object)).unwrap().unwrap();
        // Of all copies the coldest.
        if object < IN_USE {
            in_use.push(file);
        }
    }
    // The others were used more often, so that the search begins with these however often they are passed over.
    for object in (IN_USE..256).cycle().take(1000) {
        drop(tier.open_copy(ObjectId(object), Access::Read).unwrap().unwrap());
    }
    tier.set_budget((IN_USE + 10) * (4 << 10)).unwrap();
    let steps = (0..100).take_while(|_| tier.shrink() != Shrunk::Fits).count();
    assert!(steps < 20, "{steps} steps");
    assert!((0..IN_USE).all(|object| tier.holds(ObjectId(object))));
    // New ones take the places of the others, although some are told that there is none.
    let has_room = |object| tier.receive(ObjectId(object), 4 << 10).unwrap().is_some();
    assert_eq!((300..350).filter(|object| has_room(*object)).count(), 10);
}
