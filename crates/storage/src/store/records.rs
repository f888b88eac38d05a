//! The records of `meta.redb` as they lie there, for a check that trusts none of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use redb::{AccessGuard, Database, ReadableDatabase, StorageError, TableError};

use super::database::{
    Backend, RECORDS, begin_durable, change_all, check, decode, guarded, have_records,
    open_database,
};
use super::{StoreError, keys, last_mount};

/// Changed records by key; `None` means "removed".
pub(crate) type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

type Table = redb::ReadOnlyTable<&'static [u8], &'static [u8]>;

/// The database of a store that nobody has mounted.
#[derive(Debug)]
pub(crate) struct Records {
    database: Database,
}

impl Records {
    /// Opens it without starting a new epoch, and finds the table of records.
    pub(crate) fn open_unread(backend: Backend) -> Result<Records, StoreError> {
        guarded(|| {
            let is_new = backend.storage.len()? == 0;
            let records = Records { database: open_database(backend)? };
            if !is_new {
                have_records(&records.database)?;
            }
            Ok(records)
        })
    }

    /// The same, reads all of it and compares its own checksums, and what all records add up to. The flag is false if it
    /// had to go back to its last sound commit.
    pub(crate) fn open(backend: Backend) -> Result<(Records, bool), StoreError> {
        let disk = Arc::clone(&backend.disk);
        let mut records = Records::open_unread(backend)?;
        let sound = guarded(|| Ok(records.database.check_integrity()?))?;
        records.check()?;
        last_mount::check(disk.as_ref(), records.epoch()?)?;
        Ok((records, sound))
    }

    /// Compares what all records add up to with what was recorded with them.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        guarded(|| match self.table()? {
            Some(_) => check(&self.database.begin_read()?),
            None => Ok(()),
        })
    }

    /// The epoch of the mount that wrote them.
    pub(crate) fn epoch(&self) -> Result<u32, StoreError> {
        guarded(|| {
            let Some(table) = self.table()? else { return Ok(u32::MAX) };
            let last = table.get(keys::epoch().as_slice())?.map(|value| decode(value.value()));
            // What cannot be decoded, or is missing, is a finding of its own.
            let (epoch, _): (u32, bool) = last.and_then(Result::ok).unwrap_or((u32::MAX, true));
            Ok(epoch)
        })
    }

    /// Whatever records can still be read of a database that cannot be trusted.
    pub(crate) fn read_damaged(backend: Backend) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut found = BTreeMap::new();
        let outcome = guarded(|| {
            let database = open_database(backend)?;
            let table = database.begin_read()?.open_table(RECORDS)?;
            // Reading ends at the first broken page, from either side.
            let forward = guarded(|| read_all(table.range::<&[u8]>(..)?, &mut found));
            if forward.is_err() {
                read_all(table.range::<&[u8]>(..)?.rev(), &mut found)?;
            }
            Ok(())
        });
        if let Err(error) = outcome {
            log::debug!("not all old records can be read: {error}");
        }
        found
    }

    /// The records, if the store was ever mounted.
    fn table(&self) -> Result<Option<Table>, StoreError> {
        match self.database.begin_read()?.open_table(RECORDS) {
            Err(TableError::TableDoesNotExist(_)) => Ok(None),
            outcome => Ok(Some(outcome?)),
        }
    }

    /// Visits the records whose keys start with `tag`, in the order of their keys.
    pub(crate) fn scan(
        &self, tag: u8, mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), StoreError> {
        let Some(table) = self.table()? else { return Ok(()) };
        let prefix = keys::table(tag);
        guarded(|| {
            for record in table.range(prefix.as_slice()..)? {
                let (key, value) = record?;
                if !key.value().starts_with(&prefix) {
                    break;
                }
                visit(key.value(), value.value());
            }
            Ok(())
        })
    }

    /// Makes all changes durable at once.
    pub(crate) fn write(&self, changes: &Changes) -> Result<(), StoreError> {
        let transaction = begin_durable(&self.database)?;
        change_all(&transaction, changes)?;
        transaction.commit()?;
        Ok(())
    }
}

type Pair = (AccessGuard<'static, &'static [u8]>, AccessGuard<'static, &'static [u8]>);

fn read_all(
    records: impl Iterator<Item = Result<Pair, StorageError>>,
    found: &mut BTreeMap<Vec<u8>, Vec<u8>>,
) -> Result<(), StoreError> {
    for record in records {
        let (key, value) = record?;
        found.insert(key.value().to_vec(), value.value().to_vec());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use crate::store::disk::DiskPath;
    use crate::store::metadata::Metadata;

    #[test]
    fn changes_are_there_at_once_and_a_table_ends_where_the_next_begins() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(directory.path()).unwrap();
        let scan = |records: &Records| {
            let mut found = Vec::new();
            records.scan(b'E', |key, value| found.push((key.to_vec(), value.to_vec()))).unwrap();
            found
        };
        let open = || Records::open(store.metadata().unwrap()).unwrap();
        let (records, is_sound) = open();
        assert!(is_sound && scan(&records).is_empty(), "it was never mounted");
        drop(records);
        drop(Metadata::open(store.metadata().unwrap()).unwrap());
        let key = |text: &str| text.as_bytes().to_vec();
        let put = ["D1", "E1", "E2", "F1"].map(|name| (key(name), Some(vec![7])));
        let (records, _) = open();
        records.write(&Changes::from(put)).unwrap();
        assert_eq!(scan(&records), [(key("E1"), vec![7]), (key("E2"), vec![7])]);
        records.write(&Changes::from([(key("E1"), None), (key("E3"), Some(vec![8]))])).unwrap();
        drop(records);
        assert_eq!(scan(&open().0), [(key("E2"), vec![7]), (key("E3"), vec![8])]);
    }

    #[test]
    fn an_empty_file_is_a_new_database_and_one_without_its_table_has_lost_it() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(directory.path()).unwrap();
        let backend = || store.database(store.disk.database(&DiskPath::MetadataStaging).unwrap());
        drop(Records::open_unread(backend()).unwrap());
        // It is not empty any more.
        let lost = Records::open_unread(backend()).unwrap_err();
        assert!(matches!(&lost, StoreError::Corrupt(why) if why.contains("is missing")), "{lost}");
        drop(Records::open_unread(store.metadata().unwrap()).unwrap());
    }

    /// Reads end at a broken page from either side.
    #[test]
    fn of_a_damaged_database_both_ends_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(directory.path()).unwrap();
        let record = |number: u32| {
            let text = format!("E{number:08}");
            (text.clone().into_bytes(), Some(format!("value of {text}").into_bytes()))
        };
        let count = 5000;
        let written: Changes = (0..count).map(record).collect();
        let (records, _) = Records::open(store.metadata().unwrap()).unwrap();
        records.write(&written).unwrap();
        drop(records);
        let (middle, value) = record(count / 2);
        let path = directory.path().join("meta.redb");
        let mut bytes = std::fs::read(&path).unwrap();
        let value = value.unwrap();
        let windows = bytes.windows(value.len()).enumerate();
        let places: Vec<usize> =
            windows.filter(|(_, found)| *found == value).map(|(at, _)| at - at % 4096).collect();
        assert!(!places.is_empty());
        for place in places {
            bytes[place..place + 4096].fill(0xff);
        }
        std::fs::write(&path, bytes).unwrap();
        assert!(Records::open(store.metadata().unwrap()).is_err());
        let found = Records::read_damaged(store.metadata().unwrap());
        assert!(!found.contains_key(&middle));
        for number in [0, count - 1] {
            let (key, value) = record(number);
            assert_eq!(found.get(&key), value.as_ref(), "{number}");
        }
        assert!(
            found.iter().all(|(key, value)| written.get(key) == Some(&Some(value.clone()))
                || !key.starts_with(b"E"))
        );
        assert!(found.len() > count as usize / 2, "{}", found.len());
    }
}
