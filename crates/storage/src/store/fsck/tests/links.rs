//! Reference counts, and inodes without a name.

use super::*;

#[test]
fn links_are_counted() {
    let has = |links| move |inode: &mut Inode| inode.links = links;
    check(
        |patient| patient.records.inode(A, has(7)),
        &["files/d/linked: link count 7 instead of 2"],
        |_| (),
    );
    check(
        |patient| patient.records.inode(D, has(2)),
        &["files/d: link count 2 instead of 3"],
        |_| (),
    );
    check(
        |patient| patient.records.inode(ROOT, has(3)),
        &["inode 0000000000000001: link count 3 instead of 4"],
        |_| (),
    );
}

fn keep_b(records: &mut Records, place: InodeId) {
    records.name(place, b"#0000000100000026", B);
    records.unname(D, b"b");
}

#[test]
fn a_file_without_a_name_comes_to_lost_and_found() {
    let unname = |patient: &mut Patient| patient.records.unname(D, b"b");
    check(
        unname,
        &["inode 0000000100000026: has no name, now files/lost+found/#0000000100000026"],
        |records| {
            let place = records.lost_and_found();
            keep_b(records, place);
        },
    );
    let make = |records: &mut Records| {
        let found = directory(DirectoryClass::Plain, FILES, b"lost+found", 2);
        records.put(keys::inode(InodeId(number(0x50))), &found);
        records.name(FILES, b"lost+found", InodeId(number(0x50)));
        records.inode(FILES, |inode| inode.links = 4);
    };
    check(
        |patient| {
            make(&mut patient.records);
            unname(patient);
        },
        &["inode 0000000100000026: has no name, now files/lost+found/#0000000100000026"],
        |records| {
            make(records);
            keep_b(records, InodeId(number(0x50)));
        },
    );
    // That name is one of a file, and a directory of the same name elsewhere does not count.
    let take = |records: &mut Records| {
        records.name(FILES, b"lost+found", A);
        records.inode(A, |inode| inode.links = 3);
        records.unname(D, b"e");
        records.put(keys::inode(E), &directory(DirectoryClass::Plain, D, b"lost+found+", 2));
        records.name(D, b"lost+found+", E);
    };
    check(
        |patient| {
            take(&mut patient.records);
            unname(patient);
        },
        &["inode 0000000100000026: has no name, now files/lost+found+/#0000000100000026"],
        |records| {
            take(records);
            let id = InodeId(2 << 32 | 1);
            let found = directory(DirectoryClass::Plain, FILES, b"lost+found+", 2);
            records.put(keys::inode(id), &found);
            records.name(FILES, b"lost+found+", id);
            records.inode(FILES, |files| files.links = 4);
            records.put(keys::epoch(), &(2_u32, true));
            keep_b(records, id);
        },
    );
}

#[test]
fn rows_outside_of_their_layer_are_an_ordinary_file() {
    let (_, report) = check(
        |patient| patient.records.unname(LAYER, TAIL_NAME),
        &["inode 0000000100000023: has no name, now files/lost+found/#0000000100000023"],
        |records| {
            let place = records.lost_and_found();
            records.unname(LAYER, TAIL_NAME);
            records.file(TAIL, |file| file.role = Role::Plain);
            records.name(place, b"#0000000100000023", TAIL);
        },
    );
    assert_eq!(report.leftovers, Leftovers::default());
}

#[test]
fn a_page_without_a_name_is_one_still() {
    check(
        |patient| patient.records.unname(LAYER, PAGE_NAME),
        &["inode 0000000100000021: has no name, now files/lost+found/#0000000100000021"],
        |records| {
            let place = records.lost_and_found();
            records.unname(LAYER, PAGE_NAME);
            records.name(place, b"#0000000100000021", PAGE);
        },
    );
}

#[test]
fn what_has_neither_name_nor_bytes_goes() {
    check(
        |patient| patient.records.unname(FILES, b"symlink"),
        &["inode 0000000100000027: has no name, and no bytes, removed"],
        |records| {
            records.unname(FILES, b"symlink");
            records.remove(&keys::inode(SYMLINK));
        },
    );
}

#[test]
fn references_are_counted() {
    check(
        |patient| {
            let change = |record: &mut ObjectRecord| record.references = 5;
            patient.records.change(keys::object(object(A)), change);
        },
        &["object 0000000100000125: 5 references instead of 1"],
        |_| (),
    );
    // Two files with the same bytes.
    let share = |records: &mut Records| {
        let kind = records.get::<Inode>(&keys::inode(A)).kind;
        records.inode(B, |inode| inode.kind = kind);
        records.remove(&keys::object(object(B)));
        let change = |record: &mut ObjectRecord| record.references = 2;
        records.change(keys::object(object(A)), change);
        records.count();
    };
    check(
        |patient| {
            share(&mut patient.records);
            patient.remove_raw(B);
        },
        &[],
        share,
    );
}

fn unreferenced(patient: &mut Patient) {
    patient.records.unname(D, b"b");
    patient.records.remove(&keys::inode(B));
}

#[test]
fn bytes_that_no_file_refers_to_are_kept_aside() {
    let lost = |records: &mut Records| {
        unname_b(records);
        records.lose(B);
    };
    let (patient, report) = check(
        unreferenced,
        &["object 0000000100000126: no file refers to it; its bytes are kept in quarantine"],
        lost,
    );
    assert_eq!(patient.quarantined(), ["0000000100000126"]);
    assert_eq!(report.leftovers, Leftovers::default());
    let (patient, _) = check(
        |patient| {
            unreferenced(patient);
            patient.remove_raw(B);
        },
        &["object 0000000100000126: no file refers to it; its record is removed"],
        lost,
    );
    assert_eq!(patient.quarantined(), Vec::<String>::new());
}

fn unname_b(records: &mut Records) {
    records.unname(D, b"b");
}

#[test]
fn after_a_crash_they_are_those_of_a_file_that_was_removed_while_it_was_open() {
    let crash = |records: &mut Records| records.put(keys::epoch(), &(1_u32, false));
    let (patient, report) = check(
        |patient| {
            crash(&mut patient.records);
            unreferenced(patient);
        },
        &[],
        |records| {
            crash(records);
            unname_b(records);
            records.lose(B);
        },
    );
    assert_eq!(report.leftovers, Leftovers { unreferenced: 1, ..Leftovers::default() });
    assert_eq!(patient.quarantined(), Vec::<String>::new());
    assert!(!patient.is_there(&DiskPath::Object(object(B))));
    // Unless a record was lost: it may have been that of its file.
    let (patient, _) = check(
        |patient| {
            crash(&mut patient.records);
            unreferenced(patient);
            patient.records.0.insert(keys::inode(B), vec![0xff; 3]);
        },
        &[
            "inode 0000000100000026: the record cannot be decoded, removed",
            "object 0000000100000126: no file refers to it; its bytes are kept in quarantine",
        ],
        |records| {
            crash(records);
            unname_b(records);
            records.lose(B);
        },
    );
    assert_eq!(patient.quarantined(), ["0000000100000126"]);
}
