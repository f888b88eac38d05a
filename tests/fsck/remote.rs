//! Objects of which the remote has a copy: fsck does not ask it, and takes its word on record.

use kvfs::store::fsck::Leftovers;
use kvfs::store::record::{RemoteCopy, RemoteState};
use kvfs::tier::encoding::Encoding;

use crate::patient::{Mounted, PAGE, Patient, number_key};

const FILES: [&str; 3] = ["files/d/b", "models/m/manifest.json", PAGE];

fn put_copy(patient: &Patient, path: &str, state: RemoteState) -> Vec<u8> {
    let object = patient.records().object(path);
    let copy =
        RemoteCopy { content: [7; 32], encoding: Encoding::Raw, stored_bytes: 10_000, state };
    let key = number_key(b'R', object.0);
    patient.put(&key, &copy);
    key
}

fn state(patient: &Patient, key: &[u8]) -> RemoteState {
    patient.records().get::<RemoteCopy>(key).state
}

#[test]
fn what_only_the_remote_has_is_no_finding() {
    for lasting in [RemoteState::Only, RemoteState::Named] {
        let patient = Patient::new();
        let keys = FILES.map(|path| {
            let key = put_copy(&patient, path, lasting);
            std::fs::remove_file(patient.object_path(path)).unwrap();
            key
        });
        let before = patient.bytes();
        let found = patient.fsck(false);
        assert_eq!((found.findings, found.only_remote), (vec![], 3));
        assert!(patient.bytes() == before, "a check without repair changed the store");
        let repaired = patient.fsck(true);
        assert_eq!((repaired.findings, repaired.only_remote), (vec![], 3));
        for key in keys {
            assert_eq!(state(&patient, &key), RemoteState::Only);
        }
        let names = Mounted::open(&patient.path);
        assert!(FILES.iter().all(|path| names.find(path).is_some()), "no name is lost");
        names.close();
    }
}

#[test]
fn a_file_that_a_crash_left_after_its_object_is_a_leftover() {
    let patient = Patient::new();
    put_copy(&patient, FILES[0], RemoteState::Only);
    // Whatever it holds: it does not count.
    std::fs::write(patient.object_path(FILES[0]), b"torn").unwrap();
    let found = patient.fsck(false);
    assert_eq!(found.findings, []);
    assert_eq!(found.leftovers, Leftovers { unreferenced: 1, ..Leftovers::default() });
    patient.fsck(true);
    assert!(!patient.object_path(FILES[0]).exists());
    assert_eq!(patient.fsck(false).leftovers, Leftovers::default());
}

#[test]
fn a_damaged_file_makes_room_for_the_copy_that_is_named() {
    let patient = Patient::new();
    let key = put_copy(&patient, FILES[0], RemoteState::Named);
    std::fs::write(patient.object_path(FILES[0]), vec![4; 10_000]).unwrap();
    let found = patient.fsck(false);
    assert_eq!(found.findings.len(), 1);
    assert!(found.findings[0].what.contains("the remote's copy takes its place"));
    assert_eq!(state(&patient, &key), RemoteState::Named);
    let repaired = patient.fsck(true);
    assert!(repaired.findings.iter().all(|finding| finding.repaired));
    assert_eq!(state(&patient, &key), RemoteState::Only);
    assert!(!patient.object_path(FILES[0]).exists());
    let kept = patient.path.join("quarantine");
    assert!(kept.read_dir().unwrap().count() > 0, "the damaged bytes are kept");
    let after = patient.fsck(false);
    assert_eq!((after.findings, after.only_remote), (vec![], 1));
}

#[test]
fn a_copy_that_no_manifest_names_saves_nothing() {
    let patient = Patient::new();
    put_copy(&patient, FILES[0], RemoteState::Held);
    std::fs::remove_file(patient.object_path(FILES[0])).unwrap();
    let found = patient.fsck(false);
    assert_eq!((found.findings.len(), found.only_remote), (1, 0));
    patient.fsck(true);
    assert_eq!(patient.fsck(false).findings, []);
    let names = Mounted::open(&patient.path);
    assert!(names.find(FILES[0]).is_none());
    names.close();
}
