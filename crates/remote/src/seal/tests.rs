//! Sealed directories, and what somebody who can write to them may try.

use std::path::{Path, PathBuf};

use super::*;
use crate::directory::Directory;
use crate::gc::collect;
use crate::hold::{Grace, Holder};
use crate::marker::attach_sealed;
use crate::names::table::Table;
use crate::names::{Publisher, Row, read_latest, versions};
use crate::transfer::MemorySink;
use kvfs_encoding::Encoding;

const GRACE: Grace = Grace(Duration::from_secs(3600));
const WHOLE: Extent = Extent::Whole { bytes: None };
const PLAIN: &[u8] = b"what nobody else may read, and longer than any accident";

fn key() -> String {
    KeyRing::generate().unwrap()
}

/// A file with the keys of several.
fn ring(files: &[&str]) -> KeyRing {
    let keys = files.iter().flat_map(|file| file.lines().skip(1));
    let lines: Vec<&str> = files[0].lines().take(1).chain(keys).collect();
    lines.join("\n").parse().unwrap()
}

fn directory_at(path: &Path) -> Arc<dyn BlobStore> {
    Arc::new(Directory::open(path).unwrap())
}

/// As a machine that mounts it.
fn machine(path: &Path, keys: KeyRing) -> Result<Arc<dyn BlobStore>> {
    let store = directory_at(path);
    let id = attach_sealed(store.as_ref(), None, Some(&keys))?;
    let seal = Seal { keys: Arc::new(keys), numbers: Arc::default() };
    Ok(Arc::new(Sealed::new(store, id, &seal)))
}

fn blob(bytes: &[u8]) -> BlobName {
    BlobName { content: ContentHash::of(bytes), encoding: Encoding::Raw }
}

fn put(store: &dyn BlobStore, bytes: &[u8]) -> Put {
    let source = Source::of(bytes.to_vec());
    store.put(RemoteName::Blob(blob(bytes)), source, PutMode::IfAbsent).unwrap()
}

fn get(store: &dyn BlobStore, bytes: &[u8], extent: Extent) -> Result<Vec<u8>> {
    let sink = MemorySink::new(1 << 20);
    store.get(RemoteName::Blob(blob(bytes)), extent, sink.clone())?;
    Ok(sink.take())
}

/// Files below a directory, but for the marker.
fn files(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries
        .flat_map(|entry| if entry.is_dir() { files(&entry) } else { vec![entry] })
        .filter(|file| !file.ends_with("KVFS-REMOTE"))
        .collect();
    found.sort();
    found
}

fn refusal(outcome: Result<Arc<dyn BlobStore>>) -> String {
    match outcome {
        Err(RemoteError::Key(text)) => text,
        other => panic!("{other:?}"),
    }
}

fn rows(blobs: &[BlobName]) -> Vec<Result<Row>> {
    let row = |(index, blob): (usize, &BlobName)| {
        Ok(Row {
            key: vec![u8::try_from(index).unwrap()],
            value: PLAIN.to_vec(),
            blob: Some(*blob),
        })
    };
    blobs.iter().enumerate().map(row).collect()
}

fn publisher(store: &Arc<dyn BlobStore>) -> Publisher {
    Publisher::new(Arc::clone(store), StoreId(7), GRACE).unwrap()
}

fn publish(publisher: &mut Publisher, blobs: &[BlobName]) -> Sequence {
    publisher.publish(1, rows(blobs).into_iter(), None).unwrap().sequence
}

#[test]
fn nothing_of_the_bytes_or_of_their_hash_is_there_and_equal_bytes_are_one_object() {
    let (place, key) = (tempfile::tempdir().unwrap(), key());
    let one = machine(place.path(), ring(&[&key])).unwrap();
    let two = machine(place.path(), ring(&[&key])).unwrap();
    assert_eq!(put(one.as_ref(), PLAIN), Put::Stored);
    assert_eq!(put(two.as_ref(), PLAIN), Put::AlreadyThere);
    publish(&mut publisher(&one), &[blob(PLAIN)]);
    for extent in [WHOLE, Extent::Whole { bytes: Some(PLAIN.len() as u64) }] {
        assert_eq!(get(two.as_ref(), PLAIN, extent).unwrap(), PLAIN);
    }
    let part = Extent::Part { offset: 5, bytes: 6 };
    assert_eq!(get(two.as_ref(), PLAIN, part).unwrap(), PLAIN[5..11]);
    assert!(get(two.as_ref(), PLAIN, Extent::Whole { bytes: Some(9) }).is_err());
    let hash = ContentHash::of(PLAIN).to_string();
    assert_eq!(files(place.path()).len(), 3, "an object, a chunk and a manifest");
    for file in files(place.path()) {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!bytes.windows(8).any(|window| PLAIN.windows(8).any(|plain| plain == window)));
        assert!(!file.to_str().unwrap().contains(&hash));
    }

    assert_eq!(
        one.place(),
        directory_at(place.path()).place(),
        "what goes wrong is told with the place"
    );
    let elsewhere = tempfile::tempdir().unwrap();
    put(machine(elsewhere.path(), ring(&[&key])).unwrap().as_ref(), PLAIN);
    let name = |place: &Path| files(&place.join("blobs"))[0].file_name().unwrap().to_owned();
    assert_ne!(name(place.path()), name(elsewhere.path()), "each remote has names of its own");
}

#[test]
fn a_missing_a_needless_and_a_wrong_key_are_three_refusals() {
    let (sealed, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let key = key();
    machine(sealed.path(), ring(&[&key])).unwrap();
    attach_sealed(directory_at(plain.path()).as_ref(), None, None).unwrap();
    let missing = attach_sealed(directory_at(sealed.path()).as_ref(), None, None);
    let missing = refusal(missing.map(|_| directory_at(sealed.path())));
    let needless = refusal(machine(plain.path(), ring(&[&key])));
    let wrong = refusal(machine(sealed.path(), ring(&[&self::key()])));
    assert!(missing.contains("is sealed: give the file"), "{missing}");
    assert!(needless.contains("is not sealed"), "{needless}");
    assert!(wrong.contains("which the key file does not hold"), "{wrong}");
    for line in [missing, needless, wrong] {
        assert!(line.contains("--remote-key") && !line.contains('\n'), "{line}");
    }
    let marker = sealed.path().join("KVFS-REMOTE");
    let good = std::fs::read_to_string(&marker).unwrap();
    let (head, last) = good.trim_end().split_at(good.len() - 2);
    let changed = format!("{head}{}\n", if last == "0" { "1" } else { "0" });
    std::fs::write(&marker, changed).unwrap();
    assert!(refusal(machine(sealed.path(), ring(&[&key]))).contains("somebody has changed"));
    std::fs::write(&marker, good.lines().take(2).collect::<Vec<_>>().join("\n")).unwrap();
    let error = machine(sealed.path(), ring(&[&key])).unwrap_err();
    assert!(matches!(error, RemoteError::Foreign(_)), "{error}");
}

#[test]
fn the_first_key_writes_all_read_and_whoever_lacks_one_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let (old, new) = (key(), key());
    let before = machine(place.path(), ring(&[&old])).unwrap();
    put(before.as_ref(), b"before");
    let after = machine(place.path(), ring(&[&new, &old])).unwrap();
    assert_eq!(get(after.as_ref(), b"before", WHOLE).unwrap(), b"before");
    assert!(after.head(RemoteName::Blob(blob(b"before"))).unwrap().is_some());
    after.refresh(RemoteName::Blob(blob(b"before"))).unwrap();
    assert_eq!(put(after.as_ref(), b"after"), Put::Stored);
    assert!(matches!(get(before.as_ref(), b"after", WHOLE), Err(RemoteError::Missing(_))));
    assert_eq!(put(after.as_ref(), b"before"), Put::Stored, "under the new key");
    assert_eq!(files(&place.path().join("blobs")).len(), 3);

    for keys in [ring(&[&old]), ring(&[&new])] {
        assert!(refusal(machine(place.path(), keys)).contains("does not hold"));
    }
    let last = machine(place.path(), ring(&[&old, &new])).unwrap();
    assert_eq!(get(last.as_ref(), b"after", WHOLE).unwrap(), b"after");
    after.delete(RemoteName::Blob(blob(b"before"))).unwrap();
    assert!(matches!(get(last.as_ref(), b"before", WHOLE), Err(RemoteError::Missing(_))));
}

#[test]
fn a_key_that_another_machine_has_overwritten_is_listed_again() {
    let place = tempfile::tempdir().unwrap();
    let (old, new) = (key(), key());
    drop(machine(place.path(), ring(&[&old])).unwrap());
    let marker = place.path().join("KVFS-REMOTE");
    let without = std::fs::read(&marker).unwrap();
    let keys = ring(&[&new, &old]);
    let both = machine(place.path(), ring(&[&new, &old])).unwrap();
    let with = std::fs::read(&marker).unwrap();
    assert_ne!(with, without);
    // It had read the list before, and wrote it afterwards.
    std::fs::write(&marker, &without).unwrap();
    crate::marker::check_id(both.as_ref(), Some(&keys)).unwrap();
    assert_eq!(std::fs::read(&marker).unwrap(), with);
    assert!(refusal(machine(place.path(), ring(&[&old]))).contains("does not hold"));
}

#[test]
fn swapped_and_damaged_objects_are_damage() {
    let (place, key) = (tempfile::tempdir().unwrap(), key());
    let store = machine(place.path(), ring(&[&key])).unwrap();
    put(store.as_ref(), b"one");
    put(store.as_ref(), b"two");
    let found = files(&place.path().join("blobs"));
    let bytes: Vec<Vec<u8>> = found.iter().map(|file| std::fs::read(file).unwrap()).collect();
    std::fs::write(&found[0], &bytes[1]).unwrap();
    std::fs::write(&found[1], &bytes[0]).unwrap();
    for name in [b"one", b"two"] {
        assert!(matches!(get(store.as_ref(), name, WHOLE), Err(RemoteError::Corrupt(_))));
    }
    std::fs::write(&found[0], &bytes[0][..bytes[0].len() - 1]).unwrap();
    std::fs::write(&found[1], [b"kvfsseal".as_slice(), &[0xff; 5000]].concat()).unwrap();
    for name in [b"one", b"two"] {
        assert!(matches!(get(store.as_ref(), name, WHOLE), Err(RemoteError::Corrupt(_))));
    }
}

#[test]
fn an_older_manifest_is_noticed_by_whoever_saw_a_newer_one() {
    let (place, key) = (tempfile::tempdir().unwrap(), key());
    let ours = machine(place.path(), ring(&[&key])).unwrap();
    put(ours.as_ref(), PLAIN);
    let mut publishing = publisher(&ours);
    let mut saved = Vec::new();
    let manifest = |number| place.path().join(RemoteName::Manifest(StoreId(7), number).to_string());
    for _ in 0..3 {
        let number = publish(&mut publishing, &[blob(PLAIN)]);
        saved.push((number, std::fs::read(manifest(number)).unwrap()));
    }
    let reader = machine(place.path(), ring(&[&key])).unwrap();
    assert_eq!(Table::newer(&reader, StoreId(7), None).unwrap().unwrap().sequence(), Sequence(3));

    // Put back, under its own number and under a higher one.
    for number in [2, 3] {
        std::fs::remove_file(manifest(Sequence(number))).unwrap();
    }
    let corrupt = |outcome: Result<()>| matches!(outcome, Err(RemoteError::Corrupt(_)));
    assert!(corrupt(Table::newer(&reader, StoreId(7), None).map(drop)));
    assert!(corrupt(read_latest(&reader, StoreId(7)).map(drop)));
    assert!(corrupt(versions(reader.as_ref(), StoreId(7)).map(drop)));
    let refused = || collect(reader.as_ref(), GRACE, false).unwrap_err().to_string();
    assert!(refused().contains("nothing was deleted"), "{}", refused());
    assert!(refused().contains("and now only older ones are listed"), "{}", refused());
    // Not even one: all that its store relies on would go.
    let first = manifest(Sequence(1));
    let bytes = std::fs::read(&first).unwrap();
    std::fs::remove_file(&first).unwrap();
    assert!(refused().contains("and now none are listed"), "{}", refused());
    std::fs::write(&first, bytes).unwrap();
    std::fs::write(manifest(Sequence(9)), &saved[0].1).unwrap();
    assert!(corrupt(Table::newer(&reader, StoreId(7), None).map(drop)));
    std::fs::remove_file(manifest(Sequence(9))).unwrap();
    let newcomer = machine(place.path(), ring(&[&key])).unwrap();
    let seen = Table::newer(&newcomer, StoreId(7), None).unwrap().unwrap();
    assert_eq!(seen.sequence(), Sequence(1), "who has seen nothing cannot know");

    // The store itself goes on behind what it has published.
    assert_eq!(publish(&mut publisher(&ours), &[blob(PLAIN)]), Sequence(4));
    assert!(collect(reader.as_ref(), GRACE, false).is_ok());
}

#[test]
fn a_publisher_passes_over_what_others_put_in_its_place() {
    let (place, key) = (tempfile::tempdir().unwrap(), key());
    let store = machine(place.path(), ring(&[&key])).unwrap();
    put(store.as_ref(), PLAIN);
    let mut publishing = publisher(&store);
    publish(&mut publishing, &[blob(PLAIN)]);
    let forged = place.path().join(RemoteName::Manifest(StoreId(7), Sequence(2)).to_string());
    std::fs::write(forged, [0xff; 4000]).unwrap();
    assert_eq!(publish(&mut publishing, &[blob(PLAIN)]), Sequence(3));
}

#[test]
fn garbage_is_collected_by_its_keyed_name_and_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let (old, new) = (key(), key());
    let before = machine(place.path(), ring(&[&old])).unwrap();
    for bytes in [b"old named", b"old waste"] {
        put(before.as_ref(), bytes);
    }
    let store = machine(place.path(), ring(&[&new, &old])).unwrap();
    let holder = Holder::new(Arc::clone(&store), GRACE);
    for bytes in [b"new named", b"new waste"] {
        holder.hold(RemoteName::Blob(blob(bytes)), &Source::of(bytes.to_vec())).unwrap();
    }
    publish(&mut publisher(&store), &[blob(b"old named"), blob(b"new named")]);
    for file in files(place.path()) {
        let file = std::fs::File::options().append(true).open(file).unwrap();
        file.set_modified(SystemTime::now() - GRACE.0 * 2).unwrap();
    }
    let collected = collect(store.as_ref(), GRACE, false).unwrap();
    assert_eq!((collected.referenced, collected.deleted, collected.young), (3, 2, 0));
    for (bytes, is_there) in
        [(b"old named", true), (b"new named", true), (b"old waste", false), (b"new waste", false)]
    {
        assert_eq!(get(store.as_ref(), bytes, WHOLE).is_ok(), is_there);
    }
}
