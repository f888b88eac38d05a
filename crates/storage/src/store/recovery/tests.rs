use std::path::Path;

use super::*;

use crate::store::record::ObjectKind;
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
    // A directory in the place of a file is no file that can be removed.
    let place =
        |object: ObjectId| directory.path().join("store").join(DiskPath::Object(object).relative());
    std::fs::remove_file(place(stuck)).unwrap();
    std::fs::create_dir(place(stuck)).unwrap();
    let unswept = Unswept::find(&store, &mut metadata).unwrap().expect("there was no unmount");
    assert!(unswept.sweep(&store, |look| look(&metadata)).is_err());
    assert!(!place(garbage).exists());
}
