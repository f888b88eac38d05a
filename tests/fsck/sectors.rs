//! The disk loses a sector of `meta.redb`: what the records told of is never taken for garbage, by a mount as little as by
//! a repair, and a rebuild brings it back.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvfs::fs::{FileSystem, NewNode, check_records};
use kvfs::observe::Observer;
use kvfs::store::record::{RemoteCopy, RemoteState};
use kvfs::store::{Store, StoreError};
use kvfs::tier::encoding::Encoding;

use crate::common::sys::removexattr;
use crate::patient::{CALLER, Files, Mounted, Patient, number_key};
use crate::rebuild::rebuild;

const SECTOR_BYTES: usize = 512;
const NOTE: &str = "user.kvfs.note";

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

/// As if no mount had been there since.
fn put_back(store: &Path, database: &[u8]) {
    std::fs::write(store.join("meta.redb"), database).unwrap();
    // There is none before the first mount.
    let _ = removexattr(store.join("FORMAT"), NOTE);
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
            put_back(&patient.path, &damaged);
            match open(&patient.path) {
                Ok(fs) => {
                    assert!(are_all_there(&fs, &patient.files), "sector {index}: mounted without");
                    unused += 1;
                }
                Err(StoreError::Corrupt(_)) => noticed += 1,
                Err(error) => panic!("sector {index}: {error}"),
            }
            assert_eq!(objects(&patient.path), before, "sector {index}, after a mount");
            put_back(&patient.path, &damaged);
            patient.fsck(true);
            assert_eq!(objects(&patient.path), before, "sector {index}, after a repair");
        }
    }
    // Of the database of a small store most is room that was used once.
    assert!(noticed > 8 && unused > 8, "{noticed} noticed, {unused} unused");
}

/// Beside the files: directories that are open to others, symbolic links, attributes, and what only a remote has.
const DIRECTORIES: usize = 200;

fn directory(number: usize) -> String {
    format!("files/directory{number:03}")
}

fn fill(patient: &mut Patient) {
    let fs = Mounted::open(&patient.path);
    for number in 0..DIRECTORIES {
        let path = directory(number);
        fs.directory(&path);
        let node = NewNode::Symlink(format!("target{number}").into_bytes());
        fs.0.make(&fs.place(&format!("{path}/symlink")), &node, 0o777, CALLER).unwrap();
        let file = format!("{path}/file");
        fs.write(&file, file.as_bytes());
        let id = fs.find(&file).unwrap();
        fs.0.set_extended_attribute(id, b"user.number", number.to_string().as_bytes(), 0).unwrap();
        fs.0.link(id, &fs.place(&format!("{path}/linked"))).unwrap();
        for name in ["file", "linked"] {
            patient.files.insert(format!("{path}/{name}"), file.clone().into_bytes());
        }
    }
    fs.0.rename(&fs.place(&directory(7)), &fs.place("files/renamed"), 0).unwrap();
    for name in ["file", "linked"] {
        let bytes = patient.files.remove(&format!("{}/{name}", directory(7))).unwrap();
        patient.files.insert(format!("files/renamed/{name}"), bytes);
    }
    fs.close();
}

/// What is as it was: symbolic links, directories that all may read, attributes.
fn count_kept(fs: &Mounted) -> [usize; 3] {
    let mut kept = [0; 3];
    for number in 0..DIRECTORIES {
        let path = if number == 7 { "files/renamed".to_owned() } else { directory(number) };
        let Some(id) = fs.find(&path) else { continue };
        kept[0] += usize::from(fs.find(&format!("{path}/symlink")).is_some());
        kept[1] += usize::from(fs.0.attributes(id).unwrap().mode & 0o777 == 0o755);
        let Some(file) = fs.find(&format!("{path}/file")) else { continue };
        let value = fs.0.extended_attribute(file, b"user.number");
        kept[2] += usize::from(value.is_ok_and(|value| value == number.to_string().as_bytes()));
    }
    kept
}

#[test]
fn a_rebuild_keeps_what_can_be_read_of_the_old_records() {
    let mut patient = Patient::new();
    fill(&mut patient);
    let remote = "files/d/b";
    let copy = RemoteCopy {
        content: [7; 32],
        encoding: Encoding::Raw,
        stored_bytes: 10_000,
        state: RemoteState::Only,
    };
    patient.put(&number_key(b'R', patient.records().object(remote).0), &copy);
    std::fs::remove_file(patient.object_path(remote)).unwrap();
    patient.files.remove(remote);
    drop(open(&patient.path).unwrap());
    let database = patient.path.join("meta.redb");
    let whole = std::fs::read(&database).unwrap();
    // Records of names in the middle of the tree.
    let name = b"symlink";
    let places: Vec<usize> =
        (0..whole.len() - name.len()).filter(|at| whole[*at..].starts_with(name)).collect();
    let (mut seen, mut kept_remote, mut kept_most) = (0, 0, 0);
    for at in places.iter().step_by(places.len() / 6) {
        let mut bytes = whole.clone();
        let sector = at / SECTOR_BYTES * SECTOR_BYTES;
        bytes[sector..sector + SECTOR_BYTES].fill(0);
        put_back(&patient.path, &bytes);
        if patient.fsck(false).findings.is_empty() {
            continue;
        }
        seen += 1;
        let found = patient.fsck(true).findings;
        assert!(found.len() == 1 && !found[0].repaired, "{found:?}");
        assert!(found[0].what.contains("--rebuild"), "{found:?}");
        let (rebuilt, report) = rebuild(&patient);
        assert_eq!((rebuilt.lost, report.findings), (0, Vec::new()));
        let fs = open(&patient.path).unwrap();
        assert!(are_all_there(&fs, &patient.files));
        // The lost sector may have been the one with its name.
        kept_remote += usize::from(fs.find(remote).is_some() && report.only_remote == 1);
        kept_most += usize::from(count_kept(&fs).iter().all(|kept| *kept > DIRECTORIES * 9 / 10));
        drop(fs);
    }
    // The name that was looked for stands in a page above others once, and nothing can be read below that.
    let kept = (kept_remote, kept_most);
    assert!(seen > 3 && kept_remote + 2 >= seen && kept_most + 1 >= seen, "{kept:?} of {seen}");
}

/// Somebody puts back a copy of an earlier mount: objects that are younger are not taken for garbage, nor their numbers
/// given out again.
#[test]
fn a_database_of_an_earlier_mount_is_not_taken_for_the_stores() {
    let mut patient = Patient::new();
    let database = patient.path.join("meta.redb");
    let earlier = std::fs::read(&database).unwrap();
    let fs = Mounted::open(&patient.path);
    for number in 0..20 {
        let path = format!("files/younger{number}");
        fs.write(&path, path.as_bytes());
        patient.files.insert(path.clone(), path.into_bytes());
    }
    fs.close();
    let before = objects(&patient.path);
    std::fs::write(&database, &earlier).unwrap();
    let refused = open(&patient.path).map(drop).unwrap_err().to_string();
    assert!(refused.contains("older than the store"), "{refused}");
    assert_eq!(std::fs::read(&database).unwrap().len(), earlier.len());
    let found = patient.fsck(true).findings;
    assert!(found.len() == 1 && !found[0].repaired, "{found:?}");
    assert!(found[0].what.contains("--rebuild"), "{found:?}");
    assert_eq!(objects(&patient.path), before);
    let (rebuilt, report) = rebuild(&patient);
    assert_eq!((rebuilt.lost, report.findings), (0, Vec::new()));
    let fs = open(&patient.path).unwrap();
    assert!(are_all_there(&fs, &patient.files));
    // And mounts go on from there.
    fs.close();
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
    let error = kvfs::fs::sweep_after_crash(&fs.0).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt(_)), "{error}");
    let refused = fs.0.create(&fs.place("files/late"), 0o644, CALLER, true);
    assert!(refused.is_err());
    assert!(fs.0.unlink(&fs.place("files/a")).is_err());
    assert!(are_all_there(&fs, &patient.files), "what can be read is read");
    let _ = fs.0.commit_and_close();
    drop(fs);
    assert!(before.iter().all(|file| file.exists()));
    let found = patient.fsck(true).findings;
    assert!(found.len() == 1 && found[0].what.contains("--rebuild"), "{found:?}");
}
