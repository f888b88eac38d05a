use super::*;
use std::time::Duration;

use crate::retention::TTL;
use crate::retention::policy::{self, Policy};
use crate::unmounted::{FILES, Unmounted, at, place};

const NOW: i64 = 1_000_000;

fn pass(policy: Policy) -> Pass {
    let root = Root { id: FILES, class: DirectoryClass::Plain, policy, owner: 0 };
    Pass { now: at(NOW), ..Pass::new(root, 1, true) }
}

fn lives(value: &str) -> Option<Ttl> {
    policy::parse(TTL, value.as_bytes()).map(policy::Limit::ttl)
}

fn sized(bytes: u64) -> Pass {
    pass(Policy { bytes: Some(bytes), ..Policy::default() })
}

/// A sequence that was used then.
fn unit(used: i64) -> Unit {
    Unit { used: at(used), what: What::Sequence(InodeId(used.unsigned_abs())) }
}

#[test]
fn a_twentieth_of_the_size_is_to_be_free() {
    let pass = sized(1000);
    assert_eq!([0, 950, 951, 1200].map(|held| pass.excess(held)), [0, 0, 1, 250]);
    assert_eq!(super::tests::pass(Policy::default()).excess(u64::MAX), 0);
}

#[test]
fn what_was_used_longest_ago_goes_first_and_only_if_there_is_too_much() {
    let mut pass = sized(1000);
    for used in [5, 3, 4] {
        pass.judge(unit(used), at(used), None);
    }
    assert_eq!(pass.next_to_go(2000), None, "it is walked still");
    pass.phase = Phase::Removing;
    assert_eq!(pass.next_to_go(1000), None);
    assert_eq!(pass.next_to_go(1001), Some((unit(3), Reason::Size)));
    // The rest of it comes first.
    pass.go_on_with(unit(3), Reason::Size);
    assert_eq!(pass.next_to_go(960), Some((unit(3), Reason::Size)));
    assert_eq!(pass.next_to_go(950), None, "enough is free");
    assert_eq!(pass.next_to_go(951), Some((unit(4), Reason::Size)));
    assert_eq!(pass.next_to_go(951), Some((unit(5), Reason::Size)));
    assert_eq!(pass.next_to_go(951), None);
    assert!(!pass.is_unfinished);
}

#[test]
fn what_is_too_old_goes_before_anything_goes_for_room() {
    let limits = Policy { bytes: Some(1000), age: Some(Duration::from_secs(10)), ttl: None };
    let mut pass = pass(limits);
    let ttl = lives("100");
    pass.judge(unit(NOW - 9), at(NOW - 99), ttl);
    pass.judge(unit(NOW - 10), at(NOW), None);
    pass.judge(unit(NOW - 1), at(NOW - 100), ttl);
    pass.phase = Phase::Removing;
    assert_eq!(pass.next_expiry, Some(at(NOW)));
    assert_eq!(pass.next_to_go(2000), Some((unit(NOW - 10), Reason::Age)));
    pass.go_on_with(unit(NOW - 10), Reason::Age);
    assert_eq!(pass.next_to_go(2000), Some((unit(NOW - 10), Reason::Age)));
    assert_eq!(pass.next_to_go(2000), Some((unit(NOW - 1), Reason::Ttl)));
    assert_eq!(pass.next_to_go(2000), Some((unit(NOW - 9), Reason::Size)));
    assert_eq!(pass.next_to_go(2000), None);
}

#[test]
fn a_renewed_time_to_live_begins_with_the_last_use_or_change() {
    let mut pass = sized(1000);
    let ttl = lives("100 renewed");
    for (used, changed) in [(NOW - 99, NOW - 500), (NOW - 500, NOW - 99)] {
        pass.judge(unit(used), at(changed), ttl);
    }
    assert!(pass.expired.is_empty());
    assert_eq!(pass.next_expiry, Some(at(NOW + 1)));
    pass.judge(unit(NOW - 100), at(NOW - 101), ttl);
    assert_eq!(pass.expired, [(unit(NOW - 100), Reason::Ttl)]);
}

#[test]
fn a_walk_remembers_so_many_and_says_if_there_are_more() {
    let mut pass = sized(1000);
    let most = i64::try_from(UNITS_MAX).unwrap();
    for used in (0..=most).rev() {
        pass.judge(unit(used), at(used), None);
    }
    assert_eq!(pass.oldest.len(), UNITS_MAX);
    assert_eq!(pass.oldest.peek(), Some(&unit(most - 1)), "the one used last is not remembered");
    pass.phase = Phase::Removing;
    pass.files = UNITS_MAX as u64 + 1;
    assert!(pass.next_to_go(2000).is_some());
    assert!(!pass.is_unfinished, "there are enough");
    pass.leaving.clear();
    assert_eq!(pass.next_to_go(2000), None);
    assert!(pass.is_unfinished);
    pass.is_unfinished = false;
    pass.files = UNITS_MAX as u64;
    assert_eq!(pass.next_to_go(2000), None);
    assert!(!pass.is_unfinished, "all of them were remembered");
}

#[test]
fn of_what_is_too_old_so_many_go_after_one_walk() {
    let mut pass = pass(Policy { ttl: lives("1"), ..Policy::default() });
    for used in 0..=i64::try_from(UNITS_MAX).unwrap() {
        assert!(!pass.is_unfinished);
        pass.judge(unit(used), at(used), lives("1"));
    }
    assert_eq!(pass.expired.len(), UNITS_MAX);
    assert!(pass.is_unfinished);
}

/// A file in a sequence, with so many names.
fn seen(used: i64, links: u32) -> Seen {
    let inode = Inode { links, mtime: at(used), ..file() };
    let id = InodeId(used.unsigned_abs());
    Seen { place: place(FILES, "f"), id, inode, bytes: 1, used: at(used), has_own_ttl: false }
}

fn file() -> Inode {
    let unmounted = Unmounted::new();
    let id = unmounted.write(FILES, "file", b"1");
    unmounted.fs.core.state().inode(id).unwrap()
}

fn frame(directory: u64) -> Frame {
    Frame {
        directory: InodeId(directory),
        offset: 0,
        ttl: None,
        in_sequence: true,
        own_only: false,
    }
}

#[test]
fn a_sequence_was_used_when_what_it_does_not_share_was() {
    let mut pass = sized(1);
    pass.enter(frame(50), DirectoryClass::Sequence);
    pass.enter(frame(51), DirectoryClass::Layer(0));
    pass.see((true, None), seen(5, 1));
    pass.see((true, None), seen(9, 2));
    pass.leave(&frame(51));
    assert!(pass.sequence.is_some(), "there may be more layers");
    pass.see((true, None), seen(4, 1));
    pass.leave(&frame(50));
    let expected = Unit { used: at(5), what: What::Sequence(InodeId(50)) };
    assert_eq!(std::mem::take(&mut pass.oldest).into_vec(), [expected]);
    // One that shares everything was used when anything of it was.
    pass.enter(frame(60), DirectoryClass::Sequence);
    pass.see((true, None), seen(9, 2));
    pass.leave(&frame(60));
    let expected = Unit { used: at(9), what: What::Sequence(InodeId(60)) };
    assert_eq!(pass.oldest.into_vec(), [expected]);
}

#[test]
fn a_sequence_with_something_that_stays_is_no_choice() {
    let mut pass = sized(1);
    pass.enter(frame(50), DirectoryClass::Sequence);
    pass.see((true, None), seen(5, 1));
    pass.pass_by(&Frame { in_sequence: false, ..frame(40) });
    assert!(pass.sequence.as_ref().is_some_and(|sequence| !sequence.is_protected));
    pass.pass_by(&frame(51));
    pass.leave(&frame(50));
    assert!(pass.oldest.is_empty());
}

#[test]
fn the_log_has_files_and_bytes_by_their_reasons() {
    let mut gone = Gone::default();
    let removal = |files, bytes| Removal { files, bytes, ..Removal::default() };
    gone.add(Reason::Ttl, &removal(0, 0));
    assert_eq!(gone.to_string(), "");
    gone.add(Reason::Ttl, &removal(2, 10));
    gone.add(Reason::Size, &removal(1, 5));
    gone.add(Reason::Ttl, &removal(3, 20));
    assert_eq!(
        gone.to_string(),
        "1 files, 5 bytes for their size, 5 files, 30 bytes for their ttl"
    );
}
