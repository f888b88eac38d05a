//! Versioned manifests of a store's names, so that an empty store can be rebuilt from its remote.
//!
//! A store's metadata is an ordered table of rows. It is cut where the keys say so ([`cut`]), so
//! an unchanged part of the table is the same chunk in the next manifest and is not sent again.
//! The manifest itself ([`mod@format`]) lists the chunks, and appears under the next number only when
//! all of them are there. The last [`VERSIONS_KEPT`] stay.

pub mod cut;
pub mod format;
pub mod published;
pub mod table;

use std::collections::HashSet;
use std::sync::Arc;

use super::error::{RemoteError, Result};
use super::hold::{Grace, Holder, Stamp};
use super::name::{BlobName, RemoteName, RemotePrefix, Sequence, StoreId};
use super::transfer::{Extent, MemorySink, Source};
use super::{BlobStore, Put, PutMode, for_each};
use format::{About, ChunkEntry, Root};
use kvfs_encoding::content::ContentHash;

/// Manifests of a store that stay: the newest, and two to fall back on.
pub const VERSIONS_KEPT: usize = 3;
/// Numbers that are tried when others are taken, as after a publication whose answer was lost.
const NUMBERS_TRIED: u64 = 16;

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

/// What a publication did.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// Number of the manifest.
    pub sequence: Sequence,
    /// Rows in it.
    pub rows: u64,
    /// Chunks in it.
    pub chunks: usize,
    /// Of those, chunks that were sent.
    pub chunks_sent: usize,
    /// Bytes that were sent.
    pub bytes_sent: u64,
    /// False: too much time has passed since the oldest object was held
    /// ([`Grace::publish_within`]). No local copy may go because of this manifest; hold the
    /// objects again and publish again.
    pub is_reliable: bool,
}

/// Publishes the manifests of one store. The store's lock makes sure that there is only one.
#[derive(Debug)]
pub struct Publisher {
    store: Arc<dyn BlobStore>,
    holder: Holder,
    id: StoreId,
    last: Option<Last>,
    about: About,
}

/// The newest manifest, if it is known for sure.
#[derive(Debug, Default)]
struct Last {
    sequence: Sequence,
    chunks: HashSet<ContentHash>,
}

impl Publisher {
    /// For one store.
    pub fn new(store: Arc<dyn BlobStore>, id: StoreId, grace: Grace) -> Publisher {
        let holder = Holder::new(Arc::clone(&store), grace);
        Publisher { store, holder, id, last: None, about: About::default() }
    }

    /// What the next manifest tells people about the store.
    pub fn describe(&mut self, about: About) {
        self.about = about;
    }

    /// Publishes a snapshot of all rows, in the order of their keys.
    ///
    /// `layout` is the version of the rows. `pending` is the oldest [`super::hold::Held::since`]
    /// of the objects that the rows name and the last reliable manifest did not.
    pub fn publish(
        &mut self, layout: u32, rows: impl Iterator<Item = Result<Row>>, pending: Option<Stamp>,
    ) -> Result<Published> {
        let start = Stamp::now();
        let oldest = pending.map_or(start, |pending| pending.or_earlier(start));
        // Whatever fails from here on, what is known of the remote may be wrong.
        let last = match self.last.take() {
            Some(last) => last,
            None => self.find_last()?,
        };
        let mut published = Published {
            sequence: last.sequence,
            rows: 0,
            chunks: 0,
            chunks_sent: 0,
            bytes_sent: 0,
            is_reliable: false,
        };
        let mut entries = Vec::new();
        for part in cut::cut(rows) {
            let part = part?;
            let (entry, chunk) = format::encode_chunk(&part)?;
            let hash = entry.hash();
            if !last.chunks.contains(&hash) {
                let source = Source::of(format::compress(&chunk)?);
                published.bytes_sent += source.length();
                published.chunks_sent += 1;
                self.holder.hold(RemoteName::Chunk(hash), &source)?;
            }
            published.rows += part.len() as u64;
            entries.push(entry);
        }
        published.chunks = entries.len();
        let chunks = entries.iter().map(ChunkEntry::hash).collect();
        let root = Root { about: self.about.clone(), ..Root::new(self.id, layout, entries) };
        let (sequence, bytes) = self.put_root(last.sequence, root)?;
        published.sequence = sequence;
        published.bytes_sent += bytes;
        published.is_reliable = oldest.age() < self.holder.grace().publish_within();
        self.forget_old(sequence);
        self.last = Some(Last { sequence, chunks });
        Ok(published)
    }

    fn find_last(&self) -> Result<Last> {
        let seen = self.store.newest_seen(self.id);
        let newest = listed_versions(self.store.as_ref(), self.id)?.pop();
        if let Some(seen) = seen.filter(|seen| newest.is_none_or(|newest| newest < *seen)) {
            log::warn!(
                "remote {}: the newest manifests of this store's names are gone: they are \
                 published anew",
                self.store.place()
            );
            return Ok(Last { sequence: seen, chunks: HashSet::new() });
        }
        let Some(sequence) = newest else {
            return Ok(Last::default());
        };
        match read_root(self.store.as_ref(), self.id, sequence) {
            Ok(root) => {
                let chunks = root.chunks.iter().map(ChunkEntry::hash).collect();
                Ok(Last { sequence, chunks })
            }
            // Its number is taken all the same.
            Err(RemoteError::Corrupt(_) | RemoteError::Foreign(_)) => {
                Ok(Last { sequence, chunks: HashSet::new() })
            }
            Err(error) => Err(error),
        }
    }

    fn put_root(&self, last: Sequence, mut root: Root) -> Result<(Sequence, u64)> {
        for step in 1..=NUMBERS_TRIED {
            root.sequence = Sequence(last.0.saturating_add(step));
            let name = RemoteName::Manifest(self.id, root.sequence);
            let bytes = format::encode_root(&root)?;
            let source = Source::of(bytes.clone());
            let is_ours = match self.store.put(name, source, PutMode::IfAbsent)? {
                Put::Stored => true,
                // Perhaps an attempt of this very call, repeated because its answer was lost.
                Put::AlreadyThere => match fetch(self.store.as_ref(), name, bytes.len()) {
                    Err(RemoteError::Corrupt(_)) => false,
                    found => found? == bytes,
                },
            };
            if is_ours {
                return Ok((root.sequence, bytes.len() as u64));
            }
        }
        Err(RemoteError::Other(format!(
            "remote {}: names/{}: somebody else publishes under the id of this store: a copied \
             store needs an id of its own",
            self.store.place(),
            self.id
        )))
    }

    /// What cannot be deleted now is deleted after the next publication.
    fn forget_old(&self, newest: Sequence) {
        let outcome = listed_versions(self.store.as_ref(), self.id).and_then(|mut versions| {
            versions.retain(|version| *version <= newest);
            let surplus = versions.len().saturating_sub(VERSIONS_KEPT);
            versions[..surplus]
                .iter()
                .try_for_each(|version| self.store.delete(RemoteName::Manifest(self.id, *version)))
        });
        if let Err(error) = outcome {
            log::warn!("old manifests of names stay: {error}");
        }
    }
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
                "remote {}: names/{id}: manifest {seen} was there before, and now there are only \
                 older ones",
                store.place()
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
        Ok(root)
    } else {
        Err(RemoteError::Corrupt(format!("remote {}: {name} is another manifest", store.place())))
    }
}

/// Reads and verifies a chunk.
pub(super) fn read_chunk(store: &dyn BlobStore, entry: &ChunkEntry) -> Result<Vec<Row>> {
    let name = RemoteName::Chunk(entry.hash());
    let bytes = fetch(store, name, format::COMPRESSED_BYTES_MAX)?;
    format::decode_chunk(entry, &bytes).map_err(|problem| problem.at(store, name))
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
