//! Versioned manifests of a store's names, so that an empty store can be rebuilt from its remote.
//!
//! A store's metadata is an ordered table of rows. It is cut where the keys say so ([`cut`]), so
//! an unchanged part of the table is the same chunk in the next manifest and is not sent again.
//! The manifest itself ([`mod@format`]) lists the chunks, and appears under the next number only when
//! all of them are there. The last [`VERSIONS_KEPT`] stay.

pub mod cut;
pub mod format;
pub mod published;
mod publisher;
pub mod table;

use std::sync::Arc;

use super::error::{RemoteError, Result};
use super::name::{BlobName, RemoteName, RemotePrefix, Sequence, StoreId};
use super::transfer::{Extent, MemorySink};
use super::{BlobStore, for_each};
use format::{ChunkEntry, Root};
pub use publisher::{Found, OwnManifests, Published, Publisher};

/// Manifests of a store that stay: the newest, and two to fall back on.
pub const VERSIONS_KEPT: usize = 3;

/// One record of a store's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Orders the rows; no two are equal.
    pub key: Vec<u8>,
    /// The record.
    pub value: Vec<u8>,
    /// The object that the record relies on.
    pub blob: Option<BlobName>,
}

/// Stores that have published to a remote.
pub fn stores(store: &dyn BlobStore) -> Result<Vec<StoreId>> {
    let mut stores = Vec::new();
    for_each(store, RemotePrefix::Manifests, |listed| {
        if let RemoteName::Manifest(id, _) = listed.name
            && stores.last() != Some(&id)
        {
            stores.push(id);
        }
        Ok(())
    })?;
    Ok(stores)
}

/// Manifests of a store, oldest first.
///
/// # Errors
/// [`RemoteError::Corrupt`] if the newest is older than one that was seen before
/// ([`BlobStore::newest_seen`]).
pub fn versions(store: &dyn BlobStore, id: StoreId) -> Result<Vec<Sequence>> {
    // Asked first: what is published from here on may be missing in the listing.
    let seen = store.newest_seen(id);
    let versions = listed_versions(store, id)?;
    match seen {
        Some(seen) if versions.last().is_none_or(|newest| *newest < seen) => {
            Err(RemoteError::Corrupt(format!(
                "remote {}: names/{id}: manifest {seen} was there before, and now there {}",
                store.place(),
                if versions.is_empty() { "is none" } else { "are only older ones" }
            )))
        }
        _ => Ok(versions),
    }
}

fn listed_versions(store: &dyn BlobStore, id: StoreId) -> Result<Vec<Sequence>> {
    let mut versions = Vec::new();
    for_each(store, RemotePrefix::ManifestsOf(id), |listed| {
        if let RemoteName::Manifest(_, sequence) = listed.name {
            versions.push(sequence);
        }
        Ok(())
    })?;
    versions.sort_unstable();
    Ok(versions)
}

/// A manifest that was found damaged, and why.
#[derive(Clone, Debug)]
pub struct Damaged {
    /// Its number.
    pub sequence: Sequence,
    /// What is wrong with it.
    pub error: RemoteError,
}

/// A manifest whose chunks were all verified.
#[derive(Debug)]
pub struct Names {
    store: Arc<dyn BlobStore>,
    root: Root,
    /// Newer ones that could not be used.
    pub damaged: Vec<Damaged>,
}

/// The newest manifest of a store that is whole; None if the store never published one.
///
/// Every chunk is read and verified before the first row is handed out, so a rebuild never stops
/// half way because of old damage; the chunks are then read a second time.
pub fn read_latest(store: &Arc<dyn BlobStore>, id: StoreId) -> Result<Option<Names>> {
    let mut damaged = Vec::new();
    for sequence in versions(store.as_ref(), id)?.into_iter().rev() {
        let outcome = read_root(store.as_ref(), id, sequence).and_then(|root| {
            for entry in &root.chunks {
                read_chunk(store.as_ref(), entry)?;
            }
            Ok(root)
        });
        match outcome {
            Ok(root) => return Ok(Some(Names { store: Arc::clone(store), root, damaged })),
            Err(error @ (RemoteError::Corrupt(_) | RemoteError::Missing(_))) => {
                damaged.push(Damaged { sequence, error });
            }
            Err(error) => return Err(error),
        }
    }
    match damaged.first() {
        None => Ok(None),
        Some(first) => Err(first.error.clone()),
    }
}

impl Names {
    /// Number of the manifest.
    pub fn sequence(&self) -> Sequence {
        self.root.sequence
    }

    /// Version of the rows.
    pub fn layout(&self) -> u32 {
        self.root.layout
    }

    /// How many rows.
    pub fn row_count(&self) -> u64 {
        self.root.chunks.iter().map(|entry| u64::from(entry.rows)).sum()
    }

    /// The rows, in the order of their keys. An error is the last item.
    pub fn rows(&self) -> impl Iterator<Item = Result<Row>> + '_ {
        let mut failed = false;
        let chunks = self.root.chunks.iter().flat_map(|entry| {
            match read_chunk(self.store.as_ref(), entry) {
                Ok(rows) => rows.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            }
        });
        chunks.take_while(move |row| {
            let go_on = !failed;
            failed = row.is_err();
            go_on
        })
    }
}

/// Reads and verifies a manifest without its chunks.
pub(super) fn read_root(store: &dyn BlobStore, id: StoreId, sequence: Sequence) -> Result<Root> {
    let name = RemoteName::Manifest(id, sequence);
    let bytes = fetch(store, name, format::ROOT_BYTES_MAX)?;
    let root = format::decode_root(&bytes).map_err(|problem| problem.at(store, name))?;
    if (root.store, root.sequence) == (id, sequence) {
        store.note_manifest(id, sequence);
        Ok(root)
    } else {
        Err(RemoteError::Corrupt(format!("remote {}: {name} is another manifest", store.place())))
    }
}

/// Reads and verifies a chunk.
pub(super) fn read_chunk(store: &dyn BlobStore, entry: &ChunkEntry) -> Result<Vec<Row>> {
    read_stored_chunk(store, entry).map(|(rows, _)| rows)
}

/// The same, and how many bytes it has there.
fn read_stored_chunk(store: &dyn BlobStore, entry: &ChunkEntry) -> Result<(Vec<Row>, u64)> {
    let name = RemoteName::Chunk(entry.hash());
    let bytes = fetch(store, name, format::COMPRESSED_BYTES_MAX)?;
    let rows = format::decode_chunk(entry, &bytes).map_err(|problem| problem.at(store, name))?;
    Ok((rows, bytes.len() as u64))
}

fn fetch(store: &dyn BlobStore, name: RemoteName, bytes_max: usize) -> Result<Vec<u8>> {
    let sink = MemorySink::new(bytes_max);
    match store.get(name, Extent::Whole { bytes: None }, sink.clone()) {
        Ok(_) => Ok(sink.take()),
        // Only the sink's own limit fails on this side.
        Err(RemoteError::Local(_)) => Err(RemoteError::Corrupt(format!(
            "remote {}: {name} has more than {bytes_max} bytes",
            store.place()
        ))),
        Err(error) => Err(error),
    }
}
