//! Rules of the data structure, and what it hits.

mod adapting;
mod distance;
mod finished;
mod hit_rates;
mod parts;
mod sequences;

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::cache::PINNED_SKIPPED_MAX;
use super::names::State;
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
fn pinned_objects_are_passed_over_and_not_met_again() {
    const OBJECTS: u64 = 8 * PINNED_SKIPPED_MAX as u64;
    const FREE: ObjectId = ObjectId(OBJECTS / 2);
    let mut tier = Replacement::new(OBJECTS);
    for object in 0..OBJECTS {
        use_object(&mut tier, object, 1);
    }
    let mut asked = 0;
    let pinned = |object: ObjectId| object != FREE;
    for _ in 0..10 {
        let victims = tier.victims(1, |object| {
            asked += 1;
            pinned(object)
        });
        assert!(asked <= 2 * PINNED_SKIPPED_MAX + 1);
        asked = 0;
        if let [victim] = victims[..] {
            assert_eq!(victim, Victim { object: FREE, bytes: 1 });
            return;
        }
    }
    panic!("it was never found");
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
    assert!(tier.cache.names.length() <= 1100, "{}", tier.cache.names.length());
    assert!(tier.cache.names.count() <= 1101, "{}", tier.cache.names.count());
}

/// What the caller may ask for, by object.
#[derive(Clone, Debug)]
enum Step {
    Use(u64, u64),
    Insert(u64, u64),
    Remove(u64),
    Evict(u64),
    Victims(u64, u64),
    Finish(u64, bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..40_u64, 1..30_u64).prop_map(|(object, bytes)| Step::Use(object, bytes)),
        2 => (0..40_u64, 1..30_u64).prop_map(|(object, bytes)| Step::Insert(object, bytes)),
        1 => (0..40_u64).prop_map(Step::Remove),
        1 => (0..40_u64).prop_map(Step::Evict),
        1 => (0..120_u64, 0..40_u64).prop_map(|(bytes, pinned)| Step::Victims(bytes, pinned)),
        1 => (0..40_u64, any::<bool>()).prop_map(|(object, is_so)| Step::Finish(object, is_so)),
    ];
    proptest::collection::vec(step, 0..300)
}

fn check_invariants(tier: &Replacement, resident: &HashMap<u64, u64>) {
    let Cache { names, absent, absent_max, .. } = &tier.cache;
    assert!(tier.finished.iter().all(|object| resident.contains_key(&object.0)));
    let lirs = tier.cache.lirs.as_ref().unwrap();
    let frequency = tier.cache.frequency.as_ref().unwrap();
    assert_eq!(tier.resident_bytes(), resident.values().sum::<u64>());
    let mut bytes = HashMap::new();
    let mut listed = HashSet::new();
    for (kind, list) in [("hot", &lirs.hot), ("cold", &lirs.cold), ("absent", absent)] {
        let mut next = list.last();
        let mut length = 0;
        while let Some(index) = next {
            let node = &names[index];
            assert_eq!(node.state == State::Hot, kind == "hot");
            assert_eq!(node.state == State::Cold, kind == "cold");
            assert!(listed.insert(index));
            assert_eq!(names.find(node.object), Some(index));
            assert_eq!(resident.contains_key(&node.object.0), node.state.is_resident());
            assert!(lirs.history.contains(names, index) || kind != "hot");
            assert_eq!(frequency.contains(names, index), node.state.is_resident());
            *bytes.entry(kind).or_insert(0) += node.bytes;
            length += 1;
            next = list.before(names, index);
        }
        assert_eq!(length, list.length());
    }
    assert_eq!(listed.len(), names.length());
    assert_eq!(bytes.get("hot").copied().unwrap_or(0), lirs.hot_bytes);
    assert_eq!(bytes.get("cold").copied().unwrap_or(0), lirs.cold_bytes);
    let end = lirs.history.last().map(|index| names[index].state);
    assert!(lirs.hot.length() == 0 || end == Some(State::Hot));
    assert!(lirs.hot.length() <= 1 || lirs.hot_bytes <= lirs.hot_bytes_max);
    assert!(absent.length() <= *absent_max);
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
                    let different: HashSet<u64> = victims.iter().map(|victim| victim.object.0).collect();
                    prop_assert_eq!(different.len(), victims.len(), "one leaves once");
                }
                Step::Finish(object, is_so) => {
                    tier.finish(ObjectId(object), is_so);
                    let expected = is_so && resident.contains_key(&object);
                    prop_assert_eq!(tier.is_finished(ObjectId(object)), expected);
                }
            }
            check_invariants(&tier, &resident);
        }
    }
}
