//! What is noted beside names and files: copies, attributes, the remote, the clock. And what of it a store tells
//! before it is mounted.

use super::*;
use crate::store::record::{EncodedCopy, RemoteCopy, RemoteIdentity, RemotePlace, RemoteState};
use crate::store::standing;
use crate::tier::encoding::Encoding;

fn remote_copy(state: RemoteState) -> RemoteCopy {
    RemoteCopy { content: [7; 32], encoding: Encoding::Raw, stored_bytes: 90, state }
}

#[test]
fn a_remote_copy_is_relied_upon_as_far_as_was_said() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    metadata.has_tiers = true;
    assert!(!metadata.has_remote_copies().unwrap() && !metadata.has_remote_copies);
    let file = inode(false).file().unwrap().clone();
    assert!(!metadata.is_named(&file) && !metadata.is_only_remote(OBJECT).unwrap());
    for (state, is_named, is_only) in [
        (RemoteState::Held, false, false),
        (RemoteState::Named, true, false),
        (RemoteState::Only, true, true),
        (RemoteState::Only, true, true),
    ] {
        metadata.set_remote_state(OBJECT, remote_copy(RemoteState::Held), state);
        assert_eq!(metadata.remote_copy(OBJECT).unwrap(), Some(remote_copy(state)));
        assert_eq!(metadata.is_named(&file), is_named, "{state:?}");
        assert_eq!(metadata.is_only_remote(OBJECT).unwrap(), is_only, "{state:?}");
        let only = (metadata.only_remote.objects, metadata.only_remote.stored_bytes);
        assert_eq!(only, if is_only { (1, 90) } else { (0, 0) });
    }
    assert!(metadata.has_remote_copies().unwrap());
    metadata.put_inode(Life::Durable, FILE, &inode(false));
    assert_eq!(metadata.arrivals.take(), None, "the remote has it");
    commit(&mut metadata);
    drop(metadata);
    let mut metadata = open(directory.path());
    assert!(metadata.has_remote_copies);
    assert!(metadata.is_only_remote(OBJECT).unwrap(), "whether there are tiers or not");
    assert_eq!(metadata.only_remote.objects, 1);
    metadata.note_arrival(FILE).unwrap();
    assert_eq!(metadata.arrivals.take(), Some(FILE));
    metadata.forget_remote_copy(OBJECT).unwrap();
    assert_eq!(metadata.remote_copy(OBJECT).unwrap(), None);
    assert_eq!((metadata.only_remote.objects, metadata.only_remote.stored_bytes), (0, 0));
}

#[test]
fn without_tiers_nobody_looks_for_copies() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let copy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 10 };
    assert!(!metadata.has_encoded_copies().unwrap());
    metadata.put_encoded_copy(OBJECT, &copy);
    metadata.put_remote_copy(OBJECT, &remote_copy(RemoteState::Only));
    assert!(metadata.has_encoded_copies().unwrap());
    assert_eq!(metadata.encoded_copy(OBJECT).unwrap(), None);
    assert!(!metadata.is_only_remote(OBJECT).unwrap());
    metadata.has_tiers = true;
    assert_eq!(metadata.encoded_copy(OBJECT).unwrap(), Some(copy));
    assert!(metadata.is_only_remote(OBJECT).unwrap());
    assert_eq!(metadata.forget_encoded_copy(OBJECT).unwrap(), Some(copy));
    assert_eq!(metadata.forget_encoded_copy(OBJECT).unwrap(), None);
}

#[test]
fn attributes_belong_to_their_inode_and_go_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let neighbour = InodeId(FILE.0 + 1);
    metadata.put_attribute(Life::Durable, FILE, b"user.a", b"one");
    commit(&mut metadata);
    metadata.put_attribute(Life::Volatile, FILE, b"user.bc", b"");
    metadata.put_attribute(Life::Durable, neighbour, b"user.d", b"other");
    let [a, bc] = [(b"user.a".to_vec(), b"one".to_vec()), (b"user.bc".to_vec(), vec![])];
    assert_eq!(metadata.attributes(FILE).unwrap(), [a.clone(), bc.clone()]);
    assert_eq!(metadata.attribute_names(FILE).unwrap(), [a.0, bc.0]);
    assert_eq!(metadata.attribute(FILE, b"user.a").unwrap(), Some(b"one".to_vec()));
    assert_eq!(metadata.attribute(FILE, b"user.d").unwrap(), None);
    // A value has its length before it.
    assert_eq!(metadata.attribute_bytes(FILE, b"").unwrap(), 6 + 1 + 3 + 7 + 1);
    assert_eq!(metadata.attribute_bytes(FILE, b"user.a").unwrap(), 7 + 1);
    metadata.make_durable(FILE, None);
    commit(&mut metadata);
    metadata.remove_attribute(Life::Durable, FILE, b"user.bc");
    assert_eq!(metadata.attribute_names(FILE).unwrap(), [b"user.a"]);
    metadata.remove_inode(Life::Durable, FILE).unwrap();
    assert_eq!(metadata.attributes(FILE).unwrap(), []);
    assert_eq!(metadata.attribute_names(neighbour).unwrap(), [b"user.d"]);
}

#[test]
fn a_directory_is_listed_from_wherever_somebody_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let mut metadata = open(directory.path());
    let [here, next] = [InodeId(5), InodeId(6)];
    for name in ["a", "b", "c"] {
        metadata.put_entry(Life::Durable, here, name.as_bytes(), entry(FILE));
    }
    commit(&mut metadata);
    metadata.remove_entry(Life::Durable, here, b"b");
    metadata.put_entry(Life::Volatile, here, b"d", entry(FILE));
    metadata.put_entry(Life::Durable, next, b"e", entry(FILE));
    let list = |from: u64, most: usize| {
        let mut found = Vec::new();
        let visit = |offset: u64, name: &[u8], _: Entry| {
            found.push((offset, String::from_utf8_lossy(name).into_owned()));
            found.len() < most
        };
        metadata.entries(here, from, visit).unwrap();
        found
    };
    let all = list(0, usize::MAX);
    let mut names: Vec<&str> = all.iter().map(|(_, name)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["a", "c", "d"]);
    assert_eq!(list(0, 2), all[..2]);
    assert_eq!(list(all[1].0, usize::MAX), all[1..]);
}

#[test]
fn a_store_tells_how_it_may_be_mounted() {
    let directory = tempfile::tempdir().unwrap();
    let standing = || {
        let store = Store::open_or_create(directory.path()).unwrap();
        standing::read(store.metadata().unwrap()).unwrap()
    };
    let mut metadata = open(directory.path());
    assert_eq!(metadata.clock().unwrap(), None);
    let now = Time { seconds: 12, nanoseconds: 7 };
    metadata.put_clock(now);
    metadata.put_entry(Life::Durable, InodeId::ROOT, b"models", entry(FILE));
    commit(&mut metadata);
    assert_eq!(metadata.clock().unwrap(), Some(now));
    drop(metadata);
    let found = standing();
    assert!(!found.is_in_use, "every mount has this name");
    assert!(found.identity.is_none() && found.place.is_none());
    let mut metadata = open(directory.path());
    metadata.put_entry(Life::Durable, FILE, b"a", entry(FILE));
    let place = RemotePlace { place: "/remote".to_owned(), since_seconds: 9 };
    metadata.put_single(&place);
    metadata.put_remote_copy(OBJECT, &remote_copy(RemoteState::Only));
    metadata.set_manifest_seen(3, Some(30), true);
    metadata.set_manifest_seen(4, Some(40), true);
    metadata.set_manifest_seen(5, Some(50), false);
    metadata.set_manifest_seen(6, Some(60), false);
    commit(&mut metadata);
    metadata.set_manifest_seen(6, None, false);
    commit(&mut metadata);
    assert_eq!(metadata.manifests_seen(true).unwrap(), [(3, 30), (4, 40)]);
    assert_eq!(metadata.manifests_seen(false).unwrap(), [(5, 50)]);
    assert_eq!(metadata.single().unwrap(), Some(place.clone()));
    // As by a kvfs that did not count what only the remote has.
    metadata.put(Life::Durable, keys::only_remote(), &OnlyRemote::default());
    let layer = std::mem::take(&mut metadata.active);
    metadata.writer().write(&layer).unwrap();
    drop(metadata);
    let found = standing();
    assert!(found.is_in_use && found.identity.is_none());
    assert_eq!(found.place, Some(place));
    assert_eq!((found.only_remote.objects, found.only_remote.stored_bytes), (1, 90));
    let mut metadata = open(directory.path());
    metadata.remove_entry(Life::Durable, FILE, b"a");
    let identity = RemoteIdentity { store: 1, remote: None };
    metadata.put_single(&identity);
    commit(&mut metadata);
    assert_eq!(metadata.single().unwrap(), Some(identity));
    drop(metadata);
    let found = standing();
    assert!(found.is_in_use && found.identity == Some(identity));
    assert_eq!(found.only_remote.objects, 1, "as the last mount counted");
}
