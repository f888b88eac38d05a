//! A remote that is not trusted: what goes there is sealed, whoever keeps it.
//!
//! [`Sealed`] stands in front of a store and is one itself, so nothing above it knows: it is asked by
//! the names that everybody has, which follow from the bytes.
//!
//! - *Names* of objects and chunks are replaced by a keyed hash of them. Equal bytes are one object
//!   still, and without the key nobody can tell which bytes that may be. Manifests keep their names,
//!   which are random ids and numbers.
//! - *Contents* are encrypted and authenticated together with the name (`frames`).
//! - *Numbers* of manifests only grow; the highest that was seen is remembered (`numbers`).
//!
//! What does not prove to be genuine is [`RemoteError::Corrupt`], as a wrong checksum is. Every key
//! of the ring reads, the first one writes (`keys`). Whether a remote is sealed, and with which
//! keys, stands in its marker (`marker`).

pub mod frames;
pub mod keys;

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use keys::{KeyId, KeyRing};

use self::frames::{Failure, SealedSource, Unsealer, plain_length, sealed_length};
use self::keys::Subkeys;
use super::error::{RemoteError, Result};
use super::marker::RemoteId;
use super::name::{BlobName, RemoteName, RemotePrefix, Sequence, StoreId};
use super::numbers::Numbers;
use super::transfer::{Extent, Sink, Source, WriteAt};
use super::{BlobStore, Listing, Put, PutMode, Stat};
use kvfs_encoding::content::ContentHash;

/// How a remote is sealed.
#[derive(Clone, Debug)]
pub struct Seal {
    /// The keys.
    pub keys: Arc<KeyRing>,
    /// What was seen of the manifests there.
    pub numbers: Arc<Numbers>,
}

/// A store whose objects are sealed.
#[derive(Debug)]
pub struct Sealed {
    store: Arc<dyn BlobStore>,
    keys: Arc<[Subkeys]>,
    numbers: Arc<Numbers>,
}

impl Sealed {
    /// In front of a store that is the remote of this id.
    pub fn new(store: Arc<dyn BlobStore>, remote: RemoteId, seal: &Seal) -> Sealed {
        let keys = seal.keys.subkeys(remote).into();
        Sealed { store, keys, numbers: Arc::clone(&seal.numbers) }
    }

    /// What the store may call an object: a name for each key, that of the first key first.
    fn stored_names(&self, name: RemoteName) -> Vec<RemoteName> {
        match name {
            RemoteName::Marker | RemoteName::Manifest(..) => vec![name],
            RemoteName::Blob(_) | RemoteName::Chunk(_) => {
                self.keys.iter().map(|keys| keyed(name, keys)).collect()
            }
        }
    }

    fn first_name(&self, name: RemoteName) -> Result<(RemoteName, &Subkeys)> {
        let keys = self.keys.first();
        let keys = keys.ok_or_else(|| RemoteError::Key("the key file holds no key".to_owned()))?;
        let stored = match name {
            RemoteName::Marker | RemoteName::Manifest(..) => name,
            RemoteName::Blob(_) | RemoteName::Chunk(_) => keyed(name, keys),
        };
        Ok((stored, keys))
    }

    /// Does it under the first name that the store has.
    fn where_it_is<T>(&self, name: RemoteName, act: impl Fn(RemoteName) -> Result<T>) -> Result<T> {
        let mut names = self.stored_names(name).into_iter().peekable();
        while let Some(stored) = names.next() {
            match act(stored) {
                Err(RemoteError::Missing(_)) if names.peek().is_some() => {}
                outcome => return outcome,
            }
        }
        Err(RemoteError::Missing(format!("remote {}: {name}", self.store.place())))
    }

    fn open(&self, stored: RemoteName, bytes: Option<u64>, sink: &Sink) -> Result<u64> {
        let corrupt = |why: &dyn std::fmt::Display| {
            RemoteError::Corrupt(format!("remote {}: {stored} {why}", self.store.place()))
        };
        let bytes = bytes.map(|bytes| sealed_length(bytes).ok_or_else(|| corrupt(&"is too long")));
        let extent = Extent::Whole { bytes: bytes.transpose()? };
        let unsealer = Unsealer::new(&self.keys, stored.to_string(), Arc::clone(sink));
        let unsealer = Arc::new(unsealer);
        match self.store.get(stored, extent, Arc::clone(&unsealer) as Sink) {
            Err(RemoteError::Local(error)) => {
                return Err(match unsealer.problem() {
                    Some(problem) => corrupt(&problem),
                    None => RemoteError::Local(error),
                });
            }
            outcome => outcome?,
        };
        unsealer.finish().map_err(|failure| match failure {
            Failure::Problem(problem) => corrupt(&problem),
            Failure::Sink(error) => RemoteError::local(error),
        })
    }
}

/// The keyed hash of a name, in its place.
fn keyed(name: RemoteName, keys: &Subkeys) -> RemoteName {
    let hash = blake3::keyed_hash(&keys.names, name.to_string().as_bytes());
    let hash = ContentHash(*hash.as_bytes());
    match name {
        RemoteName::Blob(blob) => RemoteName::Blob(BlobName { content: hash, ..blob }),
        RemoteName::Chunk(_) => RemoteName::Chunk(hash),
        RemoteName::Marker | RemoteName::Manifest(..) => name,
    }
}

impl BlobStore for Sealed {
    fn place(&self) -> &str {
        self.store.place()
    }

    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put> {
        if name == RemoteName::Marker {
            return self.store.put(name, source, mode);
        }
        let too_long = || RemoteError::local(io::Error::from_raw_os_error(libc::EFBIG));
        let length = sealed_length(source.length()).ok_or_else(too_long)?;
        let (stored, keys) = self.first_name(name)?;
        let sealed = SealedSource::new(source, keys, &stored.to_string());
        let sealed = Source::new(Arc::new(sealed.map_err(RemoteError::local)?), length);
        let put = self.store.put(stored, sealed, mode)?;
        if let (RemoteName::Manifest(store, sequence), Put::Stored) = (name, put) {
            self.numbers.note(store, sequence);
        }
        Ok(put)
    }

    /// A part costs as much as the whole: what is not read cannot be authenticated.
    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64> {
        if name == RemoteName::Marker {
            return self.store.get(name, extent, sink);
        }
        let count = match extent {
            Extent::Whole { bytes } => {
                self.where_it_is(name, |stored| self.open(stored, bytes, &sink))?
            }
            Extent::Part { offset, bytes } => {
                let window: Sink = Arc::new(Window { sink, offset, bytes });
                let size = self.where_it_is(name, |stored| self.open(stored, None, &window))?;
                let found = extent.within(size).map_err(|why| {
                    RemoteError::Corrupt(format!("remote {}: {name} {why}", self.store.place()))
                })?;
                found.1
            }
        };
        if let RemoteName::Manifest(store, sequence) = name {
            self.numbers.note(store, sequence);
        }
        Ok(count)
    }

    fn head(&self, name: RemoteName) -> Result<Option<Stat>> {
        for stored in self.stored_names(name) {
            if let Some(stat) = self.store.head(stored)? {
                // What is no sealed object is as long as none can be.
                let bytes = plain_length(stat.bytes).unwrap_or(u64::MAX);
                return Ok(Some(Stat { bytes, ..stat }));
            }
        }
        Ok(None)
    }

    fn refresh(&self, name: RemoteName) -> Result<()> {
        self.where_it_is(name, |stored| self.store.refresh(stored))
    }

    fn delete(&self, name: RemoteName) -> Result<()> {
        let mut names = self.stored_names(name).into_iter();
        names.try_for_each(|stored| self.store.delete(stored))
    }

    fn delete_if_older(&self, listed: RemoteName, than: SystemTime) -> Result<bool> {
        self.store.delete_if_older(listed, than)
    }

    fn settling(&self) -> Duration {
        self.store.settling()
    }

    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        self.store.list(prefix, after)
    }

    fn listed_names(&self, name: RemoteName) -> Result<Vec<RemoteName>> {
        Ok(self.stored_names(name))
    }

    fn newest_seen(&self, store: StoreId) -> Option<Sequence> {
        self.numbers.highest(store)
    }

    fn manifests_seen(&self) -> Vec<(StoreId, Sequence)> {
        self.numbers.all()
    }

    fn sweep(&self, older_than: SystemTime) -> Result<u64> {
        self.store.sweep(older_than)
    }

    fn is_vacant(&self) -> Result<bool> {
        self.store.is_vacant()
    }
}

/// Passes on a part of what arrives, from offset 0 on.
struct Window {
    sink: Sink,
    offset: u64,
    bytes: u64,
}

impl WriteAt for Window {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let length = bytes.len() as u64;
        let end = self.offset.saturating_add(self.bytes).min(offset + length);
        let begin = self.offset.max(offset);
        if begin >= end {
            return Ok(());
        }
        let within = |place: u64| usize::try_from(place - offset).unwrap_or(bytes.len());
        self.sink.write_all_at(&bytes[within(begin)..within(end)], begin - self.offset)
    }
}

#[cfg(test)]
mod tests;
