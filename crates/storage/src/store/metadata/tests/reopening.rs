//! A commit for which the disk has no room, and the database that refuses everything after it.

use std::io;
use std::sync::Arc;

use super::super::reopening::{go_on_with, reopen};
use super::*;
use crate::store::commit::{is_full, may_pass};
use crate::store::disk::DiskPath;
use crate::store::faulty_disk::{Call, Events, FaultyDisk};

fn open_faulty(directory: &Path) -> (Store, Arc<Events>, Metadata) {
    let mut store = Store::open_or_create(directory).unwrap();
    let disk = FaultyDisk::open(directory);
    let events = Arc::clone(&disk.events);
    store.set_disk(Arc::new(disk)).unwrap();
    let metadata = Metadata::open(store.metadata().unwrap()).unwrap();
    (store, events, metadata)
}

/// Fails to commit.
fn fail(metadata: &mut Metadata, events: &Events, call: Call) -> io::Error {
    *events.failing_call.lock().unwrap() = Some((call, DiskPath::Metadata, libc::ENOSPC));
    let layer = metadata.freeze().unwrap();
    let Err(StoreError::Io(error)) = metadata.writer().write(&layer) else {
        panic!("it was written, or met another error")
    };
    *events.failing_call.lock().unwrap() = None;
    error
}

#[test]
fn a_commit_that_found_no_room_is_written_once_there_is_some() {
    let directory = tempfile::tempdir().unwrap();
    let (store, events, mut metadata) = open_faulty(directory.path());
    let put = |metadata: &mut Metadata, id| {
        metadata.put_inode(Life::Durable, id, &inode(false));
    };
    put(&mut metadata, InodeId(1));
    metadata.put_object(OBJECT, &record(ObjectKind::Page, 10));
    commit(&mut metadata);

    put(&mut metadata, InodeId(2));
    metadata.remove_object(OBJECT);
    let error = fail(&mut metadata, &events, Call::Write);
    assert!(is_full(&error), "{error}");
    put(&mut metadata, InodeId(3));
    // With room, too.
    let again = metadata.writer().write(&metadata.frozen().unwrap()).unwrap_err();
    assert!(again.is_after_a_failure(), "{again}");

    let before = go_on_with(&mut metadata, reopen(&store).unwrap());
    drop(before);
    // What the last commit wrote is known to be what the disk has: of this object it knows.
    metadata.thaw_failed(false);
    assert!(metadata.discarded.is_empty());
    assert_eq!(metadata.committed_inode(InodeId(1)).unwrap(), Some(inode(false)));
    assert_eq!(metadata.committed_inode(InodeId(2)).unwrap(), None);
    commit(&mut metadata);
    drop(metadata);
    let metadata = Metadata::open(store.metadata().unwrap()).unwrap();
    for number in 1..=3 {
        assert_eq!(metadata.inode(InodeId(number)).unwrap(), Some(inode(false)), "{number}");
    }
    assert_eq!(metadata.object(OBJECT).unwrap(), None);
}

#[test]
fn what_the_disk_has_is_known_again_once_the_database_was_opened_anew() {
    let directory = tempfile::tempdir().unwrap();
    let (store, events, mut metadata) = open_faulty(directory.path());
    metadata.put_object(OBJECT, &record(ObjectKind::Page, 10));
    fail(&mut metadata, &events, Call::Write);
    metadata.remove_object(OBJECT);
    metadata.thaw_failed(true);
    assert!(metadata.discarded.is_empty(), "it may be on the disk");
    go_on_with(&mut metadata, reopen(&store).unwrap());
    metadata.thaw_failed(false);
    assert_eq!(metadata.discarded.take(9), [OBJECT], "it is not");
}

#[test]
fn a_sync_that_found_no_room_is_no_want_of_room() {
    let directory = tempfile::tempdir().unwrap();
    let (_, events, mut metadata) = open_faulty(directory.path());
    metadata.put_inode(Life::Durable, InodeId(1), &inode(false));
    let error = fail(&mut metadata, &events, Call::Sync);
    assert!(!may_pass(&error) && error.to_string().contains("may be lost"), "{error}");
}
