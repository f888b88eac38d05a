//! Copies come, change and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::counters::Counters;
use super::ram::{LetGo, RamTier, Shrunk, Wanted};
use crate::store::Store;
use crate::store::disk::Access;
use crate::store::event::{Event, What};
use crate::store::events::EventCursor;
use crate::store::metadata::Metadata;
use crate::store::record::{InodeId, ObjectId};

const OBJECT: ObjectId = ObjectId(7);

/// A tier of 1 MiB, and what it counts.
fn tier() -> (RamTier, Counters) {
    let counters = Counters::default();
    (RamTier::open(1 << 20, counters.clone()).unwrap(), counters)
}

/// A copy that the disk has too and that nobody has open.
fn bring(tier: &RamTier, object: ObjectId, bytes: u64) {
    drop(tier.receive(object, bytes).unwrap().unwrap());
    drop(tier.arrived(object, InodeId(object.0)).unwrap().unwrap());
}

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
        tier.used(ObjectId(object));
    }
    tier.set_budget((IN_USE + 10) * (4 << 10)).unwrap();
    let steps = (0..100).take_while(|_| tier.shrink() != Shrunk::Fits).count();
    assert!(steps < 20, "{steps} steps");
    assert!((0..IN_USE).all(|object| tier.holds(ObjectId(object))));
    // New ones take the places of the others, although some are told that there is none.
    let has_room = |object| tier.receive(ObjectId(object), 4 << 10).unwrap().is_some();
    assert_eq!((300..350).filter(|object| has_room(*object)).count(), 10);
}

#[test]
fn what_is_opened_to_be_flushed_or_uploaded_is_not_used() {
    let (tier, _) = tier();
    let part = 256 << 10;
    for object in 0..4 {
        bring(&tier, ObjectId(object), part);
    }
    for _ in 0..10 {
        drop(tier.open_copy(ObjectId(0), Access::Read).unwrap().unwrap());
    }
    tier.used(ObjectId(1));
    tier.used(ObjectId(100));
    for object in 4..6 {
        bring(&tier, ObjectId(object), part);
    }
    let held = [0, 1, 2, 3].map(|object| tier.holds(ObjectId(object)));
    assert_eq!(held, [false, true, false, true]);
}

#[test]
fn a_new_copy_has_its_space_from_the_beginning() {
    let (tier, _) = tier();
    let file = tier.create(OBJECT, 64 << 10, Access::ReadWrite).unwrap().unwrap();
    assert_eq!(file.stat().unwrap().blocks * 512, 64 << 10);
    file.write_all_at(&[1; 100], 0).unwrap();
    assert_eq!(tier.stat(OBJECT).unwrap().unwrap().length, 100);
    let file = tier.create(ObjectId(8), 4096, Access::Read).unwrap().unwrap();
    assert!(file.write_all_at(&[1], 0).is_err(), "it counts as no writer");
    assert!(tier.stat(ObjectId(9)).is_none());
}

#[test]
fn what_the_disk_has_counts_only_if_nobody_wrote_since() {
    let (tier, _) = tier();
    drop(tier.create(OBJECT, 4096, Access::ReadWrite).unwrap().unwrap());
    let first = tier.dirty_version(OBJECT).unwrap();
    tier.note_at_rest(OBJECT);
    tier.make_clean(OBJECT, first);
    let second = tier.dirty_version(OBJECT).expect("its last bytes may be missing on the disk");
    tier.make_clean(OBJECT, second);
    assert_eq!(tier.dirty_version(OBJECT), None);
    tier.note_at_rest(OBJECT);
    tier.make_dirty(OBJECT);
    tier.make_clean(OBJECT, second);
    assert_eq!(tier.dirty_version(OBJECT), Some(second + 1));
    assert_eq!(tier.usage().dirty_bytes, 4096);
}

#[test]
fn only_what_another_tier_has_and_nobody_reads_is_dropped() {
    let (tier, counters) = tier();
    let [dirty, open, clean] = [ObjectId(1), ObjectId(2), ObjectId(3)];
    drop(tier.create(dirty, 4096, Access::ReadWrite).unwrap().unwrap());
    bring(&tier, open, 4096);
    bring(&tier, clean, 4096);
    let reader = tier.open_copy(open, Access::Read).unwrap().unwrap();
    for object in [dirty, open, clean] {
        tier.drop_clean(object);
    }
    assert_eq!([dirty, open, clean].map(|object| tier.holds(object)), [true, true, false]);
    bring(&tier, clean, 4096);
    let left = [dirty, open, clean, ObjectId(4)].map(|object| tier.let_leave(object));
    assert_eq!(left, [false, false, true, true]);
    assert_eq!([dirty, open, clean].map(|object| tier.holds(object)), [true, true, false]);
    assert_eq!(counters.told(), [r#"kvfs_evictions_total{reason="asked",tier="ram"} 1"#]);
    drop(reader);
    assert!(tier.let_leave(open));
}

#[test]
fn what_is_removed_while_somebody_reads_it_is_freed_afterwards() {
    let (tier, _) = tier();
    assert!(!tier.remove(OBJECT));
    bring(&tier, OBJECT, 1 << 20);
    let reader = tier.open_copy(OBJECT, Access::Read).unwrap().unwrap();
    assert!(tier.remove(OBJECT));
    assert!(!tier.holds(OBJECT));
    assert_eq!(tier.usage().used_bytes, 1 << 20);
    drop(reader);
    tier.tidy();
    assert_eq!(tier.usage().objects, 0);
}

#[test]
fn what_does_not_arrive_is_given_up_and_nothing_else_is() {
    let (tier, _) = tier();
    drop(tier.receive(OBJECT, 4096).unwrap().unwrap());
    assert!(tier.receive(OBJECT, 4096).unwrap().is_none(), "it is on its way");
    tier.give_up(OBJECT);
    assert_eq!(tier.usage().objects, 0);
    bring(&tier, OBJECT, 4096);
    tier.give_up(OBJECT);
    assert!(tier.holds(OBJECT));
}

#[test]
fn what_fits_to_the_last_byte_makes_nothing_leave() {
    let (tier, _) = tier();
    bring(&tier, ObjectId(1), 512 << 10);
    bring(&tier, ObjectId(2), 512 << 10);
    assert!(tier.holds(ObjectId(1)));
    // What needs all of the room gets it.
    bring(&tier, ObjectId(3), 1 << 20);
    assert!(tier.let_leave(ObjectId(3)));
    bring(&tier, ObjectId(4), 1);
    bring(&tier, ObjectId(5), 1 << 20);
    assert!(!tier.holds(ObjectId(4)));
}

#[test]
fn a_copy_belongs_to_the_file_that_it_was_given_to() {
    let (tier, _) = tier();
    bring(&tier, OBJECT, 4096);
    tier.set_owner(OBJECT, InodeId(8));
    tier.keep(InodeId(8), true);
    assert_eq!(tier.kept_bytes(), 4096);
}

#[test]
fn a_search_asks_the_kernel_about_so_many_copies_and_takes_its_no() {
    let (tier, _) = tier();
    for object in 0..256 {
        bring(&tier, ObjectId(object), 4096);
    }
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    tier.on_eviction(LetGo(Arc::new(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        false
    })));
    assert!(tier.receive(OBJECT, 1 << 20).unwrap().is_none());
    assert!(tier.receive(ObjectId(1000), 1 << 20).unwrap().is_none());
    assert_eq!(asked.load(Ordering::Relaxed), 64);
    assert!(!tier.let_leave(ObjectId(1)));
    assert_eq!(tier.usage().objects, 256);
}

#[test]
fn who_watches_is_told_which_copy_left_to_make_room() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open_or_create(directory.path()).unwrap();
    let metadata = Metadata::open(store.metadata().unwrap()).unwrap();
    let (tier, counters) = tier();
    tier.tell(Arc::clone(&store.events));
    bring(&tier, OBJECT, 1 << 20);
    bring(&tier, ObjectId(8), 4096);
    let told = store.events.read(&metadata, &mut EventCursor::default(), 10).unwrap();
    let [Event { what: What::Evicted, inode, bytes, .. }] = told.as_slice() else {
        panic!("{told:?}");
    };
    assert_eq!((*inode, *bytes), (Some(InodeId(OBJECT.0)), Some(1 << 20)));
    tier.count_flush(70);
    tier.count_promotion(7);
    for object in [OBJECT, OBJECT, ObjectId(8), ObjectId(9)] {
        tier.used(object);
    }
    let expected = [
        r#"kvfs_evicted_age_seconds_count{tier="ram"} 1"#,
        r#"kvfs_evicted_idle_seconds_count{tier="ram"} 1"#,
        r#"kvfs_evicted_opens_total{tier="ram"} 2"#,
        r#"kvfs_evicted_unused_total{tier="ram"} 1"#,
        r#"kvfs_evictions_total{reason="room",tier="ram"} 1"#,
        r#"kvfs_move_bytes_total{from="ram",to="ssd"} 70"#,
        r#"kvfs_move_bytes_total{from="ssd",to="ram"} 7"#,
        r#"kvfs_moves_total{from="ram",to="ssd"} 1"#,
        r#"kvfs_moves_total{from="ssd",to="ram"} 1"#,
    ];
    assert_eq!(counters.told(), expected);
}

#[test]
fn only_a_smaller_budget_asks_for_copies_to_leave_and_no_more_than_needed_do() {
    let (tier, _) = tier();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    tier.on_too_large(Wanted(Arc::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    })));
    for object in 0..16 {
        bring(&tier, ObjectId(object), 64 << 10);
    }
    for (budget_bytes, times) in [(1 << 20, 0), (2 << 20, 0), (512 << 10, 1)] {
        tier.set_budget(budget_bytes).unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), times, "{budget_bytes}");
    }
    assert_eq!(tier.shrink(), Shrunk::Fits);
    assert_eq!(tier.usage().used_bytes, 512 << 10);
    tier.set_budget(512 << 10).unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 1, "the place is as small as the budget now");
}

#[test]
fn a_larger_budget_has_room_for_as_much() {
    let (tier, _) = tier();
    // More than its tmpfs has beyond its budget.
    let bytes = 80 << 20;
    tier.set_budget(bytes).unwrap();
    assert!(tier.receive(OBJECT, bytes).unwrap().is_some());
}

/// Or a hint that is given right after the last page was written would be over with the next commit.
#[test]
fn only_a_client_goes_on_with_what_was_finished() {
    let (tier, _) = tier();
    drop(tier.create(OBJECT, 4096, Access::ReadWrite).unwrap().unwrap());
    tier.finish(OBJECT, true);
    drop(tier.open_copy(OBJECT, Access::Read).unwrap().unwrap());
    let version = tier.dirty_version(OBJECT).unwrap();
    tier.make_clean(OBJECT, version);
    drop(tier.open_copy(OBJECT, Access::Read).unwrap().unwrap());
    assert!(tier.is_finished(OBJECT));
    tier.used(OBJECT);
    assert!(!tier.is_finished(OBJECT));
}

#[test]
fn what_is_finished_leaves_before_what_is_older() {
    let (tier, _) = tier();
    let objects = [1, 2, 3, 4].map(ObjectId);
    for object in objects {
        bring(&tier, object, 256 << 10);
    }
    tier.finish(objects[1], true);
    assert!(tier.receive(ObjectId(9), 4096).unwrap().is_some());
    assert_eq!(objects.map(|object| tier.holds(object)), [true, false, true, true]);
}

#[test]
fn another_program_goes_on_with_what_is_there() {
    let (tier, _) = tier();
    let (dirty, oldest, used, finished, arriving, doomed) =
        (ObjectId(1), ObjectId(2), ObjectId(3), ObjectId(4), ObjectId(5), ObjectId(6));
    drop(tier.create(dirty, 4096, Access::ReadWrite).unwrap().unwrap());
    tier.make_dirty(dirty);
    for object in [oldest, used, finished, doomed] {
        bring(&tier, object, 4096);
    }
    tier.used(used);
    tier.keep(InodeId(oldest.0), true);
    tier.finish(finished, true);
    let held = tier.open_copy(doomed, Access::Read).unwrap().unwrap();
    assert!(tier.remove(doomed));
    drop(tier.receive(arriving, 4096).unwrap().unwrap());
    let version = tier.dirty_version(dirty);
    let before = tier.usage();
    let order = |tier: &RamTier| {
        let mut objects = [dirty, oldest, used, finished];
        objects.sort_by_key(|object| tier.before(*object).unwrap().objects);
        objects
    };
    let leaves = order(&tier);

    let frozen = tier.freeze().unwrap();
    let live = frozen.live().clone();
    // As a program that is replaced.
    std::mem::forget(frozen);
    std::mem::forget(tier);
    let tier = RamTier::go_on(live, 1 << 20, Counters::default()).unwrap();
    let after = tier.usage();
    assert_eq!((after.objects, after.used_bytes), (before.objects - 1, before.used_bytes - 4096));
    assert_eq!(after.dirty_bytes, 4096);
    assert_eq!(tier.dirty_version(dirty), version);
    assert!(tier.is_finished(finished) && !tier.is_finished(used));
    assert!(!tier.holds(arriving) && !tier.holds(doomed));
    let again = tier.receive(arriving, 4096).unwrap();
    assert!(again.is_some(), "its file is gone");
    tier.give_up(arriving);
    drop(held);
    tier.tidy();
    assert_eq!(tier.usage().objects, 4);
    // What leaves first, and what never does, is the same.
    assert_eq!(order(&tier), leaves);
    assert_eq!((leaves[0], leaves[3]), (finished, used));
    assert!(tier.create(ObjectId(9), (1 << 20) - 8192, Access::Read).unwrap().is_some());
    assert!(tier.holds(dirty) && tier.holds(oldest) && !tier.holds(used) && !tier.holds(finished));
}

#[test]
fn a_tier_that_was_left_too_large_becomes_smaller() {
    let (tier, _) = tier();
    bring(&tier, OBJECT, 512 << 10);
    let frozen = tier.freeze().unwrap();
    let live = frozen.live().clone();
    std::mem::forget(frozen);
    std::mem::forget(tier);
    let tier = RamTier::go_on(live, 4096, Counters::default()).unwrap();
    let told = Arc::new(AtomicUsize::new(0));
    let tells = Arc::clone(&told);
    tier.on_too_large(Wanted(Arc::new(move || {
        tells.fetch_add(1, Ordering::Relaxed);
    })));
    assert_eq!(told.load(Ordering::Relaxed), 1);
    assert_eq!(tier.shrink(), Shrunk::Fits);
    assert!(!tier.holds(OBJECT));
}
