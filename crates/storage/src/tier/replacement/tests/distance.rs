//! The rules of LIRS, of a tier that follows nothing else.

use std::collections::BTreeSet;

use crate::store::record::ObjectId;
use crate::tier::replacement::Access;
use crate::tier::replacement::cache::{Cache, Rule, Use};

struct Tier {
    cache: Cache,
    run: u32,
}

impl Tier {
    fn new() -> Tier {
        Tier { cache: Cache::under(Rule::Distance, 100, 1000), run: 0 }
    }

    /// The next use of an object of 10 bytes, which has nothing to do with the one before.
    fn next(&mut self, object: u64) -> Use {
        self.run += 1;
        Use { object: ObjectId(object), bytes: 10, uses: 1, run: self.run }
    }

    fn use_object(&mut self, object: u64) -> Access {
        let used = self.next(object);
        let answer = self.cache.access(Rule::Distance, used);
        if answer == Access::Admit {
            self.cache.make_room(Rule::Distance, 10);
            self.cache.insert(used);
        }
        answer
    }

    fn victims(&mut self, bytes: u64) -> Vec<u64> {
        let victims = self.cache.first_to_leave(
            Rule::Distance,
            (self.cache.excess_bytes(bytes), usize::MAX),
            &BTreeSet::new(),
            |_| Some(false),
        );
        victims.iter().map(|victim| victim.object.0).collect()
    }
}

#[test]
fn a_second_use_is_what_admits() {
    let mut tier = Tier::new();
    for object in 0..10 {
        assert_eq!(tier.use_object(object), Access::Admit, "there is room");
    }
    assert_eq!(tier.cache.resident_bytes(), 100);
    assert_eq!(tier.use_object(50), Access::Bypass);
    assert!(!tier.cache.is_resident(ObjectId(50)));
    assert_eq!(tier.use_object(50), Access::Admit);
    assert_eq!(tier.use_object(50), Access::Hit);
    assert_eq!(tier.cache.resident_bytes(), 100);
}

#[test]
fn victims_are_cold_first_then_the_longest_unused() {
    let mut tier = Tier::new();
    for object in 0..10 {
        tier.use_object(object);
    }
    // Nine are hot, 9 is cold; 0 was used last.
    assert_eq!(tier.use_object(0), Access::Hit);
    assert_eq!(tier.victims(100), [9, 1, 2, 3, 4, 5, 6, 7, 8, 0]);
    assert_eq!(tier.victims(11), [9, 1], "10 bytes are not enough for 11");
    assert!(tier.victims(0).is_empty());
}

#[test]
fn a_new_page_waits_among_the_cold() {
    let mut tier = Tier::new();
    for object in 0..10 {
        tier.use_object(object);
    }
    assert_eq!(tier.victims(10), [9]);
    tier.cache.evicted(ObjectId(9));
    let new = tier.next(20);
    tier.cache.insert(new);
    assert_eq!(tier.victims(10), [20]);
    // Read soon after it was written, it stays in the place of another.
    assert_eq!(tier.use_object(20), Access::Hit);
    assert_eq!(tier.victims(10), [0]);
}
