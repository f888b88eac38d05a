//! Names lead to inodes, and directories hang together.

use super::*;

const ABSENT: InodeId = InodeId(number(0x99));

/// A repair leaves what was there before.
fn check_restored(damage: impl FnOnce(&mut Records), expected: &[&str]) {
    check(|patient| damage(&mut patient.records), expected, |_| ());
}

#[test]
fn the_directories_that_every_mount_has_are_made_anew() {
    let remove = |id| move |records: &mut Records| records.remove(&keys::inode(id));
    check_restored(
        remove(ROOT),
        &["/: its directory is missing, made", "inode 0000000000000001: link count 2 instead of 4"],
    );
    check_restored(
        remove(MODELS),
        &["/models: its directory is missing, made", "models: link count 2 instead of 3"],
    );
    check_restored(
        remove(FILES),
        &["/files: its directory is missing, made", "files: link count 2 instead of 3"],
    );
    let of_another_class = |records: &mut Records| {
        records.put(keys::inode(MODELS), &directory(DirectoryClass::Plain, ROOT, b"models", 3));
    };
    check_restored(
        of_another_class,
        &["/models: its directory is missing, made", "models: link count 2 instead of 3"],
    );
    let unname = |records: &mut Records| records.unname(ROOT, b"files");
    check_restored(unname, &["/files: its name is missing, made"]);
    check_restored(
        |records| records.name(ROOT, b"models", E),
        &["/models: its name is missing, made"],
    );
}

#[test]
fn nothing_is_shown_under_the_number_0() {
    let make = |patient: &mut Patient| {
        let inode = directory(DirectoryClass::Plain, FILES, b"0", 2);
        patient.records.put(keys::inode(InodeId(0)), &inode);
    };
    let expected = [
        "! inode 0: nothing that has this number can be shown",
        "directory 0000000000000000: has no name and no file in it, removed",
    ];
    let mut patient = Patient::new();
    make(&mut patient);
    patient.write();
    assert_eq!(lines(&patient.fsck(true), true), expected);
    assert_eq!(patient.fsck(false).findings, []);
}

#[test]
fn a_name_that_leads_nowhere_is_removed() {
    check_restored(
        |records| records.name(ABSENT, b"x", A),
        &[
            "<directory 4294967449>/x: stands in a directory that does not exist; the name is removed",
        ],
    );
    let leads = |to| {
        move |records: &mut Records| {
            let entry = Entry { inode: to, file_type: libc::S_IFDIR };
            records.put(keys::entry(D, b"x"), &entry);
        }
    };
    check_restored(
        leads(ABSENT),
        &["files/d/x: leads to inode 0000000100000099, which does not exist; the name is removed"],
    );
    check_restored(leads(ROOT), &["files/d/x: leads to the root; the name is removed"]);
}

#[test]
fn a_name_tells_what_it_leads_to() {
    let mistype = |records: &mut Records| {
        let entry = Entry { inode: A, file_type: libc::S_IFDIR };
        records.put(keys::entry(FILES, b"a"), &entry);
    };
    check_restored(mistype, &["files/a: listed as another type of file than it is"]);
}

#[test]
fn a_directory_has_one_name_and_knows_it() {
    // Before and behind its own one in the order of the records.
    check_restored(
        |records| records.name(FILES, b"again", E),
        &["files/again: second name of a directory, removed"],
    );
    check_restored(
        |records| records.name(E, b"again", D),
        &["files/d/e/again: second name of a directory, removed"],
    );
    let think = |parent: InodeId, name: &'static [u8]| {
        move |records: &mut Records| {
            records.put(keys::inode(E), &directory(DirectoryClass::Plain, parent, name, 2));
        }
    };
    for damage in [think(D, b"other"), think(FILES, b"e"), think(MODELS, b"other")] {
        check_restored(damage, &["files/d/e: the directory thinks to be elsewhere"]);
    }
}

#[test]
fn a_directory_without_a_name_goes_if_there_is_nothing_in_it() {
    check(
        |patient| patient.records.unname(D, b"e"),
        &[
            "directory 0000000100000016: has no name and no file in it, removed",
            "files/d: link count 3 instead of 2",
        ],
        |records| {
            records.unname(D, b"e");
            records.remove(&keys::inode(E));
            records.inode(D, |inode| inode.links = 2);
        },
    );
    // A symbolic link is nothing that takes room, and has another name.
    check(
        |patient| {
            patient.records.name(E, b"symlink", SYMLINK);
            patient.records.inode(SYMLINK, |inode| inode.links = 2);
            patient.records.unname(D, b"e");
        },
        &[
            "directory 0000000100000016: has no name and no file in it, removed",
            "files/d: link count 3 instead of 2",
        ],
        |records| {
            records.unname(D, b"e");
            records.remove(&keys::inode(E));
            records.inode(D, |inode| inode.links = 2);
        },
    );
}

/// The one that lost its name is kept as a whole, whatever its number.
#[test]
fn what_stands_below_it_comes_along() {
    let low = InodeId(number(5));
    let make = |records: &mut Records| {
        records.put(keys::inode(low), &directory(DirectoryClass::Plain, D, b"low", 2));
        records.name(D, b"low", low);
        records.inode(D, |inode| inode.links = 4);
    };
    check(
        |patient| {
            let records = &mut patient.records;
            make(records);
            records.unname(FILES, b"d");
            records.name(ABSENT, b"d", D);
        },
        &[
            "<directory 4294967449>/d: stands in a directory that does not exist; the name is removed",
            "directory 0000000100000015: has no name, now files/lost+found/#0000000100000015",
        ],
        |records| {
            make(records);
            keep_d(records);
            records.inode(D, |inode| inode.links = 4);
        },
    );
}

#[test]
fn a_path_through_a_circle_ends() {
    let mut patient = Patient::new();
    let records = &mut patient.records;
    records.unname(FILES, b"d");
    records.put(keys::inode(D), &directory(DirectoryClass::Plain, E, b"d", 3));
    records.name(E, b"d", D);
    records.name(E, b"x", ROOT);
    patient.write();
    let told = lines(&patient.fsck(false), false);
    let told = told.iter().find(|line| line.ends_with("x: leads to the root; the name is removed"));
    let told = told.expect("it is told");
    assert!(told.starts_with("<directory 4294967317>/e/d/e/"), "{}", &told[..50]);
}

fn keep_d(records: &mut Records) {
    records.unname(FILES, b"d");
    let place = records.lost_and_found();
    let name = b"#0000000100000015";
    records.put(keys::inode(D), &directory(DirectoryClass::Plain, place, name, 3));
    records.name(place, name, D);
    records.inode(place, |inode| inode.links = 3);
    records.inode(FILES, |inode| inode.links = 3);
}

#[test]
fn a_directory_with_files_in_it_comes_to_lost_and_found() {
    check(
        |patient| patient.records.unname(FILES, b"d"),
        &["directory 0000000100000015: has no name, now files/lost+found/#0000000100000015"],
        keep_d,
    );
}

#[test]
fn a_circle_of_directories_is_cut() {
    check(
        |patient| {
            let records = &mut patient.records;
            records.unname(FILES, b"d");
            records.put(keys::inode(D), &directory(DirectoryClass::Plain, E, b"d", 3));
            records.name(E, b"d", D);
        },
        &["directory 0000000100000015: has no name, now files/lost+found/#0000000100000015"],
        keep_d,
    );
}

#[test]
fn what_a_directory_is_for_follows_from_its_place() {
    let reclass = |id, class, parent, name: &'static [u8], links| {
        move |records: &mut Records| {
            records.put(keys::inode(id), &directory(class, parent, name, links));
        }
    };
    check_restored(
        reclass(STATES, DirectoryClass::Layer(7), SEQUENCE, b"001", 2),
        &["models/m/sequences/s/001: marked as Layer(7), stands where Layer(1) belongs"],
    );
    check_restored(
        reclass(D, DirectoryClass::Models, FILES, b"d", 3),
        &["files/d: marked as Models, stands where Plain belongs"],
    );
}

#[test]
fn a_name_that_cannot_be_looked_up_is_removed() {
    let long = [b'n'; 256];
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &long] {
        let what = format!(
            "{} in directory 3: a name that cannot be looked up, removed",
            kvfs_page::escaped_bytes(name)
        );
        check_restored(|records| records.name(FILES, name, A), &[&what]);
    }
    let misplaced = |records: &mut Records| {
        let mut key = keys::entry(FILES, b"a");
        key[9] ^= 1;
        records.put(key, &Entry { inode: A, file_type: libc::S_IFREG });
    };
    check_restored(misplaced, &["a in directory 3: a name that cannot be looked up, removed"]);
    // The longest name that there can be.
    let name_it = |records: &mut Records| {
        records.name(FILES, &long[..255], A);
        records.inode(A, |inode| inode.links = 3);
    };
    check(|patient| name_it(&mut patient.records), &[], name_it);
}
