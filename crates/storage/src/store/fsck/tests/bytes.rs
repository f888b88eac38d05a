//! The bytes behind every file, and encoded copies of them.

use std::sync::Arc;

use super::*;
use crate::store::faulty_disk::{Call, FaultyDisk};

const KEPT: &str = "a miss after repair, its bytes are kept in quarantine";

pub(super) fn forget_b(records: &mut Records) {
    records.unname(D, b"b");
    records.lose(B);
}

fn check_lost(damage: impl FnOnce(&mut Patient), what: &str, is_kept: bool) {
    let end = if is_kept { KEPT } else { "a miss after repair" };
    let (patient, _) = check(damage, &[&format!("files/d/b: {what}; {end}")], forget_b);
    let expected = if is_kept { vec![object(B).to_string()] } else { Vec::new() };
    assert_eq!(patient.quarantined(), expected);
    assert!(!patient.is_there(&DiskPath::Object(object(B))));
}

#[test]
fn a_file_whose_bytes_are_missing_or_others_is_a_miss() {
    let what = "object 0000000100000126";
    check_lost(|patient| patient.remove_raw(B), &format!("the bytes of {what} are missing"), false);
    check_lost(
        |patient| patient.overwrite(B, b"more", 10_000),
        &format!("{what} has 10004 bytes instead of 10000"),
        true,
    );
    check_lost(
        |patient| patient.overwrite(B, b"x", 9_999),
        &format!("the bytes of {what} are not those that were written (checksum mismatch)"),
        true,
    );
    let change = |record: &mut ObjectRecord| record.length = 7;
    check_lost(
        |patient| {
            patient.records.change(keys::object(object(B)), change);
            patient.records.count();
        },
        &format!("{what} has 10000 bytes, its record says 7"),
        true,
    );
}

#[test]
fn all_names_of_a_lost_file_are_told_and_go() {
    check(
        |patient| patient.remove_raw(A),
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
    check(
        |patient| {
            patient.remove_raw(B);
            patient.records.unname(D, b"b");
        },
        &[
            "inode 0000000100000026: the bytes of object 0000000100000126 are missing; a miss after repair",
        ],
        forget_b,
    );
}

#[test]
fn a_file_without_an_object_is_a_miss() {
    let damage = |patient: &mut Patient| {
        patient.records.file(B, |file| file.object = None);
        patient.records.remove(&keys::object(object(B)));
        patient.records.count();
        patient.remove_raw(B);
    };
    check_lost(damage, "has no bytes", false);
}

#[test]
fn bytes_that_two_lost_files_share_are_kept_once() {
    let share = |records: &mut Records| {
        let kind = records.get::<Inode>(&keys::inode(A)).kind;
        records.inode(B, |inode| inode.kind = kind);
        records.remove(&keys::object(object(B)));
        let change = |record: &mut ObjectRecord| record.references = 2;
        records.change(keys::object(object(A)), change);
        records.count();
    };
    let mut patient = Patient::new();
    share(&mut patient.records);
    patient.remove_raw(B);
    patient.overwrite(A, b"other", 0);
    patient.write();
    patient.fsck(true);
    assert_eq!(patient.quarantined(), [object(A).to_string()]);
    while !patient.fsck(true).findings.is_empty() {}
    assert_eq!(patient.fsck(false).objects, 5);
}

#[test]
fn without_a_checksum_the_length_is_all_that_is_known() {
    let forget = |records: &mut Records| {
        let change = |record: &mut ObjectRecord| (record.checksum, record.length) = (None, 0);
        records.change(keys::object(object(B)), change);
        records.count();
    };
    let (_, report) = check(
        |patient| {
            patient.overwrite(B, b"x", 9_999);
            forget(&mut patient.records);
        },
        &[],
        forget,
    );
    let whole = Patient::new();
    whole.write();
    assert_eq!(report.bytes_read + 10_000, whole.fsck(false).bytes_read);
}

#[test]
fn an_object_gets_the_record_that_its_file_tells() {
    for (id, kind) in
        [(A, ObjectKind::File), (PAGE, ObjectKind::Page), (MANIFEST, ObjectKind::Manifest)]
    {
        let what = format!("object {} (inode {:016x}): has no record, made", object(id), id.0);
        let mut patient = Patient::new();
        let sound: ObjectRecord = patient.records.get(&keys::object(object(id)));
        assert_eq!(sound.kind, kind);
        patient.records.remove(&keys::object(object(id)));
        patient.records.count();
        patient.write();
        assert_eq!(lines(&patient.fsck(true), true), [what]);
        let expected = ObjectRecord { checksum: None, ..sound };
        assert_eq!(patient.read().get::<ObjectRecord>(&keys::object(object(id))), expected);
        assert_eq!(patient.fsck(false).findings, []);
    }
    // As long as the file is, until it is at rest.
    let mut patient = Patient::new();
    patient.records.remove(&keys::object(object(TAIL)));
    patient.records.count();
    patient.write();
    assert_eq!(patient.fsck(true).findings.len(), 1);
    let made: ObjectRecord = patient.read().get(&keys::object(object(TAIL)));
    assert_eq!((made.kind, made.length), (ObjectKind::Rows, 64));
}

#[test]
fn a_share_of_the_objects_is_read() {
    let reads = |subset, number| FsckOptions { repair: false, subset }.reads(number);
    let read = |subset| (0..6).filter(|number| reads(subset, *number)).collect::<Vec<_>>();
    assert_eq!(read(None), [0, 1, 2, 3, 4, 5]);
    assert_eq!(read(Some((1, 3))), [0, 3]);
    assert_eq!(read(Some((3, 3))), [2, 5]);
    assert_eq!(read(Some((1, 0))), [0, 1, 2, 3, 4, 5]);
    let mut patient = Patient::new();
    patient.encode(B);
    patient.write();
    let read = |subset| {
        let options = FsckOptions { repair: false, subset };
        run(&patient.store, &options, &|_, _| ()).unwrap().bytes_read
    };
    // Of the headers of pages all are.
    let [first, second] = [Some((1, 2)), Some((2, 2))].map(read);
    assert_eq!(first + second, read(None) + 2 * 4096);
    let page = patient.store.disk.stat(&DiskPath::Object(object(PAGE))).unwrap().length;
    assert_eq!((second, first > second), (page + 5 + 2 * 4096, true));
}

#[test]
fn what_was_being_written_gets_the_size_of_its_bytes() {
    let begin = |records: &mut Records| {
        records.file(B, |file| (file.size, file.blocks, file.unsettled) = (1, 0, true));
        records.put(keys::unsettled(B), &());
    };
    let (patient, report) = check(
        |patient| {
            begin(&mut patient.records);
            patient.records.inode(B, |inode| inode.mtime = Time::default());
        },
        &["object 0000000100000126: has a checksum although its file may have changed"],
        |records| {
            let change = |record: &mut ObjectRecord| record.checksum = None;
            records.change(keys::object(object(B)), change);
        },
    );
    assert_eq!(report.leftovers, Leftovers { unsettled: 1, ..Leftovers::default() });
    assert_eq!(patient.quarantined(), Vec::<String>::new());
    check(
        |patient| {
            let tail = keys::object(object(TAIL));
            patient
                .records
                .change(tail, |record: &mut ObjectRecord| record.checksum = Some([1; 16]));
        },
        &["object 0000000100000123: has a checksum although its file may have changed"],
        |_| (),
    );
}

const ENCODED: &str = "object 0000000100000126";

/// B has an encoded copy as well.
fn encoded(records: &mut Records) {
    let mut patient = Patient::new();
    patient.encode(B);
    records.clone_from(&patient.records);
}

#[test]
fn an_encoded_copy_takes_the_place_of_missing_bytes() {
    let (patient, report) = check(|patient| patient.encode(B), &[], encoded);
    assert!(patient.is_there(&DiskPath::Encoded(object(B))));
    let stored = patient.store.disk.stat(&DiskPath::Encoded(object(B))).unwrap().length;
    let (_, raw) = check(|_| (), &[], |_| ());
    let both = report.bytes_read;
    assert_eq!(both, raw.bytes_read + stored);
    // A page's checksum is bound to what the page is.
    check(
        |patient| {
            patient.encode(PAGE);
            patient.remove_raw(PAGE);
        },
        &[],
        |records| {
            let mut patient = Patient::new();
            patient.encode(PAGE);
            records.clone_from(&patient.records);
        },
    );
    let (_, report) = check(
        |patient| {
            patient.encode(B);
            patient.remove_raw(B);
        },
        &[],
        encoded,
    );
    assert_eq!(report.bytes_read + 10_000, both);
    let (patient, _) = check(
        |patient| {
            patient.encode(B);
            patient.overwrite(B, b"x", 0);
        },
        &[&format!(
            "{ENCODED}: the bytes of {ENCODED} are not those that were written (checksum mismatch); its encoded copy takes its place"
        )],
        encoded,
    );
    assert_eq!(patient.quarantined(), [object(B).to_string()]);
    assert!(patient.is_there(&DiskPath::Encoded(object(B))));
}

fn change_copy(patient: &mut Patient, change: impl FnOnce(&mut EncodedCopy)) {
    patient.encode(B);
    patient.records.change(keys::encoded_copy(object(B)), change);
}

#[test]
fn an_encoded_copy_that_is_wrong_does_not_count() {
    let longer = |patient: &mut Patient| change_copy(patient, |copy| copy.stored_bytes += 1);
    let damage = |patient: &mut Patient| {
        patient.encode(B);
        let path = DiskPath::Encoded(object(B));
        let file = patient.store.disk.open(&path, Access::ReadWrite).unwrap();
        let last = file.stat().unwrap().length - 1;
        file.write_all_at(&[0xa5], last).unwrap();
    };
    let mut sizes = Patient::new();
    sizes.encode(B);
    let copy: EncodedCopy = sizes.records.get(&keys::encoded_copy(object(B)));
    let bytes = copy.stored_bytes;
    let told = format!("its encoded copy has {bytes} bytes instead of {}", bytes + 1);
    let no_more = "it does not count any more";
    let (patient, _) = check(longer, &[&format!("{ENCODED}: {told}; {no_more}")], |_| ());
    assert!(!patient.is_there(&DiskPath::Encoded(object(B))));
    check(damage, &[&format!("{ENCODED}: its encoded copy: copy is damaged *")], |_| ());
    check(
        |patient| {
            patient.encode(B);
            patient.store.disk.remove(&DiskPath::Encoded(object(B))).unwrap();
        },
        &[&format!("{ENCODED}: its encoded copy is missing; {no_more}")],
        |_| (),
    );
    let forget = |records: &mut Records| {
        let change = |record: &mut ObjectRecord| record.checksum = None;
        records.change(keys::object(object(B)), change);
    };
    check(
        |patient| {
            patient.encode(B);
            forget(&mut patient.records);
        },
        &[&format!("{ENCODED}: it may have changed since it was encoded; {no_more}")],
        forget,
    );
    // The file was opened for writing, and a crash came before its copy went: a mount does the same.
    let crash = |records: &mut Records| records.put(keys::epoch(), &(1_u32, false));
    let (patient, _) = check(
        |patient| {
            crash(&mut patient.records);
            longer(patient);
        },
        &[],
        crash,
    );
    assert!(!patient.is_there(&DiskPath::Encoded(object(B))));
    // Nothing else is there: it is told, and kept aside.
    let (patient, _) = check(
        |patient| {
            crash(&mut patient.records);
            longer(patient);
            patient.remove_raw(B);
        },
        &[
            &format!("{ENCODED}: {told}; {no_more}"),
            &format!("files/d/b: the bytes of {ENCODED} are missing; {KEPT}"),
        ],
        |records| {
            crash(records);
            forget_b(records);
        },
    );
    assert_eq!(patient.quarantined(), [object(B).to_string()]);
}

#[test]
fn what_only_the_remote_has_is_not_missed() {
    let remote = |state| {
        move |records: &mut Records| {
            let copy =
                RemoteCopy { content: [9; 32], encoding: Encoding::Raw, stored_bytes: 5, state };
            records.put(keys::remote_copy(object(B)), &copy);
        }
    };
    let only = RemoteState::Only;
    for state in [RemoteState::Named, only] {
        let (_, report) = check(
            |patient| {
                patient.copy_to_remote(B, state);
                patient.remove_raw(B);
            },
            &[],
            remote(only),
        );
        assert_eq!((report.only_remote, report.leftovers), (1, Leftovers::default()));
    }
    // A crash came before its file could be removed.
    let (patient, report) = check(|patient| patient.copy_to_remote(B, only), &[], remote(only));
    let unreferenced = Leftovers { unreferenced: 1, ..Leftovers::default() };
    assert_eq!((report.only_remote, report.leftovers), (1, unreferenced));
    assert!(!patient.is_there(&DiskPath::Object(object(B))));
    // What is only held there may go.
    check_lost_but_held();
    let (patient, _) = check(
        |patient| {
            patient.encode(B);
            patient.copy_to_remote(B, only);
            patient.remove_raw(B);
        },
        &[&format!("{ENCODED}: has left, but has an encoded copy, removed")],
        remote(only),
    );
    assert!(!patient.is_there(&DiskPath::Encoded(object(B))));
}

fn check_lost_but_held() {
    check_lost(
        |patient| {
            patient.copy_to_remote(B, RemoteState::Held);
            patient.remove_raw(B);
        },
        &format!("the bytes of {ENCODED} are missing"),
        false,
    );
}

#[test]
fn how_much_only_the_remote_has_is_counted_anew_where_that_changes() {
    let counted = |records: &mut Records| {
        records.0.insert(keys::only_remote(), b"counted".to_vec());
    };
    check(|patient| counted(&mut patient.records), &[], counted);
    check(
        |patient| {
            counted(&mut patient.records);
            patient.copy_to_remote(B, RemoteState::Named);
            patient.remove_raw(B);
        },
        &[],
        |records| {
            let state = RemoteState::Only;
            let copy =
                RemoteCopy { content: [9; 32], encoding: Encoding::Raw, stored_bytes: 5, state };
            records.put(keys::remote_copy(object(B)), &copy);
        },
    );
}

#[test]
fn bytes_that_the_disk_cannot_read_are_lost_and_other_failures_end_the_check() {
    let mut patient = Patient::new();
    patient.encode(B);
    patient.write();
    let disk = FaultyDisk::open(patient.store.path());
    let events = Arc::clone(&disk.events);
    patient.store.set_disk(Arc::new(disk)).unwrap();
    let check = |failing| {
        *events.failing_call.lock().unwrap() = Some(failing);
        run(&patient.store, &FsckOptions::default(), &|_, _| ())
    };
    let (raw, encoded) = (DiskPath::Object(object(A)), DiskPath::Encoded(object(B)));
    let report = check((Call::Read, raw.clone(), libc::EIO)).unwrap();
    let told = "files/a, files/d/linked: the bytes of object 0000000100000125 cannot be read: *";
    assert_told(&lines(&report, false), &[told]);
    for failing in [
        (Call::Read, raw.clone(), libc::EACCES),
        (Call::Read, DiskPath::Object(object(MANIFEST)), libc::EIO),
        (Call::Stat, raw, libc::EIO),
        (Call::Stat, encoded.clone(), libc::EIO),
        (Call::Read, encoded, libc::EIO),
    ] {
        let outcome = check(failing);
        assert!(matches!(outcome, Err(StoreError::Io(_))), "{outcome:?}");
    }
}

/// Tokens that were removed would count again, and rows that mean nothing.
#[test]
fn what_says_where_rows_stand_is_never_a_miss() {
    let rename = |records: &mut Records| {
        records.unname(D, b"b");
        records.name(SEQUENCE, b"positions.json", B);
    };
    let mut patient = Patient::new();
    rename(&mut patient.records);
    patient.remove_raw(B);
    patient.write();
    for _ in 0..2 {
        let findings = patient.fsck(true).findings;
        let [finding] = &findings[..] else { panic!("{findings:?}") };
        assert!(!finding.repaired);
        assert!(finding.what.contains("sequences/") && finding.what.contains("positions.json"));
        assert!(finding.what.ends_with("it stays, and its sequence cannot be used: remove that"));
    }
    assert_same(&patient.read(), &patient.records, "repaired");
}
