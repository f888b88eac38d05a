//! What hangs on inodes, what adds up, and files that no record knows.

use std::sync::Arc;

use super::*;
use crate::store::faulty_disk::{Call, FaultyDisk};

const ABSENT: InodeId = InodeId(number(0x99));
const LATER: ObjectId = ObjectId(7 << 32);

fn insert(key: Vec<u8>) -> impl FnOnce(&mut Patient) {
    move |patient| {
        patient.records.0.insert(key, Vec::new());
    }
}

#[test]
fn what_hangs_on_nothing_is_removed() {
    let two = |patient: &mut Patient| {
        for name in [&b"user.x"[..], b"user.y"] {
            insert(keys::attribute(ABSENT, name))(patient);
        }
        insert(keys::attribute(InodeId(ABSENT.0 + 1), b"user.x"))(patient);
    };
    check(
        two,
        &[
            "inode 0000000100000099: does not exist but has attributes, removed",
            "inode 000000010000009a: does not exist but has attributes, removed",
        ],
        |_| (),
    );
    check(
        |patient| patient.records.put(keys::unsettled(ABSENT), &()),
        &["inode 0000000100000099: marked for recovery without need"],
        |_| (),
    );
    check(
        |patient| patient.copy_to_remote(ABSENT, RemoteState::Named),
        &["object 0000000100000199: has a remote copy but no record, removed"],
        |_| (),
    );
    let copy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 1 };
    let (_, report) = check(
        |patient| patient.records.put(keys::encoded_copy(object(ABSENT)), &copy),
        &["object 0000000100000199: has an encoded copy but no record, removed"],
        |_| (),
    );
    assert_eq!(report.leftovers, Leftovers::default());
    let crash = |records: &mut Records| records.put(keys::epoch(), &(1_u32, false));
    let (_, report) = check(
        |patient| {
            patient.records.put(keys::encoded_copy(object(ABSENT)), &copy);
            crash(&mut patient.records);
        },
        &[],
        crash,
    );
    assert_eq!(report.leftovers, Leftovers { unreferenced: 1, ..Leftovers::default() });
}

#[test]
fn what_hung_on_a_lost_file_goes_with_it_untold() {
    check(
        |patient| {
            patient.copy_to_remote(A, RemoteState::Held);
            patient.records.file(A, |file| file.unsettled = true);
            patient.records.put(keys::unsettled(A), &());
            patient.remove_raw(A);
        },
        &[
            "files/a, files/d/linked: the bytes of object 0000000100000125 are missing; a miss after repair",
        ],
        |records| {
            records.unname(FILES, b"a");
            records.unname(D, b"linked");
            records.remove(&keys::attribute(A, b"user.colour"));
            records.lose(A);
        },
    );
}

#[test]
fn marks_are_those_of_what_may_have_been_written_to() {
    check(
        |patient| patient.records.remove(&keys::unsettled(TAIL)),
        &["inode 0000000100000023: may have been written to, but recovery would not look at it"],
        |_| (),
    );
    check(
        |patient| patient.records.put(keys::unsettled(A), &()),
        &["inode 0000000100000025: marked for recovery without need"],
        |_| (),
    );
}

#[test]
fn totals_are_those_of_the_objects() {
    check(
        |patient| patient.records.put(keys::totals(), &Totals { objects: 1, pages: 2, bytes: 3 }),
        &["totals: 1 objects, 2 pages, 3 bytes; counted: 7, 2, 26622"],
        |_| (),
    );
}

#[test]
fn numbers_are_never_given_out_twice() {
    check(
        |patient| patient.records.put(keys::epoch(), &(0_u32, true)),
        &["epoch 0: numbers of epoch 1 are in use already"],
        |_| (),
    );
    let later = |records: &mut Records| {
        let record: ObjectRecord = records.get(&keys::object(object(B)));
        records.put(keys::object(LATER), &record);
        records.file(B, |file| file.object = Some(LATER));
        records.remove(&keys::object(object(B)));
    };
    // Those of objects count as well, and what a repair makes lies above all of them.
    check(
        |patient| {
            later(&mut patient.records);
            let [from, to] = [object(B), LATER].map(DiskPath::Object);
            patient.store.disk.rename(&from, &to).unwrap();
            patient.records.unname(D, b"b");
        },
        &[
            "inode 0000000100000026: has no name, now files/lost+found/#0000000100000026",
            "epoch 1: numbers of epoch 7 are in use already",
        ],
        |records| {
            later(records);
            records.unname(D, b"b");
            let place = InodeId(8 << 32 | 1);
            let made = directory(DirectoryClass::Plain, FILES, b"lost+found", 2);
            records.put(keys::inode(place), &made);
            records.name(FILES, b"lost+found", place);
            records.inode(FILES, |files| files.links += 1);
            records.name(place, b"#0000000100000026", B);
            records.put(keys::epoch(), &(8_u32, true));
        },
    );
}

fn make(patient: &Patient, path: &DiskPath) {
    patient.store.disk.create(path).unwrap().write_all_at(b"bytes", 0).unwrap();
}

#[test]
fn what_is_in_staging_is_garbage() {
    let paths = [
        DiskPath::Staging(ObjectId(7)),
        DiskPath::Incoming(ObjectId(7)),
        DiskPath::Encoding(ObjectId(7)),
        DiskPath::Scratch(7),
    ];
    let (patient, report) =
        check(|patient| paths.iter().for_each(|path| make(patient, path)), &[], |_| ());
    assert_eq!(report.leftovers, Leftovers { staged: 4, ..Leftovers::default() });
    assert_eq!(patient.store.disk.list(DiskDirectory::Staging).unwrap(), Vec::<String>::new());
    assert_eq!(patient.fsck(false).leftovers, Leftovers::default());
}

#[test]
fn files_without_a_record_are_garbage() {
    let paths = [DiskPath::Object(object(ABSENT)), DiskPath::Encoded(object(ABSENT))];
    let damage = |patient: &mut Patient| paths.iter().for_each(|path| make(patient, path));
    let what = "object 0000000100000199";
    let mut expected = [
        format!("{what}: has no record, removed"),
        format!("{what}: its encoded copy has no record, removed"),
    ];
    let mut patient = Patient::new();
    damage(&mut patient);
    patient.write();
    let mut found = lines(&patient.fsck(true), true);
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);
    let crash = |records: &mut Records| records.put(keys::epoch(), &(1_u32, false));
    let (after_crash, report) = check(
        |patient| {
            damage(patient);
            crash(&mut patient.records);
        },
        &[],
        crash,
    );
    assert_eq!(report.leftovers, Leftovers { unreferenced: 2, ..Leftovers::default() });
    for patient in [patient, after_crash] {
        assert!(paths.iter().all(|path| !patient.is_there(path)));
        assert_eq!(patient.fsck(false).leftovers, Leftovers::default());
    }
}

#[test]
fn what_is_no_file_of_a_store_is_left_alone() {
    let plant = |name: &'static str| {
        move |patient: &mut Patient| {
            std::fs::write(patient.store.path().join("objects").join(name), b"mine").unwrap();
        }
    };
    for name in ["00/mine.txt", "00/0000000100000199", "00/0000000100000199.z"] {
        let what = format!("! objects/{name}: no file of a store, left alone");
        let (patient, _) = check(plant(name), &[&what], |_| ());
        assert!(patient.store.path().join("objects").join(name).exists());
    }
}

#[test]
fn a_missing_directory_is_made() {
    let remove = |patient: &mut Patient| {
        std::fs::remove_dir(patient.store.path().join("objects/ab")).unwrap();
    };
    let (patient, _) = check(remove, &["objects/ab: the directory is missing, made"], |_| ());
    assert!(patient.store.path().join("objects/ab").is_dir());
}

#[test]
fn a_store_that_was_never_mounted_is_sound() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open_or_create(directory.path()).unwrap();
    for repair in [false, true, false] {
        let options = FsckOptions { repair, subset: None };
        let report = run(&store, &options, &|_, _| ()).unwrap();
        assert_eq!(report, Report::default(), "{repair}");
    }
}

#[test]
fn before_the_first_commit_of_a_mount_there_is_nothing_to_miss() {
    let told = |epoch: (u32, bool), record: Option<(Vec<u8>, Vec<u8>)>| {
        let mut patient = Patient::new();
        for id in [MANIFEST, PAGE, STATE, TAIL, TOKENS, A, B] {
            patient.remove_raw(id);
        }
        patient.records = Records::default();
        patient.records.put(keys::epoch(), &epoch);
        patient.records.0.extend(record);
        patient.write();
        let found = lines(&patient.fsck(false), false);
        found.iter().any(|line| line == "/: its directory is missing, made")
    };
    assert!(!told((0, true), None) && !told((1, false), None) && told((1, true), None));
    let sound = Patient::new().records;
    for key in [keys::inode(SYMLINK), keys::entry(FILES, b"a"), keys::object(object(A))] {
        let record = sound.0[&key].clone();
        assert!(told((1, false), Some((key, record))));
    }
}

#[test]
fn a_disk_that_fails_is_no_database_that_is_lost() {
    let mut patient = Patient::new();
    patient.write();
    let disk = FaultyDisk::open(patient.store.path());
    let events = Arc::clone(&disk.events);
    let failing = (Call::Stat, DiskPath::Metadata, libc::EIO);
    *disk.events.failing_call.lock().unwrap() = Some(failing);
    patient.store.set_disk(Arc::new(disk)).unwrap();
    let outcome = run(&patient.store, &FsckOptions::default(), &|_, _| ());
    assert!(matches!(outcome, Err(StoreError::Io(_))), "{outcome:?}");
    let outcome = rebuild(&patient.store, &|_, _| ());
    assert!(matches!(outcome, Err(StoreError::Io(_))), "{outcome:?}");
    *events.failing_call.lock().unwrap() = None;
    assert_same(&patient.read(), &patient.records, "after it could not be read");
}

#[test]
fn without_records_nothing_is_told_of_the_objects() {
    let patient = Patient::new();
    let why = "restore it from a backup, or make it anew from what is in objects/ with kvfs fsck --rebuild";
    for repair in [false, true] {
        let report = patient.fsck(repair);
        assert_eq!(lines(&report, true), [format!("! meta.redb: is missing: {why}")]);
    }
    std::fs::write(patient.store.path().join("meta.redb"), vec![7; 10_000]).unwrap();
    let report = patient.fsck(true);
    let told = &lines(&report, true)[0];
    assert!(told.starts_with("! meta.redb: is damaged (") && told.ends_with(why), "{told}");
    assert!(patient.is_there(&DiskPath::Object(object(A))));
}
