use std::path::Path;

use super::super::Store;
use super::super::record::InodeId;
use super::*;

/// A store that is open, as a mount has it.
struct Opened {
    store: Store,
    metadata: Metadata,
}

impl Opened {
    fn new(path: &Path) -> Opened {
        let store = Store::open_or_create(path).unwrap();
        let metadata = Metadata::open(store.metadata().unwrap()).unwrap();
        store.events.begin(&metadata).unwrap();
        Opened { store, metadata }
    }

    fn note(&self, what: What, number: u64) {
        self.store.events.note(Event::new(what, "test").of(InodeId(number)));
    }

    fn commit(&mut self) {
        self.store.events.write_to(&mut self.metadata);
        let layer = self.metadata.freeze().unwrap();
        self.metadata.writer().write(&layer).unwrap();
        drop(layer);
        self.metadata.thaw_committed().unwrap();
    }

    fn read(&self, from: &mut EventCursor) -> Vec<Event> {
        let mut all = Vec::new();
        loop {
            let some = self.store.events.read(&self.metadata, from, 100).unwrap();
            if some.is_empty() {
                return all;
            }
            all.extend(some);
        }
    }

    fn inodes(&self) -> Vec<u64> {
        let events = self.read(&mut EventCursor::default());
        events.iter().filter_map(|event| event.inode).map(|inode| inode.0).collect()
    }
}

#[test]
fn events_are_read_in_their_order_wherever_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let mut opened = Opened::new(directory.path());
    assert!(opened.inodes().is_empty());
    opened.note(What::Deleted, 1);
    opened.note(What::Evicted, 2);
    opened.commit();
    opened.note(What::Refused, 3);
    opened.store.events.write_to(&mut opened.metadata);
    opened.note(What::Evicted, 4);
    opened.note(What::Deleted, 5);
    assert_eq!(opened.inodes(), [1, 2, 3, 4, 5]);
    // Whoever has read all of them goes on with what is new.
    let mut from = EventCursor::default();
    assert_eq!(opened.read(&mut from).len(), 5);
    opened.note(What::Fetched, 6);
    let new = opened.read(&mut from);
    assert_eq!((new.len(), new[0].number, new[0].inode), (1, 6, Some(InodeId(6))));
}

#[test]
fn what_a_commit_has_not_is_gone_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut opened = Opened::new(directory.path());
    opened.note(What::Deleted, 1);
    opened.commit();
    opened.note(What::Deleted, 2);
    opened.store.events.write_to(&mut opened.metadata);
    opened.note(What::Deleted, 3);
    drop(opened);
    let opened = Opened::new(directory.path());
    assert_eq!(opened.inodes(), [1]);
    opened.note(What::Deleted, 4);
    let events = opened.read(&mut EventCursor::default());
    assert_eq!(events.iter().map(|event| event.number).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn a_full_ring_forgets_its_oldest_and_no_other_ring_does() {
    let directory = tempfile::tempdir().unwrap();
    let mut opened = Opened::new(directory.path());
    opened.note(What::Deleted, 7);
    let slots = Ring::Refusals.slots();
    let mut behind = EventCursor::default();
    for number in 0..slots + 10 {
        opened.note(What::Refused, 1000 + number);
        if number == 2 {
            assert_eq!(
                opened.store.events.read(&opened.metadata, &mut behind, 2).unwrap().len(),
                2
            );
        }
        if number % 1000 == 0 {
            opened.commit();
        }
    }
    opened.commit();
    let expected: Vec<u64> = (0..slots).map(|number| 1000 + 10 + number).collect();
    assert_eq!(opened.inodes()[0], 7);
    assert_eq!(opened.inodes()[1..], expected);
    // Whoever was overtaken goes on with the oldest that is left.
    let rest = opened.read(&mut behind);
    assert_eq!(rest.len() as u64, slots);
    assert!(rest.is_sorted_by_key(|event| event.number));
}

#[test]
fn whoever_comes_back_goes_on_after_the_number_it_read_last() {
    let directory = tempfile::tempdir().unwrap();
    let mut opened = Opened::new(directory.path());
    let whats = [What::Deleted, What::Refused, What::Evicted, What::Evicted, What::Deleted];
    for round in 0..40 {
        opened.note(whats[round % whats.len()], 0);
        if round == 30 {
            opened.store.events.write_to(&mut opened.metadata);
            let heads = metadata::events::heads(&opened.metadata).unwrap();
            let unknown = [(Ring::Losses, 4), (Ring::Moves, 0), (Ring::Moves, 7), (Ring::Moves, 8)];
            let unknown = unknown.map(|(ring, slot)| (keys::event(ring, slot), vec![0xff; 20]));
            metadata::events::put(&mut opened.metadata, &heads, BTreeMap::from(unknown));
        }
    }
    let all = opened.read(&mut EventCursor::default());
    assert_eq!(all.len(), 36);
    for number in 0..45 {
        let mut from = opened.store.events.after(&opened.metadata, number).unwrap();
        let expected: Vec<_> = all.iter().filter(|event| event.number > number).cloned().collect();
        assert_eq!(opened.read(&mut from), expected, "after {number}");
    }
    // Where the rings went on past the number, with the oldest that is left.
    for number in 0..Ring::Refusals.slots() {
        opened.note(What::Refused, number);
        if number % 1000 == 0 {
            opened.commit();
        }
    }
    let mut from = opened.store.events.after(&opened.metadata, 3).unwrap();
    let rest = opened.read(&mut from);
    let expected = opened.read(&mut EventCursor::default());
    assert_eq!(rest.len(), expected.iter().filter(|event| event.number > 3).count());
}

#[test]
fn what_finds_no_room_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let mut opened = Opened::new(directory.path());
    for number in 0..WAITING_MAX as u64 + 5 {
        opened.note(What::Deleted, number);
    }
    opened.commit();
    let events = opened.read(&mut EventCursor::default());
    assert_eq!(events.len(), WAITING_MAX + 1);
    let last = events.last().unwrap();
    assert_eq!((last.what, last.files, last.inode), (What::Lost, 5, None));
    // The next ones are kept again.
    opened.note(What::Deleted, 1);
    assert_eq!(opened.read(&mut EventCursor::default()).len(), WAITING_MAX + 2);
}

#[test]
fn a_commit_that_failed_takes_its_events_along_when_it_is_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut opened = Opened::new(directory.path());
    opened.note(What::Deleted, 1);
    opened.store.events.write_to(&mut opened.metadata);
    drop(opened.metadata.freeze().unwrap());
    opened.note(What::Deleted, 2);
    opened.metadata.thaw_failed(false);
    assert_eq!(opened.inodes(), [1, 2]);
    opened.commit();
    drop(opened);
    assert_eq!(Opened::new(directory.path()).inodes(), [1, 2]);
}

#[test]
fn an_event_of_a_later_version_is_passed_over() {
    let directory = tempfile::tempdir().unwrap();
    let mut opened = Opened::new(directory.path());
    opened.note(What::Deleted, 1);
    opened.note(What::Deleted, 2);
    opened.store.events.write_to(&mut opened.metadata);
    let heads = metadata::events::heads(&opened.metadata).unwrap();
    let key = keys::event(Ring::Losses, 0);
    let unknown = BTreeMap::from([(key, vec![0xff; 20])]);
    metadata::events::put(&mut opened.metadata, &heads, unknown);
    assert_eq!(opened.inodes(), [2]);
}
