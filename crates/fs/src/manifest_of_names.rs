//! The records of a store as a manifest of names, from which an empty store is rebuilt.
//!
//! A row is a record of `meta.redb` as it lies there. Left out is what only means something to this
//! machine: the epoch, marks of recovery, totals, and who the store is. An object's remote copy is
//! told as the only one, which it will be to whoever reads it. Files that grow have no such copy;
//! theirs are those that were made for this manifest ([`super::growing`]).

use std::collections::{BTreeMap, HashMap};

use super::foreign::is_open_to_all;
use super::growing::GrowingCopy;
use kvfs_storage::store::database::{RawRecord, Snapshot, decode, encode};
use kvfs_storage::store::record::{
    Inode, InodeId, ObjectId, ObjectRecord, RemoteCopy, RemoteState,
};
use kvfs_storage::store::{StoreError, keys};
use kvfs_storage::tier::content::ContentHash;
use kvfs_storage::tier::remote::names::Row;
use kvfs_storage::tier::remote::{BlobName, RemoteError};

/// Tables whose records are rows: names, who has which prefix, inodes, objects and their remote
/// copies, attributes. A rebuild makes the prefixes anew; they are for other stores
/// ([`super::foreign`]).
const TABLES: [u8; 6] = [b'E', b'H', b'I', b'O', b'R', b'X'];

/// Sequences that were looked at, while the rows are made: each has as many records as pages.
const SEQUENCES_REMEMBERED_MAX: usize = 1 << 18;

/// The rows, in the order of their keys.
pub(super) fn rows<'a>(
    snapshot: &'a Snapshot, growing: &'a BTreeMap<ObjectId, GrowingCopy>,
) -> Result<impl Iterator<Item = Result<Row, RemoteError>> + 'a, StoreError> {
    let mut open_sequences = HashMap::new();
    let mut records = snapshot.records(&[])?.peekable();
    let made = growing.iter().map(|(object, made)| {
        let copy = RemoteCopy { state: RemoteState::Only, ..made.copy };
        (keys::remote_copy(*object), encode(&copy))
    });
    let mut made = made.collect::<Vec<_>>().into_iter().peekable();
    let merged = std::iter::from_fn(move || {
        let next_made = made.peek().map(|(key, _)| key);
        match (records.peek(), next_made) {
            (Some(Ok((key, _))), Some(made_key)) if made_key <= key => made.next().map(Ok),
            (None, Some(_)) => made.next().map(Ok),
            _ => records.next(),
        }
    });
    Ok(merged.filter_map(move |record| {
        let row = record.and_then(|record| {
            let is_row = record.0.first().is_some_and(|table| TABLES.contains(table))
                && tells_of_what_is_open(&record.0, snapshot, &mut open_sequences)?;
            if is_row { row(record, growing).map(Some) } else { Ok(None) }
        });
        row.map_err(|error| RemoteError::local(std::io::Error::other(error))).transpose()
    }))
}

/// Whether a record may be told to other machines: who has a prefix only if everybody may read it here, for the
/// hash of a guess would tell whether somebody has said that. Everything else is the store's own, to be rebuilt.
fn tells_of_what_is_open(
    key: &[u8], snapshot: &Snapshot, known: &mut HashMap<InodeId, bool>,
) -> Result<bool, StoreError> {
    let Some((_, _, sequence)) = keys::split_holder(key) else { return Ok(true) };
    if let Some(is_open) = known.get(&sequence) {
        return Ok(*is_open);
    }
    let is_open = is_open_to_all(snapshot, sequence)?;
    if known.len() < SEQUENCES_REMEMBERED_MAX {
        known.insert(sequence, is_open);
    }
    Ok(is_open)
}

fn row(
    (key, value): RawRecord, growing: &BTreeMap<ObjectId, GrowingCopy>,
) -> Result<Row, StoreError> {
    let value = match key.first() {
        Some(b'R') => {
            let copy: RemoteCopy = decode(&value)?;
            let blob = BlobName { content: ContentHash(copy.content), encoding: copy.encoding };
            let value = encode(&RemoteCopy { state: RemoteState::Only, ..copy });
            return Ok(Row { key, value, blob: Some(blob) });
        }
        Some(b'I') => with_size(value, growing)?,
        Some(b'O') => with_length(&key, value, growing)?,
        _ => value,
    };
    Ok(Row { key, value, blob: None })
}

/// Of a file that grows the file on the disk knows size and time.
fn with_size(
    value: Vec<u8>, growing: &BTreeMap<ObjectId, GrowingCopy>,
) -> Result<Vec<u8>, StoreError> {
    let mut inode: Inode = decode(&value)?;
    let object = inode.file().and_then(|file| file.object);
    let Some(made) = object.and_then(|object| growing.get(&object)) else {
        return Ok(value);
    };
    inode.mtime = made.mtime;
    if let Some(file) = inode.file_mut() {
        (file.size, file.blocks) = (made.length, made.length.div_ceil(512));
    }
    Ok(encode(&inode))
}

fn with_length(
    key: &[u8], value: Vec<u8>, growing: &BTreeMap<ObjectId, GrowingCopy>,
) -> Result<Vec<u8>, StoreError> {
    let object = keys::number(key).map(ObjectId);
    let Some(made) = object.and_then(|object| growing.get(&object)) else {
        return Ok(value);
    };
    let record: ObjectRecord = decode(&value)?;
    Ok(encode(&ObjectRecord { length: made.length, ..record }))
}
