//! The records of a store as a manifest of names, from which an empty store is rebuilt.
//!
//! A row is a record of `meta.redb` as it lies there. Left out is what only means something to this
//! machine: the epoch, marks of recovery, totals, and who the store is. An object's remote copy is
//! told as the only one, which it will be to whoever reads it.

use crate::store::StoreError;
use crate::store::database::{Snapshot, decode, encode};
use crate::store::record::{RemoteCopy, RemoteState};
use crate::tier::content::ContentHash;
use crate::tier::remote::names::Row;
use crate::tier::remote::{BlobName, RemoteError};

/// Tables whose records are rows: inodes, names, attributes, objects and their remote copies.
const TABLES: [u8; 5] = [b'E', b'I', b'O', b'R', b'X'];

/// The rows, in the order of their keys.
pub(super) fn rows(
    snapshot: &Snapshot,
) -> Result<impl Iterator<Item = Result<Row, RemoteError>>, StoreError> {
    let records = snapshot.records(&[])?;
    Ok(records.filter_map(|record| {
        let row = record.and_then(|(key, value)| {
            let is_row = key.first().is_some_and(|table| TABLES.contains(table));
            if is_row { row(key, value).map(Some) } else { Ok(None) }
        });
        row.map_err(|error| RemoteError::local(std::io::Error::other(error))).transpose()
    }))
}

fn row(key: Vec<u8>, value: Vec<u8>) -> Result<Row, StoreError> {
    if key.first() != Some(&b'R') {
        return Ok(Row { key, value, blob: None });
    }
    let copy: RemoteCopy = decode(&value)?;
    let blob = BlobName { content: ContentHash(copy.content), encoding: copy.encoding };
    let value = encode(&RemoteCopy { state: RemoteState::Only, ..copy });
    Ok(Row { key, value, blob: Some(blob) })
}
