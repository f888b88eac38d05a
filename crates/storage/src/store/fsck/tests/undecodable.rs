//! Records that cannot be decoded count as absent.

use super::*;

fn garble(key: Vec<u8>) -> impl FnOnce(&mut Patient) {
    move |patient| {
        assert!(patient.records.0.insert(key, vec![0xff; 3]).is_some());
    }
}

#[test]
fn what_is_told_nowhere_else_is_lost() {
    let (patient, _) = check(
        garble(keys::inode(B)),
        &[
            "inode 0000000100000026: the record cannot be decoded, removed",
            "files/d/b: leads to inode 0000000100000026, which does not exist; the name is removed",
            "object 0000000100000126: no file refers to it; its bytes are kept in quarantine",
        ],
        |records| {
            records.unname(D, b"b");
            records.lose(B);
        },
    );
    assert_eq!(patient.quarantined(), ["0000000100000126"]);
    check(
        garble(keys::entry(D, b"linked")),
        &[
            "linked in directory 4294967317: the record cannot be decoded, removed",
            "files/a: link count 2 instead of 1",
        ],
        |records| {
            records.unname(D, b"linked");
            records.inode(A, |inode| inode.links = 1);
        },
    );
}

#[test]
fn what_follows_from_others_is_made_anew() {
    check(
        garble(keys::object(object(B))),
        &[
            "object 0000000100000126: the record cannot be decoded, removed",
            "object 0000000100000126 (inode 0000000100000026): has no record, made",
            "totals: 7 objects, 2 pages, 26622 bytes; counted: 6, 2, 16622",
        ],
        |records| {
            let change = |record: &mut ObjectRecord| record.checksum = None;
            records.change(keys::object(object(B)), change);
        },
    );
    check(
        garble(keys::totals()),
        &[
            "the totals: the record cannot be decoded, removed",
            "totals: 0 objects, 0 pages, 0 bytes; counted: 7, 2, 26622",
        ],
        |_| (),
    );
}

#[test]
fn copies_count_as_absent() {
    let copies = |patient: &mut Patient| {
        patient.copy_to_remote(A, RemoteState::Held);
        patient.encode(B);
        for key in [keys::remote_copy(object(A)), keys::encoded_copy(object(B))] {
            garble(key)(patient);
        }
    };
    let (patient, _) = check(
        copies,
        &[
            "remote copy of object 0000000100000125: the record cannot be decoded, removed",
            "encoded copy of object 0000000100000126: the record cannot be decoded, removed",
        ],
        |_| (),
    );
    assert!(!patient.is_there(&DiskPath::Encoded(object(B))));
}

#[test]
fn a_key_without_a_number_is_told() {
    let keys = [b"I\0", b"E\0", b"O\0", b"R\0", b"Z\0"];
    let insert = |patient: &mut Patient| {
        for key in keys {
            patient.records.0.insert(key.to_vec(), vec![0xff; 3]);
        }
    };
    check(
        insert,
        &[
            "inode without a number: the record cannot be decoded, removed",
            "a name without a directory: the record cannot be decoded, removed",
            "object without a number: the record cannot be decoded, removed",
            "remote copy of object without a number: the record cannot be decoded, removed",
            "encoded copy of object without a number: the record cannot be decoded, removed",
        ],
        |_| (),
    );
}
