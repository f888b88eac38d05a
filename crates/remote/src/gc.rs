//! Deletes what no store refers to, while other stores go on without knowing.
//!
//! # Why an object that somebody relies on cannot vanish
//!
//! A store *relies* on an object when it drops its own copy. With the grace period G it may do so
//! only after these steps ([`super::hold`], [`super::names`]):
//!
//! 1. *Hold*, at h: the object is put; or found, and refreshed if it is older than G/4. Either
//!    way it was modified at m >= h - G/4.
//! 2. *Verify*: read it back. On an object store not before [`super::BlobStore::settling`].
//! 3. *Publish*, done at p <= h + G/4: a manifest that names it is there, and so is a newer one
//!    that names it as long as the store relies on it. A publication that took longer says that
//!    it is not reliable.
//!
//! A collector lists and reads the manifests of all stores from s on, and deletes at d <= s + G/4
//! what no manifest names and what is older than G at d.
//!
//! If p <= s, the collector has seen the object's name. (A manifest may vanish while it is read
//! only because newer ones are there; if the newest of a listing vanishes, it lists again.) If
//! p > s, then m >= h - G/4 >= p - G/2 > s - G/2 >= d - 3G/4, so the object is younger than G at
//! d and stays. A quarter of G is left for clocks that differ (ages are taken by the remote's
//! clock, which a client of some filesystems sets itself) and for listings that are out of date
//! (NFS: a minute).
//!
//! Age is tested at the very deletion. On a directory the object is renamed aside, looked at, and
//! given its name back if it is young, so a deletion that hangs for hours does no harm. An object
//! store has no such operation: a request to delete may arrive after somebody refreshed the
//! object, at most so late as a request may take with its repetitions. That is the time of
//! [`super::BlobStore::settling`]: an object that is still there after it stays.
//!
//! A manifest that cannot be read or verified may name anything: then nothing is deleted at all. Nor where a listing
//! lacks a manifest that was seen before, or newer ones of that store: it is short, or whoever keeps the remote has
//! removed them. Only somebody can know that a store is gone for good, and says so ([`collect_without`]).

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, SystemTime};

use super::error::{RemoteError, Result};
use super::hold::{Grace, Stamp, remote_now};
use super::name::{BlobName, RemoteName, RemotePrefix, Sequence, StoreId};
use super::names::{read_chunk, read_root};
use super::{BlobStore, for_each};
use kvfs_encoding::content::ContentHash;

/// Listings of manifests before giving up on stores that publish faster than they can be read.
const LISTINGS_MAX: usize = 3;

/// What a collection found and did; in a dry run, what it would have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Stores that share the remote.
    pub stores: u64,
    /// Objects and chunks that a manifest names.
    pub referenced: u64,
    /// That no manifest names, but too young to be deleted.
    pub young: u64,
    /// Deleted.
    pub deleted: u64,
    /// Bytes of those.
    pub deleted_bytes: u64,
    /// Remains of puts that were cut off, removed.
    pub swept: u64,
    /// Garbage was left because the time was over ([`Grace::collect_within`]): collect again.
    pub is_unfinished: bool,
}

/// Deletes garbage of all stores. [`RemoteError::Corrupt`] if a manifest is damaged: then nothing
/// was deleted.
pub fn collect(store: &dyn BlobStore, grace: Grace, dry_run: bool) -> Result<Collected> {
    collect_without(store, grace, dry_run, &[])
}

/// The same where some stores are gone for good, and their names were removed.
///
/// # Errors
/// [`RemoteError::Other`] if one of them has names there, or was never seen.
pub fn collect_without(
    store: &dyn BlobStore, grace: Grace, dry_run: bool, gone: &[StoreId],
) -> Result<Collected> {
    let start = Stamp::now();
    let now = remote_now(store)?;
    let references = find_references(store, gone)?;
    let mut run = Run {
        store,
        grace,
        only_look: dry_run,
        start,
        now,
        collected: Collected { stores: references.stores, ..Collected::default() },
    };
    for_each(store, RemotePrefix::Blobs, |listed| {
        let is_named = matches!(listed.name, RemoteName::Blob(blob) if references.names(blob));
        run.look_at(listed.name, listed.stat, is_named)
    })?;
    for_each(store, RemotePrefix::Chunks, |listed| {
        let is_named = references.listed_chunks.contains(&listed.name);
        run.look_at(listed.name, listed.stat, is_named)
    })?;
    if !dry_run {
        run.collected.swept = store.sweep(run.too_old(Duration::ZERO))?;
    }
    Ok(run.collected)
}

struct Run<'run> {
    store: &'run dyn BlobStore,
    grace: Grace,
    only_look: bool,
    start: Stamp,
    /// The remote's time at the start.
    now: SystemTime,
    collected: Collected,
}

impl Run<'_> {
    /// What was modified before this has outlived the grace period, so long after the start.
    fn too_old(&self, since_start: Duration) -> SystemTime {
        (self.now + since_start).checked_sub(self.grace.0).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    fn look_at(&mut self, name: RemoteName, stat: super::Stat, is_named: bool) -> Result<()> {
        let since_start = self.start.age();
        let too_old = self.too_old(since_start);
        if is_named {
            self.collected.referenced += 1;
        } else if stat.modified >= too_old {
            self.collected.young += 1;
        } else if since_start >= self.grace.collect_within() {
            self.collected.is_unfinished = true;
        } else if self.only_look || self.store.delete_if_older(name, too_old)? {
            self.collected.deleted += 1;
            self.collected.deleted_bytes += stat.bytes;
        } else {
            self.collected.young += 1;
        }
        Ok(())
    }
}

/// What the manifests of all stores name.
#[derive(Debug, Default)]
struct References {
    stores: u64,
    chunks: HashSet<ContentHash>,
    /// The same as a listing calls them.
    listed_chunks: HashSet<RemoteName>,
    /// Sorted fingerprints of their names in a listing: 8 bytes for each of perhaps ten million objects. Two that share one
    /// are both kept, which is safe.
    blobs: Vec<u64>,
}

fn fingerprint(blob: BlobName) -> u64 {
    let (first, _) = blob.content.0.split_first_chunk().expect("32 bytes");
    u64::from_le_bytes(*first).wrapping_add(blob.encoding as u64)
}

impl References {
    fn names(&self, blob: BlobName) -> bool {
        self.blobs.binary_search(&fingerprint(blob)).is_ok()
    }
}

/// The manifests that a listing has.
type Manifests = BTreeMap<StoreId, Vec<Sequence>>;

fn find_references(store: &dyn BlobStore, gone: &[StoreId]) -> Result<References> {
    let mut lacking = None;
    for _ in 0..LISTINGS_MAX {
        let mut manifests = Manifests::new();
        for_each(store, RemotePrefix::Manifests, |listed| {
            if let RemoteName::Manifest(id, sequence) = listed.name {
                manifests.entry(id).or_default().push(sequence);
            }
            Ok(())
        })?;
        check_gone(store, &manifests, gone)?;
        lacking = what_is_lacking(store, &manifests, gone);
        if lacking.is_none()
            && let Some(references) = read_manifests(store, &manifests)?
        {
            return Ok(references);
        }
    }
    if let Some(what) = lacking {
        return Err(RemoteError::Other(format!("remote {}: {what}", store.place())));
    }
    Err(RemoteError::Unreachable(format!(
        "remote {}: manifests change faster than they can be read; nothing was deleted",
        store.place()
    )))
}

/// Refuses to take stores for gone that are not, or that are not meant.
fn check_gone(store: &dyn BlobStore, manifests: &Manifests, gone: &[StoreId]) -> Result<()> {
    let seen = store.manifests_seen();
    let refused = |why| Err(RemoteError::Other(format!("remote {}: {why}", store.place())));
    for id in gone {
        if manifests.contains_key(id) {
            return refused(format!(
                "nothing was deleted, since store {id} has names there: remove names/{id} first, if \
                 that store is gone for good"
            ));
        }
        if !seen.iter().any(|(known, _)| known == id) {
            return refused(format!(
                "nothing was deleted, since no names of a store {id} were seen"
            ));
        }
    }
    Ok(())
}

/// What the listing does not have that was seen before: it is short, or whoever keeps the remote has removed names, or
/// they were published since. What that store relies on would go.
fn what_is_lacking(
    store: &dyn BlobStore, manifests: &Manifests, gone: &[StoreId],
) -> Option<String> {
    let is_expected = |(id, _): &(StoreId, Sequence)| !gone.contains(id);
    store.manifests_seen().into_iter().filter(is_expected).find_map(|(id, seen)| {
        let newest = manifests.get(&id).and_then(|found| found.iter().max());
        let what = match newest {
            Some(newest) if *newest >= seen => return None,
            Some(_) => "only older ones",
            None => "none",
        };
        Some(format!(
            "nothing was deleted: names/{id}: manifest {seen} was there before, and now {what} are \
             listed: see what answers there, or have that store publish (mount it); if it is gone \
             for good, remove names/{id} and run kvfs gc --forget-store {id}"
        ))
    })
}

/// None if the newest manifest of a store vanished.
fn read_manifests(store: &dyn BlobStore, manifests: &Manifests) -> Result<Option<References>> {
    let mut references = References::default();
    for (id, sequences) in manifests {
        references.stores += 1;
        let newest = sequences.iter().max();
        for sequence in sequences {
            match read_manifest(store, *id, *sequence, &mut references) {
                Ok(false) if Some(sequence) == newest => return Ok(None),
                Ok(_) => {}
                Err(error @ (RemoteError::Corrupt(_) | RemoteError::Foreign(_))) => {
                    return Err(RemoteError::Corrupt(format!(
                        "nothing was deleted, since the names of store {id} cannot be read: {}",
                        error.text()
                    )));
                }
                Err(error) => return Err(error),
            }
        }
    }
    references.blobs.sort_unstable();
    references.blobs.dedup();
    Ok(Some(references))
}

/// False if the manifest vanished, as old ones do.
fn read_manifest(
    store: &dyn BlobStore, id: StoreId, sequence: Sequence, references: &mut References,
) -> Result<bool> {
    let root = match read_root(store, id, sequence) {
        Err(RemoteError::Missing(_)) => return Ok(false),
        other => other?,
    };
    for entry in &root.chunks {
        if references.chunks.contains(&entry.hash()) {
            continue;
        }
        let rows = match read_chunk(store, entry) {
            Err(RemoteError::Missing(text)) => {
                // With its manifest, or without.
                let is_there = store.head(RemoteName::Manifest(id, sequence))?.is_some();
                return if is_there { Err(RemoteError::Corrupt(text)) } else { Ok(false) };
            }
            other => other?,
        };
        for blob in rows.iter().filter_map(|row| row.blob) {
            for listed in store.listed_names(RemoteName::Blob(blob))? {
                if let RemoteName::Blob(listed) = listed {
                    references.blobs.push(fingerprint(listed));
                }
            }
        }
        references.listed_chunks.extend(store.listed_names(RemoteName::Chunk(entry.hash()))?);
        references.chunks.insert(entry.hash());
    }
    Ok(true)
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
