//! The remote tier: encoded objects in a directory that machines share, or in an object store.
//!
//! ```text
//! KVFS-REMOTE                         version of this layout, and which remote it is
//! blobs/ab/<64 hex>.<extension>       an encoded object, named by the hash of its logical bytes
//! names/<store>/<sequence>            a manifest of a store's names; the last few are kept
//! chunks/ab/<64 hex>                  a part of such manifests, named by the hash of its bytes
//! ```
//!
//! Nobody coordinates the stores that share a remote. Objects never change and are put only where
//! nothing is; what may be deleted follows from the manifests of all stores and from the age of
//! objects ([`gc`] has the argument).
//!
//! [`BlobStore`] is the narrow door: a shared [`directory`], an [`object`] store, and in front of
//! either a bandwidth limit ([`throttle`]), a seal where the place is not trusted ([`seal`]), and
//! deadlines ([`Remote`]). Everything that crosses it is owned, so that a call which hangs can be left
//! behind.

#![forbid(unsafe_code)]

pub mod counters;
pub mod directory;
mod error;
pub mod gc;
mod guard;
mod health;
pub mod hold;
pub mod listing;
mod marker;
mod name;
pub mod names;
mod numbers;
pub mod object;
mod pace;
mod pool;
pub mod seal;
mod spec;
pub mod throttle;
mod transfer;

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

pub use error::{RemoteError, Result};
pub use guard::{Connector, Limits, Options, Remote};
pub use health::State;
pub use listing::{LISTING_MAX, Listed, Listing, for_each};
pub use marker::{RemoteId, attach, attach_sealed, identify};
pub use name::{BlobName, RemoteName, RemotePrefix, Sequence, StoreId};
pub use numbers::Numbers;
pub use spec::RemoteSpec;
pub use transfer::{Extent, MemorySink, ReadAt, Sink, Source, WriteAt};

/// Objects by name, on storage that may be slow, full, away or wrong.
///
/// An implementation blocks its caller; [`Remote`] puts a deadline in front. Every failure is a
/// [`RemoteError`], one variant per decision.
pub trait BlobStore: Debug + Send + Sync + 'static {
    /// Where it is, as the user wrote it, for messages.
    fn place(&self) -> &str;

    /// Stores exactly the source's bytes, durably and as a whole or not at all.
    ///
    /// With [`PutMode::IfAbsent`] an object that is there stays as it is, also when two machines
    /// put at the same time. The answer [`Put::AlreadyThere`] says nothing about its bytes.
    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put>;

    /// Copies an object's bytes to the sink, at offset 0 of it, and returns how many. An object of
    /// another size than the extent says is [`RemoteError::Corrupt`]; fewer bytes are never a
    /// success. Where it can, the answer comes from the remote itself and not from a cache of it.
    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64>;

    /// Size and age of an object, or None.
    fn head(&self, name: RemoteName) -> Result<Option<Stat>>;

    /// Makes the object as young as one put now, by the remote's clock.
    /// [`RemoteError::Missing`] if it is not there.
    fn refresh(&self, name: RemoteName) -> Result<()>;

    /// Deletes an object; one that is not there is fine.
    fn delete(&self, name: RemoteName) -> Result<()>;

    /// Deletes an object, by the name that a listing gave, that was modified before a time;
    /// whether it did. The age is tested at the deletion, so a [`BlobStore::refresh`] saves the
    /// object; for how late a deletion may still come, see [`BlobStore::settling`].
    fn delete_if_older(&self, listed: RemoteName, than: SystemTime) -> Result<bool>;

    /// How long after it was put or refreshed an object may still fall to a deletion that looked
    /// at it before.
    fn settling(&self) -> Duration;

    /// The next objects in the order of their names, after `after`. Foreign names are left out.
    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing>;

    /// What an object may be called in a listing: something else where names are keyed.
    fn listed_names(&self, name: RemoteName) -> Result<Vec<RemoteName>> {
        Ok(vec![name])
    }

    /// The highest number of a store's manifests that was ever seen, where that can be relied
    /// upon: manifests that all have lower numbers are not its newest.
    fn newest_seen(&self, _: StoreId) -> Option<Sequence> {
        None
    }

    /// The stores of which a manifest was ever seen, with the highest number: a listing that has lower ones, or none,
    /// is no reason to delete anything.
    fn manifests_seen(&self) -> Vec<(StoreId, Sequence)> {
        Vec::new()
    }

    /// A manifest was read or published.
    fn note_manifest(&self, _: StoreId, _: Sequence) {}

    /// Removes what puts that were cut off left behind before `older_than`; how many.
    fn sweep(&self, older_than: SystemTime) -> Result<u64>;

    /// Whether nothing is in this place, not even something foreign.
    fn is_vacant(&self) -> Result<bool>;
}

/// What a put does where an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMode {
    /// Leaves it.
    IfAbsent,
    /// Replaces it at once and as a whole: heals a damaged copy, and refreshes a good one.
    Replace,
}

/// What a put did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The bytes are stored.
    Stored,
    /// An object of this name was there.
    AlreadyThere,
}

/// What is known of an object without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Stored bytes.
    pub bytes: u64,
    /// When it was put or refreshed, by the remote's clock.
    pub modified: SystemTime,
}
