//! `kvfs fsck`: every kind of damage is found, repaired, and gone in the second run. Nothing else
//! is lost, and without repair not a byte of the store changes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvfs::fs::{Caller, FileSystem, Lookup, NewNode, Place};
use kvfs::observe::Observer;
use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, pack_page};
use kvfs::store::Store;
use kvfs::store::fsck::{self, FsckOptions, Report};
use kvfs::store::record::{Entry, Inode, InodeId, Kind, ObjectId, ObjectRecord, Role, Totals};

const RECORDS: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("records");
const TOKENS: u32 = 16;
const CALLER: Caller = Caller { uid: 0, gid: 0 };
const LAYER: &str = "models/m/sequences/s/000";
const PAGE: &str = "models/m/sequences/s/000/0000000.safetensors";
const NEXT_PAGE: &str = "models/m/sequences/s/000/0000016.safetensors";

/// The names that are there before any damage, and what they hold.
type Files = BTreeMap<String, Vec<u8>>;

struct Mounted(FileSystem);

impl Mounted {
    fn open(path: &Path) -> Mounted {
        let store = Store::open_or_create(path).unwrap();
        let (sender, _) = crossbeam_channel::bounded(1 << 16);
        Mounted(
            FileSystem::open(store, Arc::new(Observer::new()), sender)
                .unwrap()
                .0,
        )
    }

    fn find(&self, path: &str) -> Option<InodeId> {
        let mut at = InodeId::ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            match self.0.lookup(at, name.as_bytes()).unwrap() {
                Lookup::Found(found) => at = found.attributes.inode,
                Lookup::Absent { .. } => return None,
            }
        }
        Some(at)
    }

    fn place(&self, path: &str) -> Place {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = self.find(parent).unwrap();
        Place {
            parent,
            name: name.as_bytes().to_vec(),
        }
    }

    fn directory(&self, path: &str) {
        self.0
            .make(&self.place(path), &NewNode::Directory, 0o755, CALLER)
            .unwrap();
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let created = self
            .0
            .create(&self.place(path), 0o644, CALLER, true)
            .unwrap();
        self.0.write(created.opened.handle, 0, bytes, true).unwrap();
        self.0.flush(created.opened.handle).unwrap();
        self.0.release(created.opened.handle).unwrap();
    }

    fn read(&self, path: &str) -> Option<Result<Vec<u8>, String>> {
        let id = self.find(path)?;
        let opened = match self.0.open_file(id, libc::O_RDONLY) {
            Ok(opened) => opened,
            Err(error) => return Some(Err(error.to_string())),
        };
        let mut bytes = vec![0; 1 << 20];
        let count = self.0.read(opened.handle, 0, &mut bytes).unwrap();
        bytes.truncate(count);
        self.0.release(opened.handle).unwrap();
        Some(Ok(bytes))
    }

    fn list(&self, path: &str) -> Vec<String> {
        let mut names = Vec::new();
        let id = self.find(path).unwrap();
        let listing = kvfs::fs::Listing::Names;
        let outcome = self.0.list(id, 3, listing, |line| {
            names.push(String::from_utf8_lossy(line.name).into_owned());
            true
        });
        outcome.unwrap();
        names
    }

    fn close(self) {
        self.0.commit_and_close().unwrap();
    }
}

fn page(manifest: &Manifest, start: u64) -> Vec<u8> {
    let place = PagePlace::new(manifest, Layer(0), TokenStart(start)).unwrap();
    let length = usize::try_from(place.geometry().row_bytes()).unwrap() * TOKENS as usize;
    let rows: Vec<u8> = (0..=250)
        .cycle()
        .skip(usize::try_from(start).unwrap())
        .take(length)
        .collect();
    pack_page(&place, &rows, TOKENS).unwrap()
}

/// A store with one of everything.
fn make_store(path: &Path) -> Files {
    let fs = Mounted::open(path);
    let fields = ManifestFields {
        page_tokens: TOKENS,
        ..ManifestFields::new("m", Dtype::F16, 2, 2, 8)
    };
    let manifest = Manifest::new(fields).unwrap();
    let mut files = Files::new();
    for path in [
        "models/m",
        "models/m/sequences",
        "models/m/sequences/s",
        LAYER,
        "files/d",
        "files/d/e",
        "files/empty",
    ] {
        if path == "models/m/sequences" {
            fs.write("models/m/manifest.json", manifest.to_json().as_bytes());
        }
        fs.directory(path);
    }
    files.insert(
        "models/m/manifest.json".into(),
        manifest.to_json().into_bytes(),
    );
    for (name, start) in [(PAGE, 0), (NEXT_PAGE, u64::from(TOKENS))] {
        let bytes = page(&manifest, start);
        let temporary = format!("{LAYER}/.tmp");
        fs.write(&temporary, &bytes);
        fs.0.rename(&fs.place(&temporary), &fs.place(name), 0)
            .unwrap();
        files.insert(name.into(), bytes);
    }
    for (name, bytes) in [
        ("models/m/sequences/s/tokens", vec![1; 32 * 4]),
        ("models/m/sequences/s/000/0000032.tail", vec![2; 64 * 3]),
        ("files/a", b"first".to_vec()),
        ("files/d/b", vec![3; 10_000]),
        ("files/d/e/c", b"third".to_vec()),
        ("files/zero", Vec::new()),
    ] {
        fs.write(name, &bytes);
        files.insert(name.into(), bytes);
    }
    let a = fs.find("files/a").unwrap();
    fs.0.link(a, &fs.place("files/d/linked")).unwrap();
    files.insert("files/d/linked".into(), b"first".to_vec());
    fs.0.make(
        &fs.place("files/symlink"),
        &NewNode::Symlink(b"a".to_vec()),
        0o777,
        CALLER,
    )
    .unwrap();
    fs.0.set_extended_attribute(a, b"user.colour", b"blue", 0)
        .unwrap();
    fs.close();
    files
}

fn number_key(tag: u8, number: u64) -> Vec<u8> {
    [&[tag][..], &number.to_be_bytes()].concat()
}

/// The records of a store, for damage that no call of the library does.
struct Records(BTreeMap<Vec<u8>, Vec<u8>>);

impl Records {
    fn read(store: &Path) -> Records {
        use redb::{ReadableDatabase, ReadableTable};
        let database = redb::Database::open(store.join("meta.redb")).unwrap();
        let table = database.begin_read().unwrap().open_table(RECORDS).unwrap();
        let pairs = table.iter().unwrap().map(|pair| {
            let (key, value) = pair.unwrap();
            (key.value().to_vec(), value.value().to_vec())
        });
        Records(pairs.collect())
    }

    fn get<T: serde::de::DeserializeOwned>(&self, key: &[u8]) -> T {
        postcard::from_bytes(&self.0[key]).unwrap()
    }

    fn entry_key(&self, path: &str) -> Vec<u8> {
        let mut parent = InodeId::ROOT;
        let mut found = Vec::new();
        for name in path.split('/') {
            let prefix = number_key(b'E', parent.0);
            found = self
                .0
                .keys()
                .find(|key| key.starts_with(&prefix) && key[17..] == *name.as_bytes())
                .unwrap()
                .clone();
            parent = self.get::<Entry>(&found).inode;
        }
        found
    }

    fn id(&self, path: &str) -> InodeId {
        self.get::<Entry>(&self.entry_key(path)).inode
    }

    fn inode(&self, path: &str) -> Inode {
        self.get(&number_key(b'I', self.id(path).0))
    }

    fn object(&self, path: &str) -> ObjectId {
        self.inode(path).file().unwrap().object.unwrap()
    }
}

/// A store that is to be damaged.
struct Patient {
    _directory: tempfile::TempDir,
    path: PathBuf,
    files: Files,
}

impl Patient {
    fn new() -> Patient {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let files = make_store(&path);
        Patient {
            _directory: directory,
            path,
            files,
        }
    }

    fn records(&self) -> Records {
        Records::read(&self.path)
    }

    fn put<T: serde::Serialize>(&self, key: &[u8], value: &T) {
        self.change(key, Some(&postcard::to_stdvec(value).unwrap()));
    }

    fn change(&self, key: &[u8], value: Option<&[u8]>) {
        let database = redb::Database::open(self.path.join("meta.redb")).unwrap();
        let transaction = database.begin_write().unwrap();
        {
            let mut table = transaction.open_table(RECORDS).unwrap();
            match value {
                Some(value) => table.insert(key, value).unwrap(),
                None => table.remove(key).unwrap(),
            };
        }
        transaction.commit().unwrap();
    }

    fn put_inode(&self, path: &str, change: impl FnOnce(&mut Inode)) {
        let records = self.records();
        let mut inode = records.inode(path);
        change(&mut inode);
        self.put(&number_key(b'I', records.id(path).0), &inode);
    }

    fn object_path(&self, path: &str) -> PathBuf {
        let object = self.records().object(path);
        let shard = (object.0 >> 8) & 0xff;
        self.path.join(format!("objects/{shard:02x}/{object}"))
    }

    fn fsck(&self, repair: bool) -> Report {
        let store = Store::open(&self.path).unwrap();
        let options = FsckOptions {
            repair,
            subset: None,
        };
        fsck::run(&store, &options, &|_, _| ()).unwrap()
    }

    /// Everything on the disk.
    fn bytes(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut left = vec![self.path.clone()];
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(path.read_dir().unwrap().map(|entry| entry.unwrap().path()));
            } else {
                found.insert(path.clone(), std::fs::read(&path).unwrap());
            }
        }
        found
    }
}

/// Damages a store, and expects these findings (parts of their lines) and these lost names.
fn check(damage: impl FnOnce(&Patient), expected: &[&str], lost: &[&str]) -> Patient {
    let patient = Patient::new();
    damage(&patient);
    let before = patient.bytes();
    let found = patient.fsck(false);
    let lines: Vec<&str> = found
        .findings
        .iter()
        .map(|finding| finding.what.as_str())
        .collect();
    assert_eq!(
        lines.len(),
        expected.len(),
        "{lines:#?} instead of {expected:#?}"
    );
    for part in expected {
        assert!(
            lines.iter().any(|line| line.contains(part)),
            "{part:?} is not in {lines:#?}"
        );
    }
    assert!(found.findings.iter().all(|finding| !finding.repaired));
    assert!(lines.iter().all(|line| !line.contains('\n')));
    assert!(
        patient.bytes() == before,
        "a check without repair changed the store"
    );

    let repaired = patient.fsck(true);
    assert!(
        repaired.findings.iter().all(|finding| finding.repaired),
        "{repaired:#?}"
    );
    assert_eq!(repaired.findings.len(), expected.len());
    let after = patient.fsck(false);
    assert_eq!(after.findings, [], "after the repair");
    assert_eq!(after.leftovers, fsck::Leftovers::default());

    let fs = Mounted::open(&patient.path);
    for (path, bytes) in &patient.files {
        let read = fs.read(path);
        if lost.contains(&path.as_str()) {
            assert_eq!(read, None, "{path}");
        } else {
            assert_eq!(read, Some(Ok(bytes.clone())), "{path}");
        }
    }
    fs.close();
    let later = patient.fsck(false);
    assert_eq!(later.findings, [], "after another mount");
    patient
}

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
fn names_that_lead_nowhere() {
    let remove_inode = |path: &'static str| {
        move |patient: &Patient| {
            let id = patient.records().id(path);
            patient.change(&number_key(b'I', id.0), None);
        }
    };
    check(
        remove_inode("files/symlink"),
        &["files/symlink: leads to inode"],
        &[],
    );
    // Its object is then one that nothing refers to.
    let patient = check(
        remove_inode("files/d/b"),
        &[
            "files/d/b: leads to inode",
            "no file refers to it; its bytes are kept",
        ],
        &["files/d/b"],
    );
    assert_eq!(
        patient.path.join("quarantine").read_dir().unwrap().count(),
        2
    );
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
    check(
        garble(b'O', "files/d/b"),
        &["cannot be decoded", "has no record, made", "totals"],
        &[],
    );
    check(
        |patient| patient.change(b"T", Some(&[0xff])),
        &["the totals", "totals: 0 objects"],
        &[],
    );
}

#[test]
fn wrong_types_and_keys_of_names() {
    check(
        |patient| {
            let records = patient.records();
            let key = records.entry_key("files/a");
            let entry: Entry = records.get(&key);
            patient.put(
                &key,
                &Entry {
                    file_type: libc::S_IFDIR,
                    ..entry
                },
            );
        },
        &["files/a: listed as another type"],
        &[],
    );
    check(
        |patient| {
            let mut key = number_key(b'E', 3);
            key.extend([9; 8]);
            key.extend(b"unreachable");
            let entry: Entry = patient
                .records()
                .get(&patient.records().entry_key("files/a"));
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
    check(
        rename,
        &["files/d/e: the directory thinks to be elsewhere"],
        &[],
    );
    let class = |patient: &Patient| {
        patient.put_inode(LAYER, |inode| {
            if let Kind::Directory { class, .. } = &mut inode.kind {
                *class = kvfs::store::record::DirectoryClass::Layer(1);
            }
        });
    };
    check(
        class,
        &["marked as Layer(1), stands where Layer(0) belongs"],
        &[],
    );
}

#[test]
fn directories_without_a_name() {
    let remove_name = |path: &'static str| {
        move |patient: &Patient| patient.change(&patient.records().entry_key(path), None)
    };
    check(
        remove_name("files/empty"),
        &[
            "has no name and no file in it, removed",
            "files: link count",
        ],
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
        &[
            PAGE,
            NEXT_PAGE,
            "models/m/sequences/s/tokens",
            "models/m/sequences/s/000/0000032.tail",
        ],
    );
    let fs = Mounted::open(&patient.path);
    let kept = format!(
        "files/lost+found/{}/000/0000000.safetensors",
        fs.list("files/lost+found")[0]
    );
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
            patient.put(
                &fs_key,
                &Entry {
                    inode: d,
                    file_type: libc::S_IFDIR,
                },
            );
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
fn damaged_bytes_become_a_miss_and_go_to_quarantine() {
    let flip = |path: &'static str, at: usize| {
        move |patient: &Patient| {
            let file = patient.object_path(path);
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[at] ^= 1;
            std::fs::write(&file, bytes).unwrap();
        }
    };
    let patient = check(
        flip(PAGE, 5000),
        &["0000000.safetensors: the bytes of object"],
        &[PAGE],
    );
    let names = patient.path.join("quarantine").read_dir().unwrap();
    let reason = names
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some());
    assert!(
        std::fs::read_to_string(reason.unwrap())
            .unwrap()
            .starts_with(PAGE)
    );
    check(flip(PAGE, 9), &["0000000.safetensors: "], &[PAGE]);
    check(
        flip("files/d/b", 0),
        &["files/d/b: the bytes of object"],
        &["files/d/b"],
    );
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
            let file = std::fs::OpenOptions::new()
                .write(true)
                .open(patient.object_path(path))
                .unwrap();
            file.set_len(4).unwrap();
        }
    };
    let remove = |path: &'static str| {
        move |patient: &Patient| std::fs::remove_file(patient.object_path(path)).unwrap()
    };
    check(
        cut("files/d/b"),
        &["has 4 bytes instead of 10000"],
        &["files/d/b"],
    );
    check(cut(PAGE), &["0000000.safetensors: "], &[PAGE]);
    check(
        remove(PAGE),
        &["0000000.safetensors: the bytes of object"],
        &[PAGE],
    );
    check(
        remove("models/m/sequences/s/tokens"),
        &["tokens: the bytes of object"],
        &["models/m/sequences/s/tokens"],
    );
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
    check(
        change(|record| record.references = 3),
        &["3 references instead of 1"],
        &[],
    );
    check(
        |patient| {
            let key = number_key(b'O', 0x0000_0001_0000_0099);
            let record = ObjectRecord {
                kind: kvfs::store::record::ObjectKind::File,
                length: 5,
                checksum: None,
                references: 1,
            };
            patient.put(&key, &record);
        },
        &["no file refers to it; its record is removed", "totals"],
        &[],
    );
    check(
        |patient| {
            patient.put(
                b"T",
                &Totals {
                    objects: 1,
                    pages: 2,
                    bytes: 3,
                },
            )
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
    let patient = check(
        plant,
        &["object 0000000100000123: has no record, removed"],
        &[],
    );
    assert!(!patient.path.join("objects/01/0000000100000123").exists());
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
            )
        },
        &["recovery would not look at it"],
        &[],
    );
}

#[test]
fn numbers_of_a_later_epoch() {
    check(
        |patient| patient.put(b"C", &(0_u32, true)),
        &["epoch 0: numbers of epoch 1"],
        &[],
    );
}

#[test]
fn what_a_crash_leaves_is_no_damage() {
    let patient = Patient::new();
    let fs = Mounted::open(&patient.path);
    let staged =
        fs.0.create(&fs.place("files/half"), 0o644, CALLER, true)
            .unwrap();
    fs.0.write(staged.opened.handle, 0, b"half", true).unwrap();
    // Written to in place, and unlinked while open.
    let b = fs.find("files/d/b").unwrap();
    let opened = fs.0.open_file(b, libc::O_WRONLY).unwrap();
    fs.0.write(opened.handle, 0, b"new", true).unwrap();
    let zero = fs.find("files/zero").unwrap();
    fs.0.open_file(zero, libc::O_RDONLY).unwrap();
    fs.0.unlink(&fs.place("files/zero")).unwrap();
    fs.0.commit().unwrap();
    std::fs::write(
        patient.path.join("objects/01/0000000100000123"),
        b"not committed",
    )
    .unwrap();
    drop(fs);
    let before = patient.bytes();
    let report = patient.fsck(false);
    assert_eq!(report.findings, []);
    let expected = fsck::Leftovers {
        staged: 1,
        unsettled: 1,
        unreferenced: 2,
    };
    assert_eq!(report.leftovers, expected);
    assert!(patient.bytes() == before);
    let repaired = patient.fsck(true);
    assert_eq!((repaired.findings, repaired.leftovers), (vec![], expected));
    let after = patient.fsck(false);
    assert_eq!(
        (after.findings, after.leftovers),
        (vec![], fsck::Leftovers::default())
    );
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
        let options = FsckOptions {
            repair: false,
            subset: Some((part, 3)),
        };
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
    assert!(
        report.findings[0].what.starts_with("meta.redb: "),
        "{report:?}"
    );
    assert!(!report.findings[0].repaired);
}
