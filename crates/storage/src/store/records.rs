//! The records of `meta.redb` as they lie there, for a check that trusts none of them.

use std::collections::BTreeMap;

use redb::{Database, ReadableDatabase, TableError};

use super::database::{Backend, RECORDS, begin_durable, guarded, open_database};
use super::{StoreError, keys};

/// Changed records by key; `None` means "removed".
pub(crate) type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// The database of a store that nobody has mounted.
#[derive(Debug)]
pub(crate) struct Records {
    database: Database,
}

impl Records {
    /// Opens it without starting a new epoch, reads all of it and compares its own checksums.
    /// The flag is false if it had to go back to its last sound commit.
    pub(crate) fn open(backend: Backend) -> Result<(Records, bool), StoreError> {
        guarded(|| {
            let mut database = open_database(backend)?;
            let sound = database.check_integrity()?;
            Ok((Records { database }, sound))
        })
    }

    /// Visits the records whose keys start with `tag`, in the order of their keys.
    pub(crate) fn scan(
        &self, tag: u8, mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), StoreError> {
        let table = match self.database.begin_read()?.open_table(RECORDS) {
            // The store was made and never mounted.
            Err(TableError::TableDoesNotExist(_)) => return Ok(()),
            outcome => outcome?,
        };
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
        {
            let mut table = transaction.open_table(RECORDS)?;
            for (key, change) in changes {
                match change {
                    Some(value) => table.insert(key.as_slice(), value.as_slice())?,
                    None => table.remove(key.as_slice())?,
                };
            }
        }
        transaction.commit()?;
        Ok(())
    }
}
