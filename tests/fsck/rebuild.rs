//! The records are lost, and made again from what the object files say about themselves.

use std::path::{Path, PathBuf};

use kvfs::store::fsck::{self, Rebuilt, Report};
use kvfs::store::{Store, StoreError};

use crate::common::sys::{attribute, removexattr, setxattr};
use crate::patient::{LAYER, Mounted, NEXT_PAGE, PAGE, Patient, manifest, page};

const NOTE: &str = "user.kvfs.note";

fn database(patient: &Patient) -> PathBuf {
    patient.path.join("meta.redb")
}

fn remove(patient: &Patient) {
    std::fs::remove_file(database(patient)).unwrap();
}

pub(crate) fn rebuild(patient: &Patient) -> (Rebuilt, Report) {
    let store = Store::open(&patient.path).unwrap();
    fsck::rebuild(&store, &|_, _| ()).unwrap()
}

/// The store is sound, and has these names with the bytes that they had.
fn assert_has(patient: &Patient, lost: &[&str]) {
    assert_eq!(patient.fsck(false).findings, []);
    let fs = Mounted::open(&patient.path);
    for (path, bytes) in &patient.files {
        let expected = (!lost.contains(&path.as_str())).then(|| Ok(bytes.clone()));
        assert_eq!(fs.read(path), expected, "{path}");
    }
    fs.close();
    assert_eq!(patient.fsck(false).findings, [], "after a mount");
}

#[test]
fn files_and_pages_are_where_they_were() {
    let cut = |patient: &Patient| {
        let length = std::fs::metadata(database(patient)).unwrap().len();
        let file = std::fs::File::options().write(true).open(database(patient)).unwrap();
        file.set_len(length / 2 / 4096 * 4096).unwrap();
    };
    let garbage = |patient: &Patient| std::fs::write(database(patient), vec![7; 100_000]).unwrap();
    for damage in [&remove as &dyn Fn(&Patient), &cut, &garbage] {
        let patient = Patient::new();
        let before = patient.records();
        damage(&patient);
        let found = patient.fsck(false).findings;
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].what.contains("kvfs fsck --rebuild"), "{found:?}");
        let (rebuilt, report) = rebuild(&patient);
        assert_eq!(report.findings, []);
        let files = patient.files.len() as u64 - 1;
        assert_eq!(rebuilt, Rebuilt { files, lost: 0 }, "two names are one file");
        assert_has(&patient, &[]);
        for path in patient.files.keys() {
            let (old, new) = (before.inode(path), patient.records().inode(path));
            assert_eq!((old.mode, old.uid, old.gid), (new.mode, new.uid, new.gid), "{path}");
            assert_eq!(old.links, new.links, "{path}");
            // That of what grows is its file's, which is synced after its record was made.
            let grows = old.file().unwrap().role.is_append_only();
            assert!(grows || old.mtime == new.mtime, "{path}");
        }
    }
}

#[test]
fn without_records_nothing_is_taken_for_garbage() {
    let patient = Patient::new();
    remove(&patient);
    let objects = patient.bytes();
    let store = Store::open(&patient.path).unwrap();
    let (sender, _) = crossbeam_channel::bounded(16);
    let observer = std::sync::Arc::new(kvfs::observe::Observer::new());
    let refused = kvfs::fs::FileSystem::open(store, observer, sender).unwrap_err().to_string();
    assert!(refused.contains("kvfs fsck --rebuild"), "{refused}");
    assert!(!patient.fsck(true).findings[0].repaired);
    assert!(patient.bytes() == objects);
}

#[test]
fn sound_records_are_not_replaced() {
    let patient = Patient::new();
    let before = patient.bytes();
    let store = Store::open(&patient.path).unwrap();
    let refused = fsck::rebuild(&store, &|_, _| ()).unwrap_err();
    assert!(matches!(refused, StoreError::MetadataSound(_)), "{refused}");
    drop(store);
    assert!(patient.bytes() == before);
}

fn fs_remove(patient: &Patient, path: &str) {
    let fs = Mounted::open(&patient.path);
    fs.0.unlink(&fs.place(path)).unwrap();
    fs.close();
}

#[test]
fn what_happened_last_counts() {
    let mut patient = Patient::new();
    let fs = Mounted::open(&patient.path);
    fs.0.rename(&fs.place("files/d/b"), &fs.place("files/moved"), 0).unwrap();
    fs.0.commit().unwrap();
    fs.write("files/new", b"old bytes");
    fs.0.commit().unwrap();
    fs.write("files/tmp", b"new bytes");
    fs.0.rename(&fs.place("files/tmp"), &fs.place("files/new"), 0).unwrap();
    // One of two names is another file's now, and the other one was the older.
    fs.write("files/tmp", b"taken");
    fs.0.rename(&fs.place("files/tmp"), &fs.place("files/d/linked"), 0).unwrap();
    let tail = fs.find(&format!("{LAYER}/0000032.tail")).unwrap();
    let opened = fs.0.open_file(tail, libc::O_WRONLY | libc::O_APPEND).unwrap();
    fs.0.write(opened.handle, 0, &[2; 64], true).unwrap();
    fs.0.release(opened.handle).unwrap();
    fs.close();
    let bytes = patient.files.remove("files/d/b").unwrap();
    patient.files.insert("files/moved".into(), bytes);
    patient.files.insert("files/d/linked".into(), b"taken".to_vec());
    fs_remove(&patient, "files/zero");
    patient.files.remove("files/zero");
    patient.files.insert("files/new".into(), b"new bytes".to_vec());
    patient.files.insert(format!("{LAYER}/0000032.tail"), vec![2; 64 * 4]);
    remove(&patient);
    let (rebuilt, report) = rebuild(&patient);
    assert_eq!((rebuilt.lost, report.findings), (0, Vec::new()));
    assert_has(&patient, &[]);
    let fs = Mounted::open(&patient.path);
    for gone in ["files/zero", "files/d/b", "files/tmp"] {
        assert_eq!(fs.read(gone), None, "{gone}");
    }
}

/// Names that went together with their directory, or below one that was moved, do not come back in the place of
/// the one that a file still has.
#[test]
fn names_that_went_with_their_directory_do_not_come_back() {
    let patient = Patient::new();
    let fs = Mounted::open(&patient.path);
    for directory in ["files/gone", "files/made", "files/moved"] {
        let link = |path: &str| fs.0.link(fs.find("files/d/b").unwrap(), &fs.place(path)).unwrap();
        let is_moved = directory == "files/moved";
        if is_moved {
            fs.directory("files/made");
            link("files/made/b");
            fs.0.commit().unwrap();
            fs.0.rename(&fs.place("files/made"), &fs.place(directory), 0).unwrap();
        } else {
            fs.directory(directory);
            link(&format!("{directory}/b"));
        }
        fs.0.commit().unwrap();
        fs.0.unlink(&fs.place(&format!("{directory}/b"))).unwrap();
        fs.0.remove_directory(&fs.place(directory)).unwrap();
        fs.0.commit().unwrap();
    }
    fs.close();
    remove(&patient);
    let (rebuilt, report) = rebuild(&patient);
    assert_eq!((rebuilt.lost, report.findings), (0, Vec::new()));
    assert_has(&patient, &[]);
    let fs = Mounted::open(&patient.path);
    for gone in ["files/gone", "files/made", "files/moved"] {
        assert_eq!(fs.find(gone), None, "{gone}");
    }
}

/// `kvfs seq` and slots make a sequence beside the name that it gets, and commits note the files there.
#[test]
fn sequences_that_operations_made_have_their_names() {
    let patient = Patient::new();
    let fs = Mounted::open(&patient.path);
    let sequences = "models/m/sequences";
    let manifest = manifest();
    for (made, name) in [("copied~", "copied"), ("saved~~", "saved"), ("s~", "s.rebuilt")] {
        fs.directory(&format!("{sequences}/{made}"));
        fs.directory(&format!("{sequences}/{made}/000"));
        fs.write(&format!("{sequences}/{made}/000/0000000.safetensors"), &page(&manifest, 0));
        fs.0.commit().unwrap();
        if name != "s.rebuilt" {
            let [from, to] = [made, name].map(|name| fs.place(&format!("{sequences}/{name}")));
            fs.0.rename(&from, &to, 0).unwrap();
        }
    }
    fs.close();
    remove(&patient);
    rebuild(&patient);
    let fs = Mounted::open(&patient.path);
    kvfs::fs::remove_unfinished_saves(&fs.0).unwrap();
    let mut found = fs.list(sequences);
    found.sort_unstable();
    assert_eq!(found, ["copied", "s", "s.rebuilt", "saved"]);
    for name in ["copied", "saved", "s.rebuilt"] {
        let path = format!("{sequences}/{name}/000/0000000.safetensors");
        assert_eq!(fs.read(&path), Some(Ok(page(&manifest, 0))), "{name}");
    }
    fs.close();
    assert_has(&patient, &[]);
}

#[test]
fn what_says_nothing_comes_to_lost_and_found() {
    let patient = Patient::new();
    let files = [PAGE, "files/d/b"].map(|path| patient.object_path(path));
    for file in &files {
        removexattr(file, NOTE).unwrap();
    }
    remove(&patient);
    let (rebuilt, report) = rebuild(&patient);
    assert_eq!((rebuilt.lost, report.findings), (2, Vec::new()));
    assert_has(&patient, &[PAGE, "files/d/b"]);
    let fs = Mounted::open(&patient.path);
    for (file, path) in files.iter().zip([PAGE, "files/d/b"]) {
        let name = file.file_name().unwrap().to_str().unwrap();
        let read = fs.read(&format!("files/lost+found/#{name}"));
        assert_eq!(read, Some(Ok(patient.files[path].clone())));
    }
}

#[test]
fn damaged_bytes_and_forged_notes_are_not_believed() {
    let patient = Patient::new();
    let paths = [PAGE, NEXT_PAGE, "files/d/b", "files/d/e/c"].map(|path| patient.object_path(path));
    let mut bytes = std::fs::read(&paths[0]).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&paths[0], bytes).unwrap();
    // Another page's note, one that ends in the middle, and a name outside of the mount.
    let note = |path: &Path| attribute(path, NOTE).unwrap();
    setxattr(&paths[1], NOTE, &note(&paths[0])).unwrap();
    setxattr(&paths[2], NOTE, &note(&paths[2])[..20]).unwrap();
    let text = note(&paths[3]);
    let at = text.windows(5).position(|window| window == b"files").unwrap();
    let forged = [&text[..at], b"../..", &text[at + 5..]].concat();
    setxattr(&paths[3], NOTE, &forged).unwrap();
    remove(&patient);
    let (rebuilt, report) = rebuild(&patient);
    assert_eq!(rebuilt.lost, 3);
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    assert!(report.findings[0].what.starts_with(PAGE), "{:?}", report.findings);
    assert_has(&patient, &[PAGE, NEXT_PAGE, "files/d/b", "files/d/e/c"]);
}

#[test]
fn ended_at_any_moment_it_can_be_run_again() {
    let patient = Patient::new();
    remove(&patient);
    // What a rebuild that was ended has left.
    std::fs::write(patient.path.join("meta.redb.tmp"), [1; 5000]).unwrap();
    rebuild(&patient);
    assert_has(&patient, &[]);
    // The old database is kept.
    std::fs::write(database(&patient), b"garbage").unwrap();
    rebuild(&patient);
    let kept = std::fs::read(patient.path.join("quarantine/meta.redb")).unwrap();
    assert_eq!(kept, b"garbage");
    assert_has(&patient, &[]);
}
