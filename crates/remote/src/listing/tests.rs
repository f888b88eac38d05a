//! Listings that lie, from a store that has nothing else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::*;
use crate::name::{Sequence, StoreId};
use crate::transfer::{Extent, Sink, Source};
use crate::{Put, PutMode};

/// Lists store after store, or the same ones again and again.
#[derive(Debug)]
struct Endless {
    repeats: bool,
    empty: bool,
    calls: AtomicU64,
}

impl Endless {
    fn new() -> Endless {
        Endless { repeats: false, empty: false, calls: AtomicU64::new(0) }
    }
}

impl BlobStore for Endless {
    fn place(&self) -> &'static str {
        "s3://endless"
    }
    fn put(&self, _: RemoteName, _: Source, _: PutMode) -> Result<Put> {
        unreachable!("it is only listed")
    }
    fn get(&self, _: RemoteName, _: Extent, _: Sink) -> Result<u64> {
        unreachable!("it is only listed")
    }
    fn head(&self, _: RemoteName) -> Result<Option<Stat>> {
        unreachable!("it is only listed")
    }
    fn refresh(&self, _: RemoteName) -> Result<()> {
        unreachable!("it is only listed")
    }
    fn delete(&self, _: RemoteName) -> Result<()> {
        unreachable!("it is only listed")
    }
    fn delete_if_older(&self, _: RemoteName, _: SystemTime) -> Result<bool> {
        unreachable!("it is only listed")
    }
    fn settling(&self) -> Duration {
        Duration::ZERO
    }
    fn list(&self, _: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let first = match after {
            Some(RemoteName::Manifest(StoreId(id), _)) if !self.repeats => id + 1,
            _ => 1,
        };
        let stat = Stat { bytes: 1, modified: SystemTime::UNIX_EPOCH };
        let listed = |id| Listed { name: RemoteName::Manifest(StoreId(id), Sequence(1)), stat };
        let count = if self.empty { 0 } else { LISTING_MAX as u128 };
        Ok(Listing { objects: (first..first + count).map(listed).collect(), is_last: false })
    }
    fn sweep(&self, _: SystemTime) -> Result<u64> {
        unreachable!("it is only listed")
    }
    fn is_vacant(&self) -> Result<bool> {
        unreachable!("it is only listed")
    }
}

fn refusal(store: &Endless) -> String {
    let outcome = for_each(store, RemotePrefix::Manifests, |_| Ok(()));
    let error = outcome.expect_err("no listing ends here");
    assert!(matches!(error, RemoteError::Other(_)), "{error}");
    error.to_string()
}

#[test]
fn a_listing_without_end_is_refused_before_it_fills_the_memory() {
    let store = Endless::new();
    let line = refusal(&store);
    assert!(line.contains("names has more than 262144 names"), "{line}");
    assert_eq!(store.calls.load(Ordering::Relaxed), MANIFESTS_MAX / LISTING_MAX as u64 + 1);
    let stores = crate::names::stores(&Endless::new());
    assert!(matches!(stores, Err(RemoteError::Other(_))), "{stores:?}");
}

#[test]
fn a_listing_that_begins_again_or_goes_on_with_nothing_is_refused() {
    let store = Endless { repeats: true, ..Endless::new() };
    let line = refusal(&store);
    assert!(line.contains(" after names/"), "{line}");
    let store = Endless { empty: true, ..Endless::new() };
    let line = refusal(&store);
    assert!(line.contains("goes on with nothing"), "{line}");
}
