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
