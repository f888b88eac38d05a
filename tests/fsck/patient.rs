//! A store with one of everything, and ways to damage it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvfs::fs::{Caller, FileSystem, Lookup, NewNode, Place};
use kvfs::observe::Observer;
use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, pack_page};
use kvfs::store::Store;
use kvfs::store::fsck::{self, FsckOptions, Report};
use kvfs::store::record::{Entry, Inode, InodeId, ObjectId};

pub(crate) const RECORDS: redb::TableDefinition<'_, &[u8], &[u8]> =
    redb::TableDefinition::new("records");
const DIGEST: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("digest");
pub(crate) const TOKENS: u32 = 16;
pub(crate) const CALLER: Caller = Caller { uid: 0, gid: 0 };
pub(crate) const LAYER: &str = "models/m/sequences/s/000";
pub(crate) const PAGE: &str = "models/m/sequences/s/000/0000000.safetensors";
pub(crate) const NEXT_PAGE: &str = "models/m/sequences/s/000/0000016.safetensors";

/// The names that are there before any damage, and what they hold.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

pub(crate) struct Mounted(pub(crate) FileSystem);

impl Mounted {
    pub(crate) fn open(path: &Path) -> Mounted {
        let store = Store::open_or_create(path).unwrap();
        let (sender, _) = crossbeam_channel::bounded(1 << 16);
        Mounted(FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap().0)
    }

    pub(crate) fn find(&self, path: &str) -> Option<InodeId> {
        let mut at = InodeId::ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            match self.0.lookup(at, name.as_bytes()).unwrap() {
                Lookup::Found(found) => at = found.attributes.inode,
                Lookup::Absent { .. } => return None,
            }
        }
        Some(at)
    }

    pub(crate) fn place(&self, path: &str) -> Place {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = self.find(parent).unwrap();
        Place { parent, name: name.as_bytes().to_vec() }
    }

    pub(crate) fn directory(&self, path: &str) {
        self.0.make(&self.place(path), &NewNode::Directory, 0o755, CALLER).unwrap();
    }

    pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
        let created = self.0.create(&self.place(path), 0o644, CALLER, true).unwrap();
        self.0.write(created.opened.handle, 0, bytes, true).unwrap();
        self.0.flush(created.opened.handle).unwrap();
        self.0.release(created.opened.handle).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> Option<Result<Vec<u8>, String>> {
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

    pub(crate) fn list(&self, path: &str) -> Vec<String> {
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

    pub(crate) fn close(self) {
        self.0.commit_and_close().unwrap();
    }
}

pub(crate) fn page(manifest: &Manifest, start: u64) -> Vec<u8> {
    let place = PagePlace::new(manifest, Layer(0), TokenStart(start)).unwrap();
    let length = usize::try_from(place.geometry().row_bytes()).unwrap() * TOKENS as usize;
    let rows: Vec<u8> =
        (0..=250).cycle().skip(usize::try_from(start).unwrap()).take(length).collect();
    pack_page(&place, &rows, TOKENS).unwrap()
}

/// Of the model in the store.
pub(crate) fn manifest() -> Manifest {
    let fields =
        ManifestFields { page_tokens: TOKENS, ..ManifestFields::new("m", Dtype::F16, 2, 2, 8) };
    Manifest::new(fields).unwrap()
}

/// A store with one of everything.
pub(crate) fn make_store(path: &Path) -> Files {
    let fs = Mounted::open(path);
    let manifest = manifest();
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
    files.insert("models/m/manifest.json".into(), manifest.to_json().into_bytes());
    for (name, start) in [(PAGE, 0), (NEXT_PAGE, u64::from(TOKENS))] {
        let bytes = page(&manifest, start);
        let temporary = format!("{LAYER}/.tmp");
        fs.write(&temporary, &bytes);
        fs.0.rename(&fs.place(&temporary), &fs.place(name), 0).unwrap();
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
    fs.0.make(&fs.place("files/symlink"), &NewNode::Symlink(b"a".to_vec()), 0o777, CALLER).unwrap();
    fs.0.set_extended_attribute(a, b"user.colour", b"blue", 0).unwrap();
    fs.close();
    files
}

pub(crate) fn number_key(tag: u8, number: u64) -> Vec<u8> {
    [&[tag][..], &number.to_be_bytes()].concat()
}

/// The records of a store, for damage that no call of the library does.
pub(crate) struct Records(pub(crate) BTreeMap<Vec<u8>, Vec<u8>>);

impl Records {
    pub(crate) fn read(store: &Path) -> Records {
        use redb::{ReadableDatabase, ReadableTable};
        let database = redb::Database::open(store.join("meta.redb")).unwrap();
        let table = database.begin_read().unwrap().open_table(RECORDS).unwrap();
        let pairs = table.iter().unwrap().map(|pair| {
            let (key, value) = pair.unwrap();
            (key.value().to_vec(), value.value().to_vec())
        });
        Records(pairs.collect())
    }

    pub(crate) fn get<T: serde::de::DeserializeOwned>(&self, key: &[u8]) -> T {
        postcard::from_bytes(&self.0[key]).unwrap()
    }

    pub(crate) fn entry_key(&self, path: &str) -> Vec<u8> {
        let mut parent = InodeId::ROOT;
        let mut found = Vec::new();
        for name in path.split('/') {
            let prefix = number_key(b'E', parent.0);
            let mut keys = self.0.keys();
            let key = keys.find(|key| key.starts_with(&prefix) && key[17..] == *name.as_bytes());
            found.clone_from(key.unwrap());
            parent = self.get::<Entry>(&found).inode;
        }
        found
    }

    pub(crate) fn id(&self, path: &str) -> InodeId {
        self.get::<Entry>(&self.entry_key(path)).inode
    }

    pub(crate) fn inode(&self, path: &str) -> Inode {
        self.get(&number_key(b'I', self.id(path).0))
    }

    pub(crate) fn object(&self, path: &str) -> ObjectId {
        self.inode(path).file().unwrap().object.unwrap()
    }
}

/// A store that is to be damaged.
pub(crate) struct Patient {
    _directory: tempfile::TempDir,
    pub(crate) path: PathBuf,
    pub(crate) files: Files,
}

impl Patient {
    pub(crate) fn new() -> Patient {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let files = make_store(&path);
        Patient { _directory: directory, path, files }
    }

    pub(crate) fn records(&self) -> Records {
        Records::read(&self.path)
    }

    pub(crate) fn put<T: serde::Serialize>(&self, key: &[u8], value: &T) {
        self.change(key, Some(&postcard::to_stdvec(value).unwrap()));
    }

    pub(crate) fn change(&self, key: &[u8], value: Option<&[u8]>) {
        let database = redb::Database::open(self.path.join("meta.redb")).unwrap();
        let transaction = database.begin_write().unwrap();
        {
            let mut table = transaction.open_table(RECORDS).unwrap();
            match value {
                Some(value) => table.insert(key, value).unwrap(),
                None => table.remove(key).unwrap(),
            };
        }
        // What the records add up to is not recorded any more, or nothing but that would be found.
        transaction.delete_table(DIGEST).unwrap();
        transaction.commit().unwrap();
    }

    pub(crate) fn put_inode(&self, path: &str, change: impl FnOnce(&mut Inode)) {
        let records = self.records();
        let mut inode = records.inode(path);
        change(&mut inode);
        self.put(&number_key(b'I', records.id(path).0), &inode);
    }

    pub(crate) fn object_path(&self, path: &str) -> PathBuf {
        let object = self.records().object(path);
        let shard = (object.0 >> 8) & 0xff;
        self.path.join(format!("objects/{shard:02x}/{object}"))
    }

    pub(crate) fn fsck(&self, repair: bool) -> Report {
        let store = Store::open(&self.path).unwrap();
        let options = FsckOptions { repair, subset: None };
        fsck::run(&store, &options, &|_, _| ()).unwrap()
    }

    /// Everything on the disk.
    pub(crate) fn bytes(&self) -> BTreeMap<PathBuf, Vec<u8>> {
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
pub(crate) fn check(damage: impl FnOnce(&Patient), expected: &[&str], lost: &[&str]) -> Patient {
    let patient = Patient::new();
    damage(&patient);
    let before = patient.bytes();
    let found = patient.fsck(false);
    let lines: Vec<&str> = found.findings.iter().map(|finding| finding.what.as_str()).collect();
    assert_eq!(lines.len(), expected.len(), "{lines:#?} instead of {expected:#?}");
    for part in expected {
        assert!(lines.iter().any(|line| line.contains(part)), "{part:?} is not in {lines:#?}");
    }
    assert!(found.findings.iter().all(|finding| !finding.repaired));
    assert!(lines.iter().all(|line| !line.contains('\n')));
    assert!(patient.bytes() == before, "a check without repair changed the store");

    let repaired = patient.fsck(true);
    assert!(repaired.findings.iter().all(|finding| finding.repaired), "{repaired:#?}");
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
