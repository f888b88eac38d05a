//! A database that is damaged, or is not that of the last mount, is left as it is.

use super::*;
use crate::store::StoreError;
use crate::store::database::{RECORDS, open_database};
use crate::store::metadata::Integrity;

fn reopen(directory: &Path) -> Result<Metadata, StoreError> {
    Metadata::open(Store::open_or_create(directory)?.metadata()?)
}

#[test]
fn a_database_of_an_earlier_mount_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("meta.redb");
    drop(open(directory.path()));
    let earlier = std::fs::read(&file).unwrap();
    drop(open(directory.path()));
    let latest = std::fs::read(&file).unwrap();
    std::fs::write(&file, &earlier).unwrap();
    let refused = reopen(directory.path()).unwrap_err();
    assert!(matches!(refused, StoreError::Corrupt(_)), "{refused}");
    assert!(refused.to_string().contains("of mount 1, and the last one was mount 2"), "{refused}");
    assert!(std::fs::read(&file).unwrap() == earlier);
    std::fs::write(&file, &latest).unwrap();
    let metadata = open(directory.path());
    assert_eq!(metadata.only_remote.epoch, 3);
}

#[test]
fn records_that_do_not_add_up_are_missed_before_anything_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("meta.redb");
    let mut metadata = open(directory.path());
    assert_eq!(metadata.integrity, Integrity::Checked);
    for id in [OBJECT, ObjectId(72)] {
        metadata.put_object(id, &record(ObjectKind::File, 7));
    }
    commit(&mut metadata);
    drop(metadata);
    let sound = std::fs::read(&file).unwrap();
    let key = keys::object(OBJECT);
    for (value, expected) in [
        (None, "it had 5 records, and 4 are there"),
        (Some(encode(&record(ObjectKind::File, 8))), "of its 5 records some are not as they were"),
    ] {
        std::fs::write(&file, &sound).unwrap();
        let store = Store::open_or_create(directory.path()).unwrap();
        let database = open_database(store.metadata().unwrap()).unwrap();
        let transaction = database.begin_write().unwrap();
        {
            let mut table = transaction.open_table(RECORDS).unwrap();
            match value {
                Some(value) => drop(table.insert(key.as_slice(), value.as_slice()).unwrap()),
                None => drop(table.remove(key.as_slice()).unwrap()),
            }
        }
        transaction.commit().unwrap();
        drop((database, store));
        let damaged = std::fs::read(&file).unwrap();
        let refused = reopen(directory.path()).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
        assert!(std::fs::read(&file).unwrap() == damaged);
    }
}
