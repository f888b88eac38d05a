//! `meta.redb`: one ordered table of records, written a frozen layer at a time.

mod digest;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use redb::{Database, ReadableDatabase, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::StoreError;
use super::commit::lost;
use super::disk::Disk;
use super::format;
use super::layer::Layer;
use super::record::InodeId;
use super::reserve::Reserve;
pub(super) use digest::{Changer, check};

pub(super) const RECORDS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("records");

/// Pages of `meta.redb` kept in memory. 16 MiB hold the inner nodes of tens of millions of
/// records; the rest is the kernel's page cache. (redb's own default is 1 GiB.)
const CACHE_BYTES: usize = 16 << 20;

/// Writes a frozen layer out.
#[derive(Clone, Debug)]
pub struct Writer {
    database: Arc<Database>,
}

impl Writer {
    /// A writer to a database.
    pub(super) fn new(database: Arc<Database>) -> Writer {
        Writer { database }
    }

    /// Writes a layer and makes it durable.
    pub fn write(&self, layer: &Layer) -> Result<(), StoreError> {
        guarded(|| {
            let transaction = begin_durable(&self.database)?;
            change_all(&transaction, &layer.records)?;
            Ok(transaction.commit()?)
        })
    }
}

/// A key and its value.
pub type RawRecord = (Vec<u8>, Vec<u8>);

/// The records as of some commit.
pub struct Snapshot {
    transaction: redb::ReadTransaction,
    table: redb::ReadOnlyTable<&'static [u8], &'static [u8]>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Snapshot")
    }
}

impl Snapshot {
    /// As of the last commit.
    pub(super) fn open(database: &Database) -> Result<Snapshot, StoreError> {
        let transaction = database.begin_read()?;
        let table = transaction.open_table(RECORDS)?;
        Ok(Snapshot { transaction, table })
    }

    /// Keys and values in the order of the keys, from those that start with `tag`.
    pub fn records(
        &self, from: &[u8],
    ) -> Result<impl Iterator<Item = Result<RawRecord, StoreError>> + use<>, StoreError> {
        let mut records = guarded(|| Ok(self.table.range::<&[u8]>(from..)?))?;
        let mut next = move || -> Result<Option<RawRecord>, StoreError> {
            let Some(record) = records.next() else {
                return Ok(None);
            };
            let (key, value) = record?;
            Ok(Some((key.value().to_vec(), value.value().to_vec())))
        };
        Ok(std::iter::from_fn(move || guarded(&mut next).transpose()))
    }

    /// Reads all records and compares what they add up to with what was recorded with them.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`]: some were lost, or are not those that were written.
    pub fn check(&self) -> Result<(), StoreError> {
        guarded(|| check(&self.transaction))
    }

    /// One record.
    pub fn get<T: DeserializeOwned>(&self, key: &[u8]) -> Result<Option<T>, StoreError> {
        guarded(|| {
            let Some(value) = self.table.get(key)? else { return Ok(None) };
            decode(value.value()).map(Some)
        })
    }

    /// Sequences of which the index of prefixes has anything.
    pub fn indexed_sequences(&self) -> Result<Vec<InodeId>, StoreError> {
        let (mut found, mut from) = (Vec::new(), super::keys::table(b'Q'));
        while let Some(record) = self.records(&from)?.next() {
            let (key, _) = record?;
            let is_one = key.first() == Some(&b'Q');
            let Some(number) = super::keys::number(&key).filter(|_| is_one) else { break };
            found.push(InodeId(number));
            // Behind all of its pages.
            let Some(next) = number.checked_add(1) else { break };
            from = super::keys::indexed(InodeId(next));
        }
        Ok(found)
    }

    /// Calls `visit` with number and name in the key of each record of one table.
    pub fn for_each_named(
        &self, tag: u8, mut visit: impl FnMut(u64, &[u8]),
    ) -> Result<(), StoreError> {
        for record in self.records(&[tag])? {
            let (key, _) = record?;
            if key.first() != Some(&tag) {
                break;
            }
            if let (Some(number), Some(name)) = (super::keys::number(&key), key.get(9..)) {
                visit(number, name);
            }
        }
        Ok(())
    }

    /// Calls `visit` with the number in the key and the value of each record of one table.
    pub fn for_each<T: DeserializeOwned>(
        &self, tag: u8, mut visit: impl FnMut(u64, T),
    ) -> Result<(), StoreError> {
        for record in self.records(&[tag])? {
            let (key, value) = record?;
            if key.first() != Some(&tag) {
                break;
            }
            if let Some(number) = super::keys::number(&key) {
                visit(number, decode(&value)?);
            }
        }
        Ok(())
    }
}

/// Takes a key and its value.
pub type Put<'a> = dyn FnMut(&[u8], &[u8]) -> Result<(), StoreError> + 'a;

/// Puts records into a database, all of them or none.
pub fn fill<T, E: From<StoreError>>(
    backend: Backend, write: impl FnOnce(&mut Put<'_>) -> Result<T, E>,
) -> Result<T, E> {
    let database = open_database(backend)?;
    let transaction = begin_durable(&database)?;
    let outcome = {
        let mut records = Changer::open(&transaction)?;
        let outcome = write(&mut |key, value| records.put(key, value))?;
        records.close()?;
        outcome
    };
    transaction.commit().map_err(StoreError::from)?;
    Ok(outcome)
}

/// Makes changes within a transaction; `None` means "removed".
pub(super) fn change_all<'a>(
    transaction: &redb::WriteTransaction,
    changes: impl IntoIterator<Item = (&'a Vec<u8>, &'a Option<Vec<u8>>)>,
) -> Result<(), StoreError> {
    let mut records = Changer::open(transaction)?;
    for (key, change) in changes {
        match change {
            Some(value) => records.put(key, value)?,
            None => records.remove(key)?,
        }
    }
    records.close()
}

/// Makes a database that holds nothing, durably.
pub(super) fn create(backend: Backend) -> Result<(), StoreError> {
    fill(backend, |_| Ok(()))
}

/// redb meets some kinds of damage with a panic. Here that is an error like any other.
pub(super) fn guarded<T>(act: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
    let panicked = |_| Err(StoreError::Corrupt("its inner structure is broken".to_owned()));
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(panicked)
}

/// Opens or creates the database.
pub(super) fn open_database(backend: Backend) -> Result<Database, StoreError> {
    let mut builder = redb::Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    Ok(builder.create_with_backend(backend)?)
}

/// The table of records is made with the database, so one without it lost it, and is not that of an empty store.
pub(super) fn have_records(database: &Database) -> Result<(), StoreError> {
    match database.begin_read()?.open_table(RECORDS) {
        Err(redb::TableError::TableDoesNotExist(_)) => {
            Err(StoreError::Corrupt("its table of records is missing".to_owned()))
        }
        outcome => Ok(outcome.map(drop)?),
    }
}

/// A write transaction whose commit makes a later open after a crash fast: without quick repair
/// redb would walk the whole file (seconds for a million records) before the mount answers.
pub(super) fn begin_durable(database: &Database) -> Result<redb::WriteTransaction, StoreError> {
    let mut transaction = database.begin_write()?;
    transaction.set_quick_repair(true);
    Ok(transaction)
}

/// A record as it lies in the database.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("records are plain data, which postcard always encodes")
}

/// The record that such bytes are; bytes that are none are [`StoreError::Corrupt`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, StoreError> {
    postcard::from_bytes(bytes).map_err(|error| StoreError::Corrupt(format!("a record: {error}")))
}

/// Where the database lies. It holds the store's lock: redb changes the length of the file when it
/// closes it, and whoever opened the file before that would find header and length at odds.
#[derive(Debug)]
pub struct Backend {
    pub(super) storage: Box<dyn redb::StorageBackend>,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) reserve: Arc<Reserve>,
    pub(super) lock: Arc<format::Lock>,
}

impl Backend {
    /// The same store's, that lies elsewhere.
    pub(super) fn with(&self, storage: Box<dyn redb::StorageBackend>) -> Backend {
        let (disk, reserve) = (Arc::clone(&self.disk), Arc::clone(&self.reserve));
        Backend { storage, disk, reserve, lock: Arc::clone(&self.lock) }
    }
}

impl redb::StorageBackend for Backend {
    fn len(&self) -> std::io::Result<u64> {
        self.storage.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.storage.read(offset, out)
    }
    fn set_len(&self, length: u64) -> std::io::Result<()> {
        self.reserve.lend(self.disk.as_ref(), || self.storage.set_len(length))
    }
    fn sync_data(&self) -> std::io::Result<()> {
        self.storage.sync_data().map_err(|error| lost(&error))
    }
    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.reserve.lend(self.disk.as_ref(), || self.storage.write(offset, data))
    }
    fn close(&self) -> std::io::Result<()> {
        self.storage.close()
    }
}

#[cfg(test)]
mod tests;
