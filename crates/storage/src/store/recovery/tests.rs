use std::path::Path;

use super::*;

use crate::store::record::{Kind, ObjectKind};
use crate::tier::encoding::Encoding;

fn open(directory: &Path) -> (Store, Metadata) {
    let store = Store::open_or_create(&directory.join("store")).unwrap();
    let metadata = Metadata::open(store.metadata().unwrap()).unwrap();
    (store, metadata)
}

/// A file in `objects/`, of an object that gets its record only if it is committed.
fn make(store: &Store, metadata: &mut Metadata) -> ObjectId {
    let object = metadata.new_object();
    store.disk.create(&DiskPath::Object(object)).unwrap();
    metadata.staged.remove(&object);
    object
}

fn put(metadata: &mut Metadata, object: ObjectId) {
    let record = ObjectRecord { kind: ObjectKind::File, length: 0, checksum: None, references: 1 };
    metadata.put_object(object, &record);
}

fn commit(metadata: &mut Metadata) {
    let writer = metadata.writer();
    let layer = metadata.freeze().unwrap();
    writer.write(&layer).unwrap();
    metadata.thaw_committed().unwrap();
}

fn is_there(store: &Store, path: &DiskPath) -> bool {
    store.disk.open(path, Access::Read).is_ok()
}

#[test]
fn what_the_mount_makes_and_removes_meanwhile_is_not_swept() {
    let directory = tempfile::tempdir().unwrap();
    let (kept, removed, garbage, encoded) = {
        let (store, mut metadata) = open(directory.path());
        let [kept, removed, garbage] = [(); 3].map(|()| make(&store, &mut metadata));
        put(&mut metadata, kept);
        put(&mut metadata, removed);
        let copy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 0 };
        metadata.put_encoded_copy(kept, &copy);
        commit(&mut metadata);
        store.disk.create(&DiskPath::Encoded(kept)).unwrap();
        (kept, removed, garbage, DiskPath::Encoded(kept))
    };
    let (store, mut metadata) = open(directory.path());
    metadata.has_tiers = true;
    let unswept = Unswept::find(&store, &mut metadata).unwrap().expect("there was no unmount");
    let made = make(&store, &mut metadata);
    put(&mut metadata, made);
    // A crash from here on would bring both back.
    metadata.remove_object(removed);
    metadata.forget_encoded_copy(kept).unwrap();
    assert_eq!(unswept.sweep(&store, |look| look(&metadata)).unwrap(), 1);
    for object in [kept, removed, made] {
        assert!(is_there(&store, &DiskPath::Object(object)), "{object}");
    }
    assert!(!is_there(&store, &DiskPath::Object(garbage)));
    assert!(is_there(&store, &encoded));
}

#[test]
fn what_goes_during_the_sweep_does_not_end_it() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()));
    let (store, mut metadata) = open(directory.path());
    let unswept = Unswept::find(&store, &mut metadata).unwrap().expect("there was no unmount");
    let garbage = [ObjectId(1), ObjectId(2)].map(DiskPath::Encoded);
    for path in &garbage {
        store.disk.create(path).unwrap();
    }
    // The mount drops the first one, its record and then its file, once it was listed.
    let within = |look: &dyn Fn(&Metadata) -> Result<bool, StoreError>| {
        store.remove_if_there(&garbage[0]).unwrap();
        look(&metadata)
    };
    unswept.sweep(&store, within).unwrap();
    let left = store.disk.list(DiskDirectory::ObjectShard(0)).unwrap();
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn after_an_unmount_there_is_nothing_to_sweep() {
    let directory = tempfile::tempdir().unwrap();
    let (_, mut metadata) = open(directory.path());
    metadata.put_epoch(true);
    commit(&mut metadata);
    drop(metadata);
    let (store, mut metadata) = open(directory.path());
    assert!(Unswept::find(&store, &mut metadata).unwrap().is_none());
}

/// Its record comes back with a crash, whatever the mount has in mind.
#[test]
fn an_encoded_copy_whose_record_is_durable_or_about_to_be_is_not_swept() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()));
    let (store, mut metadata) = open(directory.path());
    metadata.has_tiers = true;
    let unswept = Unswept::find(&store, &mut metadata).unwrap().expect("there was no unmount");
    let [durable, committing] = [ObjectId(1), ObjectId(2)];
    let copy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 0 };
    metadata.put_encoded_copy(durable, &copy);
    commit(&mut metadata);
    metadata.put_encoded_copy(committing, &copy);
    let _layer = metadata.freeze().unwrap();
    for object in [durable, committing] {
        metadata.forget_encoded_copy(object).unwrap();
        store.disk.create(&DiskPath::Encoded(object)).unwrap();
    }
    assert_eq!(unswept.sweep(&store, |look| look(&metadata)).unwrap(), 0);
    for object in [durable, committing] {
        assert!(is_there(&store, &DiskPath::Encoded(object)), "{object}");
    }
}

#[test]
fn what_cannot_be_removed_keeps_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let [stuck, garbage] = {
        let (store, mut metadata) = open(directory.path());
        [(); 2].map(|()| make(&store, &mut metadata))
    };
    let (store, mut metadata) = open(directory.path());
    // A directory in the place of a file, with something in it, is no file that can be removed.
    let place =
        |object: ObjectId| directory.path().join("store").join(DiskPath::Object(object).relative());
    std::fs::remove_file(place(stuck)).unwrap();
    std::fs::create_dir_all(place(stuck).join("something")).unwrap();
    let unswept = Unswept::find(&store, &mut metadata).unwrap().expect("there was no unmount");
    assert!(unswept.sweep(&store, |look| look(&metadata)).is_err());
    assert!(!place(garbage).exists());
}

/// A file that was being written in place, of so many bytes on the disk; its record knows of one.
fn make_unsettled(store: &Store, metadata: &mut Metadata, role: Role, bytes: usize) -> InodeId {
    let (id, object) = (metadata.new_inode(), make(store, metadata));
    let file = store.disk.open(&DiskPath::Object(object), Access::ReadWrite).unwrap();
    file.write_all_at(&vec![7; bytes], 0).unwrap();
    let file = FileRecord { role, object: Some(object), size: 1, blocks: 0, unsettled: true };
    let time = Time { seconds: 1, nanoseconds: 0 };
    // By a clock that was wrong.
    let mtime = Time { seconds: i64::MAX, nanoseconds: 0 };
    let kind = Kind::File(file);
    let inode =
        Inode { kind, mode: 0o644, uid: 1, gid: 2, links: 1, atime: time, mtime, ctime: time };
    metadata.put_inode(Life::Durable, id, &inode);
    put(metadata, object);
    id
}

fn file(metadata: &Metadata, id: InodeId) -> FileRecord {
    metadata.inode(id).unwrap().unwrap().file().unwrap().clone()
}

fn object(metadata: &Metadata, id: InodeId) -> ObjectId {
    file(metadata, id).object.unwrap()
}

fn length_on_record(metadata: &Metadata, id: InodeId) -> u64 {
    metadata.object(object(metadata, id)).unwrap().unwrap().length
}

#[test]
fn what_was_being_written_gets_the_size_and_time_of_its_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let (store, mut metadata) = open(directory.path());
    let [full, empty] =
        [100, 0].map(|bytes| make_unsettled(&store, &mut metadata, Role::Plain, bytes));
    let recovered = recover(&store, &mut metadata).unwrap();
    assert_eq!(recovered, Recovered { files_settled: 2, ..Recovered::default() });
    let stat = store.disk.stat(&DiskPath::Object(object(&metadata, full))).unwrap();
    let settled = file(&metadata, full);
    assert_eq!((settled.size, settled.blocks, settled.unsettled), (100, stat.blocks, false));
    assert_eq!(metadata.inode(full).unwrap().unwrap().mtime, stat.mtime);
    assert_eq!(length_on_record(&metadata, full), 100);
    assert!(metadata.publishes(object(&metadata, full)), "it gets its checksum");
    assert_eq!(file(&metadata, empty).size, 0);
    let kept = metadata.inode(empty).unwrap().unwrap().mtime;
    assert_eq!(kept.seconds, i64::MAX, "its file may have been made ahead of it");
    assert_eq!(recover(&store, &mut metadata).unwrap(), Recovered::default());
}

#[test]
fn rows_and_token_ids_may_go_on_growing() {
    let directory = tempfile::tempdir().unwrap();
    let (store, mut metadata) = open(directory.path());
    let tail = Role::Tail { start: 0, directory: InodeId(9) };
    let [rows, no_rows, tokens] = [(tail, 64), (tail, 0), (Role::Tokens, 4)]
        .map(|(role, bytes)| make_unsettled(&store, &mut metadata, role, bytes));
    // Whoever has it open may write, as always.
    let path = DiskPath::Object(object(&metadata, rows));
    let _writer = store.disk.open(&path, Access::ReadWrite).unwrap();
    let recovered = recover(&store, &mut metadata).unwrap();
    let expected = Recovered { files_settled: 3, tails: vec![rows], ..Recovered::default() };
    assert_eq!(recovered, expected);
    for (id, size) in [(rows, 64), (no_rows, 0), (tokens, 4)] {
        let found = file(&metadata, id);
        assert_eq!((found.size, found.unsettled), (size, true));
        assert_eq!(length_on_record(&metadata, id), 0, "it is that of the file");
        assert!(!metadata.publishes(object(&metadata, id)));
    }
}

#[test]
fn who_still_has_a_file_open_for_writing_goes_on_writing() {
    let directory = tempfile::tempdir().unwrap();
    let (store, mut metadata) = open(directory.path());
    let id = make_unsettled(&store, &mut metadata, Role::Plain, 100);
    let object = object(&metadata, id);
    let writer = store.disk.open(&DiskPath::Object(object), Access::ReadWrite).unwrap();
    let recovered = recover(&store, &mut metadata).unwrap();
    let still_changing = vec![(id, object)];
    assert_eq!(recovered, Recovered { still_changing, ..Recovered::default() });
    let found = file(&metadata, id);
    assert_eq!((found.size, found.unsettled), (100, true));
    assert!(!metadata.publishes(object));
    drop(writer);
    assert_eq!(recover(&store, &mut metadata).unwrap().files_settled, 1);
    assert!(metadata.publishes(object));
}

#[test]
fn a_missing_file_keeps_nothing_else_and_one_that_cannot_be_opened_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (store, mut metadata) = open(directory.path());
    let id = make_unsettled(&store, &mut metadata, Role::Plain, 100);
    let object = object(&metadata, id);
    store.remove_if_there(&DiskPath::Object(object)).unwrap();
    assert!(recover(&store, &mut metadata).unwrap().still_changing.is_empty());
    assert!(file(&metadata, id).unsettled);
    let place = directory.path().join("store").join(DiskPath::Object(object).relative());
    std::os::unix::fs::symlink(&place, &place).unwrap();
    assert!(recover(&store, &mut metadata).is_err());
}

#[test]
fn what_no_name_refers_to_yet_goes_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let (store, mut metadata) = open(directory.path());
    let path = DiskPath::Staging(metadata.new_object());
    store.disk.create(&path).unwrap();
    empty_staging(&store).unwrap();
    assert!(!is_there(&store, &path));
}
