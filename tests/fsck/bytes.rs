//! Objects, their records, and what a crash leaves.

use kvfs::store::Store;
use kvfs::store::fsck::{self, FsckOptions};
use kvfs::store::record::{ObjectKind, ObjectRecord, Role, Totals};

use crate::common::sys::rename;
use crate::patient::{CALLER, LAYER, Mounted, NEXT_PAGE, PAGE, Patient, check, number_key};

#[test]
fn a_sound_store_has_no_findings() {
    let patient = check(|_| (), &[], &[]);
    let report = patient.fsck(false);
    assert!(report.inodes > 15 && report.objects > 8, "{report:?}");
    assert!(report.bytes_read > 10_000);
}

#[test]
fn a_store_that_was_never_mounted_has_no_findings() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open_or_create(&directory.path().join("store")).unwrap();
    let report = fsck::run(&store, &FsckOptions::default(), &|_, _| ()).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn damaged_bytes_become_a_miss_and_go_to_quarantine() {
    let flip = |path: &'static str, at: usize| {
        move |patient: &Patient| {
            let file = patient.object_path(path);
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[at] ^= 1;
            std::fs::write(&file, bytes).unwrap();
        }
    };
    let patient = check(flip(PAGE, 5000), &["0000000.safetensors: the bytes of object"], &[PAGE]);
    let names = patient.path.join("quarantine").read_dir().unwrap();
    let reason = names.map(|entry| entry.unwrap().path()).find(|path| path.extension().is_some());
    assert!(std::fs::read_to_string(reason.unwrap()).unwrap().starts_with(PAGE));
    check(flip(PAGE, 9), &["0000000.safetensors: "], &[PAGE]);
    check(flip("files/d/b", 0), &["files/d/b: the bytes of object"], &["files/d/b"]);
    // One object behind two names.
    check(
        flip("files/a", 0),
        &["files/a, files/d/linked: the bytes"],
        &["files/a", "files/d/linked"],
    );
}

#[test]
fn cut_and_missing_bytes() {
    let cut = |path: &'static str| {
        move |patient: &Patient| {
            let file =
                std::fs::OpenOptions::new().write(true).open(patient.object_path(path)).unwrap();
            file.set_len(4).unwrap();
        }
    };
    let remove = |path: &'static str| {
        move |patient: &Patient| std::fs::remove_file(patient.object_path(path)).unwrap()
    };
    check(cut("files/d/b"), &["has 4 bytes instead of 10000"], &["files/d/b"]);
    check(cut(PAGE), &["0000000.safetensors: "], &[PAGE]);
    check(remove(PAGE), &["0000000.safetensors: the bytes of object"], &[PAGE]);
    check(
        remove("models/m/sequences/s/tokens"),
        &["tokens: the bytes of object"],
        &["models/m/sequences/s/tokens"],
    );
}

#[test]
fn a_tail_without_its_bytes_hides_no_other_name() {
    let patient = Patient::new();
    std::fs::remove_file(patient.object_path(&format!("{LAYER}/0000032.tail"))).unwrap();
    let fs = Mounted::open(&patient.path);
    let layer = fs.find(LAYER).unwrap();
    let mut names = Vec::new();
    let listed = fs.0.list(layer, 3, kvfs::fs::Listing::Attributes, |line| {
        names.push((String::from_utf8_lossy(line.name).into_owned(), line.attributes.is_some()));
        true
    });
    listed.unwrap();
    names.sort();
    let expected =
        [("0000000.safetensors", true), ("0000016.safetensors", true), ("0000032.tail", false)];
    assert_eq!(names, expected.map(|(name, is_there)| (name.to_owned(), is_there)));
}

fn open(path: &std::path::Path) -> Result<(), String> {
    let (sender, _) = crossbeam_channel::bounded(16);
    let observer = std::sync::Arc::new(kvfs::observe::Observer::new());
    let opened = kvfs::fs::FileSystem::open(Store::open(path).unwrap(), observer, sender);
    opened.map(drop).map_err(|error| error.to_string())
}

#[test]
fn a_directory_of_objects_that_is_missing_is_waited_for_or_made_anew() {
    let patient = Patient::new();
    let directory = patient.object_path(PAGE).parent().unwrap().to_owned();
    let aside = patient.path.join("aside");
    rename(&directory, &aside).unwrap();
    let refused = open(&patient.path).unwrap_err();
    let name = directory.to_str().unwrap();
    assert!(refused.contains(&format!("{name} is missing")), "{refused}");
    assert!(refused.contains("fsck --repair"), "{refused}");
    // It is put back, and nothing is lost.
    rename(&aside, &directory).unwrap();
    open(&patient.path).unwrap();
    let fs = Mounted::open(&patient.path);
    assert!(patient.files.iter().all(|(path, bytes)| fs.read(path) == Some(Ok(bytes.clone()))));
    fs.close();
    // It is lost for good.
    std::fs::remove_dir_all(&directory).unwrap();
    let found = patient.fsck(false).findings;
    assert!(found.iter().any(|finding| finding.what.contains("directory is missing")), "{found:?}");
    assert!(patient.fsck(true).findings.iter().any(|finding| finding.repaired));
    let fs = Mounted::open(&patient.path);
    fs.write("files/after", b"there is room for files again");
    fs.close();
    let after = patient.fsck(false).findings;
    assert!(after.iter().all(|finding| finding.what.contains("manifest.json")), "{after:?}");
}

#[test]
fn empty_directories_that_a_copy_left_out_are_made_anew() {
    let patient = Patient::new();
    let used = patient.object_path(PAGE).parent().unwrap().to_owned();
    for shard in 0..=255 {
        let directory = patient.path.join(format!("objects/{shard:02x}"));
        if directory != used {
            std::fs::remove_dir(directory).unwrap();
        }
    }
    std::fs::remove_dir(patient.path.join("staging")).unwrap();
    let fs = Mounted::open(&patient.path);
    assert!(patient.files.iter().all(|(path, bytes)| fs.read(path) == Some(Ok(bytes.clone()))));
    fs.close();
    assert_eq!(std::fs::read_dir(patient.path.join("objects")).unwrap().count(), 256);
    assert_eq!(patient.fsck(false).findings, []);
}

#[test]
fn swapped_pages_are_found() {
    check(
        |patient| {
            let (one, other) = (patient.object_path(PAGE), patient.object_path(NEXT_PAGE));
            let bytes = std::fs::read(&one).unwrap();
            std::fs::copy(&other, &one).unwrap();
            std::fs::write(&other, bytes).unwrap();
        },
        &["0000000.safetensors: ", "0000016.safetensors: "],
        &[PAGE, NEXT_PAGE],
    );
    // The same, done to the names.
    check(
        |patient| {
            let records = patient.records();
            let (one, other) = (records.entry_key(PAGE), records.entry_key(NEXT_PAGE));
            patient.change(&one, Some(&records.0[&other]));
            patient.change(&other, Some(&records.0[&one]));
        },
        &[
            "holds the page of another place",
            "holds the page of another place",
            "lost+found",
            "lost+found",
        ],
        &[PAGE, NEXT_PAGE],
    );
}

#[test]
fn a_page_name_without_a_sealed_page() {
    check(
        |patient| {
            patient.put_inode(PAGE, |inode| {
                inode.file_mut().unwrap().role = Role::Plain;
            });
        },
        &["was never sealed"],
        &[PAGE],
    );
}

#[test]
fn records_of_objects() {
    let change = |change: fn(&mut ObjectRecord)| {
        move |patient: &Patient| {
            let records = patient.records();
            let key = number_key(b'O', records.object("files/d/b").0);
            let mut record: ObjectRecord = records.get(&key);
            change(&mut record);
            patient.put(&key, &record);
        }
    };
    check(change(|record| record.references = 3), &["3 references instead of 1"], &[]);
    check(
        |patient| {
            let key = number_key(b'O', 0x0000_0001_0000_0099);
            let record =
                ObjectRecord { kind: ObjectKind::File, length: 5, checksum: None, references: 1 };
            patient.put(&key, &record);
        },
        &["no file refers to it; its record is removed", "totals"],
        &[],
    );
    check(
        |patient| {
            patient.put(b"T", &Totals { objects: 1, pages: 2, bytes: 3 });
        },
        &["totals: 1 objects, 2 pages, 3 bytes"],
        &[],
    );
}

#[test]
fn files_that_no_record_knows() {
    let plant = |patient: &Patient| {
        std::fs::write(patient.path.join("objects/01/0000000100000123"), b"orphan").unwrap();
    };
    let patient = check(plant, &["object 0000000100000123: has no record, removed"], &[]);
    assert!(!patient.path.join("objects/01/0000000100000123").exists());
}

#[test]
fn what_a_crash_leaves_is_no_damage() {
    let patient = Patient::new();
    let fs = Mounted::open(&patient.path);
    let staged = fs.0.create(&fs.place("files/half"), 0o644, CALLER, true).unwrap();
    fs.0.write(staged.opened.handle, 0, b"half", true).unwrap();
    // Written to in place, and unlinked while open.
    let b = fs.find("files/d/b").unwrap();
    let opened = fs.0.open_file(b, libc::O_WRONLY).unwrap();
    fs.0.write(opened.handle, 0, b"new", true).unwrap();
    let zero = fs.find("files/zero").unwrap();
    fs.0.open_file(zero, libc::O_RDONLY).unwrap();
    fs.0.unlink(&fs.place("files/zero")).unwrap();
    fs.0.commit().unwrap();
    std::fs::write(patient.path.join("objects/01/0000000100000123"), b"not committed").unwrap();
    drop(fs);
    let before = patient.bytes();
    let report = patient.fsck(false);
    assert_eq!(report.findings, []);
    let expected = fsck::Leftovers { staged: 1, unsettled: 1, unreferenced: 2 };
    assert_eq!(report.leftovers, expected);
    assert!(patient.bytes() == before);
    let repaired = patient.fsck(true);
    assert_eq!((repaired.findings, repaired.leftovers), (vec![], expected));
    let after = patient.fsck(false);
    assert_eq!((after.findings, after.leftovers), (vec![], fsck::Leftovers::default()));
    let fs = Mounted::open(&patient.path);
    assert_eq!(fs.read("files/zero"), None);
    assert_eq!(fs.read("files/half"), None);
    assert_eq!(&fs.read("files/d/b").unwrap().unwrap()[..4], b"new\x03");
}

#[test]
fn a_subset_reads_only_its_part() {
    let patient = Patient::new();
    let object = patient.records().object("files/d/b").0;
    let file = patient.object_path("files/d/b");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[77] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let store = Store::open(&patient.path).unwrap();
    for part in 1..=3 {
        let options = FsckOptions { repair: false, subset: Some((part, 3)) };
        let report = fsck::run(&store, &options, &|_, _| ()).unwrap();
        let expected = usize::from(object % 3 == u64::from(part) - 1);
        assert_eq!(report.findings.len(), expected, "part {part}");
    }
}

#[test]
fn a_database_beyond_reading_is_told() {
    let patient = Patient::new();
    let file = patient.path.join("meta.redb");
    let mut bytes = std::fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[4096..end].fill(0x5a);
    std::fs::write(&file, bytes).unwrap();
    let report = patient.fsck(false);
    assert_eq!(report.findings.len(), 1, "{report:?}");
    assert!(report.findings[0].what.starts_with("meta.redb: "), "{report:?}");
    assert!(!report.findings[0].repaired);
}
