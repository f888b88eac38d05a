//! Copies that arrive from another tier.

use super::counters::Counters;
use super::ram::RamTier;
use crate::store::disk::Access;
use crate::store::record::{InodeId, ObjectId};

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
fn what_arrived_does_not_leave_before_whoever_waited_has_it() {
    let tier = RamTier::open(1 << 20, Counters::default()).unwrap();
    drop(tier.receive(OBJECT, 1 << 20).unwrap().unwrap());
    let landed = tier.arrived(OBJECT, InodeId(1)).unwrap().unwrap();
    assert!(tier.receive(ObjectId(8), 4096).unwrap().is_none());
    assert!(tier.holds(OBJECT));
    drop(landed);
    assert!(tier.receive(ObjectId(8), 4096).unwrap().is_some());
}
