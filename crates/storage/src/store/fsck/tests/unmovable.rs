//! What a repair cannot move or remove: that is told and stays, and everything else is repaired.

use super::bytes::forget_b;
use super::*;

/// A directory has the name that an object's bytes get in quarantine.
fn occupy(patient: &Patient, id: InodeId) -> std::path::PathBuf {
    let path = DiskPath::Quarantine(object(id).to_string()).relative();
    let path = patient.store.path().join(path);
    std::fs::create_dir(&path).unwrap();
    path
}

#[test]
fn what_cannot_be_moved_is_told_and_kept_and_all_else_is_repaired() {
    let (patient, _) = check(
        |patient| {
            patient.overwrite(A, b"x", 0);
            patient.overwrite(B, b"x", 0);
            occupy(patient, A);
            patient.records.inode(ROOT, |inode| inode.links = 3);
        },
        &[
            "! files/a, files/d/linked: the bytes of object 0000000100000125 are not those that were written (checksum \
             mismatch); *",
            "files/d/b: the bytes of object 0000000100000126 are not those that were written (checksum mismatch); a miss \
             after repair, its bytes are kept in quarantine",
            "inode 0000000000000001: link count 3 instead of 4",
        ],
        forget_b,
    );
    let mut quarantined = patient.quarantined();
    quarantined.sort();
    assert_eq!(quarantined, [object(A), object(B)].map(|object| object.to_string()));
    let told = lines(&patient.fsck(true), true);
    let end = "cannot be moved to quarantine/0000000100000125 (Is a directory (os error 21)), see to that and run \
               kvfs fsck --repair again";
    assert!(told[0].ends_with(end), "{told:?}");
    // Once nothing is in the way any more.
    let place = patient.store.path().join("quarantine").join(object(A).to_string());
    std::fs::remove_dir(place).unwrap();
    assert!(patient.fsck(true).findings[0].repaired);
    assert_eq!(patient.fsck(false).findings, []);
}

#[test]
fn another_copy_takes_no_place_that_is_not_given_up() {
    for is_encoded in [true, false] {
        let mut patient = Patient::new();
        if is_encoded {
            patient.encode(B);
        } else {
            patient.copy_to_remote(B, RemoteState::Named);
        }
        patient.overwrite(B, b"x", 0);
        patient.write();
        let place = occupy(&patient, B);
        let report = patient.fsck(true);
        assert_eq!(lines(&report, true).len(), 1, "{report:?}");
        assert!(!report.findings[0].repaired, "{report:?}");
        assert_same(&patient.read(), &patient.records, "what cannot be moved");
        std::fs::remove_dir(place).unwrap();
        assert!(patient.fsck(true).findings[0].repaired);
        assert_eq!(patient.fsck(false).findings, []);
    }
}

#[test]
fn garbage_that_cannot_be_removed_is_told() {
    let patient = Patient::new();
    patient.write();
    let staged = DiskPath::Staging(object(B));
    let place = patient.store.path().join(staged.relative());
    std::fs::create_dir(&place).unwrap();
    let told = lines(&patient.fsck(true), true);
    let expected = format!("! {}: cannot be removed (*", staged.relative().display());
    assert_told(&told, &[expected]);
    std::fs::remove_dir(place).unwrap();
    assert_eq!(patient.fsck(true).findings, []);
}
