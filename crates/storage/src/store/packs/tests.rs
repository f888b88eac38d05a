//! Packs against a map in memory, through crashes that tear what was not synced.

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
        let below: Arc<dyn Disk> = Arc::new(LocalDisk::open(path).unwrap());
        let packs = Arc::new(Packs::open(Arc::clone(&below)).unwrap());
        let disk = Arc::new(PackedDisk::new(below, Arc::clone(&packs)));
        for name in disk.list(DiskDirectory::Staging).unwrap() {
            disk.remove(&DiskPath::staged(&name).unwrap()).unwrap();
        }
        packs.recover().unwrap();
        Mount { packs, disk }
    }

    fn append(&self, object: u64, bytes: &[u8]) -> Vec<Appended> {
        let mtime = Time { seconds: bytes.len() as i64, nanoseconds: 7 };
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
        let id = ObjectId(object);
        if self.packs.unpack(id).unwrap() {
            let file = self.disk.open(&DiskPath::Staging(id), Access::ReadWrite).unwrap();
            file.write_all_at(bytes, 0).unwrap();
            file.set_length(bytes.len() as u64).unwrap();
        } else {
            let file = self.disk.create(&DiskPath::Staging(id)).unwrap();
            file.write_all_at(bytes, 0).unwrap();
        }
        self.disk.rename(&DiskPath::Staging(id), &DiskPath::Object(id)).unwrap();
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
        let seed = self.roll(256) as u8;
        (0..length).map(|at: usize| seed.wrapping_add((at % 251) as u8)).collect()
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
    let path = directory.path();
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut known: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut mount = Mount::new(path);
    let (mut next, mut synced) = (256, HashMap::new());
    for _ in 0..400 {
        let some = known.keys().copied().nth(dice.roll(known.len() as u64 + 1) as usize);
        match (dice.roll(16), some) {
            // Written, and then somebody had the file open: it goes on counting.
            (9, Some(object)) if !mount.packs.holds(ObjectId(object)) => {
                mount.append(object, b"nobody's");
            }
            (0..=4, _) | (5..=10, None) | (9, _) => {
                let bytes = dice.bytes();
                mount.pack(next, &bytes);
                known.insert(next, bytes);
                next += 1 + dice.roll(300);
                synced = lengths(path);
            }
            (5, Some(object)) => {
                let bytes = dice.bytes();
                mount.change(object, &bytes);
                known.insert(object, bytes);
            }
            (6, Some(object)) if mount.packs.unpack(ObjectId(object)).unwrap() => {
                let bytes = dice.bytes();
                mount.pack(object, &bytes);
                known.insert(object, bytes);
                synced = lengths(path);
            }
            (7, Some(object)) => {
                mount.disk.remove(&DiskPath::Object(ObjectId(object))).unwrap();
                known.remove(&object);
                assert_eq!(mount.read(object), None);
            }
            // Taken out to be changed, and never published; the next to ask finds what is there now.
            (8, Some(object)) if mount.packs.unpack(ObjectId(object)).unwrap() => {
                let bytes = known.get(&object).unwrap();
                mount.pack(object, bytes);
                synced = lengths(path);
            }
            (10, Some(object)) => {
                let note = dice.bytes();
                let path = DiskPath::Object(ObjectId(object));
                mount.disk.set_note(&path, &note[..note.len().min(300)]).unwrap();
                let found = mount.disk.note(&path).unwrap().unwrap();
                assert_eq!(found, note[..note.len().min(300)]);
            }
            (11 | 12, _) => {
                mount.packs.compact().unwrap();
                synced = lengths(path);
            }
            (13, _) => mount.packs.write_dead().unwrap(),
            (14, _) => {
                mount.packs.end().unwrap();
                mount = Mount::new(path);
                assert_eq!(mount.objects(), known.keys().copied().collect::<Vec<_>>(), "{seed}");
                synced = lengths(path);
            }
            _ => {
                drop(mount);
                if path.join("packs").exists() {
                    tear(path, &synced, &mut dice);
                }
                mount = Mount::new(path);
                // What was removed may be there again: no record of the database knows it.
                for object in mount.objects() {
                    if !known.contains_key(&object) {
                        mount.disk.remove(&DiskPath::Object(ObjectId(object))).unwrap();
                    }
                }
                synced = lengths(path);
            }
        }
        for (object, bytes) in &known {
            assert!(mount.read(*object).as_ref() == Some(bytes), "seed {seed}, object {object}");
        }
    }
    let packed = mount.packs.packed();
    assert!(packed.live_bytes <= packed.bytes, "{packed:?}");
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
        mount.pack(object, &vec![object as u8; 1 << 20]);
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
