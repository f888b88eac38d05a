//! What a store tells about itself before it is mounted: whether it is new, and which remote it
//! cannot do without.

use redb::{ReadableDatabase, ReadableTable, TableError};
use serde::de::DeserializeOwned;

use super::database::{Backend, RECORDS, decode, guarded, open_database};
use super::record::{InodeId, OnlyRemote, RemoteCopy, RemoteIdentity, RemotePlace};
use super::{StoreError, keys};

/// What decides how a store may be mounted.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// The store has names, or a remote knows it.
    pub is_in_use: bool,
    /// What nobody but the remote has.
    pub only_remote: OnlyRemote,
    /// Its name and the remote's, once it had one.
    pub identity: Option<RemoteIdentity>,
    /// Where the remote was; unknown to a store that was last mounted by a kvfs that did not note it.
    pub place: Option<RemotePlace>,
    /// The store whose names it took over when it was new.
    pub rebuilt_from: Option<u128>,
}

/// Reads a store's standing; of one that was never mounted there is nothing to tell.
pub fn read(backend: Backend) -> Result<Standing, StoreError> {
    guarded(|| {
        let database = open_database(backend)?;
        let table = match database.begin_read()?.open_table(RECORDS) {
            Err(TableError::TableDoesNotExist(_)) => return Ok(Standing::default()),
            outcome => outcome?,
        };
        let (epoch, _): (u32, bool) = get(&table, &keys::epoch())?.unwrap_or((0, true));
        let identity = get(&table, &keys::single::<RemoteIdentity>())?;
        Ok(Standing {
            is_in_use: identity.is_some() || has_names(&table)?,
            only_remote: only_remote(&table, epoch)?,
            identity,
            place: get(&table, &keys::single::<RemotePlace>())?,
            rebuilt_from: get(&table, &keys::rebuilt_from())?,
        })
    })
}

/// What only the remote has, as of the mount of this epoch: counted by that mount, or now.
pub(super) fn only_remote(
    table: &impl ReadableTable<&'static [u8], &'static [u8]>, epoch: u32,
) -> Result<OnlyRemote, StoreError> {
    let counted: Option<OnlyRemote> = get(table, &keys::only_remote())?;
    if let Some(counted) = counted.filter(|counted| counted.epoch == epoch) {
        return Ok(counted);
    }
    let (mut counted, prefix) = (OnlyRemote::default(), keys::table(b'R'));
    for record in table.range::<&[u8]>(prefix.as_slice()..)? {
        let (key, value) = record?;
        if !key.value().starts_with(&prefix) {
            break;
        }
        // What cannot be decoded is for fsck to find.
        if let Ok(copy) = decode::<RemoteCopy>(value.value()) {
            counted.add(&copy);
        }
    }
    Ok(counted)
}

/// Whether there are names beside those that every mount has.
fn has_names(table: &impl ReadableTable<&'static [u8], &'static [u8]>) -> Result<bool, StoreError> {
    let roots = keys::entries(InodeId::ROOT);
    for record in table.range::<&[u8]>(keys::table(b'E').as_slice()..)? {
        let (key, _) = record?;
        if !key.value().starts_with(b"E") {
            break;
        }
        if !key.value().starts_with(&roots) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn get<T: DeserializeOwned>(
    table: &impl ReadableTable<&'static [u8], &'static [u8]>, key: &[u8],
) -> Result<Option<T>, StoreError> {
    table.get(key)?.map(|value| decode(value.value())).transpose()
}
