//! Manifests of names: an empty store finds all of it again.

use std::sync::Arc;

use kvfs::tier::content::ContentHash;
use kvfs::tier::encoding::Encoding;
use kvfs::tier::remote::hold::Grace;
use kvfs::tier::remote::names::{
    Found, OwnManifests, Publisher, Row, VERSIONS_KEPT, read_latest, stores, versions,
};
use kvfs::tier::remote::{
    BlobName, PutMode, RemoteError, RemoteName, RemotePrefix, Result, Sequence, Source, StoreId,
    for_each,
};

use crate::place::{Place, bytes};

const STORE: StoreId = StoreId(0xfeed);

/// A table of so many rows, a third of which rely on an object.
fn table(rows: u64) -> Vec<Row> {
    let row = |number: u64| Row {
        key: [b"E".as_slice(), &number.to_be_bytes()].concat(),
        value: bytes(number, 50),
        blob: number.is_multiple_of(3).then(|| BlobName {
            content: ContentHash::of(&number.to_le_bytes()),
            encoding: Encoding::Zstd,
        }),
    };
    (0..rows).map(row).collect()
}

fn snapshot(table: &[Row]) -> impl Iterator<Item = Result<Row>> + '_ {
    table.iter().cloned().map(Ok)
}

fn publisher(place: &Place) -> Publisher {
    Publisher::new(Arc::clone(&place.store), STORE, Grace::default()).unwrap()
}

fn latest(place: &Place) -> (Sequence, Vec<Row>, usize) {
    let names = read_latest(&place.store, STORE).unwrap().unwrap();
    let rows = names.rows().map(Result::unwrap).collect();
    (names.sequence(), rows, names.damaged.len())
}

/// One of the behaviours of [`crate::suite`].
pub(crate) fn a_table_comes_back_and_only_what_changed_is_sent(place: &Place) {
    assert!(read_latest(&place.store, STORE).unwrap().is_none());
    let mut table = table(50_000);
    let mut publisher = publisher(place);
    let first = publisher.publish(3, snapshot(&table), None).unwrap();
    assert!(first.is_reliable && first.chunks == first.chunks_sent && first.chunks > 10);
    assert_eq!(latest(place), (Sequence(1), table.clone(), 0));

    table[30_000].value = b"changed".to_vec();
    let second = publisher.publish(3, snapshot(&table), None).unwrap();
    assert_eq!((second.sequence, second.chunks_sent), (Sequence(2), 1));
    assert_eq!(latest(place), (Sequence(2), table.clone(), 0));

    // Another process knows what is there as well.
    table.remove(10_000);
    let third = self::publisher(place).publish(3, snapshot(&table), None).unwrap();
    assert!((1..=2).contains(&third.chunks_sent), "{third:?}");
    assert_eq!(latest(place), (Sequence(3), table, 0));
    assert_eq!(stores(place.store.as_ref()).unwrap(), [STORE]);
    let names = read_latest(&place.store, STORE).unwrap().unwrap();
    assert_eq!((names.layout(), names.row_count()), (3, 49_999));
}

#[test]
fn an_empty_table_is_a_table_too() {
    let place = Place::directory();
    publisher(&place).publish(1, std::iter::empty(), None).unwrap();
    assert_eq!(latest(&place), (Sequence(1), Vec::new(), 0));
}

#[test]
fn the_last_versions_are_kept() {
    let place = Place::directory();
    let mut publisher = publisher(&place);
    for rows in 1..=6 {
        publisher.publish(1, snapshot(&table(rows)), None).unwrap();
    }
    let kept = versions(place.store.as_ref(), STORE).unwrap();
    assert_eq!(kept, [Sequence(4), Sequence(5), Sequence(6)]);
    assert_eq!(kept.len(), VERSIONS_KEPT);
}

#[test]
fn a_damaged_manifest_falls_back_to_the_one_before() {
    let place = Place::directory();
    let mut publisher = publisher(&place);
    publisher.publish(1, snapshot(&table(10)), None).unwrap();
    publisher.publish(1, snapshot(&table(20)), None).unwrap();
    let newest = place.file(RemoteName::Manifest(STORE, Sequence(2)));
    let good = std::fs::read(&newest).unwrap();
    for length in [0, 1, 11, good.len() - 1] {
        std::fs::write(&newest, &good[..length]).unwrap();
        assert_eq!(latest(&place), (Sequence(1), table(10), 1), "length {length}");
    }
    // A whole manifest in the wrong place.
    let first = place.file(RemoteName::Manifest(STORE, Sequence(1)));
    std::fs::copy(&first, &newest).unwrap();
    assert_eq!(latest(&place), (Sequence(1), table(10), 1));
    std::fs::write(&first, b"damaged too").unwrap();
    assert!(matches!(read_latest(&place.store, STORE), Err(RemoteError::Corrupt(_))));
    // The next publication finds its number past the damaged ones.
    let next = self::publisher(&place).publish(1, snapshot(&table(30)), None).unwrap();
    assert_eq!((next.sequence, latest(&place).1), (Sequence(3), table(30)));
}

#[test]
fn a_damaged_or_missing_chunk_counts_as_a_damaged_manifest() {
    let place = Place::directory();
    let mut publisher = publisher(&place);
    publisher.publish(1, snapshot(&table(10)), None).unwrap();
    let chunks = || walk(&place.files.join("chunks"));
    let before = chunks();
    publisher.publish(1, snapshot(&table(20)), None).unwrap();
    let newest = chunks().into_iter().find(|chunk| !before.contains(chunk)).unwrap();
    let good = std::fs::read(&newest).unwrap();
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 0x10;
    std::fs::write(&newest, bad).unwrap();
    assert_eq!(latest(&place), (Sequence(1), table(10), 1));
    std::fs::remove_file(&newest).unwrap();
    assert_eq!(latest(&place), (Sequence(1), table(10), 1));
    std::fs::write(&newest, vec![0; 16 << 20]).unwrap();
    assert_eq!(latest(&place), (Sequence(1), table(10), 1));
    std::fs::write(&newest, good).unwrap();
    assert_eq!(latest(&place), (Sequence(2), table(20), 0));
}

/// One of the behaviours of [`crate::suite`].
pub(crate) fn what_is_lost_is_noticed_and_sent_again(place: &Place) {
    let mut publisher = publisher(place);
    assert_eq!(publisher.look().unwrap(), Found::All, "nothing was published");
    let table = table(50_000);
    publisher.publish(3, snapshot(&table), None).unwrap();
    assert_eq!(publisher.look().unwrap(), Found::All);
    let mut chunks = Vec::new();
    for_each(place.store.as_ref(), RemotePrefix::Chunks, |listed| {
        chunks.push(listed.name);
        Ok(())
    })
    .unwrap();
    place.store.delete(chunks[0]).unwrap();
    place.store.put(chunks[1], Source::of(b"cut".to_vec()), PutMode::Replace).unwrap();
    let lost = |found: Found| match found {
        Found::All => panic!("nothing was noticed"),
        Found::Less(what) => what,
    };
    // By a process that has published it, and by the next one.
    let what = lost(self::publisher(place).look().unwrap());
    assert!(what.contains("2 of "), "{what}");
    assert_eq!(lost(publisher.look().unwrap()), what);
    let second = publisher.publish(3, snapshot(&table), None).unwrap();
    assert_eq!(second.chunks_sent, 2);
    assert_eq!(publisher.look().unwrap(), Found::All);
    assert_eq!(latest(place), (Sequence(2), table.clone(), 0));
    // What lies in the place of a part that is new here is not taken for it.
    place.store.put(chunks[1], Source::of(b"cut".to_vec()), PutMode::Replace).unwrap();
    place.store.delete(RemoteName::Manifest(STORE, Sequence(2))).unwrap();
    place.store.delete(RemoteName::Manifest(STORE, Sequence(1))).unwrap();
    let what = lost(publisher.look().unwrap());
    assert!(what.contains("manifest 0000000000000002"), "{what}");
    let own = OwnManifests { highest: Sequence(2), authors: Vec::new() };
    let mut next = self::publisher(place).knowing(own);
    assert_eq!(next.publish(3, snapshot(&table), None).unwrap().sequence, Sequence(3));
    assert_eq!(latest(place), (Sequence(3), table, 0));
}

#[test]
fn a_store_knows_its_own_manifests_from_those_of_a_copy() {
    let place = Place::directory();
    let publish = |publisher: &mut Publisher| {
        publisher.publish(1, snapshot(&table(10)), None).map(|published| published.sequence)
    };
    let somebody_else = |outcome: Result<Sequence>| {
        let error = outcome.unwrap_err();
        assert!(matches!(error, RemoteError::Foreign(_)), "{error}");
        assert!(error.to_string().contains("somebody else publishes"), "{error}");
    };
    let mut first = publisher(&place);
    let noted_before = first.own_manifests();
    publish(&mut first).unwrap();
    let noted_after = first.own_manifests();
    // Killed right after it published, and before it could note that it did.
    assert_eq!(publish(&mut publisher(&place).knowing(noted_before.clone())).unwrap(), Sequence(2));
    // What it does not know by now is somebody else's, in the next mount as well.
    somebody_else(publish(&mut first));
    somebody_else(publish(&mut publisher(&place).knowing(noted_after.clone())));
    somebody_else(publisher(&place).knowing(noted_after).look().map(|_| Sequence(0)));
    assert_eq!(versions(place.store.as_ref(), STORE).unwrap().len(), 2);

    // A mount that is killed before it publishes does not push out the one that did.
    let mut own = noted_before.clone();
    for _ in 0..20 {
        own = publisher(&place).knowing(own).own_manifests();
    }
    assert_eq!((own.authors.len(), own.highest), (8, Sequence(0)));
}

fn walk(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in directory.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.append(&mut walk(&path)) } else { files.push(path) }
    }
    files
}
