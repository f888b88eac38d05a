//! Rules of the data structure, and what it hits.

mod hit_rates;

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

const NEVER: fn(ObjectId) -> bool = |_| false;

/// Uses an object and does what the answer says.
pub(super) fn use_object(tier: &mut Replacement, object: u64, bytes: u64) -> Access {
    let object = ObjectId(object);
    let answer = tier.access(object, bytes);
    if answer == Access::Admit {
        for victim in tier.victims(bytes, NEVER) {
            tier.evicted(victim.object);
        }
        tier.insert(object, bytes);
    }
    answer
}

#[test]
fn a_second_use_is_what_admits() {
    let mut tier = Replacement::new(100);
    for object in 0..10 {
        assert_eq!(use_object(&mut tier, object, 10), Access::Admit, "there is room");
    }
    assert_eq!(tier.resident_bytes(), 100);
    assert_eq!(use_object(&mut tier, 50, 10), Access::Bypass);
    assert!(!tier.is_resident(ObjectId(50)));
    assert_eq!(use_object(&mut tier, 50, 10), Access::Admit);
    assert_eq!(use_object(&mut tier, 50, 10), Access::Hit);
    assert_eq!(tier.resident_bytes(), 100);
}

#[test]
fn victims_are_cold_first_then_the_longest_unused() {
    let mut tier = Replacement::new(100);
    for object in 0..10 {
        use_object(&mut tier, object, 10);
    }
    // Nine are hot, 9 is cold; 0 was used last.
    assert_eq!(use_object(&mut tier, 0, 10), Access::Hit);
    let order: Vec<u64> = tier.victims(100, NEVER).iter().map(|v| v.object.0).collect();
    assert_eq!(order, [9, 1, 2, 3, 4, 5, 6, 7, 8, 0]);
    let two: Vec<u64> = tier.victims(11, NEVER).iter().map(|v| v.object.0).collect();
    assert_eq!(two, [9, 1], "10 bytes are not enough for 11");
    assert!(tier.victims(0, NEVER).is_empty());
}

#[test]
fn pinned_objects_are_passed_over_and_not_met_again() {
    let mut tier = Replacement::new(1000);
    for object in 0..1000 {
        use_object(&mut tier, object, 1);
    }
    let mut asked = 0;
    let pinned = |object: ObjectId| object.0 != 500;
    for _ in 0..1000 / PINNED_SKIPPED_MAX + 2 {
        let victims = tier.victims(1, |object| {
            asked += 1;
            pinned(object)
        });
        assert!(asked <= 2 * PINNED_SKIPPED_MAX + 1);
        asked = 0;
        if let [victim] = victims[..] {
            assert_eq!(victim, Victim { object: ObjectId(500), bytes: 1 });
            return;
        }
    }
    panic!("500 was never found");
}

#[test]
fn a_new_page_waits_among_the_cold() {
    let mut tier = Replacement::new(100);
    for object in 0..10 {
        use_object(&mut tier, object, 10);
    }
    for victim in tier.victims(10, NEVER) {
        assert_eq!(victim.object, ObjectId(9));
        tier.evicted(victim.object);
    }
    tier.insert(ObjectId(20), 10);
    assert_eq!(tier.victims(10, NEVER)[0].object, ObjectId(20));
    // Read soon after it was written, it stays in the place of another.
    assert_eq!(use_object(&mut tier, 20, 10), Access::Hit);
    assert_eq!(tier.victims(10, NEVER)[0].object, ObjectId(0));
}

#[test]
fn objects_that_do_not_fit() {
    let mut tier = Replacement::new(100);
    for _ in 0..3 {
        assert_eq!(use_object(&mut tier, 1, 101), Access::Bypass);
        assert_eq!(use_object(&mut tier, 2, u64::MAX), Access::Bypass);
    }
    // As large as the budget: one at a time.
    assert_eq!(use_object(&mut tier, 3, 100), Access::Admit);
    assert_eq!(use_object(&mut tier, 4, 100), Access::Bypass);
    assert_eq!(use_object(&mut tier, 4, 100), Access::Admit);
    assert_eq!(use_object(&mut tier, 4, 100), Access::Hit);
    assert!(!tier.is_resident(ObjectId(3)));
    let mut none = Replacement::new(0);
    for _ in 0..3 {
        assert_eq!(use_object(&mut none, 1, 1), Access::Bypass);
    }
}

#[test]
fn memory_is_bounded() {
    let mut tier = Replacement::with_memory(100, 1000);
    for object in 0..100_000 {
        use_object(&mut tier, object, 1);
    }
    assert!(tier.by_object.len() <= 1100, "{}", tier.by_object.len());
    assert!(tier.nodes.count() <= 1101, "{}", tier.nodes.count());
}

/// What the caller may ask for, by object.
#[derive(Clone, Debug)]
enum Step {
    Use(u64, u64),
    Insert(u64, u64),
    Remove(u64),
    Evict(u64),
    Victims(u64, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..40_u64, 1..30_u64).prop_map(|(object, bytes)| Step::Use(object, bytes)),
        2 => (0..40_u64, 1..30_u64).prop_map(|(object, bytes)| Step::Insert(object, bytes)),
        1 => (0..40_u64).prop_map(Step::Remove),
        1 => (0..40_u64).prop_map(Step::Evict),
        1 => (0..120_u64, 0..40_u64).prop_map(|(bytes, pinned)| Step::Victims(bytes, pinned)),
    ];
    proptest::collection::vec(step, 0..300)
}

fn check_invariants(tier: &Replacement, resident: &HashMap<u64, u64>) {
    assert_eq!(tier.resident_bytes(), resident.values().sum::<u64>());
    let mut bytes = HashMap::new();
    let mut listed = HashSet::new();
    let lists = [(State::Hot, &tier.hot), (State::Cold, &tier.cold), (State::Absent, &tier.absent)];
    for (state, list) in lists {
        let mut next = list.last();
        let mut length = 0;
        while let Some(index) = next {
            let node = &tier.nodes[index];
            assert_eq!(node.state, state);
            assert!(listed.insert(index));
            assert_eq!(tier.by_object.get(&node.object), Some(&index));
            assert_eq!(resident.contains_key(&node.object.0), state != State::Absent);
            let in_history = tier.history.contains(&tier.nodes, index);
            assert!(in_history || state == State::Cold);
            *bytes.entry(state == State::Hot).or_insert(0) +=
                if state == State::Absent { 0 } else { node.bytes };
            length += 1;
            next = list.before(&tier.nodes, index);
        }
        assert_eq!(length, list.length());
    }
    assert_eq!(listed.len(), tier.by_object.len());
    assert_eq!(bytes.get(&true).copied().unwrap_or(0), tier.hot_bytes);
    assert_eq!(bytes.get(&false).copied().unwrap_or(0), tier.cold_bytes);
    let end = tier.history.last().map(|index| tier.nodes[index].state);
    assert!(tier.hot.length() == 0 || end == Some(State::Hot));
    assert!(tier.hot.length() <= 1 || tier.hot_bytes <= tier.hot_bytes_max());
    assert!(tier.absent.length() <= tier.absent_max);
}

proptest! {
    /// Whatever is asked in whatever order, bytes and lists agree with a plain map.
    #[test]
    fn any_order_of_calls(steps in steps()) {
        let mut tier = Replacement::with_memory(100, 12);
        let mut resident = HashMap::new();
        for step in steps {
            match step {
                Step::Use(object, bytes) => {
                    let bytes = *resident.get(&object).unwrap_or(&bytes);
                    let answer = tier.access(ObjectId(object), bytes);
                    prop_assert_eq!(answer == Access::Hit, resident.contains_key(&object));
                }
                Step::Insert(object, bytes) => {
                    tier.insert(ObjectId(object), bytes);
                    resident.insert(object, bytes);
                }
                Step::Remove(object) => {
                    tier.remove(ObjectId(object));
                    resident.remove(&object);
                }
                Step::Evict(object) => {
                    tier.evicted(ObjectId(object));
                    resident.remove(&object);
                }
                Step::Victims(bytes, pinned) => {
                    let victims = tier.victims(bytes, |object| object.0 < pinned);
                    let freed: u64 = victims.iter().map(|victim| victim.bytes).sum();
                    for victim in &victims {
                        prop_assert!(victim.object.0 >= pinned);
                        prop_assert_eq!(resident.get(&victim.object.0), Some(&victim.bytes));
                    }
                    let evictable: u64 = resident.iter().filter(|(object, _)| **object >= pinned)
                        .map(|(_, bytes)| *bytes).sum();
                    let over = (tier.resident_bytes() + bytes).saturating_sub(100);
                    prop_assert!(freed >= over.min(evictable));
                }
            }
            check_invariants(&tier, &resident);
        }
    }
}
