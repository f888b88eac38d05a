//! Opening the database: a new epoch of numbers begins, and records that the disk lost are missed.

use std::sync::Arc;

use redb::{Database, ReadableTable};

use super::super::database::{Backend, Changer, begin_durable, decode, encode, open_database};
use super::super::disk::DiskPath;
use super::super::overlay::Overlay;
use super::super::record::OnlyRemote;
use super::super::records::Records;
use super::super::{StoreError, keys, last_mount, standing};

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

/// Whether the database is the store's, and whole as far as that is looked at, before redb writes to it.
fn check_untouched(backend: &Backend, is_small: bool) -> Result<(), StoreError> {
    let storage = Overlay::new(backend.disk.database(&DiskPath::Metadata)?)?;
    let records = Records::open_unread(backend.with(Box::new(storage)))?;
    last_mount::check(backend.disk.as_ref(), records.epoch()?)?;
    if is_small { records.check() } else { Ok(()) }
}

/// Opens or creates the database. One that is damaged, or is not that of the last mount, is left as it is.
pub(super) fn open(backend: Backend) -> Result<Opened, StoreError> {
    let length = backend.storage.len()?;
    let is_small = length <= CHECKED_AT_OPEN_BYTES;
    if length > 0 {
        check_untouched(&backend, is_small)?;
    }
    let disk = Arc::clone(&backend.disk);
    let database = open_database(backend)?;
    let transaction = begin_durable(&database)?;
    let mut changer = Changer::open(&transaction)?;
    let key = keys::epoch();
    let last = changer.table().get(key.as_slice())?.map(|value| decode(value.value()));
    let (last, was_clean): (u32, bool) = last.transpose()?.unwrap_or((0, true));
    let epoch = last.checked_add(1).ok_or(StoreError::Full)?;
    let only_remote = standing::only_remote(changer.table(), last)?;
    let only_remote = OnlyRemote { epoch, ..only_remote };
    changer.put(&key, &encode(&(epoch, false)))?;
    changer.put(&keys::only_remote(), &encode(&only_remote))?;
    changer.close()?;
    transaction.commit()?;
    last_mount::note(disk.as_ref(), epoch);
    let integrity = if is_small { Integrity::Checked } else { Integrity::Unchecked };
    Ok(Opened { database, epoch, was_clean, only_remote, integrity })
}
