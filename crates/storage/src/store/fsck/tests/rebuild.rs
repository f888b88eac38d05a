//! The records are lost, and made again from notes, bytes, and what can still be read.

use super::*;
use crate::store::database::{RECORDS, open_database};
use crate::store::description::Description;
use crate::store::record::{RemoteIdentity, RemotePlace};

/// The store of [`Patient::new`], with what its objects say of themselves.
fn described() -> Patient {
    let patient = Patient::new();
    let layer = "models/m/sequences/s/000";
    for (id, paths) in [
        (MANIFEST, vec!["models/m/manifest.json".to_owned()]),
        (PAGE, vec![format!("{layer}/0000000.safetensors")]),
        (STATE, vec!["models/m/sequences/s/001/state-0000016.safetensors".to_owned()]),
        (TAIL, vec![format!("{layer}/0000016.tail")]),
        (TOKENS, vec!["models/m/sequences/s/tokens".to_owned()]),
        (A, vec!["files/a".to_owned(), "files/d/linked".to_owned()]),
        (B, vec!["files/d/b".to_owned()]),
    ] {
        let paths = paths.into_iter().map(String::into_bytes).collect();
        let note = Description::new(
            paths,
            patient.records.get(&keys::inode(id)),
            patient.records.get(&keys::object(object(id))),
        );
        patient.store.describe(object(id), &note).unwrap();
    }
    patient
}

/// The records, and one that does not fit to what they add up to.
fn write_damaged(patient: &Patient) {
    patient.write();
    let database = open_database(patient.store.metadata().unwrap()).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(RECORDS).unwrap().insert(&b"!"[..], &b""[..]).unwrap();
    transaction.commit().unwrap();
}

fn rebuilt(patient: &Patient) -> (Rebuilt, Vec<String>) {
    let (rebuilt, report) = rebuild(&patient.store, &|_, _| ()).unwrap();
    (rebuilt, lines(&report, true))
}

fn id(records: &Records, path: &str) -> Option<InodeId> {
    path.split('/').try_fold(ROOT, |at, part| {
        let key = keys::entry(at, part.as_bytes());
        records.0.contains_key(&key).then(|| records.get::<Entry>(&key).inode)
    })
}

fn inode(records: &Records, path: &str) -> Inode {
    records.get(&keys::inode(id(records, path).unwrap_or_else(|| panic!("{path}"))))
}

const PATHS: [&str; 7] = [
    "models/m/manifest.json",
    "models/m/sequences/s/000/0000000.safetensors",
    "models/m/sequences/s/001/state-0000016.safetensors",
    "models/m/sequences/s/000/0000016.tail",
    "models/m/sequences/s/tokens",
    "files/a",
    "files/d/b",
];

#[test]
fn sound_records_are_not_made_anew() {
    let patient = described();
    patient.write();
    let outcome = rebuild(&patient.store, &|_, _| ());
    assert!(matches!(outcome, Err(StoreError::MetadataSound(_))));
    assert_same(&patient.read(), &patient.records, "after it was refused");
}

#[test]
fn without_records_notes_tell_all_of_a_file() {
    let patient = described();
    assert_eq!(rebuilt(&patient), (Rebuilt { files: 7, lost: 0 }, Vec::new()));
    let found = patient.read();
    for path in PATHS {
        let (old, new) = (inode(&patient.records, path), inode(&found, path));
        assert_eq!((old.mode, old.uid, old.links), (new.mode, new.uid, new.links), "{path}");
        let [old, new] = [&old, &new].map(|inode| inode.file().unwrap().clone());
        assert_eq!((old.object, old.unsettled), (new.object, new.unsettled), "{path}");
        assert_eq!(old.size, new.size, "{path}");
        let key = keys::object(old.object.unwrap());
        assert_eq!(found.0[&key], patient.records.0[&key], "{path}");
        assert_eq!(
            found.0.contains_key(&keys::unsettled(id(&found, path).unwrap())),
            old.unsettled
        );
        let is_new = id(&found, path).unwrap().0 >> 32 == 2;
        assert!(is_new, "no mount has given out that number");
    }
    assert_eq!(id(&found, "files/d/linked"), id(&found, "files/a"));
    let layer = id(&found, "models/m/sequences/s/000").unwrap();
    let tail = inode(&found, PATHS[3]).file().unwrap().role;
    assert_eq!(tail, Role::Tail { start: 16, directory: layer });
    let a: Inode = patient.read_as_is().get(&keys::inode(id(&found, "files/a").unwrap()));
    assert_eq!((a.mtime, a.ctime), (THEN, THEN), "not those of the object's file");
    assert_eq!(found.get::<(u32, bool)>(&keys::epoch()), (2, false), "as after a crash");
    assert_eq!(found.0[&keys::totals()], patient.records.0[&keys::totals()]);
    assert_eq!(patient.quarantined(), Vec::<String>::new());
}

#[test]
fn what_says_nothing_of_itself_is_lost_and_found() {
    let mut patient = Patient::new();
    patient.encode(B);
    patient.remove_raw(B);
    let (counts, told) = rebuilt(&patient);
    assert_eq!((counts, told), (Rebuilt { files: 0, lost: 7 }, Vec::new()));
    let found = patient.read();
    for file in [MANIFEST, PAGE, STATE, TAIL, TOKENS, A, B] {
        let path = format!("files/lost+found/#{}", object(file));
        let new = inode(&found, &path);
        assert_eq!((new.mode, new.links), (0o600, 1), "{path}");
        let old = patient.records.get::<Inode>(&keys::inode(file)).file().unwrap().clone();
        let new = new.file().unwrap();
        assert_eq!((new.object, new.size), (old.object, old.size), "{path}");
        assert_eq!((new.role, new.unsettled), (Role::Plain, false));
        let record: ObjectRecord = found.get(&keys::object(object(file)));
        assert_eq!((record.kind, record.length), (ObjectKind::File, new.size));
    }
    // What is encoded was at rest, and is what it decodes to.
    let sound: ObjectRecord = patient.records.get(&keys::object(object(B)));
    assert_eq!(found.get::<ObjectRecord>(&keys::object(object(B))).checksum, sound.checksum);
    let key = keys::encoded_copy(object(B));
    assert_eq!(found.0[&key], patient.records.0[&key]);
}

#[test]
fn raw_bytes_without_a_note_count_more_than_an_encoded_copy() {
    let mut patient = Patient::new();
    patient.encode(B);
    patient.overwrite(B, b"more", 10_000);
    rebuilt(&patient);
    let found = patient.read();
    let path = format!("files/lost+found/#{}", object(B));
    assert_eq!(inode(&found, &path).file().unwrap().size, 10_004);
    assert!(!found.0.contains_key(&keys::encoded_copy(object(B))));
}

#[test]
fn a_note_counts_more_than_an_old_record() {
    let mut patient = described();
    patient.records.inode(B, |inode| inode.mode = 0o604);
    write_damaged(&patient);
    rebuilt(&patient);
    assert_eq!(inode(&patient.read(), "files/d/b").mode, 0o640);
}

#[test]
fn a_note_of_another_object_tells_nothing() {
    let patient = described();
    let note = patient.store.disk.note(&DiskPath::Object(object(A))).unwrap().unwrap();
    patient.store.disk.set_note(&DiskPath::Object(object(B)), &note).unwrap();
    assert_eq!(rebuilt(&patient).0, Rebuilt { files: 6, lost: 1 });
    let found = patient.read();
    let kept = format!("files/lost+found/#{}", object(B));
    assert_eq!(inode(&found, &kept).file().unwrap().object, Some(object(B)));
}

#[test]
fn what_was_being_written_has_the_size_of_its_bytes() {
    let mut patient = Patient::new();
    patient.records.file(B, |file| file.unsettled = true);
    let (inode_of_b, record) =
        (patient.records.get(&keys::inode(B)), patient.records.get(&keys::object(object(B))));
    let record = ObjectRecord { checksum: None, ..record };
    let note = Description::new(vec![b"files/b".to_vec()], inode_of_b, record);
    patient.store.describe(object(B), &note).unwrap();
    rebuilt(&patient);
    let found = patient.read();
    let file = inode(&found, "files/b").file().unwrap().clone();
    let stat = patient.store.disk.stat(&DiskPath::Object(object(B))).unwrap();
    assert_eq!((file.size, file.blocks, file.unsettled), (10_000, stat.blocks, false));
    let expected = ObjectRecord { length: 10_000, ..record };
    assert_eq!(found.get::<ObjectRecord>(&keys::object(object(B))), expected);
}

#[test]
fn what_can_be_read_of_old_records_counts() {
    let mut patient = described();
    let identity = RemoteIdentity { store: 7, remote: Some(8) };
    let others = &mut patient.records;
    others.put(keys::single::<RemoteIdentity>(), &identity);
    let place = RemotePlace { place: "/remote".to_owned(), since_seconds: 5 };
    others.put(keys::single::<RemotePlace>(), &place);
    others.put(keys::clock(), &THEN);
    others.put(keys::manifest_seen(3 << 64, true), &4_u64);
    others.inode(D, |inode| inode.mode = 0o711);
    others.inode(FILES, |inode| inode.mode = 0o711);
    patient.copy_to_remote(A, RemoteState::Only);
    patient.encode(B);
    let new = |patient: &Patient| {
        write_damaged(patient);
        rebuilt(patient)
    };
    assert_eq!(new(&patient), (Rebuilt { files: 7, lost: 0 }, Vec::new()));
    let (mut found, mut expected) = (patient.read(), patient.records.clone());
    let other = found.get::<RemoteIdentity>(&keys::single::<RemoteIdentity>());
    assert!(other.store != 7, "it publishes its names as another store");
    expected
        .put(keys::single::<RemoteIdentity>(), &RemoteIdentity { store: other.store, ..identity });
    expected.put(keys::epoch(), &(2_u32, false));
    // The disk has it after all.
    let copy = RemoteCopy {
        content: [9; 32],
        encoding: Encoding::Raw,
        stored_bytes: 5,
        state: RemoteState::Named,
    };
    expected.put(keys::remote_copy(object(A)), &copy);
    for id in [A, B, TAIL, TOKENS, PAGE, STATE, MANIFEST] {
        // Their notes do not tell when they were read.
        for records in [&mut found, &mut expected] {
            records.inode(id, |inode| (inode.atime, inode.mtime, inode.ctime) = (THEN, THEN, THEN));
            // A note that does not fit into its inode takes a block, on one filesystem and not on another.
            records.file(id, |file| file.blocks = 0);
        }
    }
    assert_same(&found, &expected, "after it was rebuilt");
    assert_eq!(patient.quarantined(), ["meta.redb"]);
}

#[test]
fn names_of_what_only_the_remote_has_are_kept() {
    let mut patient = described();
    patient.copy_to_remote(A, RemoteState::Only);
    patient.remove_raw(A);
    patient.copy_to_remote(B, RemoteState::Only);
    patient.remove_raw(B);
    patient.records.unname(D, b"b");
    // A file without any bytes, and one whose bytes are gone.
    patient.records.remove(&keys::object(object(TOKENS)));
    patient.copy_to_remote(TOKENS, RemoteState::Only);
    patient.remove_raw(TOKENS);
    patient.remove_raw(STATE);
    write_damaged(&patient);
    let (counts, told) = rebuilt(&patient);
    assert_eq!((counts, told), (Rebuilt { files: 4, lost: 0 }, Vec::new()));
    let found = patient.read();
    let copy: RemoteCopy = found.get(&keys::remote_copy(object(A)));
    assert_eq!(copy.state, RemoteState::Only);
    assert_eq!(found.0[&keys::inode(A)], patient.records.0[&keys::inode(A)]);
    assert_eq!(found.0[&keys::inode(SYMLINK)], patient.records.0[&keys::inode(SYMLINK)]);
    for path in ["files/d/b", PATHS[2], PATHS[4]] {
        assert_eq!(id(&found, path), None, "{path}");
    }
    for gone in [B, TOKENS, STATE] {
        assert!(!found.0.contains_key(&keys::inode(gone)), "{gone:?}");
    }
}

#[test]
fn files_that_share_bytes_are_those_of_the_old_records() {
    let mut patient = described();
    let records = &mut patient.records;
    let kind = records.get::<Inode>(&keys::inode(A)).kind;
    records.inode(B, |inode| (inode.kind, inode.mode) = (kind, 0o604));
    records.remove(&keys::object(object(B)));
    let change = |record: &mut ObjectRecord| record.references = 2;
    records.change(keys::object(object(A)), change);
    records.count();
    patient.remove_raw(B);
    write_damaged(&patient);
    assert_eq!(rebuilt(&patient), (Rebuilt { files: 7, lost: 0 }, Vec::new()));
    let found = patient.read();
    for id in [A, B] {
        assert_eq!(found.0[&keys::inode(id)], patient.records.0[&keys::inode(id)]);
    }
    assert_eq!(found.0[&keys::object(object(A))], patient.records.0[&keys::object(object(A))]);
}

#[test]
fn of_two_notes_with_the_same_name_the_newer_one_counts() {
    let patient = described();
    let record = patient.records.get(&keys::object(object(B)));
    let note =
        Description::new(vec![b"files/a".to_vec()], patient.records.get(&keys::inode(B)), record);
    patient.store.describe(object(B), &note).unwrap();
    assert_eq!(rebuilt(&patient).0, Rebuilt { files: 7, lost: 0 });
    let found = patient.read();
    assert_eq!(inode(&found, "files/a").file().unwrap().object, Some(object(B)));
    assert_eq!(inode(&found, "files/d/linked").file().unwrap().object, Some(object(A)));
}

#[test]
fn the_numbers_of_a_mount_that_is_noted_are_not_given_out_again() {
    let patient = described();
    last_mount_is(&patient, 40);
    rebuilt(&patient);
    assert_eq!(patient.read().get::<(u32, bool)>(&keys::epoch()), (41, false));
    // Nor those that the old records tell of.
    let mut patient = described();
    patient.records.put(keys::epoch(), &(50_u32, true));
    write_damaged(&patient);
    rebuilt(&patient);
    assert_eq!(patient.read().get::<(u32, bool)>(&keys::epoch()), (51, false));
}

fn last_mount_is(patient: &Patient, epoch: u32) {
    crate::store::last_mount::note(patient.store.disk.as_ref(), epoch);
}

#[test]
fn what_lies_where_no_object_does_is_none() {
    let patient = described();
    let place = patient.store.path().join("objects/00").join(object(A).to_string());
    std::fs::write(&place, b"mine").unwrap();
    std::fs::write(place.with_extension("z"), b"mine").unwrap();
    std::fs::remove_file(patient.store.path().join("objects/01").join(object(A).to_string()))
        .unwrap();
    assert_eq!(rebuilt(&patient).0, Rebuilt { files: 6, lost: 0 });
    assert!(place.exists());
}
