//! What the policy is made of: the index of names, and the sample.

use std::collections::HashMap;

use proptest::prelude::*;

use super::use_object;
use crate::store::record::ObjectId;
use crate::tier::replacement::names::Names;
use crate::tier::replacement::shadows::RESIDENT_MAX;
use crate::tier::replacement::{Access, Replacement};

proptest! {
    /// An index that grows bucket by bucket finds what a plain map does.
    #[test]
    fn names_are_found(steps in proptest::collection::vec((0..300_u64, any::<bool>()), 0..2000)) {
        let (mut names, mut expected) = (Names::new(), HashMap::new());
        for (object, is_added) in steps {
            let found = names.find(ObjectId(object));
            prop_assert_eq!(found, expected.get(&object).copied());
            match found {
                None if is_added => {
                    expected.insert(object, names.add(ObjectId(object), 1));
                }
                Some(index) if !is_added => {
                    names.free(index);
                    expected.remove(&object);
                }
                _ => {}
            }
            prop_assert_eq!(names.length(), expected.len());
        }
        let mut objects: Vec<u64> = names.objects().iter().map(|object| object.0).collect();
        objects.sort_unstable();
        let mut keys: Vec<u64> = expected.into_keys().collect();
        keys.sort_unstable();
        prop_assert_eq!(objects, keys);
    }
}

#[test]
fn a_large_tier_is_judged_by_a_sample() {
    let budget = 32 * RESIDENT_MAX as u64;
    let mut tier = Replacement::new(budget);
    let mut hits = 0;
    // A loop of twice the budget, of which half can be kept.
    for round in 0..4 {
        for object in 0..2 * budget {
            let answer = use_object(&mut tier, object, 1);
            hits += u64::from(round > 0 && answer == Access::Hit);
        }
        assert!(tier.shadows.resident_max() <= RESIDENT_MAX + 1);
    }
    assert!(hits > 3 * budget * 9 / 10, "{hits}");
}

/// What once held many small files judges its rules by as many pages as any other.
#[test]
fn a_sample_grows_again() {
    const PAGE_BYTES: u64 = 256;
    let pages = 4 * RESIDENT_MAX as u64;
    let mut tier = Replacement::new(pages * PAGE_BYTES);
    let small_ones = 64 * pages;
    for object in 0..small_ones {
        use_object(&mut tier, object, 1);
    }
    for object in 0..small_ones {
        tier.remove(ObjectId(object));
    }
    for object in (0..2 * pages).chain(0..2 * pages) {
        use_object(&mut tier, small_ones + object, PAGE_BYTES);
    }
    assert!(tier.shadows.resident_max() > RESIDENT_MAX / 8, "{}", tier.shadows.resident_max());
}

/// Pages that were just written stand at the end of their run and are not on the disk yet; those before them can
/// leave.
#[test]
fn many_pinned_pages_hide_none_that_may_leave() {
    const NEW: u64 = 240;
    let mut tier = Replacement::new(1000);
    for object in (0..1000).chain(0..1000 - NEW) {
        use_object(&mut tier, object, 1);
    }
    let victims = tier.victims(1, |object| object.0 >= 1000 - NEW);
    assert_eq!(victims.len(), 1);
    assert!(tier.first_to_leave(500, 10, |_| false).len() == 10, "as many as are asked for");
}

#[test]
fn who_comes_in_late_does_not_turn_the_clock_back() {
    let mut tier = Replacement::new(100);
    for object in 1..=80 {
        tier.insert(ObjectId(object), 1);
    }
    for object in [40, 20, 60, 40, 10, 40] {
        tier.access(ObjectId(object), 1);
    }
    assert_eq!(tier.access(ObjectId(200), 1), Access::Admit);
    // While its bytes are on their way others are used, one of them for the fourth time.
    for object in [70, 30, 40] {
        tier.access(ObjectId(object), 1);
    }
    tier.insert(ObjectId(200), 1);
    let first = tier.first_to_leave(3, 3, |_| false);
    assert!(first.iter().all(|victim| victim.object != ObjectId(40)), "{first:?}");
}
