//! Pages that are held back: what a crash leaves of them, and what is counted.

use super::*;
use crate::store::metadata::held_back::{hold_back, keep_in_remote};
use crate::store::record::{RemoteCopy, RemoteState, Totals};
use crate::tier::encoding::Encoding;

const NAME: &[u8] = b"0000000.safetensors";
const CHECKSUM: [u8; 16] = [9; 16];

fn page() -> ObjectRecord {
    ObjectRecord { checksum: Some(CHECKSUM), ..record(ObjectKind::Page, 4096) }
}

fn hold(metadata: &mut Metadata) {
    metadata.has_tiers = true;
    hold_back(metadata, (InodeId::ROOT, NAME), (FILE, &inode(false)), (OBJECT, &page()));
}

fn is_there(metadata: &Metadata) -> bool {
    let found = metadata.entry(InodeId::ROOT, NAME).unwrap();
    let parts = [
        found.is_some(),
        metadata.inode(FILE).unwrap().is_some(),
        metadata.object(OBJECT).unwrap() == Some(page()),
    ];
    assert!(parts.iter().all(|part| *part == parts[0]), "{parts:?}");
    parts[0]
}

#[test]
fn a_crash_forgets_it_and_nothing_counts_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    hold(&mut metadata);
    assert!(is_there(&metadata) && metadata.held_back.contains(FILE));
    assert_eq!((metadata.uncommitted(), metadata.totals), (0, Totals::default()));
    assert_eq!((metadata.arrivals.len(), metadata.arrivals.bytes()), (1, 10));
    // No other page is taken for one with the same bytes.
    assert_eq!(metadata.page_with(&CHECKSUM).unwrap(), None);
    metadata.put_inode(Life::Durable, InodeId(5), &inode(false));
    commit(&mut metadata);
    drop(metadata);
    let metadata = open(directory.path());
    assert!(!is_there(&metadata) && metadata.inode(InodeId(5)).unwrap().is_some());
    assert_eq!(metadata.totals, Totals::default());
}

#[test]
fn the_disk_gets_it_when_it_is_made_durable() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    hold(&mut metadata);
    metadata.make_durable(FILE, Some((InodeId::ROOT, NAME)));
    assert!(metadata.publishes(OBJECT) && metadata.held_back.is_empty());
    assert_eq!((metadata.totals.objects, metadata.totals.bytes), (1, 4096));
    assert_eq!(metadata.page_with(&CHECKSUM).unwrap(), Some(FILE));
    commit(&mut metadata);
    drop(metadata);
    let metadata = open(directory.path());
    assert!(is_there(&metadata));
    assert_eq!((metadata.totals.objects, metadata.totals.pages), (1, 1));
}

#[test]
fn the_remote_takes_the_place_of_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    metadata.staged.insert(OBJECT);
    hold(&mut metadata);
    metadata.make_durable(FILE, Some((InodeId::ROOT, NAME)));
    let state = RemoteState::Held;
    let copy = RemoteCopy { content: [3; 32], encoding: Encoding::Raw, stored_bytes: 4096, state };
    keep_in_remote(&mut metadata, OBJECT, &copy);
    assert!(!metadata.publishes(OBJECT) && metadata.staged.is_empty());
    commit(&mut metadata);
    drop(metadata);
    let metadata = open(directory.path());
    assert!(is_there(&metadata) && metadata.is_only_remote(OBJECT).unwrap());
    assert_eq!((metadata.only_remote.objects, metadata.totals.objects), (1, 1));
}

#[test]
fn what_is_removed_before_is_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    hold(&mut metadata);
    metadata.remove_entry(Life::Volatile, InodeId::ROOT, NAME);
    metadata.remove_inode(Life::Durable, FILE).unwrap();
    metadata.remove_inode(Life::Volatile, FILE).unwrap();
    metadata.remove_object(OBJECT);
    assert!(!is_there(&metadata) && metadata.held_back.is_empty());
    assert_eq!((metadata.totals, metadata.arrivals.len()), (Totals::default(), 0));
    metadata.freeze().unwrap();
    metadata.thaw_committed().unwrap();
    metadata.remove_object(OBJECT);
    assert!(metadata.uncommitted() > 0, "its bytes go with a commit");
    commit(&mut metadata);
    drop(metadata);
    assert_eq!(open(directory.path()).totals, Totals::default());
}
