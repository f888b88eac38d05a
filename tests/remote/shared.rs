//! Several stores and a collector on one remote, without a coordinator: what a store relies on is
//! there, and what nobody relies on goes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvfs::tier::remote::gc::collect;
use kvfs::tier::remote::hold::{Grace, Holder, Stamp};
use kvfs::tier::remote::names::{Publisher, Row};
use kvfs::tier::remote::{BlobStore, RemoteName, RemotePrefix, Source, StoreId, for_each};

use crate::place::{Place, bytes, named};

/// Short, so that thousands of objects live and die in the test.
const GRACE: Grace = Grace(Duration::from_millis(400));
const LASTS: Duration = Duration::from_secs(4);
/// Few, so that stores meet at the same objects all the time.
const CONTENTS: u64 = 24;

/// Holds, publishes and checks, again and again; returns how often it relied on objects that were
/// there before, put by another store or by itself in an earlier life.
fn live(store: &Arc<dyn BlobStore>, id: u64, end: Instant, found: &AtomicU64) -> u64 {
    let holder = Holder::new(Arc::clone(store), GRACE);
    let mut publisher = Publisher::new(Arc::clone(store), StoreId(u128::from(id)), GRACE).unwrap();
    let mut relied = 0;
    for round in 0.. {
        if Instant::now() > end {
            break;
        }
        let since = Stamp::now();
        let wanted: BTreeSet<u64> = (0..4).map(|turn| choice(id, round, turn)).collect();
        let mut rows = Vec::new();
        for number in &wanted {
            let content = bytes(*number, 500);
            let held = holder.hold(named(&content), &Source::of(content.clone())).unwrap();
            found.fetch_add(
                u64::from(held.put == kvfs::tier::remote::Put::AlreadyThere),
                Ordering::Relaxed,
            );
            let RemoteName::Blob(blob) = named(&content) else { unreachable!() };
            let key = number.to_be_bytes().to_vec();
            rows.push(Ok(Row { key, value: Vec::new(), blob: Some(blob) }));
        }
        if !publisher.publish(1, rows.into_iter(), Some(since)).unwrap().is_reliable {
            continue;
        }
        relied += 1;
        // Until the next manifest, for a random part of several grace periods.
        let until = Instant::now() + GRACE.0 * u32::try_from(choice(id, round, 9) % 3).unwrap();
        loop {
            for number in &wanted {
                let name = named(&bytes(*number, 500));
                assert!(store.head(name).unwrap().is_some(), "store {id} lost {name}");
            }
            if Instant::now() > until.min(end) {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    relied
}

fn choice(id: u64, round: u64, turn: u64) -> u64 {
    let seed = (id << 40) | (round << 8) | turn;
    u64::from(bytes(seed, 1)[0]) * CONTENTS / 256
}

#[test]
fn no_store_loses_what_it_relies_on_while_garbage_is_collected() {
    let place = Place::quick();
    let store = &place.store;
    let (end, found) = (Instant::now() + LASTS, AtomicU64::new(0));
    let (relied, deleted) = std::thread::scope(|scope| {
        let found = &found;
        let stores: Vec<_> =
            (1..=3).map(|id| scope.spawn(move || live(store, id, end, found))).collect();
        let collector = scope.spawn(move || {
            let mut deleted = 0;
            while Instant::now() < end {
                deleted += collect(store.as_ref(), GRACE, false).unwrap().deleted;
            }
            deleted
        });
        let relied: u64 = stores.into_iter().map(|store| store.join().unwrap()).sum();
        (relied, collector.join().unwrap())
    });
    let found = found.into_inner();
    assert!(
        relied > 5 && deleted > 5 && found > 5,
        "{relied} relied, {deleted} deleted, {found} found"
    );

    // Stores that are at rest keep what their last manifests name, and no more.
    std::thread::sleep(GRACE.0);
    collect(store.as_ref(), GRACE, false).unwrap();
    let last = collect(store.as_ref(), GRACE, false).unwrap();
    assert_eq!((last.stores, last.deleted, last.young), (3, 0, 0));
    let mut left = 0;
    for prefix in [RemotePrefix::Blobs, RemotePrefix::Chunks] {
        for_each(store.as_ref(), prefix, |_| {
            left += 1;
            Ok(())
        })
        .unwrap();
    }
    assert_eq!(left, last.referenced);
}
