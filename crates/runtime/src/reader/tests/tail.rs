//! Rows of tails without a scan.

use std::fs;

use super::{Fixture, remove};
use crate::page::Layer;
use crate::reader::{ReadError, TailRows};

fn missing(outcome: Result<Option<TailRows>, ReadError>) -> u64 {
    match outcome {
        Err(ReadError::Missing { start, .. }) => start.0,
        other => panic!("{other:?}"),
    }
}

#[test]
fn rows_before_a_token() {
    let fixture = Fixture::new(2, 2, 5);
    let sequence = fixture.open().unwrap();
    for (end, tokens) in [(33, 1), (37, 5), (34, 2)] {
        let tail = sequence.tail(Layer(1), end).unwrap().unwrap();
        assert_eq!((tail.start(), tail.tokens()), (32, tokens));
        assert_eq!(tail.rows(), fixture.rows(Layer(1), 32, tokens));
    }
    for end in [0, 16, 32] {
        assert!(sequence.tail(Layer(1), end).unwrap().is_none());
    }
    assert_eq!(missing(sequence.tail(Layer(1), 38)), 37);
    assert_eq!(missing(sequence.tail(Layer(1), 49)), 48);
    assert!(matches!(sequence.tail(Layer(2), 1), Err(ReadError::Arguments(_))));
    let without = Fixture::new(1, 2, 0).open().unwrap();
    assert!(without.tail(Layer(0), 32).unwrap().is_none());
    assert_eq!(missing(without.tail(Layer(0), 33)), 32);
}

#[test]
fn rows_stay_what_they_were() {
    let fixture = Fixture::new(1, 1, 3);
    let mut sequence = fixture.open().unwrap();
    let before = sequence.tail(Layer(0), 19).unwrap().unwrap();
    fixture.write_tail(Layer(0), 16, 6);
    // It grew, which needs no new listing.
    assert_eq!(sequence.tail(Layer(0), 22).unwrap().unwrap().tokens(), 6);
    remove(&fixture.tail_path(Layer(0), 16));
    fixture.write_page(Layer(0), 16, Fixture::PAGE_TOKENS);
    assert!(matches!(sequence.tail(Layer(0), 22), Err(ReadError::Changed(_))));
    sequence.refresh().unwrap();
    assert!(sequence.tail(Layer(0), 32).unwrap().is_none());
    assert_eq!(before.rows(), fixture.rows(Layer(0), 16, 3));
    fs::write(fixture.tail_path(Layer(0), 32), b"").unwrap();
    sequence.refresh().unwrap();
    assert!(sequence.tail(Layer(0), 32).unwrap().is_none());
    assert_eq!(missing(sequence.tail(Layer(0), 33)), 32);
}

/// What an operation on a sequence does, and a slot that is saved: two directories change names.
#[test]
fn rows_of_another_tail_are_not_taken_for_those_that_were_listed() {
    let fixture = Fixture::new(1, 1, 3);
    let mut sequence = fixture.open().unwrap();
    let path = fixture.tail_path(Layer(0), 16);
    let aside = path.with_extension("aside");
    fs::write(&aside, vec![7; fs::read(&path).unwrap().len()]).unwrap();
    #[expect(clippy::disallowed_methods, reason = "of a mount, not of a store")]
    fs::rename(&aside, &path).unwrap();
    assert!(matches!(sequence.tail(Layer(0), 19), Err(ReadError::Changed(_))));
    sequence.refresh().unwrap();
    assert_eq!(sequence.tail(Layer(0), 19).unwrap().unwrap().rows()[0], 7);
}
