//! A disk that is nearly full, and a pack that is written to and holds little that is valid.

use super::faults::faulty;
use super::*;
use crate::store::packs::writer::PACK_BYTES;

/// Bytes of an object here: with its header fifteen blocks.
const BYTES: usize = 15 * 4096 - 64;

fn bytes(object: u64) -> Vec<u8> {
    vec![u8::try_from(object).unwrap(); BYTES]
}

fn remove(mount: &Mount, object: u64) {
    mount.disk.remove(&DiskPath::Object(ObjectId(object))).unwrap();
}

/// What a pack takes on the disk.
fn allocated_bytes(mount: &Mount, number: u32) -> u64 {
    let pack = mount.disk.open(&DiskPath::Pack(number), Access::Read).unwrap();
    pack.sync().unwrap();
    pack.stat().unwrap().blocks * 512
}

/// Four of twenty objects are left, one of them only because somebody has it open; with an index, or without.
#[test]
fn on_a_full_disk_what_is_not_valid_becomes_holes() {
    for is_complete in [false, true] {
        let directory = store();
        let (mount, events) = faulty(directory.path());
        for object in 0..20 {
            mount.pack(object, &bytes(object));
        }
        let number = mount.packs.writer().current().unwrap();
        if is_complete {
            mount.packs.writer().turn().unwrap();
        }
        let before = mount.packs.packed();
        let open = mount.disk.open(&DiskPath::Object(ObjectId(7)), Access::Read).unwrap();
        (0..20).filter(|object| object % 9 != 0).for_each(|object| remove(&mount, object));
        // No object was told of it yet.
        let awaited = if is_complete { Vec::new() } else { mount.append(20, &bytes(20)) };
        events.available_bytes.store(2 * PACK_BYTES, Ordering::Relaxed);
        let full = allocated_bytes(&mount, number);
        mount.packs.make_holes_if_full().unwrap();
        assert_eq!(allocated_bytes(&mount, number), full, "there is room to copy");
        events.available_bytes.store(0, Ordering::Relaxed);
        let _ = mount.packs.compact();
        let left = allocated_bytes(&mount, number);
        assert!(left < 7 * 16 * 4096, "{left} of {full} bytes");
        assert!(mount.packs.packed().bytes + 14 * 15 * 4096 <= before.bytes + 2 * 16 * 4096);
        let mut found = vec![0; BYTES];
        assert_eq!(open.read_at(&mut found, 0).unwrap(), BYTES);
        assert_eq!(found, bytes(7));
        mount.packs.adopt(&awaited);
        mount.packs.note_adopted(&awaited);
        let kept = [0, 9, 18].into_iter().chain((!is_complete).then_some(20));
        kept.clone().for_each(|object| assert_eq!(mount.read(object).unwrap(), bytes(object)));
        // As after a crash: what was removed is there by name, as garbage, or not at all.
        mount.packs.sync().unwrap();
        drop((open, mount));
        let mount = Mount::new(directory.path());
        kept.for_each(|object| assert_eq!(mount.read(object).unwrap(), bytes(object)));
    }
}

#[test]
fn what_nobody_has_open_any_more_becomes_holes_as_well() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    (0..20).for_each(|object| mount.pack(object, &bytes(object)));
    let number = mount.packs.writer().current().unwrap();
    let path = DiskPath::Object(ObjectId(7));
    let open = [(); 2].map(|()| mount.disk.open(&path, Access::Read).unwrap());
    (0..20).for_each(|object| remove(&mount, object));
    events.available_bytes.store(2 * PACK_BYTES - 1, Ordering::Relaxed);
    let [one, other] = open;
    drop(one);
    mount.packs.make_holes_if_full().unwrap();
    let mut found = vec![0; BYTES];
    assert_eq!(other.read_at(&mut found, 0).unwrap(), BYTES);
    assert_eq!(found, bytes(7));
    drop(other);
    // More has become invalid since.
    mount.pack(21, &bytes(21));
    mount.pack(22, &bytes(22));
    for object in [21, 22] {
        remove(&mount, object);
    }
    mount.packs.make_holes_if_full().unwrap();
    assert!(allocated_bytes(&mount, number) <= 2 * 4096);
}

#[test]
fn on_a_full_disk_all_room_that_can_be_is_taken_back() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    (0..20).for_each(|object| mount.pack(object, &bytes(object)));
    mount.packs.writer().turn().unwrap();
    (0..19).for_each(|object| remove(&mount, object));
    events.available_bytes.store(1, Ordering::Relaxed);
    let freed = mount.packs.compact_all().unwrap();
    assert!(freed >= 18 * 15 * 4096, "{freed}");
    assert_eq!(mount.read(19).unwrap(), bytes(19));
    // Any other failure is told.
    events.available_bytes.store(u64::MAX, Ordering::Relaxed);
    *events.unreadable.lock().unwrap() = 0..u64::MAX;
    assert!(mount.packs.compact_all().is_err());
}

#[test]
fn a_disk_that_makes_no_holes_is_not_asked_again_for_each_pack() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    (0..20).for_each(|object| mount.pack(object, &bytes(object)));
    (0..20).for_each(|object| remove(&mount, object));
    events.available_bytes.store(0, Ordering::Relaxed);
    let fail_with = |code| {
        *events.failing_with.lock().unwrap() = Some(code);
        mount.packs.make_holes_if_full()
    };
    assert_eq!(fail_with(libc::EOPNOTSUPP).unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    fail_with(libc::EIO).unwrap();
}

#[test]
fn a_pack_that_is_written_to_is_complete_once_it_is_worth_copying() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, &[7; 100]);
    let first = mount.packs.writer().current();
    let becomes_complete = |(bytes, live_bytes): (u64, u64)| {
        let number = mount.packs.writer().current().unwrap();
        if let Some(known) = mount.packs.index_mut().packs.get_mut(&number) {
            // As if it had as many.
            (known.bytes, known.live_bytes) = (bytes, live_bytes);
        }
        mount.packs.compact().unwrap() && mount.packs.writer().current() != Some(number)
    };
    let (worth, half) = (PACK_BYTES / 4, PACK_BYTES / 8);
    assert!(!becomes_complete((worth - 2, 0)));
    assert!(!becomes_complete((worth, half + 1)));
    let awaited = mount.append(2, &[8; 100]);
    assert!(!becomes_complete((worth, half)));
    mount.packs.give_up(&awaited);
    assert_eq!(mount.packs.writer().current(), first);
    assert!(becomes_complete((worth, half)));
}
