//! The disk loses a sector of `meta.redb`: what the records told of is never taken for garbage, by a mount as little as by
//! a repair, and a rebuild brings it back.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvfs::fs::{FileSystem, check_records};
use kvfs::observe::Observer;
use kvfs::store::fsck;
use kvfs::store::{Store, StoreError};

use crate::patient::{Files, Mounted, Patient};

const SECTOR_BYTES: usize = 512;

fn open(path: &Path) -> Result<Mounted, StoreError> {
    let (sender, _) = crossbeam_channel::bounded(1 << 16);
    let opened = FileSystem::open(Store::open(path).unwrap(), Arc::new(Observer::new()), sender);
    opened.map(|(file_system, _)| Mounted(file_system))
}

/// Files below `objects/` and `packs/`, and whether any were set aside.
fn objects(store: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![store.join("objects"), store.join("packs"), store.join("quarantine")];
    waiting.retain(|directory| directory.exists());
    while let Some(directory) = waiting.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let is_directory = entry.file_type().unwrap().is_dir();
            if is_directory { &mut waiting } else { &mut found }.push(entry.path());
        }
    }
    found.sort();
    found
}

fn are_all_there(fs: &Mounted, files: &Files) -> bool {
    files.iter().all(|(path, bytes)| fs.read(path) == Some(Ok(bytes.clone())))
}

#[test]
fn a_lost_sector_costs_no_file() {
    let patient = Patient::new();
    let database = patient.path.join("meta.redb");
    let whole = std::fs::read(&database).unwrap();
    let before = objects(&patient.path);
    let (mut noticed, mut unused) = (0, 0);
    let sectors = whole.chunks(SECTOR_BYTES).enumerate();
    for (index, sector) in sectors.filter(|(_, sector)| sector.iter().any(|byte| *byte != 0)) {
        let garbage: Vec<u8> = sector.iter().map(|byte| byte ^ 0x5a).collect();
        for lost in [&[0; SECTOR_BYTES][..sector.len()], &garbage] {
            let mut damaged = whole.clone();
            damaged[index * SECTOR_BYTES..][..sector.len()].copy_from_slice(lost);
            std::fs::write(&database, &damaged).unwrap();
            match open(&patient.path) {
                Ok(fs) => {
                    assert!(are_all_there(&fs, &patient.files), "sector {index}: mounted without");
                    unused += 1;
                }
                Err(StoreError::Corrupt(_)) => noticed += 1,
                Err(error) => panic!("sector {index}: {error}"),
            }
            assert_eq!(objects(&patient.path), before, "sector {index}, after a mount");
            std::fs::write(&database, &damaged).unwrap();
            patient.fsck(true);
            assert_eq!(objects(&patient.path), before, "sector {index}, after a repair");
        }
    }
    // Of the database of a small store most is room that was used once.
    assert!(noticed > 8 && unused > 8, "{noticed} noticed, {unused} unused");
}

#[test]
fn a_rebuild_after_a_lost_sector_brings_the_files_back() {
    let patient = Patient::new();
    let database = patient.path.join("meta.redb");
    let mut bytes = std::fs::read(&database).unwrap();
    let name = b"0000016.safetensors";
    // All versions of the page that the name is in.
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(name.len()).position(|window| window == name) {
        at += found;
        let sector = at / SECTOR_BYTES * SECTOR_BYTES;
        bytes[sector..sector + SECTOR_BYTES].fill(0);
    }
    std::fs::write(&database, &bytes).unwrap();
    let found = patient.fsck(false).findings;
    assert!(found.len() == 1 && found[0].what.contains("--rebuild"), "{found:?}");
    let refused = patient.fsck(true).findings;
    assert!(refused.len() == 1 && !refused[0].repaired, "{refused:?}");
    let store = Store::open(&patient.path).unwrap();
    let (rebuilt, report) = fsck::rebuild(&store, &|_, _| ()).unwrap();
    assert_eq!((rebuilt.lost, report.findings), (0, Vec::new()));
    drop(store);
    assert!(are_all_there(&open(&patient.path).unwrap(), &patient.files));
}

/// More than is read before the mount answers.
#[test]
fn damage_to_a_large_database_ends_all_changes_before_anything_is_swept() {
    const ATTRIBUTES: usize = 300;
    let patient = Patient::new();
    let fs = Mounted::open(&patient.path);
    let value = |number: usize| vec![b'a' + u8::try_from(number % 26).unwrap(); 60 << 10];
    for number in 0..ATTRIBUTES {
        let path = format!("files/large{number}");
        fs.directory(&path);
        let directory = fs.find(&path).unwrap();
        fs.0.set_extended_attribute(directory, b"user.large", &value(number), 0).unwrap();
    }
    fs.close();
    let database = patient.path.join("meta.redb");
    let mut bytes = std::fs::read(&database).unwrap();
    assert!(bytes.len() > 17 << 20, "{} bytes", bytes.len());
    let sound = open(&patient.path).unwrap();
    check_records(&sound.0).unwrap();
    sound.close();

    let at = bytes.windows(4096).position(|window| window == &value(3)[..4096]).unwrap();
    // A crash left something, as far as the next mount can tell.
    drop(open(&patient.path).unwrap());
    bytes = std::fs::read(&database).unwrap();
    bytes[at + 100] ^= 1;
    std::fs::write(&database, &bytes).unwrap();
    let before = objects(&patient.path);
    let fs = open(&patient.path).unwrap();
    fs.write("files/new", b"made before anybody knew");
    let error = fs.0.sweep_after_crash().unwrap_err();
    assert!(matches!(error, StoreError::Corrupt(_)), "{error}");
    let refused = fs.0.create(&fs.place("files/late"), 0o644, crate::patient::CALLER, true);
    assert!(refused.is_err());
    assert!(fs.0.unlink(&fs.place("files/a")).is_err());
    assert!(are_all_there(&fs, &patient.files), "what can be read is read");
    let _ = fs.0.commit_and_close();
    drop(fs);
    assert!(before.iter().all(|file| file.exists()));
    let found = patient.fsck(true).findings;
    assert!(found.len() == 1 && found[0].what.contains("--rebuild"), "{found:?}");
}
