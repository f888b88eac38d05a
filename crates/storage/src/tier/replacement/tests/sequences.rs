//! What leaves of a sequence, and when.

use super::{NEVER, use_object};
use crate::store::record::ObjectId;
use crate::tier::replacement::{Access, Replacement};

fn use_all(tier: &mut Replacement, objects: impl IntoIterator<Item = u64>) {
    for object in objects {
        use_object(tier, object, 1);
    }
}

fn order(tier: &mut Replacement) -> Vec<u64> {
    tier.victims(u64::MAX, NEVER).iter().map(|victim| victim.object.0).collect()
}

#[test]
fn the_end_of_a_sequence_leaves_before_its_beginning() {
    let mut tier = Replacement::new(1000);
    // What comes in new in a row counts as one sequence until it is read in another order.
    use_all(&mut tier, 0..8);
    use_all(&mut tier, 100..104);
    use_all(&mut tier, 100..104);
    use_all(&mut tier, 0..8);
    assert_eq!(order(&mut tier), [103, 102, 101, 100, 7, 6, 5, 4, 3, 2, 1, 0]);
    // A beginning is used: only that outlives the other.
    use_all(&mut tier, 100..102);
    assert_eq!(order(&mut tier), [103, 102, 7, 6, 5, 4, 3, 2, 1, 0, 101, 100]);
}

#[test]
fn a_branch_begins_where_it_leaves_the_other() {
    let mut tier = Replacement::new(1000);
    use_all(&mut tier, [1, 2, 3, 4]);
    use_all(&mut tier, [1, 2, 30, 40]);
    assert_eq!(order(&mut tier), [4, 3, 40, 30, 2, 1]);
}

#[test]
fn a_sequence_longer_than_the_tier_keeps_its_beginning_and_moves_nothing() {
    let mut tier = Replacement::new(100);
    for _ in 0..5 {
        use_all(&mut tier, 0..150);
    }
    let answers: Vec<Access> = (0..150).map(|object| use_object(&mut tier, object, 1)).collect();
    assert!(answers[..90].iter().all(|answer| *answer == Access::Hit), "{answers:?}");
    assert!(!answers.contains(&Access::Admit), "{answers:?}");
}

#[test]
fn new_pages_without_end_are_not_one_sequence() {
    let mut tier = Replacement::new(100);
    for object in 0..10_000 {
        for victim in tier.victims(1, NEVER) {
            tier.evicted(victim.object);
        }
        tier.insert(ObjectId(object), 1);
    }
    let recent = (9900..10_000).filter(|object| tier.is_resident(ObjectId(*object))).count();
    assert!(recent >= 70, "{recent}");
}
