//! Opening the database anew below a running mount.
//!
//! After its first write that fails redb refuses everything, reads included, for as long as it is open. Where that
//! write found no room nothing is lost: what the last commit wrote is on the disk, and the changes wait in memory.

use std::sync::Arc;

use redb::{Database, ReadableDatabase};

use super::super::database::{RECORDS, guarded, open_database};
use super::super::{Store, StoreError};
use super::{Metadata, OnDisk};

/// A database as the last commit left it, that takes further ones.
pub struct Reopened {
    database: Arc<Database>,
    base: redb::ReadOnlyTable<&'static [u8], &'static [u8]>,
}

impl std::fmt::Debug for Reopened {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Reopened")
    }
}

/// Opens a store's database once more, while whoever reads the one that refuses everything still has it open.
///
/// # Errors
/// Those of the disk, and [`StoreError::Corrupt`].
pub fn reopen(store: &Store) -> Result<Reopened, StoreError> {
    guarded(|| {
        let database = Arc::new(open_database(store.metadata()?)?);
        let base = database.begin_read()?.open_table(RECORDS)?;
        Ok(Reopened { database, base })
    })
}

/// Goes on with another database. Returns the one before, which may take a while to close.
pub fn go_on_with(metadata: &mut Metadata, reopened: Reopened) -> Reopened {
    metadata.on_disk = OnDisk::Base;
    Reopened {
        database: std::mem::replace(&mut metadata.database, reopened.database),
        base: std::mem::replace(&mut metadata.base, reopened.base),
    }
}
