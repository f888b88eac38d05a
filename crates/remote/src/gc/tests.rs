//! Scripted interleavings on a real directory; ages are set with `utimensat(2)`.

use std::path::PathBuf;
use std::sync::Arc;

use super::*;
use crate::directory::Directory;
use crate::hold::Holder;
use crate::marker::attach;
use crate::names::{Publisher, Row};
use crate::transfer::Source;
use kvfs_encoding::Encoding;

const GRACE: Grace = Grace(Duration::from_secs(3600));

struct Place {
    directory: tempfile::TempDir,
    store: Arc<dyn BlobStore>,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn BlobStore> = Arc::new(Directory::open(directory.path()).unwrap());
        attach(store.as_ref(), None).unwrap();
        Place { directory, store }
    }

    fn path(&self, name: RemoteName) -> PathBuf {
        self.directory.path().join(name.to_string())
    }

    /// Makes an object so much older.
    fn age(&self, name: RemoteName, age: Duration) {
        let file = std::fs::File::options().append(true).open(self.path(name)).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    fn publisher(&self, id: u128) -> Publisher {
        Publisher::new(Arc::clone(&self.store), StoreId(id), GRACE).unwrap()
    }

    fn hold(&self, content: &[u8]) -> BlobName {
        let blob = BlobName { content: ContentHash::of(content), encoding: Encoding::Raw };
        let holder = Holder::new(Arc::clone(&self.store), GRACE);
        holder.hold(RemoteName::Blob(blob), &Source::of(content.to_vec())).unwrap();
        blob
    }
}

fn rows(blobs: &[BlobName]) -> impl Iterator<Item = Result<Row>> {
    let row = |(index, blob): (usize, &BlobName)| {
        Ok(Row { key: vec![u8::try_from(index).unwrap()], value: Vec::new(), blob: Some(*blob) })
    };
    blobs.iter().enumerate().map(row).collect::<Vec<_>>().into_iter()
}

#[test]
fn only_what_no_store_names_and_is_old_goes() {
    let place = Place::new();
    let [mine, theirs, shared, garbage, young] =
        [b"mine", b"thei", b"shar", b"garb", b"youn"].map(|content| place.hold(content));
    place.publisher(1).publish(1, rows(&[mine, shared]), None).unwrap();
    place.publisher(2).publish(1, rows(&[theirs, shared]), None).unwrap();
    for blob in [mine, theirs, shared, garbage] {
        place.age(RemoteName::Blob(blob), GRACE.0 * 2);
    }
    let dry = collect(place.store.as_ref(), GRACE, true).unwrap();
    assert!(place.path(RemoteName::Blob(garbage)).exists(), "a dry run deletes nothing");
    let collected = collect(place.store.as_ref(), GRACE, false).unwrap();
    assert_eq!(dry, collected);
    assert_eq!((collected.stores, collected.deleted, collected.young), (2, 1, 1));
    assert_eq!(collected.deleted_bytes, 4);
    for (blob, is_there) in
        [(mine, true), (theirs, true), (shared, true), (young, true), (garbage, false)]
    {
        assert_eq!(place.path(RemoteName::Blob(blob)).exists(), is_there);
    }
}

#[test]
fn chunks_of_manifests_that_are_gone_go_too() {
    let place = Place::new();
    let mut publisher = place.publisher(1);
    for version in 0..5_u8 {
        let blob = place.hold(&[version]);
        publisher.publish(1, rows(&[blob]), None).unwrap();
    }
    for prefix in [RemotePrefix::Blobs, RemotePrefix::Chunks] {
        for_each(place.store.as_ref(), prefix, |listed| {
            place.age(listed.name, GRACE.0 * 2);
            Ok(())
        })
        .unwrap();
    }
    // Of five versions three are kept, with a chunk and an object each.
    let collected = collect(place.store.as_ref(), GRACE, false).unwrap();
    assert_eq!((collected.deleted, collected.referenced), (4, 6));
}

#[test]
fn a_damaged_manifest_of_anybody_stops_every_deletion() {
    let place = Place::new();
    let garbage = place.hold(b"garbage");
    place.age(RemoteName::Blob(garbage), GRACE.0 * 2);
    let kept = place.hold(b"kept");
    let published = place.publisher(7).publish(1, rows(&[kept]), None).unwrap();
    let mut chunk = None;
    for_each(place.store.as_ref(), RemotePrefix::Chunks, |listed| {
        chunk = Some(listed.name);
        Ok(())
    })
    .unwrap();
    for victim in [RemoteName::Manifest(StoreId(7), published.sequence), chunk.unwrap()] {
        let path = place.path(victim);
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[good.len() / 2] ^= 1;
        std::fs::write(&path, bad).unwrap();
        let error = collect(place.store.as_ref(), GRACE, false).unwrap_err();
        assert!(matches!(error, RemoteError::Corrupt(_)), "{error}");
        assert!(error.to_string().contains("nothing was deleted"), "{error}");
        assert_eq!(error.to_string().matches("this copy is not used").count(), 1, "{error}");
        std::fs::remove_file(&path).unwrap();
        if matches!(victim, RemoteName::Chunk(_)) {
            let error = collect(place.store.as_ref(), GRACE, false).unwrap_err();
            assert!(matches!(error, RemoteError::Corrupt(_)), "{error}");
        }
        std::fs::write(&path, good).unwrap();
    }
    assert!(place.path(RemoteName::Blob(garbage)).exists());
    assert_eq!(collect(place.store.as_ref(), GRACE, false).unwrap().deleted, 1);
}

#[test]
fn an_object_that_is_held_and_published_between_scan_and_deletion_stays() {
    let place = Place::new();
    let blob = place.hold(b"found again");
    let name = RemoteName::Blob(blob);
    place.age(name, GRACE.0 * 2);
    let mut run = Run {
        store: place.store.as_ref(),
        grace: GRACE,
        only_look: false,
        start: Stamp::now(),
        now: remote_now(place.store.as_ref()).unwrap(),
        collected: Collected::default(),
    };
    let references = find_references(place.store.as_ref(), &[]).unwrap();
    let seen = place.store.head(name).unwrap().unwrap();
    assert!(!references.names(blob), "the scan comes before the publication");

    let since = Stamp::now();
    assert_eq!(place.hold(b"found again"), blob);
    let published = place.publisher(1).publish(1, rows(&[blob]), Some(since)).unwrap();
    assert!(published.is_reliable);

    run.look_at(name, seen, references.names(blob)).unwrap();
    assert!(place.path(name).exists());
    assert_eq!((run.collected.deleted, run.collected.young), (0, 1));
    let collected = collect(place.store.as_ref(), GRACE, false).unwrap();
    assert_eq!((collected.deleted, collected.referenced), (0, 2));
}

#[test]
fn a_deletion_cut_off_half_way_is_finished_or_undone() {
    let place = Place::new();
    let [old, refreshed] = [b"old", b"new"].map(|content| place.hold(content));
    place.age(RemoteName::Blob(old), GRACE.0 * 2);
    let condemned = |blob| {
        let path = place.path(RemoteName::Blob(blob));
        let leaf = format!(".tmp-old-{}", path.file_name().unwrap().to_str().unwrap());
        path.with_file_name(leaf)
    };
    for blob in [old, refreshed] {
        std::fs::hard_link(place.path(RemoteName::Blob(blob)), condemned(blob)).unwrap();
        std::fs::remove_file(place.path(RemoteName::Blob(blob))).unwrap();
    }
    assert_eq!(collect(place.store.as_ref(), GRACE, false).unwrap().swept, 1);
    assert!(!condemned(old).exists() && !condemned(refreshed).exists());
    assert!(!place.path(RemoteName::Blob(old)).exists());
    assert!(place.path(RemoteName::Blob(refreshed)).exists());
}

#[test]
fn a_manifest_that_comes_too_late_is_not_relied_upon() {
    let place = Place::new();
    let blob = place.hold(b"late");
    let grace = Grace(Duration::from_millis(40));
    let mut publisher = Publisher::new(Arc::clone(&place.store), StoreId(1), grace).unwrap();
    let since = Stamp::now();
    std::thread::sleep(grace.publish_within());
    assert!(!publisher.publish(1, rows(&[blob]), Some(since)).unwrap().is_reliable);
}
