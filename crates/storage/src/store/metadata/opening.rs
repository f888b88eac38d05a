//! Opening the database: a new epoch of numbers begins, and records that the disk lost are missed.

use redb::{Database, ReadableDatabase, ReadableTable};

use super::super::database::{
    Backend, Changer, begin_durable, check, decode, encode, have_records, open_database,
};
use super::super::record::OnlyRemote;
use super::super::{StoreError, keys, standing};

/// All records of a database of at most that size are read before a mount answers: some 50,000, in about 20 ms.
const CHECKED_AT_OPEN_BYTES: u64 = 16 << 20;

/// Whether what all records add up to was compared with what was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// It was.
    Checked,
    /// A large database is left to [`Snapshot::check`](super::Snapshot::check), beside the mount.
    Unchecked,
}

/// A database in which an epoch has begun.
pub(super) struct Opened {
    pub(super) database: Database,
    pub(super) epoch: u32,
    /// The last mount ended without a crash.
    pub(super) was_clean: bool,
    pub(super) only_remote: OnlyRemote,
    pub(super) integrity: Integrity,
}

/// Opens or creates the database. One that is damaged is left as it is.
pub(super) fn open(backend: Backend) -> Result<Opened, StoreError> {
    let length = backend.storage.len()?;
    let is_small = length <= CHECKED_AT_OPEN_BYTES;
    let database = open_database(backend)?;
    if length > 0 {
        have_records(&database)?;
        if is_small {
            check(&database.begin_read()?)?;
        }
    }
    let transaction = begin_durable(&database)?;
    let mut records = Changer::open(&transaction)?;
    let key = keys::epoch();
    let last = records.table().get(key.as_slice())?.map(|value| decode(value.value()));
    let (last, was_clean): (u32, bool) = last.transpose()?.unwrap_or((0, true));
    let epoch = last.checked_add(1).ok_or(StoreError::Full)?;
    let only_remote = standing::only_remote(records.table(), last)?;
    let only_remote = OnlyRemote { epoch, ..only_remote };
    records.put(&key, &encode(&(epoch, false)))?;
    records.put(&keys::only_remote(), &encode(&only_remote))?;
    records.close()?;
    transaction.commit()?;
    let integrity = if is_small { Integrity::Checked } else { Integrity::Unchecked };
    Ok(Opened { database, epoch, was_clean, only_remote, integrity })
}
