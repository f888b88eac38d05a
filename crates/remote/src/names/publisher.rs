//! Publishing the manifests of one store, and seeing whether they are still there.
//!
//! What was published once is not there for ever: whoever keeps the remote may lose a part, or put an
//! older state of all of it back. And a copied store publishes under the id of the one that it was
//! copied from: each would push the other's manifests out, and what only those name is garbage then.
//! So every manifest says which mount made it, and a store remembers those of its own.

use std::collections::HashMap;
use std::sync::Arc;

use super::format::{self, About, ChunkEntry, Making, Root};
use super::{Row, VERSIONS_KEPT, cut, fetch, listed_versions, read_root, read_stored_chunk};
use crate::error::{RemoteError, Result};
use crate::hold::{Grace, Holder, Stamp};
use crate::name::{RemoteName, Sequence, StoreId, random};
use crate::transfer::Source;
use crate::{BlobStore, Put, PutMode};
use kvfs_encoding::content::ContentHash;
use kvfs_os::{Share, in_background};

/// Numbers that are tried when others are taken, as after a publication whose answer was lost.
const NUMBERS_TRIED: u64 = 16;
/// Mounts of a store that are remembered although it is not known that they published: each that is killed
/// before its first publication is known to have been one.
const AUTHORS_MAX: usize = 8;
/// Parts that the remote is asked for at a time; opens find most of its calls free.
const ASKED_AT_ONCE: usize = 3;

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

/// The manifests that a store knows to be its own. It is kept with the store: a copy of it has what
/// was known when it was copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnManifests {
    /// The number of the newest that is known to have been published.
    pub highest: Sequence,
    /// The mounts that may have published a newer one.
    pub authors: Vec<u128>,
}

/// Whether the last manifest of a store, and its parts, are in the remote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// With the lengths that they had.
    All,
    /// Some are gone, or have another length: why. They are sent again with the next publication.
    Less(String),
}

/// Publishes the manifests of one store. The store's lock makes sure that there is only one.
#[derive(Debug)]
pub struct Publisher {
    store: Arc<dyn BlobStore>,
    holder: Holder,
    id: StoreId,
    last: Option<Last>,
    about: About,
    author: u128,
    /// `None`: nothing was ever known, so whoever published before is taken for an older kvfs.
    own: Option<OwnManifests>,
}

/// The newest manifest, if it is known for sure.
#[derive(Debug, Default)]
struct Last {
    sequence: Sequence,
    /// Its bytes there, if it can be read.
    bytes: Option<u64>,
    chunks: HashMap<ContentHash, Part>,
}

/// A chunk that the remote has.
#[derive(Clone, Debug)]
struct Part {
    entry: ChunkEntry,
    /// Its bytes there, if they are known.
    stored_bytes: Option<u64>,
}

impl Publisher {
    /// For one store.
    ///
    /// # Errors
    /// [`RemoteError::Local`] if the kernel gives no random bytes.
    pub fn new(store: Arc<dyn BlobStore>, id: StoreId, grace: Grace) -> Result<Publisher> {
        let holder = Holder::new(Arc::clone(&store), grace);
        let author = random().map_err(RemoteError::local)?.max(1);
        Ok(Publisher { store, holder, id, last: None, about: About::default(), author, own: None })
    }

    /// The store noted these as its own.
    #[must_use]
    pub fn knowing(self, own: OwnManifests) -> Publisher {
        Publisher { own: Some(own), ..self }
    }

    /// What the next manifest tells people about the store.
    pub fn describe(&mut self, about: About) {
        self.about = about;
    }

    /// What the store has to have noted durably before the next publication.
    pub fn own_manifests(&self) -> OwnManifests {
        let mut own = self.own.clone().unwrap_or_default();
        if !own.authors.contains(&self.author) {
            let surplus = (own.authors.len() + 1).saturating_sub(AUTHORS_MAX);
            own.authors.drain(..surplus);
            own.authors.push(self.author);
        }
        own
    }

    /// Publishes a snapshot of all rows, in the order of their keys.
    ///
    /// `layout` is the version of the rows. `pending` is the oldest [`Held::since`](crate::hold::Held::since)
    /// of the objects that the rows name and the last reliable manifest did not.
    ///
    /// # Errors
    /// [`RemoteError::Foreign`] if somebody else publishes under the id of this store.
    pub fn publish(
        &mut self, layout: u32, rows: impl Iterator<Item = Result<Row>>, pending: Option<Stamp>,
    ) -> Result<Published> {
        let start = Stamp::now();
        let oldest = pending.map_or(start, |pending| pending.or_earlier(start));
        let last = self.take_last()?;
        let mut published = Published {
            sequence: last.sequence,
            rows: 0,
            chunks: 0,
            chunks_sent: 0,
            bytes_sent: 0,
            is_reliable: false,
        };
        let mut parts = Vec::new();
        for rows in cut::cut(rows) {
            let rows = rows?;
            let (entry, chunk) = format::encode_chunk(&rows)?;
            let part = match last.chunks.get(&entry.hash()) {
                Some(part) => part.clone(),
                None => self.send(entry, &chunk, &mut published)?,
            };
            published.rows += rows.len() as u64;
            parts.push(part);
        }
        published.chunks = parts.len();
        let root = Root {
            about: self.about.clone(),
            making: Making { author: self.author, stored_bytes: stored_bytes(&parts) },
            ..Root::new(self.id, layout, parts.iter().map(|part| part.entry.clone()).collect())
        };
        let (sequence, bytes) = self.put_root(last.sequence, root)?;
        published.sequence = sequence;
        published.bytes_sent += bytes;
        published.is_reliable = oldest.age() < self.holder.grace().publish_within();
        self.own = Some(OwnManifests { highest: sequence, authors: vec![self.author] });
        self.forget_old(sequence);
        let chunks = parts.into_iter().map(|part| (part.entry.hash(), part)).collect();
        self.last = Some(Last { sequence, bytes: Some(bytes), chunks });
        Ok(published)
    }

    /// Puts a chunk. One that is there already may be anybody's, and damaged.
    fn send(&self, entry: ChunkEntry, chunk: &[u8], published: &mut Published) -> Result<Part> {
        let name = RemoteName::Chunk(entry.hash());
        let source = Source::of(format::compress(chunk)?);
        let mut stored_bytes = source.length();
        published.bytes_sent += stored_bytes;
        published.chunks_sent += 1;
        if self.holder.hold(name, &source)?.put == Put::AlreadyThere {
            match read_stored_chunk(self.store.as_ref(), &entry) {
                Ok((_, bytes)) => stored_bytes = bytes,
                Err(error) if error.is_outage() => return Err(error),
                Err(error) => {
                    log::warn!("{error}: replaced");
                    self.store.put(name, source, PutMode::Replace)?;
                }
            }
        }
        Ok(Part { entry, stored_bytes: Some(stored_bytes) })
    }

    /// Looks whether the remote still has what was published last. What it lacks is sent again with the
    /// next publication.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn look(&mut self) -> Result<Found> {
        let mut last = self.take_last()?;
        let mut missing = Vec::new();
        if last.sequence > Sequence::default() && !self.has_manifest(&last)? {
            missing.push(format!("manifest {} of this store's names", last.sequence));
        }
        let parts: Vec<Part> = last.chunks.values().cloned().collect();
        let outcomes =
            in_background(ASKED_AT_ONCE, Share::Quarter, &parts, |part| self.stored_bytes(part));
        let (count, mut lost_parts) = (parts.len(), 0);
        for (part, outcome) in parts.into_iter().zip(outcomes) {
            let hash = part.entry.hash();
            if let Some(stored_bytes) = outcome? {
                last.chunks.insert(hash, Part { stored_bytes: Some(stored_bytes), ..part });
            } else {
                last.chunks.remove(&hash);
                lost_parts += 1;
            }
        }
        if lost_parts > 0 {
            missing.push(format!("{lost_parts} of {count} parts of this store's names"));
        }
        self.last = Some(last);
        let place = self.store.place();
        if missing.is_empty() {
            return Ok(Found::All);
        }
        let what = missing.join(", ");
        Ok(Found::Less(format!("remote {place}: gone, or not as long as it was: {what}")))
    }

    fn has_manifest(&self, last: &Last) -> Result<bool> {
        let stat = self.store.head(RemoteName::Manifest(self.id, last.sequence))?;
        Ok(last.bytes.is_some() && stat.map(|stat| stat.bytes) == last.bytes)
    }

    /// Bytes of a part as they are stored, if the remote has it.
    fn stored_bytes(&self, part: &Part) -> Result<Option<u64>> {
        let outcome = match part.stored_bytes {
            None => {
                read_stored_chunk(self.store.as_ref(), &part.entry).map(|(_, bytes)| Some(bytes))
            }
            Some(bytes) => {
                let stat = self.store.head(RemoteName::Chunk(part.entry.hash()));
                stat.map(|stat| stat.map(|stat| stat.bytes).filter(|found| *found == bytes))
            }
        };
        match outcome {
            Err(error) if !error.is_outage() => {
                log::warn!("{error}");
                Ok(None)
            }
            outcome => outcome,
        }
    }

    /// Until it is put back, what is known of the remote may be wrong: whatever fails meanwhile.
    fn take_last(&mut self) -> Result<Last> {
        match self.last.take() {
            Some(last) => Ok(last),
            None => self.find_last(),
        }
    }

    fn find_last(&self) -> Result<Last> {
        let known = self.own.as_ref().map(|own| own.highest);
        let seen = self.store.newest_seen(self.id).max(known);
        let newest = listed_versions(self.store.as_ref(), self.id)?.pop();
        if let Some(seen) = seen.filter(|seen| newest.unwrap_or_default() < *seen) {
            log::warn!(
                "remote {}: the newest manifests of this store's names are gone: they are \
                 published anew",
                self.store.place()
            );
            return Ok(Last { sequence: seen, ..Last::default() });
        }
        let Some(sequence) = newest else {
            return Ok(Last::default());
        };
        let root = match read_root(self.store.as_ref(), self.id, sequence) {
            Ok(root) => root,
            // Its number is taken all the same.
            Err(RemoteError::Corrupt(_) | RemoteError::Foreign(_)) => {
                return Ok(Last { sequence, ..Last::default() });
            }
            Err(error) => return Err(error),
        };
        self.recognise(&root)?;
        let stat = self.store.head(RemoteName::Manifest(self.id, sequence))?;
        let mut lengths = root.making.stored_bytes.into_iter().map(u64::from);
        let chunks = root.chunks.into_iter().map(|entry| {
            let stored_bytes = lengths.next();
            (entry.hash(), Part { entry, stored_bytes })
        });
        Ok(Last { sequence, bytes: stat.map(|stat| stat.bytes), chunks: chunks.collect() })
    }

    /// A manifest that is newer than what this store knows of was made by one of its own mounts.
    fn recognise(&self, root: &Root) -> Result<()> {
        let author = root.making.author;
        let is_own = author == 0
            || author == self.author
            || self
                .own
                .as_ref()
                .is_none_or(|own| root.sequence <= own.highest || own.authors.contains(&author));
        if is_own { Ok(()) } else { Err(self.somebody_else()) }
    }

    fn somebody_else(&self) -> RemoteError {
        RemoteError::Foreign(format!(
            "remote {}: names/{}: somebody else publishes under the id of this store: a copied \
             store needs an id of its own",
            self.store.place(),
            self.id
        ))
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
                self.store.note_manifest(self.id, root.sequence);
                return Ok((root.sequence, bytes.len() as u64));
            }
            match read_root(self.store.as_ref(), self.id, root.sequence) {
                Ok(taken) => self.recognise(&taken)?,
                // The number is taken all the same.
                Err(RemoteError::Corrupt(_) | RemoteError::Foreign(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Err(self.somebody_else())
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

/// The lengths of all parts, or none.
fn stored_bytes(parts: &[Part]) -> Vec<u32> {
    let length = |part: &Part| part.stored_bytes.and_then(|bytes| u32::try_from(bytes).ok());
    parts.iter().map(length).collect::<Option<_>>().unwrap_or_default()
}
