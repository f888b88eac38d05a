//! A store with one of everything, damaged in one way at a time: what is told of that, and which records are there after a
//! repair.

mod bytes;
mod connections;
mod links;
mod places;
mod rebuild;
mod rest;
mod tree;
mod undecodable;
mod unmovable;

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::*;
use crate::ingest::seal::{self, SealedPlace};
use crate::page::{
    Checksum, Layer, Manifest, PageIdentity, PagePlace, PrefixHash, StatePlace, TokenStart,
    pack_page, pack_state,
};
use crate::store::database::{decode, encode, fill};
use crate::store::disk::Access;
use crate::store::keys;
use crate::store::record::{
    DirectoryClass, EncodedCopy, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind,
    ObjectRecord, RemoteCopy, RemoteState, Role, Time, Totals,
};
use crate::tier::encoding::{Encoding, Lossless, Subject, ZstdLevel};
use crate::tier::exchange::Item;

/// Number of something that the first mount made.
const fn number(counter: u64) -> u64 {
    1 << 32 | counter
}

const ROOT: InodeId = InodeId::ROOT;
const MODELS: InodeId = InodeId(2);
const FILES: InodeId = InodeId(3);
const MODEL: InodeId = InodeId(number(0x10));
const SEQUENCES: InodeId = InodeId(number(0x11));
const SEQUENCE: InodeId = InodeId(number(0x12));
const LAYER: InodeId = InodeId(number(0x13));
const STATES: InodeId = InodeId(number(0x14));
/// `files/d`
const D: InodeId = InodeId(number(0x15));
/// `files/d/e`, in which there is nothing.
const E: InodeId = InodeId(number(0x16));

const MANIFEST: InodeId = InodeId(number(0x20));
const PAGE: InodeId = InodeId(number(0x21));
const STATE: InodeId = InodeId(number(0x22));
const TAIL: InodeId = InodeId(number(0x23));
const TOKENS: InodeId = InodeId(number(0x24));
/// `files/a`, and `files/d/linked`
const A: InodeId = InodeId(number(0x25));
/// `files/d/b`
const B: InodeId = InodeId(number(0x26));
const SYMLINK: InodeId = InodeId(number(0x27));

const PAGE_NAME: &[u8] = b"0000000.safetensors";
const STATE_NAME: &[u8] = b"state-0000016.safetensors";
const TAIL_NAME: &[u8] = b"0000016.tail";
const MANIFEST_JSON: &str = r#"{"schema_version": 1, "model_id": "m", "dtype": "f16", "num_layers": 2,
    "num_kv_heads": 2, "head_dim": 8, "page_tokens": 16, "layers": ["attention",
    {"recurrent": {"state": [{"name": "conv", "dtype": "f16", "shape": [8]}]}}]}"#;
/// When everything was made.
const THEN: Time = Time { seconds: 1_000, nanoseconds: 0 };

/// The object of a file.
const fn object(file: InodeId) -> ObjectId {
    ObjectId(file.0 + 0x100)
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Records(BTreeMap<Vec<u8>, Vec<u8>>);

impl Records {
    fn put<T: Serialize>(&mut self, key: Vec<u8>, value: &T) {
        self.0.insert(key, encode(value));
    }

    fn remove(&mut self, key: &[u8]) {
        assert!(self.0.remove(key).is_some(), "{key:?}");
    }

    fn get<T: DeserializeOwned>(&self, key: &[u8]) -> T {
        decode(&self.0[key]).unwrap()
    }

    fn change<T: Serialize + DeserializeOwned>(
        &mut self, key: Vec<u8>, change: impl FnOnce(&mut T),
    ) {
        let mut value = self.get(&key);
        change(&mut value);
        self.put(key, &value);
    }

    fn inode(&mut self, id: InodeId, change: impl FnOnce(&mut Inode)) {
        self.change(keys::inode(id), change);
    }

    fn file(&mut self, id: InodeId, change: impl FnOnce(&mut FileRecord)) {
        self.inode(id, |inode| change(inode.file_mut().unwrap()));
    }

    fn name(&mut self, parent: InodeId, name: &[u8], inode: InodeId) {
        let file_type = self.get::<Inode>(&keys::inode(inode)).file_type();
        self.put(keys::entry(parent, name), &Entry { inode, file_type });
    }

    fn unname(&mut self, parent: InodeId, name: &[u8]) {
        self.remove(&keys::entry(parent, name));
    }

    /// A file goes, with its object, but for its names.
    fn lose(&mut self, file: InodeId) {
        self.remove(&keys::inode(file));
        self.remove(&keys::object(object(file)));
        self.count();
    }

    /// `files/lost+found`, as the first thing that a repair makes.
    fn lost_and_found(&mut self) -> InodeId {
        let id = InodeId(2 << 32 | 1);
        self.put(keys::inode(id), &directory(DirectoryClass::Plain, FILES, b"lost+found", 2));
        self.name(FILES, b"lost+found", id);
        self.inode(FILES, |files| files.links += 1);
        self.put(keys::epoch(), &(2_u32, true));
        id
    }

    fn count(&mut self) {
        let mut totals = Totals::default();
        for (_, value) in self.0.iter().filter(|(key, _)| key[0] == b'O') {
            totals.add(&decode(value).unwrap());
        }
        self.put(keys::totals(), &totals);
    }
}

fn directory(class: DirectoryClass, parent: InodeId, name: &[u8], links: u32) -> Inode {
    let made = names::new_directory(class, parent, name);
    Inode { links, atime: THEN, mtime: THEN, ctime: THEN, ..made }
}

/// A store that is to be damaged, and the records that it will have.
struct Patient {
    _directory: tempfile::TempDir,
    store: Store,
    records: Records,
}

impl Patient {
    fn new() -> Patient {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        let mut patient = Patient { _directory: directory, store, records: Records::default() };
        patient.make_directories();
        patient.make_model();
        let files: [(InodeId, &[u8]); 2] = [(A, b"first"), (B, &[3; 10_000])];
        for (id, bytes) in files {
            patient.make_file(id, Role::Plain, ObjectKind::File, bytes);
        }
        let file = patient.records.get::<Inode>(&keys::inode(A));
        let kind = Kind::Symlink { target: b"a".to_vec() };
        patient.records.put(keys::inode(SYMLINK), &Inode { kind, ..file });
        patient.records.inode(A, |inode| inode.links = 2);
        let names: [(InodeId, &[u8], InodeId); 4] =
            [(FILES, b"a", A), (D, b"linked", A), (D, b"b", B), (FILES, b"symlink", SYMLINK)];
        for (parent, name, id) in names {
            patient.records.name(parent, name, id);
        }
        patient.records.0.insert(keys::attribute(A, b"user.colour"), b"blue".to_vec());
        patient.records.put(keys::epoch(), &(1_u32, true));
        patient.records.count();
        patient
    }

    fn make_directories(&mut self) {
        use DirectoryClass::{Layer, Model, Models, Plain, Root, Sequence, Sequences};
        let made: [(InodeId, DirectoryClass, InodeId, &[u8], u32); 10] = [
            (ROOT, Root, ROOT, b"", 4),
            (MODELS, Models, ROOT, b"models", 3),
            (FILES, Plain, ROOT, b"files", 3),
            (MODEL, Model, MODELS, b"m", 3),
            (SEQUENCES, Sequences, MODEL, b"sequences", 3),
            (SEQUENCE, Sequence, SEQUENCES, b"s", 4),
            (LAYER, Layer(0), SEQUENCE, b"000", 2),
            (STATES, Layer(1), SEQUENCE, b"001", 2),
            (D, Plain, FILES, b"d", 3),
            (E, Plain, D, b"e", 2),
        ];
        for (id, class, parent, name, links) in made {
            self.records.put(keys::inode(id), &directory(class, parent, name, links));
            if id != ROOT {
                self.records.name(parent, name, id);
            }
        }
    }

    fn make_model(&mut self) {
        let manifest = manifest();
        self.make_file(MANIFEST, Role::Manifest, ObjectKind::Manifest, MANIFEST_JSON.as_bytes());
        self.records.name(MODEL, b"manifest.json", MANIFEST);
        self.make_sealed(PAGE, &SealedPlace::Page(page_place(&manifest)), &page(&manifest));
        self.records.name(LAYER, PAGE_NAME, PAGE);
        let place = StatePlace::new(&manifest, Layer(1), TokenStart(16)).unwrap();
        let state = pack_state(&place, PrefixHash([7; 32]), &[5; 16]).unwrap();
        self.make_sealed(STATE, &SealedPlace::State(Box::new(place)), &state);
        self.records.name(STATES, STATE_NAME, STATE);
        let tail = Role::Tail { start: 16, directory: LAYER };
        let growing: [(_, _, _, &[u8], _); 2] =
            [(TAIL, tail, LAYER, TAIL_NAME, 64), (TOKENS, Role::Tokens, SEQUENCE, b"tokens", 68)];
        for (id, role, parent, name, bytes) in growing {
            self.make_file(id, role, ObjectKind::Rows, &vec![2; bytes]);
            self.records.file(id, |file| file.unsettled = true);
            self.records.change(keys::object(object(id)), |record: &mut ObjectRecord| {
                (record.checksum, record.length) = (None, 0);
            });
            self.records.name(parent, name, id);
            self.records.put(keys::unsettled(id), &());
        }
    }

    /// A file with an object, and without a name.
    fn make_file(&mut self, id: InodeId, role: Role, kind: ObjectKind, bytes: &[u8]) {
        let object = object(id);
        let made = self.store.disk.create(&DiskPath::Object(object)).unwrap();
        made.write_all_at(bytes, 0).unwrap();
        let made = self.store.disk.open(&DiskPath::Object(object), Access::Read).unwrap();
        let checksum = Some(seal::content_checksum(made.as_ref()).unwrap());
        let length = bytes.len() as u64;
        let file = FileRecord {
            role,
            object: Some(object),
            size: length,
            blocks: made.stat().unwrap().blocks,
            unsettled: false,
        };
        let base = directory(DirectoryClass::Plain, ROOT, b"", 1);
        let inode = Inode { kind: Kind::File(file), mode: 0o640, ..base };
        self.records.put(keys::inode(id), &inode);
        let record = ObjectRecord { kind, length, checksum, references: 1 };
        self.records.put(keys::object(object), &record);
    }

    fn make_sealed(&mut self, id: InodeId, place: &SealedPlace, bytes: &[u8]) {
        self.make_file(id, Role::Plain, ObjectKind::Page, bytes);
        let sealed = seal::verify(&self.store, object(id), place).unwrap();
        self.records.file(id, |file| file.role = Role::Page(sealed.record));
        self.records.change(keys::object(object(id)), |record: &mut ObjectRecord| {
            record.checksum = Some(sealed.checksum);
        });
    }

    /// An encoded copy of a file.
    fn encode(&mut self, id: InodeId) {
        let record: ObjectRecord = self.records.get(&keys::object(object(id)));
        let item = Item {
            object: object(id),
            length: record.length,
            checksum: Checksum(record.checksum.unwrap()),
            subject: match self.records.get::<Inode>(&keys::inode(id)).file().unwrap().role {
                Role::Page(page) => Subject::Page(PageIdentity::from(&page)),
                _ => Subject::File,
            },
            encoded: None,
        };
        let zstd = Lossless::Zstd(ZstdLevel::DEFAULT);
        let copy = crate::tier::encoded::pack(&self.store, &item, zstd).unwrap().unwrap();
        let (from, to) = (DiskPath::Encoding(item.object), DiskPath::Encoded(item.object));
        self.store.disk.rename(&from, &to).unwrap();
        self.records.put(keys::encoded_copy(item.object), &copy);
    }

    fn copy_to_remote(&mut self, id: InodeId, state: RemoteState) {
        let copy = RemoteCopy { content: [9; 32], encoding: Encoding::Raw, stored_bytes: 5, state };
        self.records.put(keys::remote_copy(object(id)), &copy);
    }

    fn remove_raw(&self, id: InodeId) {
        self.store.disk.remove(&DiskPath::Object(object(id))).unwrap();
    }

    fn overwrite(&self, id: InodeId, bytes: &[u8], offset: u64) {
        let path = DiskPath::Object(object(id));
        let file = self.store.disk.open(&path, Access::ReadWrite).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    /// Makes the database of the records.
    fn write(&self) {
        let storage = self.store.disk.database(&DiskPath::MetadataStaging).unwrap();
        let outcome: Result<(), StoreError> = fill(self.store.database(storage), |put| {
            self.records.0.iter().try_for_each(|(key, value)| put(key, value))
        });
        outcome.unwrap();
        self.store.disk.rename(&DiskPath::MetadataStaging, &DiskPath::Metadata).unwrap();
    }

    /// The records that there are. What was made just now is as old as the rest.
    fn read(&self) -> Records {
        let Records(mut found) = self.read_as_is();
        for (_, value) in found.iter_mut().filter(|(key, _)| key[0] == b'I') {
            let Ok(mut inode) = decode::<Inode>(value) else { continue };
            for time in [&mut inode.atime, &mut inode.mtime, &mut inode.ctime] {
                *time = (*time).min(THEN);
            }
            *value = encode(&inode);
        }
        Records(found)
    }

    fn read_as_is(&self) -> Records {
        Records(super::Records::read_damaged(self.store.metadata().unwrap()))
    }

    fn fsck(&self, repair: bool) -> Report {
        run(&self.store, &FsckOptions { repair, subset: None }, &|_, _| ()).unwrap()
    }

    fn is_there(&self, path: &DiskPath) -> bool {
        self.store.disk.stat(path).is_ok()
    }

    fn quarantined(&self) -> Vec<String> {
        let mut names = self.store.disk.list(DiskDirectory::Quarantine).unwrap();
        names.retain(|name| !name.ends_with(".reason"));
        names
    }
}

fn manifest() -> Manifest {
    Manifest::parse(MANIFEST_JSON.as_bytes()).unwrap()
}

fn page_place(manifest: &Manifest) -> PagePlace {
    PagePlace::new(manifest, Layer(0), TokenStart(0)).unwrap()
}

fn page(manifest: &Manifest) -> Vec<u8> {
    let place = page_place(manifest);
    let row_bytes = usize::try_from(place.geometry().row_bytes()).unwrap();
    pack_page(&place, &vec![1; row_bytes * 16], 16).unwrap()
}

/// What was found, one in a line; in front of what no repair mends stands an exclamation mark.
fn lines(report: &Report, repair: bool) -> Vec<String> {
    let line = |finding: &Finding| {
        let mark = if repair && !finding.repaired { "! " } else { "" };
        assert!(repair || !finding.repaired);
        format!("{mark}{}", finding.what)
    };
    report.findings.iter().map(line).collect()
}

fn assert_same(found: &Records, expected: &Records, when: &str) {
    for key in found.0.keys().chain(expected.0.keys()) {
        let (found, expected) = (found.0.get(key), expected.0.get(key));
        if found != expected {
            let tag = char::from(key[0]);
            let [found, expected] = [found, expected].map(|value| match (tag, value) {
                ('I', Some(value)) => format!("{:?}", decode::<Inode>(value).unwrap()),
                ('O', Some(value)) => format!("{:?}", decode::<ObjectRecord>(value).unwrap()),
                (_, value) => format!("{value:?}"),
            });
            panic!("{when}: {tag} {:x?}:\n{found}\ninstead of\n{expected}", &key[1..]);
        }
    }
}

/// Compares lines, of which one that is expected with an asterisk at its end may go on as it likes.
fn assert_told<T: AsRef<str>>(found: &[String], expected: &[T]) {
    let is_told = |(found, expected): (&String, &T)| match expected.as_ref().strip_suffix('*') {
        Some(beginning) => found.starts_with(beginning),
        None => found == expected.as_ref(),
    };
    let expected_lines: Vec<_> = expected.iter().map(AsRef::as_ref).collect();
    let is_same = found.len() == expected.len() && found.iter().zip(expected).all(is_told);
    assert!(is_same, "{found:#?} instead of {expected_lines:#?}");
}

/// Damages a sound store, and compares all that is told. A repair leaves the records that there were before, with these
/// changes. Returns the store, and what was told without a repair.
fn check(
    damage: impl FnOnce(&mut Patient), expected: &[&str], change: impl FnOnce(&mut Records),
) -> (Patient, Report) {
    let mut patient = Patient::new();
    let mut sound = patient.records.clone();
    damage(&mut patient);
    patient.write();
    let report = patient.fsck(false);
    let mendable: Vec<_> = expected.iter().map(|line| line.trim_start_matches("! ")).collect();
    assert_told(&lines(&report, false), &mendable);
    assert_same(&patient.read(), &patient.records, "without a repair");
    let told = RefCell::new(Vec::new());
    let options = FsckOptions { repair: true, subset: None };
    let progress = |done, total| told.borrow_mut().push((done, total));
    let repaired = run(&patient.store, &options, &progress).unwrap();
    assert_told(&lines(&repaired, true), expected);
    let ends = told.borrow().last().copied();
    assert!(ends.is_none_or(|(done, total)| done == total), "{told:?}");
    change(&mut sound);
    assert_same(&patient.read(), &sound, "after the repair");
    // What no repair mends is told again, for another reason perhaps.
    let lasting = lines(&patient.fsck(true), true);
    let expected = expected.iter().filter(|line| line.starts_with('!')).count();
    assert_eq!(lasting.len(), expected, "after the repair: {lasting:#?}");
    assert!(lasting.iter().all(|line| line.starts_with('!')), "{lasting:#?}");
    (patient, report)
}

#[test]
fn a_sound_store_is_told_as_sound() {
    let (patient, report) = check(|_| (), &[], |_| ());
    let bytes_read = [MANIFEST, PAGE, STATE, A, B].map(|id| {
        let length = patient.store.disk.stat(&DiskPath::Object(object(id))).unwrap().length;
        // The headers of what was sealed are compared with the manifest.
        if [PAGE, STATE].contains(&id) { length + length.min(4096) } else { length }
    });
    let expected =
        Report { inodes: 18, objects: 7, bytes_read: bytes_read.iter().sum(), ..Report::default() };
    assert_eq!(report, expected);
    assert_eq!(patient.quarantined(), Vec::<String>::new());
}
