//! Packs against a map in memory, through crashes that tear what was not synced.

mod faults;
mod holes;
mod missing;
mod room;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::*;
use crate::store::disk::read_all;
use crate::store::local_disk::LocalDisk;
use crate::store::{Store, format};

/// A mount of the packs of a store.
struct Mount {
    packs: Arc<Packs>,
    disk: Arc<dyn Disk>,
}

impl Mount {
    fn new(path: &Path) -> Mount {
        Mount::on(Arc::new(LocalDisk::open(path).unwrap()))
    }

    fn on(below: Arc<dyn Disk>) -> Mount {
        let packs = Arc::new(Packs::open(Arc::clone(&below)).unwrap());
        let disk = Arc::new(PackedDisk::new(below, Arc::clone(&packs)));
        for name in disk.list(DiskDirectory::Staging).unwrap() {
            disk.remove(&DiskPath::staged(&name).unwrap()).unwrap();
        }
        packs.recover().unwrap();
        Mount { packs, disk }
    }

    fn append(&self, object: u64, bytes: &[u8]) -> Vec<Appended> {
        let mtime = Time { seconds: i64::try_from(bytes.len()).unwrap(), nanoseconds: 7 };
        self.packs
            .append(&[Small { object: ObjectId(object), mtime, bytes: bytes.to_vec() }])
            .unwrap()
    }

    fn pack(&self, object: u64, bytes: &[u8]) {
        let appended = self.append(object, bytes);
        self.packs.sync().unwrap();
        self.packs.adopt(&appended);
        self.packs.remove_staged(ObjectId(object)).unwrap();
        self.packs.note_adopted(&appended);
    }

    /// Changes an object in a file of its own, and publishes that.
    fn change(&self, object: u64, bytes: &[u8]) {
        self.write(object, bytes);
        let id = ObjectId(object);
        self.disk.rename(&DiskPath::Staging(id), &DiskPath::Object(id)).unwrap();
    }

    /// Changes an object in a file of its own.
    fn write(&self, object: u64, bytes: &[u8]) {
        let id = ObjectId(object);
        if self.packs.unpack(id).unwrap() {
            let file = self.disk.open(&DiskPath::Staging(id), Access::ReadWrite).unwrap();
            file.write_all_at(bytes, 0).unwrap();
            file.set_length(bytes.len() as u64).unwrap();
        } else {
            let file = self.disk.create(&DiskPath::Staging(id)).unwrap();
            file.write_all_at(bytes, 0).unwrap();
        }
    }

    fn open_pack(&self, number: u32) -> PackFile {
        let pack = self.packs.index().pack(number).unwrap();
        pack.open(|_| Ok(())).unwrap()
    }

    fn read(&self, object: u64) -> Option<Vec<u8>> {
        let file = self.disk.open(&DiskPath::Object(ObjectId(object)), Access::Read);
        file.ok().map(|file| read_all(file.as_ref(), PACKED_BYTES_MAX).unwrap())
    }

    fn objects(&self) -> Vec<u64> {
        let mut found = Vec::new();
        for shard in 0..=u8::MAX {
            for name in self.disk.list(DiskDirectory::ObjectShard(shard)).unwrap() {
                let Some(DiskPath::Object(object)) = DiskPath::stored(&name) else { panic!() };
                found.push(object.0);
            }
        }
        found.sort_unstable();
        found
    }
}

fn store() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    format::create_if_empty(directory.path()).unwrap();
    directory
}

/// Numbers that look random, the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }

    fn bytes(&mut self) -> Vec<u8> {
        let length = [0, 1, 63, 64, 65, 4096, 70_000][usize::try_from(self.roll(7)).unwrap()];
        let seed = self.roll(256);
        (0..length).map(|at: u64| (seed + at % 251).to_le_bytes()[0]).collect()
    }
}

/// Cuts what the last mount wrote to a pack behind what it had synced, and scribbles over what is left of it.
fn tear(path: &Path, synced: &HashMap<String, u64>, dice: &mut Dice) {
    for entry in std::fs::read_dir(path.join("packs")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let file = std::fs::File::options().write(true).open(entry.path()).unwrap();
        let length = file.metadata().unwrap().len();
        let durable = synced.get(&name).copied().unwrap_or(0);
        if length > durable {
            let cut = durable + dice.roll(length - durable + 1);
            file.set_len(cut).unwrap();
            if cut > durable && dice.roll(2) == 0 {
                use std::os::unix::fs::FileExt;
                file.write_all_at(&[0xa5; 32], durable + dice.roll(cut - durable)).unwrap();
            }
        }
    }
}

fn lengths(path: &Path) -> HashMap<String, u64> {
    let Ok(entries) = std::fs::read_dir(path.join("packs")) else { return HashMap::new() };
    let entries = entries.map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()))
        .collect()
}

#[test]
fn whatever_is_done_and_whenever_it_ends_objects_have_the_bytes_that_they_were_given() {
    let runs =
        std::env::var("KVFS_PACKS_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(6);
    for seed in 1..=runs {
        run(seed);
    }
}

fn run(seed: u64) {
    let directory = store();
    let mut run = Run {
        path: directory.path(),
        dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        known: BTreeMap::new(),
        notes: BTreeMap::new(),
        mount: Mount::new(directory.path()),
        next: 256,
        synced: HashMap::new(),
    };
    for _ in 0..400 {
        run.step();
        for (object, bytes) in &run.known {
            assert!(
                run.mount.read(*object).as_ref() == Some(bytes),
                "seed {seed}, object {object}"
            );
        }
    }
    let packed = run.mount.packs.packed();
    assert!(packed.live_bytes <= packed.bytes, "{packed:?}");
}

/// A store, and what must be in it.
struct Run<'a> {
    path: &'a Path,
    dice: Dice,
    known: BTreeMap<u64, Vec<u8>>,
    /// What was noted of objects in packs, until they are changed or the power is cut.
    notes: BTreeMap<u64, Vec<u8>>,
    mount: Mount,
    next: u64,
    /// Bytes of each pack that a power cut leaves.
    synced: HashMap<String, u64>,
}

impl Run<'_> {
    fn step(&mut self) {
        let count = self.known.len() as u64 + 1;
        let number = usize::try_from(self.dice.roll(count)).unwrap();
        let some = self.known.keys().copied().nth(number);
        match (self.dice.roll(16), some) {
            (5..=10, Some(object)) => self.change(object),
            (0..=10, _) => {
                let bytes = self.dice.bytes();
                self.mount.pack(self.next, &bytes);
                self.known.insert(self.next, bytes);
                self.next += 1 + self.dice.roll(300);
                self.synced = lengths(self.path);
            }
            (11 | 12, _) => {
                self.mount.packs.compact().unwrap();
                self.synced = lengths(self.path);
            }
            (13, _) => self.mount.packs.write_dead().unwrap(),
            (14, _) => {
                self.mount.packs.end().unwrap();
                self.mount = Mount::new(self.path);
                assert_eq!(self.mount.objects(), self.known.keys().copied().collect::<Vec<_>>());
                for (object, note) in &self.notes {
                    let found = self.mount.disk.note(&DiskPath::Object(ObjectId(*object))).unwrap();
                    assert_eq!(found.as_ref(), Some(note), "object {object}");
                }
                self.synced = lengths(self.path);
            }
            _ => self.crash(),
        }
    }

    fn change(&mut self, object: u64) {
        let (id, path) = (ObjectId(object), DiskPath::Object(ObjectId(object)));
        let is_packed = self.mount.packs.holds(id);
        let bytes = self.dice.bytes();
        let known_note = self.notes.remove(&object);
        match self.dice.roll(6) {
            0 => {
                self.mount.change(object, &bytes);
                self.known.insert(object, bytes);
            }
            1 => {
                self.mount.disk.remove(&path).unwrap();
                self.known.remove(&object);
                assert_eq!(self.mount.read(object), None);
            }
            // Written, and then somebody had the file open: it goes on counting.
            2 if !is_packed => drop(self.mount.append(object, b"nobody's")),
            2 => self.notes.extend(known_note.map(|note| (object, note))),
            // Taken out to be changed, and at rest again before it was published; changed or not.
            3 if self.mount.packs.unpack(id).unwrap() => {
                self.mount.pack(object, &bytes);
                self.known.insert(object, bytes);
                self.synced = lengths(self.path);
            }
            4 if self.mount.packs.unpack(id).unwrap() => {
                let bytes = self.known.get(&object).unwrap();
                self.mount.pack(object, bytes);
                self.synced = lengths(self.path);
            }
            _ => {
                let note = &bytes[..bytes.len().min(300)];
                self.mount.disk.set_note(&path, note).unwrap();
                assert_eq!(self.mount.disk.note(&path).unwrap().unwrap(), note);
                if is_packed {
                    self.notes.insert(object, note.to_vec());
                }
            }
        }
    }

    fn crash(&mut self) {
        if self.path.join("packs").exists() {
            tear(self.path, &self.synced, &mut self.dice);
        }
        self.mount = Mount::new(self.path);
        self.notes.clear();
        // What was removed may be there again: no record of the database knows it.
        for object in self.mount.objects() {
            if !self.known.contains_key(&object) {
                self.mount.disk.remove(&DiskPath::Object(ObjectId(object))).unwrap();
            }
        }
        self.synced = lengths(self.path);
    }
}

#[test]
fn a_reader_goes_on_with_what_is_changed_and_with_what_is_moved() {
    let directory = store();
    let mount = Mount::new(directory.path());
    let id = ObjectId(300);
    mount.pack(300, b"before");
    let path = DiskPath::Object(id);
    let reader = mount.disk.open(&path, Access::Read).unwrap();
    let refused = mount.disk.open(&path, Access::ReadWrite).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    mount.change(300, b"afterwards");
    assert_eq!(read_all(reader.as_ref(), 100).unwrap(), b"afterwards");
    mount.pack(301, b"moved");
    let reader = mount.disk.open(&DiskPath::Object(ObjectId(301)), Access::Read).unwrap();
    mount.packs.end().unwrap();
    assert!(mount.packs.compact().unwrap(), "half of it is not valid");
    assert_eq!(read_all(reader.as_ref(), 100).unwrap(), b"moved");
    assert_eq!(mount.read(301).unwrap(), b"moved");
}

#[test]
fn room_is_taken_back_and_short_packs_are_put_together() {
    let directory = store();
    let path = directory.path();
    for mounted in 0..20 {
        let mount = Mount::new(path);
        mount.pack(1000 + mounted, &[7; 5000]);
        mount.packs.end().unwrap();
    }
    let mount = Mount::new(path);
    while mount.packs.compact().unwrap() {}
    assert!(mount.packs.packed().packs <= 16, "{:?}", mount.packs.packed());
    for object in 1000..1020 {
        assert_eq!(mount.read(object).unwrap(), [7; 5000]);
        mount.disk.remove(&DiskPath::Object(ObjectId(object))).unwrap();
    }
    mount.packs.end().unwrap();
    while mount.packs.compact().unwrap() {}
    mount.packs.end().unwrap();
    let left: u64 = lengths(path).values().sum();
    assert!(left < 5000, "{left} bytes for nothing");
    assert!(Mount::new(path).objects().is_empty());
}

#[test]
fn a_full_pack_is_followed_by_another_and_damage_hides_nothing_else() {
    let directory = store();
    let path = directory.path();
    let mount = Mount::new(path);
    for object in 0..70 {
        mount.pack(object, &vec![object.to_le_bytes()[0]; 1 << 20]);
    }
    assert_eq!(mount.packs.packed().packs, 2);
    mount.packs.end().unwrap();
    drop(mount);
    // The index of the first, and one of its headers.
    let first = path.join("packs/00000001");
    let mut bytes = std::fs::read(&first).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let second_header = 64 + (1 << 20);
    bytes[second_header] ^= 1;
    std::fs::write(&first, bytes).unwrap();
    let mount = Mount::new(path);
    let expected: Vec<u64> = (0..70).filter(|object| *object != 1).collect();
    assert_eq!(mount.objects(), expected);
}

#[test]
fn a_store_with_packs_is_not_for_whoever_does_not_know_them() {
    let directory = store();
    let format = directory.path().join("FORMAT");
    let mount = Mount::new(directory.path());
    assert_eq!(std::fs::read_to_string(&format).unwrap(), "kvfs store 1\n");
    mount.pack(1, b"one");
    assert_eq!(std::fs::read_to_string(&format).unwrap(), "kvfs store 2\n");
    drop(mount);
    assert!(Store::open(directory.path()).unwrap().packs.holds(ObjectId(1)));
}

/// ENOSPC in the middle, for one.
#[test]
fn a_compaction_that_ends_halfway_leaves_no_copy_that_would_win() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(300, b"old");
    mount.packs.end().unwrap();
    let pack = mount.open_pack(1);
    let records = pack.read().unwrap().records;
    mount.packs.copy(&pack, &records, &mut Vec::new()).unwrap();
    mount.packs.end().unwrap();
    drop((pack, mount));
    // The bytes that were to be moved count where they were.
    let mount = Mount::new(directory.path());
    assert_eq!(mount.read(300).unwrap(), b"old");
    let pack = mount.open_pack(1);
    mount.packs.copy(&pack, &records, &mut Vec::new()).unwrap();
    mount.change(300, b"new");
    mount.packs.end().unwrap();
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.read(300).unwrap(), b"new");
    assert!(!mount.packs.holds(ObjectId(300)));
}

/// A commit removes what is left in `staging/` a moment after objects were told of their bytes.
#[test]
fn what_was_unpacked_since_is_not_removed() {
    let directory = store();
    let mount = Mount::new(directory.path());
    let id = ObjectId(1);
    mount.disk.create(&DiskPath::Staging(id)).unwrap().write_all_at(b"one", 0).unwrap();
    let appended = mount.append(1, b"one");
    mount.packs.sync().unwrap();
    mount.packs.adopt(&appended);
    mount.write(1, b"new");
    mount.packs.remove_staged(id).unwrap();
    mount.packs.note_adopted(&appended);
    mount.disk.rename(&DiskPath::Staging(id), &DiskPath::Object(id)).unwrap();
    assert_eq!(mount.read(1).unwrap(), b"new");
    assert!(!mount.packs.holds(id));
}

/// While a commit has appended the bytes of objects and has not told them yet, the index knows of nothing in
/// that pack: it looks like garbage.
#[test]
fn records_that_an_object_is_about_to_have_are_no_garbage() {
    let directory = store();
    let mount = Mount::new(directory.path());
    let appended = mount.append(1, b"one");
    let given_up = mount.append(2, b"two");
    mount.packs.sync().unwrap();
    mount.packs.writer().turn().unwrap();
    assert!(!mount.packs.compact().unwrap());
    mount.packs.compact_all().unwrap();
    mount.packs.adopt(&appended);
    mount.packs.note_adopted(&appended);
    assert_eq!(mount.read(1).unwrap(), b"one");
    assert!(!mount.packs.compact().unwrap(), "the other record may count yet");
    mount.packs.give_up(&given_up);
    assert!(mount.packs.compact().unwrap());
    assert_eq!(mount.read(1).unwrap(), b"one");
    mount.packs.end().unwrap();
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.objects(), [1]);
    assert_eq!(mount.read(1).unwrap(), b"one");
}

#[test]
fn what_cannot_be_read_keeps_nobody_from_the_rest() {
    let directory = store();
    let path = directory.path();
    for object in [1, 2] {
        let mount = Mount::new(path);
        mount.pack(object, &[7; 100]);
        mount.packs.end().unwrap();
    }
    let packs = path.join("packs");
    std::os::unix::fs::symlink("/etc/passwd", packs.join("00000003")).unwrap();
    std::fs::create_dir(packs.join("00000004")).unwrap();
    nix::unistd::mkfifo(&packs.join("00000005"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    for name in ["ffffffff", "80000000", "notes", "0000000"] {
        std::fs::write(packs.join(name), b"junk").unwrap();
    }
    let mount = Mount::new(path);
    assert_eq!(mount.objects(), [1, 2]);
    assert_eq!(mount.read(1).unwrap(), [7; 100]);
    mount.packs.end().unwrap();
    for name in ["00000003", "00000004", "00000005"] {
        assert!(packs.join(name).symlink_metadata().is_ok(), "{name}");
    }
    for name in ["ffffffff", "80000000", "notes", "0000000"] {
        assert_eq!(std::fs::read(packs.join(name)).unwrap(), b"junk", "{name}");
    }
}

#[test]
fn a_packed_object_that_gets_another_name_is_a_file_there() {
    let directory = store();
    let mount = Mount::new(directory.path());
    let [free, taken] = [7, 8].map(|number| DiskPath::Staging(ObjectId(number)));
    mount.disk.create(&taken).unwrap().write_all_at(b"what was there before", 0).unwrap();
    for (number, to) in [(1, free), (2, taken)] {
        mount.pack(number, b"bytes");
        mount.disk.rename(&DiskPath::Object(ObjectId(number)), &to).unwrap();
        let file = mount.disk.open(&to, Access::Read).unwrap();
        assert_eq!(read_all(file.as_ref(), 100).unwrap(), b"bytes");
        assert!(mount.read(number).is_none());
    }
    assert!(mount.objects().is_empty());
}
