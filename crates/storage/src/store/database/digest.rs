//! What all records add up to, recorded with them: a record that the disk lost or changed is missed.
//!
//! redb's own checksums tell of damage to a page of `meta.redb` only when all of them are compared, which takes a
//! database that nobody has open, and only until the page is written anew: from then on the damage is what its
//! checksum says. A sum over the hashes of all records costs a commit two hashes for each change, is
//! compared at any time with any state of the database, and stays wrong once a record is. (Bellare and
//! Micciancio, "A new paradigm for collision-free hashing", 1997, section 5; against accidents, so 64 bits do.)
//!
//! It lies in a table of its own: in a page with damaged keys nothing is found, and what is not there tells nothing.

use std::cmp::Ordering;

use redb::{
    ReadTransaction, ReadableTable, ReadableTableMetadata, Table, TableDefinition, TableError,
    WriteTransaction,
};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::{RECORDS, decode, encode};
use crate::store::{StoreError, keys};

type Bytes = &'static [u8];

/// The digest, under [`ONLY_KEY`].
const DIGEST: TableDefinition<'_, Bytes, Bytes> = TableDefinition::new("digest");
const ONLY_KEY: &[u8] = b"";

/// What records add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Digest {
    /// Epoch of the mount that wrote it. A version of kvfs that knows of no digest begins an epoch, too, and then changes
    /// records without changing this.
    epoch: u32,
    records: u64,
    sum: u64,
}

impl Digest {
    /// Reads all records.
    fn of<T: ReadableTable<Bytes, Bytes>>(table: &T, epoch: u32) -> Result<Digest, StoreError> {
        let mut digest = Digest { epoch, ..Digest::default() };
        for record in table.range::<&[u8]>(..)? {
            let (key, value) = record?;
            digest.add(key.value(), value.value());
        }
        Ok(digest)
    }

    fn add(&mut self, key: &[u8], value: &[u8]) {
        self.records = self.records.wrapping_add(1);
        self.sum = self.sum.wrapping_add(hash(key, value));
    }

    fn subtract(&mut self, key: &[u8], value: &[u8]) {
        self.records = self.records.wrapping_sub(1);
        self.sum = self.sum.wrapping_sub(hash(key, value));
    }
}

fn hash(key: &[u8], value: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(key), value)
}

/// What the records added up to when a mount of that epoch wrote them; `None` if only one before it recorded that.
fn recorded<T: ReadableTable<Bytes, Bytes>>(
    place: &T, epoch: u32,
) -> Result<Option<Digest>, StoreError> {
    let Some(value) = place.get(ONLY_KEY)? else {
        return Err(StoreError::Corrupt("its digest is missing".to_owned()));
    };
    let digest: Digest = decode(value.value())?;
    match digest.epoch.cmp(&epoch) {
        Ordering::Less => Ok(None),
        Ordering::Equal => Ok(Some(digest)),
        Ordering::Greater => Err(StoreError::Corrupt("its epoch is missing".to_owned())),
    }
}

fn epoch<T: ReadableTable<Bytes, Bytes>>(table: &T) -> Result<u32, StoreError> {
    let last = table.get(keys::epoch().as_slice())?.map(|value| decode(value.value()));
    let (epoch, _): (u32, bool) = last.transpose()?.unwrap_or_default();
    Ok(epoch)
}

/// Reads all records and compares what they add up to with what was recorded with them, if anything was.
///
/// # Errors
/// [`StoreError::Corrupt`] if they do not, or cannot be read.
pub(in crate::store) fn check(transaction: &ReadTransaction) -> Result<(), StoreError> {
    let table = transaction.open_table(RECORDS)?;
    let place = match transaction.open_table(DIGEST) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(()),
        outcome => outcome?,
    };
    let Some(recorded) = recorded(&place, epoch(&table)?)? else { return Ok(()) };
    let found = Digest::of(&table, recorded.epoch)?;
    if found == recorded {
        return Ok(());
    }
    Err(StoreError::Corrupt(if found.records == recorded.records {
        format!("of its {} records some are not as they were written", found.records)
    } else {
        format!("it had {} records, and {} are there", recorded.records, found.records)
    }))
}

/// Changes records within a transaction, and what they add up to with them.
pub(in crate::store) struct Changer<'a> {
    table: Table<'a, Bytes, Bytes>,
    place: Table<'a, Bytes, Bytes>,
    digest: Digest,
}

impl<'a> Changer<'a> {
    /// To be ended by [`Changer::close`]. Where a version of kvfs wrote last that records no digest, all records are read.
    pub(in crate::store) fn open(
        transaction: &'a WriteTransaction,
    ) -> Result<Changer<'a>, StoreError> {
        let (table, place) = (transaction.open_table(RECORDS)?, transaction.open_table(DIGEST)?);
        let recorded = if place.is_empty()? { None } else { recorded(&place, epoch(&table)?)? };
        let digest = recorded.map_or_else(|| Digest::of(&table, 0), Ok)?;
        Ok(Changer { table, place, digest })
    }

    /// The records with the changes made so far.
    pub(in crate::store) fn table(&self) -> &(impl ReadableTable<Bytes, Bytes> + use<'a>) {
        &self.table
    }

    /// Stores a record.
    pub(in crate::store) fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        let old = self.table.insert(key, value)?;
        if let Some(old) = old {
            self.digest.subtract(key, old.value());
        }
        self.digest.add(key, value);
        Ok(())
    }

    /// Removes a record, if it is there.
    pub(in crate::store) fn remove(&mut self, key: &[u8]) -> Result<(), StoreError> {
        let old = self.table.remove(key)?;
        if let Some(old) = old {
            self.digest.subtract(key, old.value());
        }
        Ok(())
    }

    /// Records what the records add up to.
    pub(in crate::store) fn close(mut self) -> Result<(), StoreError> {
        let digest = Digest { epoch: epoch(&self.table)?, ..self.digest };
        self.place.insert(ONLY_KEY, encode(&digest).as_slice())?;
        Ok(())
    }
}
