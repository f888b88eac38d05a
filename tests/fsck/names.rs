//! Names, directories, links, and what hangs on inodes.

use kvfs::store::record::{Entry, Inode, InodeId, Kind};

use crate::common::sys::removexattr;
use crate::patient::{LAYER, Mounted, NEXT_PAGE, PAGE, Patient, check, number_key};

#[test]
fn names_that_lead_nowhere() {
    let remove_inode = |path: &'static str| {
        move |patient: &Patient| {
            let id = patient.records().id(path);
            patient.change(&number_key(b'I', id.0), None);
        }
    };
    check(remove_inode("files/symlink"), &["files/symlink: leads to inode"], &[]);
    // Its object is then one that nothing refers to.
    let patient = check(
        remove_inode("files/d/b"),
        &["files/d/b: leads to inode", "no file refers to it; its bytes are kept"],
        &["files/d/b"],
    );
    assert_eq!(patient.path.join("quarantine").read_dir().unwrap().count(), 2);
}

#[test]
fn records_that_cannot_be_decoded() {
    let garble = |tag: u8, path: &'static str| {
        move |patient: &Patient| {
            let records = patient.records();
            let key = match tag {
                b'I' => number_key(b'I', records.id(path).0),
                b'O' => number_key(b'O', records.object(path).0),
                _ => records.entry_key(path),
            };
            patient.change(&key, Some(&[0xff; 3]));
        }
    };
    check(
        garble(b'I', "files/d/b"),
        &["inode", "files/d/b: leads to inode", "no file refers to it"],
        &["files/d/b"],
    );
    check(
        garble(b'E', "files/d/b"),
        &["b in directory", "has no name, now files/lost+found/#"],
        &["files/d/b"],
    );
    check(garble(b'O', "files/d/b"), &["cannot be decoded", "has no record, made", "totals"], &[]);
    check(|patient| patient.change(b"T", Some(&[0xff])), &["the totals", "totals: 0 objects"], &[]);
}

#[test]
fn wrong_types_and_keys_of_names() {
    check(
        |patient| {
            let records = patient.records();
            let key = records.entry_key("files/a");
            let entry: Entry = records.get(&key);
            patient.put(&key, &Entry { file_type: libc::S_IFDIR, ..entry });
        },
        &["files/a: listed as another type"],
        &[],
    );
    check(
        |patient| {
            let mut key = number_key(b'E', 3);
            key.extend([9; 8]);
            key.extend(b"unreachable");
            let entry: Entry = patient.records().get(&patient.records().entry_key("files/a"));
            patient.put(&key, &entry);
        },
        &["unreachable in directory 3: a name that cannot be looked up"],
        &[],
    );
}

#[test]
fn link_counts() {
    check(
        |patient| patient.put_inode("files/a", |inode| inode.links = 7),
        &["link count 7 instead of 2"],
        &[],
    );
    check(
        |patient| patient.put_inode("files/d", |inode| inode.links = 2),
        &["files/d: link count 2 instead of 3"],
        &[],
    );
}

#[test]
fn directories_that_think_to_be_elsewhere() {
    let rename = |patient: &Patient| {
        patient.put_inode("files/d/e", |inode| {
            if let Kind::Directory { name, parent, .. } = &mut inode.kind {
                *name = b"other".to_vec();
                *parent = InodeId(2);
            }
        });
    };
    check(rename, &["files/d/e: the directory thinks to be elsewhere"], &[]);
    let class = |patient: &Patient| {
        patient.put_inode(LAYER, |inode| {
            if let Kind::Directory { class, .. } = &mut inode.kind {
                *class = kvfs::store::record::DirectoryClass::Layer(1);
            }
        });
    };
    check(class, &["marked as Layer(1), stands where Layer(0) belongs"], &[]);
}

#[test]
fn directories_without_a_name() {
    let remove_name = |path: &'static str| {
        move |patient: &Patient| patient.change(&patient.records().entry_key(path), None)
    };
    check(
        remove_name("files/empty"),
        &["has no name and no file in it, removed", "files: link count"],
        &[],
    );
    let patient = check(
        remove_name("files/d"),
        &["has no name, now files/lost+found/#"],
        &["files/d/b", "files/d/e/c", "files/d/linked"],
    );
    let fs = Mounted::open(&patient.path);
    let kept = format!("files/lost+found/{}", fs.list("files/lost+found")[0]);
    assert_eq!(fs.read(&format!("{kept}/e/c")), Some(Ok(b"third".to_vec())));
    fs.close();
    // Pages come along as ordinary files, rows as well.
    let patient = check(
        remove_name("models/m/sequences/s"),
        &[
            "has no name, now",
            "marked as Sequence",
            "marked as Layer(0)",
            "link count",
            "tokens: marked",
            "tail: marked",
        ],
        &[PAGE, NEXT_PAGE, "models/m/sequences/s/tokens", "models/m/sequences/s/000/0000032.tail"],
    );
    let fs = Mounted::open(&patient.path);
    let kept =
        format!("files/lost+found/{}/000/0000000.safetensors", fs.list("files/lost+found")[0]);
    assert_eq!(fs.read(&kept), Some(Ok(patient.files[PAGE].clone())));
    fs.close();
}

#[test]
fn a_circle_of_directories() {
    check(
        |patient| {
            let records = patient.records();
            let (d, e) = (records.id("files/d"), records.id("files/d/e"));
            patient.change(&records.entry_key("files/d"), None);
            // d stands in e, which stands in d.
            let fs_key = {
                let hash = (twox_hash::XxHash3_64::oneshot(b"d") >> 2).max(3);
                [&number_key(b'E', e.0)[..], &hash.to_be_bytes(), b"d"].concat()
            };
            patient.put(&fs_key, &Entry { inode: d, file_type: libc::S_IFDIR });
            let mut inode: Inode = records.get(&number_key(b'I', d.0));
            if let Kind::Directory { parent, .. } = &mut inode.kind {
                *parent = e;
            }
            patient.put(&number_key(b'I', d.0), &inode);
        },
        &["has no name, now files/lost+found/#"],
        &["files/d/b", "files/d/e/c", "files/d/linked"],
    );
}

#[test]
fn a_file_without_a_name_comes_to_lost_and_found() {
    let patient = check(
        |patient| patient.change(&patient.records().entry_key("files/d/b"), None),
        &["has no name, now files/lost+found/#"],
        &["files/d/b"],
    );
    let fs = Mounted::open(&patient.path);
    let kept = format!("files/lost+found/{}", fs.list("files/lost+found")[0]);
    assert_eq!(fs.read(&kept), Some(Ok(patient.files["files/d/b"].clone())));
    fs.close();
    check(
        |patient| patient.change(&patient.records().entry_key("files/symlink"), None),
        &["has no name, and no bytes, removed"],
        &[],
    );
}

#[test]
fn the_roots_are_made_anew() {
    check(
        |patient| patient.change(&number_key(b'I', 3), None),
        &["/files: its directory is missing", "files: link count"],
        &[],
    );
    check(
        |patient| patient.change(&patient.records().entry_key("models"), None),
        &["/models: its name is missing"],
        &[],
    );
}

#[test]
fn attributes_and_marks_without_an_inode() {
    check(
        |patient| {
            let key = [&number_key(b'X', 0x0000_0001_0000_0999)[..], b"user.x"].concat();
            patient.put(&key, &b"value".to_vec());
        },
        &["does not exist but has attributes"],
        &[],
    );
    check(
        |patient| patient.put(&number_key(b'U', 0x0000_0001_0000_0999), &()),
        &["marked for recovery without need"],
        &[],
    );
    check(
        |patient| {
            patient.change(
                &number_key(b'U', patient.records().id("models/m/sequences/s/tokens").0),
                None,
            );
        },
        &["recovery would not look at it"],
        &[],
    );
}

#[test]
fn numbers_of_a_later_epoch() {
    check(
        |patient| {
            // Beside it stands which mount was the last, and that one would be told.
            removexattr(patient.path.join("FORMAT"), "user.kvfs.note").unwrap();
            patient.put(b"C", &(0_u32, true));
        },
        &["epoch 0: numbers of epoch 1"],
        &[],
    );
}
