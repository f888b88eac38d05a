//! What holds for every remote: each function is one behaviour, run against each kind of place.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvfs::tier::content::ContentHash;
use kvfs::tier::remote::gc::collect;
use kvfs::tier::remote::hold::{Grace, Holder, remote_now};
use kvfs::tier::remote::object::PART_BYTES;
use kvfs::tier::remote::{
    Extent, LISTING_MAX, Put, PutMode, RemoteError, RemoteName, RemotePrefix, Source, attach,
    for_each,
};

use crate::names::{
    a_table_comes_back_and_only_what_changed_is_sent, what_is_lost_is_noticed_and_sent_again,
};
use crate::place::{Place, WHOLE, bytes, get, named, put};

/// Runs every behaviour against places of one kind.
pub(crate) fn run(place: impl Fn() -> Place) {
    type Behaviour = (&'static str, fn(&Place));
    let behaviours: [Behaviour; 13] = [
        ("objects of all sizes come back", objects_of_all_sizes_come_back),
        ("the first put stays", the_first_put_stays_and_a_replacement_replaces),
        ("concurrent puts", concurrent_puts_of_one_name_leave_one_whole_object),
        ("parts", parts_lie_within_the_object),
        ("damage", damage_shows_in_the_size_or_the_hash),
        ("listing", a_listing_is_complete_in_order_and_without_foreign_names),
        ("age", age_is_that_of_the_last_put_or_refresh),
        ("short source", a_source_that_ends_early_stores_nothing),
        ("hold", an_old_object_that_is_held_becomes_young),
        ("markers", a_marker_is_checked),
        ("names", a_table_comes_back_and_only_what_changed_is_sent),
        ("lost names", what_is_lost_is_noticed_and_sent_again),
        ("collection", garbage_of_the_right_age_is_collected),
    ];
    for (what, behaviour) in behaviours {
        eprintln!("  {what}");
        behaviour(&place());
    }
}

fn objects_of_all_sizes_come_back(place: &Place) {
    let store = place.store.as_ref();
    let part = usize::try_from(PART_BYTES).unwrap();
    for length in [0, 1, 4096, (1 << 20) + 1, part, 2 * part + 12_345] {
        let content = bytes(length as u64 + 1, length);
        let name = named(&content);
        assert_eq!(store.head(name).unwrap(), None);
        assert!(matches!(get(store, name, WHOLE), Err(RemoteError::Missing(_))));
        let source = Source::of(content.clone());
        assert_eq!(store.put(name, source, PutMode::IfAbsent).unwrap(), Put::Stored, "{length}");
        assert_eq!(store.head(name).unwrap().unwrap().bytes, length as u64);
        let exact = Extent::Whole { bytes: Some(length as u64) };
        assert!(get(store, name, exact).unwrap() == content, "{length} bytes");
        store.delete(name).unwrap();
        store.delete(name).unwrap();
        assert_eq!(store.head(name).unwrap(), None);
    }
}

fn the_first_put_stays_and_a_replacement_replaces(place: &Place) {
    let store = place.store.as_ref();
    for length in [100, usize::try_from(PART_BYTES).unwrap() + 1] {
        let (first, second) = (bytes(1, length), bytes(2, length));
        let name = put(store, &first);
        let again = |mode| store.put(name, Source::of(second.clone()), mode).unwrap();
        assert_eq!(again(PutMode::IfAbsent), Put::AlreadyThere);
        assert!(get(store, name, WHOLE).unwrap() == first);
        assert_eq!(again(PutMode::Replace), Put::Stored);
        assert!(get(store, name, WHOLE).unwrap() == second);
    }
}

fn concurrent_puts_of_one_name_leave_one_whole_object(place: &Place) {
    let name = named(b"wanted by many");
    let contents: Vec<Vec<u8>> = (1..=8).map(|seed| bytes(seed, 300_000)).collect();
    let store = place.store.as_ref();
    let stored: Vec<Put> = std::thread::scope(|scope| {
        let put = |content: &Vec<u8>| {
            store.put(name, Source::of(content.clone()), PutMode::IfAbsent).unwrap()
        };
        let putting = contents.iter().map(|content| scope.spawn(move || put(content)));
        let threads: Vec<_> = putting.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let winners: Vec<_> =
        stored.iter().zip(&contents).filter(|(put, _)| **put == Put::Stored).collect();
    assert!(!winners.is_empty());
    let found = get(store, name, WHOLE).unwrap();
    assert!(winners.iter().any(|(_, content)| **content == found), "the bytes of a winner, whole");
    let is_directory = store.settling().is_zero();
    assert!(winners.len() == 1 || !is_directory, "{} winners", winners.len());
}

fn parts_lie_within_the_object(place: &Place) {
    let store = place.store.as_ref();
    let content = bytes(5, 100_000);
    let name = put(store, &content);
    let part = |offset, bytes| get(store, name, Extent::Part { offset, bytes });
    assert!(part(10, 5000).unwrap() == content[10..5010]);
    assert!(part(99_999, 1).unwrap() == content[99_999..]);
    assert!(part(7, 0).unwrap().is_empty());
    assert!(part(99_999, 2).is_err());
    assert!(part(200_000, 1).is_err());
    assert!(part(u64::MAX, 2).is_err());
}

fn damage_shows_in_the_size_or_the_hash(place: &Place) {
    let store = place.store.as_ref();
    let content = bytes(6, 50_000);
    let name = put(store, &content);
    let exact = Extent::Whole { bytes: Some(50_000) };
    for length in [0, 1, 4096, 49_999, 50_001] {
        let mut bad = content.clone();
        bad.resize(length, 0);
        std::fs::write(place.file(name), bad).unwrap();
        let error = get(store, name, exact).unwrap_err();
        assert!(matches!(error, RemoteError::Corrupt(_)), "{length}: {error}");
    }
    let mut bad = content.clone();
    bad[25_000] ^= 1;
    std::fs::write(place.file(name), bad).unwrap();
    let found = get(store, name, exact).unwrap();
    assert!(named(&found) != name, "the caller's hash tells");
    store.put(name, Source::of(content.clone()), PutMode::Replace).unwrap();
    assert!(get(store, name, exact).unwrap() == content);
}

fn a_listing_is_complete_in_order_and_without_foreign_names(place: &Place) {
    let store = place.store.as_ref();
    let mut expected = BTreeSet::new();
    for number in 0..LISTING_MAX + 300 {
        let name = named(&number.to_le_bytes());
        let file = place.file(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, b"x").unwrap();
        expected.insert(name.to_string());
    }
    std::fs::write(place.files.join("blobs/ab/foreign"), b"x").unwrap();
    std::fs::write(place.files.join("blobs/foreign"), b"x").unwrap();
    let first = store.list(RemotePrefix::Blobs, None).unwrap();
    assert!(!first.is_last && first.objects.len() <= LISTING_MAX);
    let mut found = Vec::new();
    for_each(store, RemotePrefix::Blobs, |listed| {
        assert_eq!(listed.stat.bytes, 1);
        found.push(listed.name.to_string());
        Ok(())
    })
    .unwrap();
    assert!(found.is_sorted());
    assert!(found.iter().eq(expected.iter()), "{} of {}", found.len(), expected.len());
    assert_eq!(store.list(RemotePrefix::Chunks, None).unwrap().objects, []);
    assert_eq!(store.list(RemotePrefix::Manifests, None).unwrap().objects, []);
}

fn age_is_that_of_the_last_put_or_refresh(place: &Place) {
    let store = place.store.as_ref();
    let large = usize::try_from(PART_BYTES).unwrap() + 1;
    for content in [bytes(8, 1000), bytes(9, large)] {
        let name = put(store, &content);
        place.make_older(name, Duration::from_secs(5000));
        let age = || {
            let now = remote_now(store).unwrap();
            now.duration_since(store.head(name).unwrap().unwrap().modified).unwrap_or_default()
        };
        assert!((4990..5100).contains(&age().as_secs()), "{:?}", age());
        store.refresh(name).unwrap();
        assert!(age() < Duration::from_secs(60), "{:?}", age());
        assert!(get(store, name, WHOLE).unwrap() == content);
        let old = SystemTime::now() - Duration::from_secs(1000);
        assert!(!store.delete_if_older(name, old).unwrap());
        place.make_older(name, Duration::from_secs(5000));
        assert!(store.delete_if_older(name, old).unwrap());
        assert!(!store.delete_if_older(name, old).unwrap());
        assert!(matches!(store.refresh(name), Err(RemoteError::Missing(_))));
    }
}

fn a_source_that_ends_early_stores_nothing(place: &Place) {
    let store = place.store.as_ref();
    for length in [1000, PART_BYTES * 2] {
        let short = Source::new(Arc::new(vec![1; 999]), length);
        let name = named(&length.to_le_bytes());
        let error = store.put(name, short, PutMode::IfAbsent).unwrap_err();
        assert!(matches!(error, RemoteError::Local(_)), "{error}");
        assert_eq!(store.head(name).unwrap(), None);
    }
}

fn an_old_object_that_is_held_becomes_young(place: &Place) {
    let holder = Holder::new(Arc::clone(&place.store), Grace::default());
    let content = bytes(10, 1000);
    let (name, source) = (named(&content), Source::of(content));
    assert_eq!(holder.hold(name, &source).unwrap().put, Put::Stored);
    for (age_hours, becomes_young) in [(1, false), (23, true)] {
        place.make_older(name, Duration::from_secs(age_hours * 3600));
        let before = place.store.head(name).unwrap().unwrap().modified;
        assert_eq!(holder.hold(name, &source).unwrap().put, Put::AlreadyThere);
        let after = place.store.head(name).unwrap().unwrap().modified;
        assert_eq!(after > before, becomes_young, "{age_hours} h");
    }
}

fn a_marker_is_checked(place: &Place) {
    let store = place.store.as_ref();
    let id = attach(store, None).unwrap();
    assert_eq!(attach(store, Some(id)).unwrap(), id);
    let marker = place.files.join("KVFS-REMOTE");
    let good = std::fs::read(&marker).unwrap();
    let refused = |bad: &[u8], words: &str| {
        std::fs::write(&marker, bad).unwrap();
        let error = attach(store, None).unwrap_err();
        assert!(matches!(error, RemoteError::Foreign(_)), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(b"kvfs remote 99\nid 0\n", "has layout 99");
    refused(b"something else", "not that of a remote");
    refused(&[0xff; 10_000], "not that of a remote");
    refused(b"", "not that of a remote");
    std::fs::write(&marker, format!("kvfs remote 1\nid {:032x}\n", id.0 ^ 1)).unwrap();
    assert!(matches!(attach(store, Some(id)), Err(RemoteError::Foreign(_))));
    std::fs::remove_file(&marker).unwrap();
    assert!(matches!(attach(store, Some(id)), Err(RemoteError::Unreachable(_))), "not mounted");
    put(store, b"an object without a marker");
    let error = attach(store, None).unwrap_err();
    assert!(matches!(error, RemoteError::Foreign(_)), "{error}");
    std::fs::write(&marker, good).unwrap();
    assert_eq!(attach(store, Some(id)).unwrap(), id);
}

fn garbage_of_the_right_age_is_collected(place: &Place) {
    let store = place.store.as_ref();
    let [old, young] = [bytes(11, 100), bytes(12, 100)].map(|content| put(store, &content));
    let damaged = RemoteName::Chunk(ContentHash::of(b"nothing"));
    store.put(damaged, Source::of(b"garbage".to_vec()), PutMode::IfAbsent).unwrap();
    for name in [old, damaged] {
        place.make_older(name, Duration::from_secs(25 * 3600));
    }
    let collected = collect(store, Grace::default(), false).unwrap();
    assert_eq!((collected.deleted, collected.deleted_bytes, collected.young), (2, 107, 1));
    assert_eq!(store.head(old).unwrap(), None);
    assert!(store.head(young).unwrap().is_some());
}
