//! How much packs say that they hold, and when room is taken back. A record here has 64 bytes before its payload, and
//! as many as fill up to the next 64 behind.

use super::faults::faulty;
use super::*;
use crate::store::faulty_disk::Meanwhile;
use crate::store::packs::writer::PACK_BYTES;

fn remove(mount: &Mount, object: u64) {
    mount.disk.remove(&DiskPath::Object(ObjectId(object))).unwrap();
}

fn numbers(mount: &Mount) -> Vec<u32> {
    mount.packs.index().packs.keys().copied().collect()
}

#[test]
fn everything_invalid_is_taken_back_and_nothing_else() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, &[7; 100]);
    mount.pack(2, &[8; 100]);
    let note = DiskPath::Object(ObjectId(2));
    mount.disk.set_note(&note, &[1; 10]).unwrap();
    mount.disk.set_note(&note, &[2; 70]).unwrap();
    let both = Packed { packs: 1, objects: 2, bytes: 192 * 3 + 128, live_bytes: 192 * 3 };
    assert_eq!(mount.packs.packed(), both);
    remove(&mount, 1);
    let packed = mount.packs.packed();
    assert_eq!(packed, Packed { objects: 1, live_bytes: 192 * 2, ..both });
    assert_eq!(packed.invalid_bytes(), 192 + 128);
    // And the record that says so.
    assert_eq!(mount.packs.compact_all().unwrap(), 192 + 128 + 64);
    let rest = Packed { packs: 1, objects: 1, bytes: 192 * 2, live_bytes: 192 * 2 };
    assert_eq!(mount.packs.packed(), rest);
    for _ in 0..2 {
        assert_eq!(mount.packs.compact_all().unwrap(), 0);
        assert_eq!(numbers(&mount), [2, 3], "one with nothing but what is valid, and an empty one");
    }
    assert_eq!(mount.read(2).unwrap(), [8; 100]);
    assert_eq!(mount.disk.note(&note).unwrap().unwrap(), [2; 70]);
    mount.packs.end().unwrap();
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.objects(), [2]);
    assert_eq!(mount.packs.packed().live_bytes, rest.live_bytes);
    assert_eq!(mount.disk.note(&note).unwrap().unwrap(), [2; 70]);
}

#[test]
fn a_pack_is_worth_it_from_half_on() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 1..=3 {
        mount.pack(object, &[7; 100]);
    }
    mount.packs.writer().turn().unwrap();
    remove(&mount, 1);
    assert!(!mount.packs.compact().unwrap(), "two thirds are valid");
    remove(&mount, 2);
    assert!(mount.packs.compact().unwrap());
    assert_eq!(mount.objects(), [3]);
    assert_eq!(mount.read(3).unwrap(), [7; 100]);
}

#[test]
fn packs_that_are_long_stay_apart_however_many() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 1..=17 {
        mount.pack(object, &[7; 100]);
        mount.packs.writer().turn().unwrap();
    }
    let others_bytes = PACK_BYTES / 4 - 192;
    for known in mount.packs.index_mut().packs.values_mut() {
        // As if each had a quarter of what it may have.
        known.bytes += others_bytes;
        known.live_bytes += others_bytes;
    }
    assert!(!mount.packs.compact().unwrap());
    for known in mount.packs.index_mut().packs.values_mut() {
        known.bytes -= others_bytes;
        known.live_bytes -= others_bytes;
    }
    assert!(mount.packs.compact().unwrap());
}

#[test]
fn room_for_the_copies_is_there_twice_or_nothing_is_copied() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    mount.pack(1, &[7; 100]);
    mount.pack(2, &[8; 100]);
    mount.packs.writer().turn().unwrap();
    remove(&mount, 1);
    events.available_bytes.store(2 * 192 - 1, Ordering::Relaxed);
    let full = mount.packs.compact().unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(mount.read(2).unwrap(), [8; 100]);
    events.available_bytes.store(2 * 192, Ordering::Relaxed);
    assert!(mount.packs.compact().unwrap());
    assert_eq!(mount.read(2).unwrap(), [8; 100]);
}

/// The disk is full after four of five objects; later one of them goes.
#[test]
fn copies_that_nobody_was_told_of_do_not_bring_an_object_back() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    for object in 0..11 {
        mount.pack(object, &vec![object.to_le_bytes()[0]; 1 << 20]);
    }
    mount.packs.writer().turn().unwrap();
    (5..11).for_each(|object| remove(&mount, object));
    mount.packs.write_dead().unwrap();
    events.written_bytes.lock().unwrap().clear();
    events.writes_left.store(1, Ordering::Relaxed);
    let full = mount.packs.compact().unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let record_bytes = (1 << 20) + 64;
    assert_eq!(*events.written_bytes.lock().unwrap(), [4 * record_bytes], "4 MiB at a time");
    events.writes_left.store(u64::MAX, Ordering::Relaxed);
    remove(&mount, 2);
    let noted = DiskPath::Object(ObjectId(0));
    mount.disk.set_note(&noted, b"since then").unwrap();
    mount.packs.end().unwrap();
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.objects(), [0, 1, 3, 4]);
    assert_eq!(mount.disk.note(&noted).unwrap().unwrap(), b"since then");
    for object in mount.objects() {
        assert_eq!(mount.read(object).unwrap(), vec![object.to_le_bytes()[0]; 1 << 20]);
    }
}

/// It goes while its copy is synced, after which the copy would count.
#[test]
fn an_object_that_goes_while_it_is_copied_stays_gone() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    mount.pack(1, &[7; 100]);
    mount.pack(2, &[8; 100]);
    mount.pack(3, &[9; 100]);
    mount.disk.set_note(&DiskPath::Object(ObjectId(1)), b"note").unwrap();
    mount.packs.writer().turn().unwrap();
    remove(&mount, 3);
    remove(&mount, 2);
    let disk = Arc::clone(&mount.disk);
    let removal = move || disk.remove(&DiskPath::Object(ObjectId(1))).unwrap();
    *events.meanwhile.lock().unwrap() = Some(Meanwhile(Box::new(removal)));
    assert!(mount.packs.compact().unwrap());
    assert!(events.meanwhile.lock().unwrap().is_none());
    assert!(mount.objects().is_empty());
    mount.packs.end().unwrap();
    drop(mount);
    assert!(Mount::new(directory.path()).objects().is_empty());
}

/// The copies are of what was there before.
#[test]
fn what_is_written_while_it_is_copied_counts() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    let noted = DiskPath::Object(ObjectId(2));
    for object in 1..=5 {
        mount.pack(object, &[7; 100]);
    }
    mount.disk.set_note(&noted, b"before").unwrap();
    mount.packs.writer().turn().unwrap();
    (3..=5).for_each(|object| remove(&mount, object));
    let (disk, packs) = (Arc::clone(&mount.disk), Arc::clone(&mount.packs));
    let changes = move || {
        let mtime = Time::default();
        let small = Small { object: ObjectId(1), mtime, bytes: b"new".to_vec() };
        let appended = packs.append(&[small]).unwrap();
        packs.adopt(&appended);
        packs.note_adopted(&appended);
        disk.set_note(&DiskPath::Object(ObjectId(2)), b"afterwards").unwrap();
    };
    *events.meanwhile.lock().unwrap() = Some(Meanwhile(Box::new(changes)));
    assert!(mount.packs.compact().unwrap());
    assert!(events.meanwhile.lock().unwrap().is_none());
    let check = |mount: &Mount| {
        assert_eq!(mount.read(1).unwrap(), b"new");
        assert_eq!(mount.read(2).unwrap(), [7; 100]);
        assert_eq!(mount.disk.note(&noted).unwrap().unwrap(), b"afterwards");
    };
    check(&mount);
    mount.packs.end().unwrap();
    drop(mount);
    check(&Mount::new(directory.path()));
}

#[test]
fn a_pack_is_filled_to_the_last_byte_and_has_its_index_at_once() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 0..64 {
        mount.pack(object, &vec![7; (1 << 20) - 64]);
    }
    assert_eq!(numbers(&mount), [1]);
    assert_eq!(mount.packs.packed().bytes, PACK_BYTES);
    mount.pack(64, b"next");
    assert_eq!(numbers(&mount), [1, 2]);
    let contents = mount.open_pack(1).read().unwrap();
    assert!(contents.is_complete);
    assert_eq!(contents.end, PACK_BYTES);
    let found: Vec<u64> = contents.records.iter().map(|(_, header)| header.object.0).collect();
    assert_eq!(found, (0..64).collect::<Vec<_>>());
}

/// The last record begins in the first 4 MiB, which are read at a time, and ends with the file.
#[test]
fn a_record_that_ends_with_its_pack_is_found_without_an_index() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 0..4 {
        mount.pack(object, &vec![7; 1 << 20]);
    }
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.objects(), [0, 1, 2, 3]);
    let packs = std::fs::read_dir(directory.path().join("packs")).unwrap().count();
    assert_eq!(packs, 2, "the next one is there before anybody changes anything");
}

#[test]
fn what_is_missing_of_a_pack_is_not_copied_as_something_else() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, &[7; 100]);
    mount.pack(2, &[8; 100]);
    let pack = mount.open_pack(1);
    let records = pack.read().unwrap().records;
    pack.file.set_length(300).unwrap();
    assert!(mount.packs.copy(&pack, &records[..1], &mut Vec::new()).is_ok());
    pack.file.set_length(200).unwrap();
    let missing = mount.packs.copy(&pack, &records[1..], &mut Vec::new()).unwrap_err();
    let missing = io::Error::from(missing);
    assert_eq!(missing.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn larger_objects_than_a_pack_takes_are_never_asked_for() {
    let directory = store();
    let mount = Mount::new(directory.path());
    assert_eq!(mount.packs.packed_bytes_max(), 0);
    mount.packs.set_packed_bytes_max(super::super::DEFAULT_PACKED_BYTES_MAX);
    assert_eq!(mount.packs.packed_bytes_max(), 65_536, "what is said where nobody says otherwise");
    mount.packs.set_packed_bytes_max(4096);
    assert_eq!(mount.packs.packed_bytes_max(), 4096);
    mount.packs.set_packed_bytes_max(u64::MAX);
    assert_eq!(mount.packs.packed_bytes_max(), 1 << 20);
}

/// The last note of an object counts, also where packs are read.
#[test]
fn a_note_that_was_replaced_while_it_is_copied_does_not_come_back() {
    let directory = store();
    let mount = Mount::new(directory.path());
    let path = DiskPath::Object(ObjectId(1));
    mount.pack(1, b"bytes");
    mount.disk.set_note(&path, b"first").unwrap();
    mount.packs.writer().turn().unwrap();
    let pack = mount.open_pack(1);
    let records = pack.read().unwrap().records;
    mount.disk.set_note(&path, b"second").unwrap();
    let mut moved = Vec::new();
    mount.packs.copy(&pack, &records, &mut moved).unwrap();
    assert_eq!(moved.len(), 1, "the bytes alone");
    mount.packs.end().unwrap();
    let mount = Mount::new(directory.path());
    assert_eq!(mount.disk.note(&path).unwrap().unwrap(), b"second");
}
