use crate::store::metadata::{Life, Metadata};
use crate::store::record::{EncodedCopy, InodeId, ObjectId, ObjectKind, ObjectRecord};
use crate::store::{Store, StoreError, keys};
use crate::tier::encoding::Encoding;

fn open(path: &std::path::Path) -> Result<Metadata, StoreError> {
    Metadata::open(Store::open_or_create(path)?.metadata()?)
}

/// Whatever it is cut to, it opens, or says that it is damaged and what to do.
#[test]
fn a_database_that_was_cut_short_is_told_as_damaged() {
    const STEP_BYTES: usize = 2048 + 512;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let mut metadata = open(&path).unwrap();
    for number in 0..2_000 {
        let value = [number.to_string().as_bytes(), b" of some size"].concat();
        metadata.put_attribute(Life::Durable, InodeId(number), b"user.name", &value);
    }
    let layer = metadata.freeze().unwrap();
    metadata.writer().write(&layer).unwrap();
    drop((layer, metadata));
    let file = path.join("meta.redb");
    let whole = std::fs::read(&file).unwrap();
    // Without any bytes it is one that was never made.
    for length in (1..whole.len()).step_by(STEP_BYTES) {
        std::fs::write(&file, &whole[..length]).unwrap();
        if let Err(error) = open(&path) {
            assert!(error.to_string().ends_with("run kvfs fsck"), "{length}: {error}");
        }
    }
}

#[test]
fn a_snapshot_is_of_the_last_commit_and_a_table_ends_where_the_next_begins() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(&directory.path().join("store")).unwrap();
    let [first, second] = [InodeId(7), InodeId(8)];
    for (id, name) in [(first, &b"user.a"[..]), (first, b"user.b"), (second, b"user.c")] {
        metadata.put_attribute(Life::Durable, id, name, b"value");
    }
    let record = ObjectRecord { kind: ObjectKind::File, length: 9, checksum: None, references: 1 };
    metadata.put_object(ObjectId(7), &record);
    let copy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 1 };
    metadata.put_encoded_copy(ObjectId(5), &copy);
    let layer = metadata.freeze().unwrap();
    metadata.writer().write(&layer).unwrap();
    metadata.thaw_committed().unwrap();
    metadata.put_object(ObjectId(8), &record);
    let snapshot = metadata.snapshot().unwrap();
    snapshot.check().unwrap();
    assert_eq!(snapshot.get(&keys::object(ObjectId(7))).unwrap(), Some(record));
    assert_eq!(snapshot.get::<ObjectRecord>(&keys::object(ObjectId(8))).unwrap(), None);
    let mut named = Vec::new();
    snapshot.for_each_named(b'X', |id, name| named.push((id, name.to_vec()))).unwrap();
    let expected = [(7, &b"user.a"[..]), (7, b"user.b"), (8, b"user.c")];
    assert_eq!(named, expected.map(|(id, name)| (id, name.to_vec())));
    let mut numbered = Vec::new();
    snapshot.for_each(b'O', |id, value: ObjectRecord| numbered.push((id, value))).unwrap();
    assert_eq!(numbered, [(7, record)]);
    let from: Vec<_> = snapshot.records(b"X").unwrap().map(|record| record.unwrap().0).collect();
    assert_eq!(from.len(), 4);
    assert_eq!(from[3], keys::encoded_copy(ObjectId(5)));
}
