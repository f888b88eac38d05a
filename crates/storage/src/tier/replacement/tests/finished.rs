//! What somebody has said to be finished.

use super::*;

/// A tier with ten objects of 10 bytes, which is full.
fn full() -> Replacement {
    let mut tier = Replacement::new(100);
    for object in 0..10 {
        use_object(&mut tier, object, 10);
    }
    tier
}

/// Those that would leave for so many bytes, if none of `pinned` may.
fn leaving(tier: &mut Replacement, bytes: u64, pinned: &[u64]) -> Vec<u64> {
    let victims = tier.victims(bytes, |object| pinned.contains(&object.0));
    victims.iter().map(|victim| victim.object.0).collect()
}

#[test]
fn it_leaves_first_and_its_end_before_its_beginning() {
    let mut tier = full();
    let before = leaving(&mut tier, 10, &[]);
    for object in [4, 5, 6] {
        tier.finish(ObjectId(object), true);
    }
    assert_eq!(leaving(&mut tier, 20, &[]), [6, 5]);
    // The rest as ever.
    assert_eq!(leaving(&mut tier, 40, &[]), [vec![6, 5, 4], before].concat());
}

#[test]
fn a_use_makes_it_like_all_others() {
    let mut tier = full();
    let before = leaving(&mut tier, 10, &[]);
    tier.finish(ObjectId(4), true);
    use_object(&mut tier, 4, 10);
    assert_ne!(leaving(&mut tier, 10, &[]), [4]);
    tier.finish(ObjectId(5), true);
    tier.finish(ObjectId(5), false);
    assert_eq!(leaving(&mut tier, 10, &[]), before);
}

#[test]
fn what_is_not_here_is_not_noted() {
    let mut tier = full();
    tier.finish(ObjectId(77), true);
    assert!(!tier.is_finished(ObjectId(77)));
    tier.finish(ObjectId(4), true);
    tier.evicted(ObjectId(4));
    tier.insert(ObjectId(4), 10);
    assert!(!tier.is_finished(ObjectId(4)), "it came back");
    tier.finish(ObjectId(5), true);
    tier.remove(ObjectId(5));
    tier.insert(ObjectId(5), 10);
    assert!(!tier.is_finished(ObjectId(5)), "it is another one");
}

/// Else each search would begin with it.
#[test]
fn what_is_in_use_is_not_finished() {
    let mut tier = full();
    tier.finish(ObjectId(4), true);
    assert_ne!(leaving(&mut tier, 10, &[4]), [4]);
    assert!(!tier.is_finished(ObjectId(4)));
}
