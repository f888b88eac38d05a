//! What pages are found by besides their names.

use super::*;
use crate::store::metadata::TokensChange;
use crate::store::record::{DirectoryClass, IndexedPage, IndexedTokens};

const MODEL: InodeId = InodeId(10);
const SEQUENCES: [InodeId; 3] = [InodeId(20), InodeId(21), InodeId(22)];

fn page(number: u8, is_full: bool) -> IndexedPage {
    let hash = is_full.then_some([number + 1; 32]);
    IndexedPage { parent: [number; 32], hash, lead: vec![number; 8] }
}

#[test]
fn a_page_is_known_by_its_bytes_until_it_goes() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let [first, second] = [InodeId(1), InodeId(2)];
    assert_eq!(metadata.page_with(&[7; 16]).unwrap(), None);
    metadata.note_page(&[7; 16], first);
    assert_eq!(metadata.page_with(&[7; 16]).unwrap(), Some(first));
    metadata.note_page(&[7; 16], second);
    metadata.forget_page(&[7; 16], first).unwrap();
    assert_eq!(metadata.page_with(&[7; 16]).unwrap(), Some(second), "another one has them by now");
    metadata.forget_page(&[7; 16], second).unwrap();
    assert_eq!(metadata.page_with(&[7; 16]).unwrap(), None);
}

#[test]
fn the_worst_that_happened_to_tokens_is_remembered() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let [grown, cut, other] = SEQUENCES;
    metadata.note_tokens(grown, b"tokens");
    metadata.note_tokens(other, b"tokens.old");
    metadata.tokens_changed(cut, TokensChange::Truncated);
    metadata.tokens_changed(cut, TokensChange::Grown);
    let found: Vec<_> = metadata.unindexed.iter().map(|(id, change)| (*id, *change)).collect();
    assert_eq!(found, [(grown, TokensChange::Grown), (cut, TokensChange::Truncated)]);
}

#[test]
fn positions_are_those_of_a_sequence() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let [sequence, plain, absent] = SEQUENCES;
    for (id, class) in [(sequence, DirectoryClass::Sequence), (plain, DirectoryClass::Plain)] {
        let kind = Kind::Directory { class, parent: MODEL, name: b"s".to_vec() };
        metadata.put_inode(Life::Durable, id, &Inode { kind, ..inode(false) });
    }
    metadata.put_inode(Life::Durable, FILE, &inode(false));
    for (parent, name, expected) in [
        (sequence, &b"positions.json"[..], true),
        (sequence, b"positions", false),
        (plain, b"positions.json", false),
        (FILE, b"positions.json", false),
        (absent, b"positions.json", false),
    ] {
        metadata.positions.clear();
        assert_eq!(metadata.note_positions(parent, name, InodeId(5)), expected);
        assert_eq!(metadata.positions.contains(&InodeId(5)), expected);
    }
}

#[test]
fn how_far_a_sequence_is_indexed_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let indexed = IndexedTokens { model: MODEL, tokens: FILE, length: 12 };
    assert_eq!(metadata.indexed(SEQUENCES[0]).unwrap(), None);
    metadata.put_indexed(SEQUENCES[0], &indexed);
    assert_eq!(metadata.indexed(SEQUENCES[0]).unwrap(), Some(indexed));
    assert_eq!(metadata.indexed(SEQUENCES[1]).unwrap(), None);
    assert!(metadata.has_index().unwrap());
    metadata.remove_indexed(SEQUENCES[0]);
    assert!(!metadata.has_index().unwrap());
    assert_eq!(metadata.indexed(SEQUENCES[0]).unwrap(), None);
}

#[test]
fn pages_are_found_by_what_is_before_and_in_them() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    for sequence in SEQUENCES {
        metadata.add_indexed_page((MODEL, sequence), 4, &page(1, true));
        metadata.add_indexed_page((MODEL, sequence), 5, &page(2, false));
    }
    let all = |page| SEQUENCES.map(|sequence| (sequence, page));
    assert_eq!(metadata.prefix_holders(MODEL, &[2; 32], 9).unwrap(), all(4));
    assert_eq!(metadata.prefix_holders(MODEL, &[2; 32], 2).unwrap(), all(4)[..2]);
    assert_eq!(metadata.prefix_holders(MODEL, &[3; 32], 9).unwrap(), [], "it is not full");
    assert_eq!(metadata.prefix_continuations(MODEL, &[1; 32], &[1; 8], 9).unwrap(), all(4));
    assert_eq!(metadata.prefix_continuations(MODEL, &[2; 32], &[2; 8], 9).unwrap(), all(5));
    assert_eq!(metadata.prefix_continuations(MODEL, &[2; 32], &[9; 8], 9).unwrap(), []);
    assert_eq!(metadata.prefix_holders(InodeId(11), &[2; 32], 9).unwrap(), []);
    assert_eq!(metadata.indexed_page(SEQUENCES[1], 4).unwrap(), Some(page(1, true)));
    assert_eq!(metadata.indexed_page(SEQUENCES[1], 6).unwrap(), None);
    let [gone, kept, _] = SEQUENCES;
    metadata.remove_indexed_page((MODEL, gone), 4, &page(1, true));
    assert_eq!(metadata.indexed_page(gone, 4).unwrap(), None);
    assert_eq!(metadata.prefix_holders(MODEL, &[2; 32], 9).unwrap(), all(4)[1..]);
    assert_eq!(metadata.prefix_continuations(MODEL, &[1; 32], &[1; 8], 9).unwrap(), all(4)[1..]);
    assert_eq!(metadata.prefix_continuations(MODEL, &[2; 32], &[2; 8], 9).unwrap(), all(5));
    let some = |first, count| metadata.some_indexed_pages(kept, first, count).unwrap();
    let both = [(4, page(1, true)), (5, page(2, false))];
    assert_eq!(some(0, 9), both);
    assert_eq!(
        (some(0, 1), some(5, 9), some(6, 9)),
        (both[..1].to_vec(), both[1..].to_vec(), vec![])
    );
}
