//! What a mount sees of its changes, and what is left of them after a crash.

mod held_back;
mod index;
mod opening;
mod reopening;
mod tables;

use std::path::Path;

use super::*;
use crate::page::{TokenStart, names};
use crate::store::Store;
use crate::store::record::{FileRecord, Kind, Role, Time};

const FILE: InodeId = InodeId(70);
const OBJECT: ObjectId = ObjectId(71);

fn open(directory: &Path) -> Metadata {
    Metadata::open(Store::open_or_create(directory).unwrap().metadata().unwrap()).unwrap()
}

fn commit(metadata: &mut Metadata) {
    let layer = metadata.freeze().unwrap();
    metadata.writer().write(&layer).unwrap();
    metadata.thaw_committed().unwrap();
}

fn inode(unsettled: bool) -> Inode {
    let object = Some(OBJECT);
    let file = FileRecord { role: Role::Plain, object, size: 10, blocks: 8, unsettled };
    let time = Time::default();
    let (atime, mtime, ctime) = (time, time, time);
    Inode { kind: Kind::File(file), mode: 0o644, uid: 1, gid: 2, links: 1, atime, mtime, ctime }
}

fn record(kind: ObjectKind, length: u64) -> ObjectRecord {
    ObjectRecord { kind, length, checksum: None, references: 1 }
}

fn is_marked(metadata: &Metadata) -> bool {
    metadata.get::<()>(&keys::unsettled(FILE)).unwrap().is_some()
}

fn entry(inode: InodeId) -> Entry {
    Entry { inode, file_type: libc::S_IFREG }
}

#[test]
fn a_crash_leaves_what_was_committed_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let [durable, volatile, moved] = [InodeId(1), InodeId(2), InodeId(3)];
    let lives = [Life::Durable, Life::Volatile, Life::Volatile];
    let mut metadata = open(directory.path());
    for (id, life) in [durable, volatile, moved].into_iter().zip(lives) {
        metadata.put_inode(life, id, &inode(false));
        metadata.put_entry(life, InodeId::ROOT, &id.0.to_le_bytes(), entry(id));
        assert_eq!(metadata.inode(id).unwrap(), Some(inode(false)));
        assert_eq!(metadata.committed_inode(id).unwrap(), None);
        assert_eq!(metadata.life(id), life);
    }
    let name = |id: InodeId| id.0.to_le_bytes();
    metadata.make_durable(moved, Some((InodeId::ROOT, &name(moved))));
    assert_eq!(metadata.life(moved), Life::Durable);
    commit(&mut metadata);
    assert_eq!(metadata.committed_inode(durable).unwrap(), Some(inode(false)));
    metadata.remove_entry(Life::Durable, InodeId::ROOT, &name(durable));
    assert_eq!(metadata.entry(InodeId::ROOT, &name(durable)).unwrap(), None);
    metadata.remove_entry(Life::Volatile, InodeId::ROOT, &name(volatile));
    assert_eq!(metadata.entry(InodeId::ROOT, &name(volatile)).unwrap(), None);
    drop(metadata);
    let metadata = open(directory.path());
    let found = [durable, volatile, moved].map(|id| {
        let is_named = metadata.entry(InodeId::ROOT, &name(id)).unwrap() == Some(entry(id));
        (metadata.inode(id).unwrap().is_some(), is_named)
    });
    assert_eq!(found, [(true, true), (false, false), (true, true)]);
    assert!(!metadata.was_clean);
}

#[test]
fn a_file_that_is_written_to_is_marked_for_recovery_until_it_is_at_rest() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    metadata.put_inode(Life::Volatile, FILE, &inode(true));
    assert!(!is_marked(&metadata), "a crash forgets all of it");
    metadata.put_inode(Life::Durable, FILE, &inode(true));
    assert!(is_marked(&metadata));
    metadata.put_inode(Life::Durable, FILE, &inode(false));
    assert!(!is_marked(&metadata));
    metadata.put_inode(Life::Durable, FILE, &inode(true));
    metadata.remove_inode(Life::Volatile, FILE).unwrap();
    assert!(is_marked(&metadata), "the durable one is still there");
    metadata.remove_inode(Life::Durable, FILE).unwrap();
    assert!(!is_marked(&metadata));
    assert_eq!(metadata.inode(FILE).unwrap(), None);
}

#[test]
fn a_file_waits_for_the_remote_once_it_is_durable_and_at_rest() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let waits = |metadata: &mut Metadata| {
        let taken = metadata.arrivals.take();
        metadata.arrivals.remove(FILE);
        taken == Some(FILE)
    };
    metadata.put_inode(Life::Durable, FILE, &inode(false));
    assert!(!waits(&mut metadata), "there are no tiers");
    metadata.has_tiers = true;
    for (life, unsettled, expected) in
        [(Life::Volatile, false, false), (Life::Durable, true, false), (Life::Durable, false, true)]
    {
        metadata.put_inode(life, FILE, &inode(unsettled));
        assert_eq!(waits(&mut metadata), expected, "{life:?} {unsettled}");
    }
}

#[test]
fn objects_are_counted_as_they_come_change_and_go() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    metadata.put_object(OBJECT, &record(ObjectKind::Page, 100));
    metadata.put_object(ObjectId(72), &record(ObjectKind::File, 7));
    assert_eq!(metadata.totals, Totals { objects: 2, pages: 1, bytes: 107 });
    metadata.put_object(OBJECT, &record(ObjectKind::Page, 50));
    assert_eq!(metadata.totals, Totals { objects: 2, pages: 1, bytes: 57 });
    commit(&mut metadata);
    metadata.disown_object(ObjectId(72));
    assert_eq!(metadata.totals, Totals { objects: 1, pages: 1, bytes: 50 });
    metadata.remove_object(OBJECT);
    assert_eq!(metadata.totals, Totals::default());
    assert_eq!(metadata.object(OBJECT).unwrap(), None);
    drop(metadata);
    assert_eq!(open(directory.path()).totals, Totals { objects: 2, pages: 1, bytes: 57 });
}

#[test]
fn a_commit_takes_all_changes_and_those_made_meanwhile_wait_for_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    assert!(metadata.freeze().is_none(), "there is nothing to write");
    let generation = metadata.generation;
    metadata.put_object(OBJECT, &record(ObjectKind::File, 7));
    metadata.publish(OBJECT);
    assert!(metadata.publishes(OBJECT) && !metadata.is_committing(OBJECT));
    assert_eq!((metadata.uncommitted(), metadata.not_durable()), (2, 2));
    let value = encode(&record(ObjectKind::File, 7));
    assert_eq!(metadata.uncommitted_bytes(), keys::object(OBJECT).len() + value.len());
    assert!(metadata.frozen().is_none());
    let layer = metadata.freeze().unwrap();
    assert_eq!(metadata.generation, generation + 1);
    assert!(!metadata.publishes(OBJECT) && metadata.is_committing(OBJECT));
    assert!(!metadata.is_committing(ObjectId(72)));
    assert_eq!(metadata.frozen().unwrap().records.len(), layer.records.len());
    // With what the store holds, and what only the remote has.
    assert_eq!((metadata.uncommitted(), metadata.not_durable()), (0, 4));
    metadata.publish(ObjectId(72));
    assert_eq!((metadata.uncommitted(), metadata.not_durable()), (1, 5));
    assert!(metadata.freeze().is_none(), "one is being written");
    drop(layer);
    let amended = record(ObjectKind::File, 8);
    metadata.amend_frozen(OBJECT, &amended);
    metadata.writer().write(&metadata.frozen().unwrap()).unwrap();
    metadata.thaw_committed().unwrap();
    assert_eq!(metadata.object(OBJECT).unwrap(), Some(amended));
    assert_eq!(metadata.not_durable(), 1);
}

#[test]
fn of_a_failed_commit_only_what_the_database_cannot_know_is_freed_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let [known, unknown, kept] = [ObjectId(1), ObjectId(2), ObjectId(3)];
    metadata.put_object(known, &record(ObjectKind::File, 1));
    commit(&mut metadata);
    for object in [unknown, kept] {
        metadata.put_object(object, &record(ObjectKind::File, 1));
        metadata.publish(object);
    }
    metadata.freeze().unwrap();
    metadata.remove_object(known);
    metadata.remove_object(unknown);
    metadata.thaw_failed(false);
    assert_eq!(metadata.discarded.take(9), [unknown]);
    assert_eq!([unknown, kept].map(|object| metadata.publishes(object)), [false, true]);
    assert!(metadata.active.removals.contains(&known), "it goes with the next commit");
    metadata.remove_object(kept);
    metadata.freeze().unwrap();
    metadata.thaw_failed(true);
    assert!(metadata.discarded.is_empty(), "nobody can tell what the disk has");
    metadata.freeze().unwrap();
    metadata.thaw_failed(false);
    assert!(metadata.discarded.is_empty());
}

#[test]
fn files_that_no_commit_has_seen_wait_for_none() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let add = |metadata: &mut Metadata| {
        let object = metadata.new_object();
        metadata.put_object(object, &record(ObjectKind::File, 5));
        metadata.publish(object);
        object
    };
    let [known, failed] = [(); 2].map(|()| add(&mut metadata));
    metadata.freeze().unwrap();
    let [made, kept] = [(); 2].map(|()| add(&mut metadata));
    let (before, totals) = (metadata.uncommitted(), metadata.totals);
    // The commit that runs may have told the database of the first one.
    metadata.remove_object(known);
    metadata.remove_object(made);
    assert_eq!(metadata.discarded.take(9), [made]);
    assert_eq!(metadata.active.removals, [known].into());
    assert_eq!(metadata.totals.bytes, totals.bytes - 10);
    // A removal and its record, and neither of those of what was made.
    assert_eq!(metadata.uncommitted(), before);
    assert_eq!(metadata.object(made).unwrap(), None);
    assert!(!metadata.publishes(made) && !metadata.staged.contains(&made));
    metadata.thaw_committed().unwrap();
    metadata.freeze().unwrap();
    metadata.thaw_failed(true);
    // Nobody can tell what the disk has of a commit that failed.
    metadata.remove_object(kept);
    metadata.remove_object(failed);
    let again = add(&mut metadata);
    metadata.remove_object(again);
    assert_eq!(metadata.discarded.take(9), [again]);
    assert_eq!(metadata.active.removals, [known, failed, kept].into());
}

#[test]
fn numbers_are_never_given_out_twice() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let counted = |metadata: &Metadata| u64::from(metadata.only_remote.epoch);
    assert_eq!(counted(&metadata), metadata.next_number >> 32, "what the remote has is counted so");
    let first = metadata.new_object();
    assert!(metadata.staged.contains(&first));
    let inode = metadata.new_inode();
    assert!(inode.0 > first.0);
    assert_eq!(metadata.uncommitted(), 0, "the epoch is noted already");
    // The last number of this epoch, and the first of the next one, which is noted.
    metadata.next_number |= u64::from(u32::MAX) - 1;
    let last = metadata.new_object();
    assert_eq!(metadata.uncommitted(), 0);
    let next = metadata.new_object();
    assert_eq!(next.0, last.0 + 1);
    commit(&mut metadata);
    assert_eq!(counted(&metadata), metadata.next_number >> 32);
    drop(metadata);
    assert!(open(directory.path()).new_object() > ObjectId(next.0 | u64::from(u32::MAX)));
}

#[test]
fn what_a_manifest_of_names_tells_has_changed_when_durable_names_and_files_have() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let changes = |metadata: &mut Metadata, change: &dyn Fn(&mut Metadata)| {
        let before = metadata.names_changed;
        change(metadata);
        metadata.names_changed - before
    };
    let durable = Life::Durable;
    let put = |life| {
        move |metadata: &mut Metadata| metadata.put_entry(life, InodeId(5), b"a", entry(FILE))
    };
    assert_eq!(changes(&mut metadata, &put(durable)), 1);
    assert_eq!(changes(&mut metadata, &put(Life::Volatile)), 0);
    let moved = |metadata: &mut Metadata| metadata.make_durable(FILE, Some((InodeId(5), b"a")));
    assert_eq!(changes(&mut metadata, &moved), 1);
    let remove = |metadata: &mut Metadata| metadata.remove_entry(durable, InodeId(5), b"a");
    assert_eq!(changes(&mut metadata, &remove), 1);
    let object =
        |metadata: &mut Metadata| metadata.put_object(OBJECT, &record(ObjectKind::File, 1));
    assert_eq!(changes(&mut metadata, &object), 0);
    let file = inode(false);
    assert_eq!(changes(&mut metadata, &|metadata| metadata.put_inode(durable, FILE, &file)), 1);
    let used = Inode { atime: Time { seconds: 7, nanoseconds: 0 }, ..file.clone() };
    assert_eq!(changes(&mut metadata, &|metadata| metadata.put_use(durable, FILE, &used)), 0);
    assert_eq!(metadata.inode(FILE).unwrap().unwrap().atime, used.atime);
}

#[test]
fn who_relies_on_names_hears_of_other_files_under_them() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let layer = InodeId(5);
    let page = names::format_page(TokenStart(0)).into_bytes();
    let mut told = |change: &dyn Fn(&mut Metadata)| {
        let watch = metadata.watches.watch([layer], 64);
        change(&mut metadata);
        watch.has_changed()
    };
    let put = |name: Vec<u8>, inode: u64| {
        move |metadata: &mut Metadata| {
            metadata.put_entry(Life::Durable, layer, &name, entry(InodeId(inode)));
        }
    };
    assert!(!told(&put(page.clone(), 1)), "nothing was there");
    assert!(!told(&put(page.clone(), 1)), "the same");
    assert!(told(&put(page.clone(), 2)));
    let remove =
        |metadata: &mut Metadata| metadata.remove_entry(Life::Durable, layer, page.as_slice());
    assert!(told(&remove));
    let tail = names::format_tail(TokenStart(0)).into_bytes();
    told(&put(tail, 3));
    assert!(told(&put(page.clone(), 1)), "there were rows in its place");
}
