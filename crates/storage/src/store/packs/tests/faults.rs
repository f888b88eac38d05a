//! What packs promise of a disk that fails: what is durable, what is refused, and what is found again.

use super::*;
use crate::store::disk::{Allocation, Seek};
use crate::store::faulty_disk::{Events, FaultyDisk};

pub(super) fn faulty(path: &Path) -> (Mount, Arc<Events>) {
    let disk = FaultyDisk::open(path);
    let events = Arc::clone(&disk.events);
    (Mount::on(Arc::new(disk)), events)
}

#[test]
fn what_is_said_to_be_durable_was_synced_once() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    let one = mount.append(1, b"one");
    let two = mount.append(2, b"two");
    assert_eq!(events.take_steps(), [".", "FORMAT", "packs"]);
    mount.packs.sync().unwrap();
    assert_eq!(events.take_steps(), ["packs/00000001"]);
    mount.packs.sync().unwrap();
    assert!(events.take_steps().is_empty());
    mount.packs.adopt(&one);
    mount.packs.adopt(&two);
    mount.packs.note_adopted(&one);
    mount.packs.note_adopted(&two);
    let file = mount.disk.open(&DiskPath::Object(ObjectId(1)), Access::Read).unwrap();
    file.sync().unwrap();
    assert!(events.take_steps().is_empty(), "it was durable before the object had it");
    // The pack gets its index, and is as durable as that.
    drop(mount.append(3, b"three"));
    mount.packs.writer().turn().unwrap();
    assert_eq!(events.take_steps(), ["packs", "packs/00000001"]);
    mount.packs.sync().unwrap();
    assert!(events.take_steps().is_empty());
    drop(mount.append(4, b"four"));
    mount.packs.end().unwrap();
    assert_eq!(events.take_steps(), ["packs/00000002", "packs/00000002"], "records, and the index");
}

#[test]
fn after_a_sync_that_failed_nothing_is_promised() {
    fn check(unsyncable: &'static str, act: impl Fn(&Mount)) {
        let directory = store();
        let (mount, events) = faulty(directory.path());
        mount.pack(1, b"one");
        drop(mount.append(2, b"two"));
        events.fail_to_sync(Some(unsyncable));
        act(&mount);
        events.fail_to_sync(None);
        assert!(mount.packs.check().is_err(), "{unsyncable}");
        assert!(mount.packs.sync().is_err(), "{unsyncable}");
        let small = Small { object: ObjectId(3), mtime: Time::default(), bytes: Vec::new() };
        assert!(mount.packs.append(&[small]).is_err(), "{unsyncable}");
        assert_eq!(mount.read(1).unwrap(), b"one");
    }
    check("packs/00000001", |mount| drop(mount.packs.sync().unwrap_err()));
    // Its index: that is tried again at the end, and the answer is for whoever counts on it.
    check("packs/00000001", |mount| mount.packs.writer().turn().unwrap());
    check("packs", |mount| drop(mount.packs.writer().turn().unwrap_err()));
    check("packs/00000001", |mount| drop(mount.packs.end().unwrap_err()));
}

#[test]
fn a_lack_of_descriptors_passes_and_leaves_no_empty_packs() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    mount.pack(1, b"one");
    events.fail_to_open_for_sync("packs");
    for _ in 0..3 {
        let failure = mount.packs.writer().turn().unwrap_err();
        assert_eq!(failure.raw_os_error(), Some(libc::EMFILE));
    }
    mount.packs.check().unwrap();
    // The same where a pack goes.
    let failure = mount.packs.noting_failure(mount.packs.disk.sync_directory(DiskDirectory::Packs));
    assert_eq!(failure.unwrap_err().raw_os_error(), Some(libc::EMFILE));
    mount.packs.check().unwrap();
    let packs = || std::fs::read_dir(directory.path().join("packs")).unwrap().count();
    assert_eq!(packs(), 1);
    events.fail_to_sync(None);
    mount.packs.writer().turn().unwrap();
    mount.pack(2, b"two");
    mount.packs.end().unwrap();
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!((mount.read(1).unwrap(), mount.read(2).unwrap()), (b"one".into(), b"two".into()));
}

#[test]
fn a_full_disk_passes_and_nothing_is_left_of_what_found_no_room() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    mount.pack(1, b"one");
    events.writes_left.store(0, Ordering::Relaxed);
    let small = Small { object: ObjectId(2), mtime: Time::default(), bytes: b"two".to_vec() };
    let full = mount.packs.append(&[small]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    mount.packs.writer().turn().unwrap();
    mount.packs.check().unwrap();
    assert!(!mount.open_pack(1).read().unwrap().is_complete);
    events.writes_left.store(u64::MAX, Ordering::Relaxed);
    mount.pack(3, b"three");
    mount.packs.end().unwrap();
    for number in [1, 2] {
        assert!(mount.open_pack(number).read().unwrap().is_complete);
    }
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.objects(), [1, 3]);
    assert_eq!(mount.read(3).unwrap(), b"three");
}

/// A record takes 5,120 bytes here, and the disk fails in blocks of 4,096.
#[test]
fn what_a_disk_cannot_read_hides_nothing_else_and_is_there_once_it_can() {
    let directory = store();
    let (mount, _) = faulty(directory.path());
    for object in 0..5 {
        mount.pack(object, &[7; 5000]);
    }
    drop(mount);
    let disk = FaultyDisk::open(directory.path());
    *disk.events.unreadable.lock().unwrap() = 8192..12288;
    let mount = Mount::on(Arc::new(disk));
    assert_eq!(mount.objects(), [0, 3, 4]);
    assert_eq!(mount.read(4).unwrap(), [7; 5000]);
    mount.packs.end().unwrap();
    drop(mount);
    assert_eq!(Mount::new(directory.path()).objects(), [0, 1, 2, 3, 4]);
}

#[test]
fn packs_that_cannot_be_listed_are_not_taken_for_none() {
    let directory = store();
    std::fs::write(directory.path().join("packs"), b"").unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    assert!(Packs::open(Arc::new(disk)).is_err());
}

#[test]
fn a_file_in_staging_that_cannot_be_removed_is_tried_again() {
    let directory = store();
    let mount = Mount::new(directory.path());
    let id = ObjectId(1);
    let appended = mount.append(1, b"one");
    mount.packs.sync().unwrap();
    mount.packs.adopt(&appended);
    let staged = directory.path().join(DiskPath::Staging(id).relative());
    std::fs::create_dir(&staged).unwrap();
    assert!(mount.packs.remove_staged(id).is_err());
    std::fs::remove_dir(&staged).unwrap();
    std::fs::write(&staged, b"one").unwrap();
    mount.packs.remove_staged(id).unwrap();
    assert!(!staged.exists());
}

#[test]
fn a_packed_object_takes_the_place_of_what_has_the_name() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, b"packed");
    let [object, target] = [DiskPath::Object(ObjectId(1)), DiskPath::Quarantine("it".to_owned())];
    // A directory is no file of anybody's: the bytes stay.
    let place = directory.path().join(target.relative());
    std::fs::create_dir(&place).unwrap();
    assert!(mount.disk.rename(&object, &target).is_err());
    assert_eq!(mount.read(1).unwrap(), b"packed");
    std::fs::remove_dir(&place).unwrap();
    std::fs::write(&place, b"a longer one that was there").unwrap();
    mount.disk.rename(&object, &target).unwrap();
    assert_eq!(std::fs::read(place).unwrap(), b"packed");
    assert!(mount.read(1).is_none());
}

#[test]
fn a_packed_object_can_be_read_and_nothing_else() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, &[1; 100]);
    mount.pack(2, b"0123456789");
    let path = DiskPath::Object(ObjectId(2));
    let file = mount.disk.open(&path, Access::Read).unwrap();
    let stat = file.stat().unwrap();
    assert_eq!((stat.length, stat.blocks), (10, 0), "128 bytes are less than a block");
    mount.pack(3, &[1; 1000]);
    let other = mount.disk.stat(&DiskPath::Object(ObjectId(3))).unwrap();
    assert_eq!((other.length, other.blocks), (1000, 2), "of 1,088 bytes");
    let first = mount.disk.stat(&DiskPath::Object(ObjectId(1))).unwrap();
    assert_eq!(first.inode, 1 << 63 | 1 << 32, "the first record of the first pack");
    assert_eq!(stat.inode, first.inode + 192);
    assert_eq!(mount.disk.stat(&path).unwrap(), stat);
    let refused = [
        file.write_all_at(b"x", 0),
        file.set_length(3),
        file.allocate(Allocation { mode: 0, offset: 0, length: 1 }),
        file.set_modified(Time::default()),
    ];
    for outcome in refused {
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EROFS));
    }
    assert_eq!(file.seek(3, Seek::Data).unwrap(), 3);
    assert_eq!(file.seek(3, Seek::Hole).unwrap(), 10);
    let target = mount.disk.create(&DiskPath::Staging(ObjectId(9))).unwrap();
    assert_eq!(file.copy_to(4, target.as_ref(), 0, 100).unwrap(), 6);
    assert_eq!(read_all(target.as_ref(), 100).unwrap(), b"456789");
    let mut buffer = [0; 100];
    assert_eq!(file.read_at(&mut buffer, 7).unwrap(), 3);
    assert_eq!(file.read_at(&mut buffer, 11).unwrap(), 0);
    assert!(file.is_at_rest().unwrap() && file.is_unused().unwrap());
    // From now on all of that is about the file that somebody writes.
    mount.packs.unpack(ObjectId(2)).unwrap();
    let writer = mount.disk.open(&DiskPath::Staging(ObjectId(2)), Access::ReadWrite).unwrap();
    assert_eq!(file.stat().unwrap().inode, writer.stat().unwrap().inode);
    assert!(!file.is_at_rest().unwrap());
}

#[test]
fn packs_hide_nothing_of_what_their_disk_can_do() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    let disk = &mount.disk;
    assert_eq!(disk.syncs_at_once(), 3);
    assert_eq!([99, 100].map(|files| disk.sync_all_files(files).unwrap()), [false, true]);
    assert_eq!(disk.stack_depth().unwrap(), 7);
    std::fs::remove_dir_all(directory.path().join("quarantine")).unwrap();
    disk.create_directory(DiskDirectory::Quarantine).unwrap();
    assert!(directory.path().join("quarantine").is_dir());
    disk.sync_directory(DiskDirectory::Quarantine).unwrap();
    assert_eq!(events.take_steps(), ["everything", "quarantine"]);
    assert!(!disk.is_read_only());
    events.available_bytes.store(0, Ordering::Relaxed);
    assert!(disk.is_read_only());
}

/// In a pack without an index. The fourth record goes on behind the first 4 MiB, which are read at a time.
#[test]
fn bytes_that_are_not_what_was_written_do_not_count_and_hide_nothing_behind_them() {
    const RECORD_BYTES: usize = (1 << 20) + 64;
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 0..6 {
        mount.pack(object, &vec![object.to_le_bytes()[0]; 1 << 20]);
    }
    drop(mount);
    let pack = directory.path().join("packs/00000001");
    let mut bytes = std::fs::read(&pack).unwrap();
    for record in [1, 3] {
        bytes[record * RECORD_BYTES + 64 + 500] ^= 1;
    }
    std::fs::write(&pack, bytes).unwrap();
    assert_eq!(Mount::new(directory.path()).objects(), [0, 2, 4, 5]);
}

#[test]
fn a_file_of_its_own_is_newer_than_a_record_after_a_crash() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, b"one");
    mount.pack(2, b"two");
    mount.change(1, b"new");
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.read(1).unwrap(), b"new");
    assert!(!mount.packs.holds(ObjectId(1)));
    mount.disk.remove(&DiskPath::Object(ObjectId(1))).unwrap();
    mount.packs.end().unwrap();
    drop(mount);
    let mount = Mount::new(directory.path());
    assert_eq!(mount.objects(), [2], "its record has not come back");
    assert!(mount.disk.space().unwrap().total_bytes > 0);
}

#[test]
fn a_complete_pack_stays_as_it_is() {
    let directory = store();
    let pack = directory.path().join("packs/00000001");
    let mount = Mount::new(directory.path());
    mount.pack(1, b"one");
    mount.packs.end().unwrap();
    drop(mount);
    let before = std::fs::read(&pack).unwrap();
    let mount = Mount::new(directory.path());
    mount.packs.end().unwrap();
    drop(mount);
    assert_eq!(std::fs::read(&pack).unwrap(), before);
}
