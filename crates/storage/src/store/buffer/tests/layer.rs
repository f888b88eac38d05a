//! What is asked of the disk goes there, with what is in memory beside it.

use super::*;
use crate::store::faulty_disk::FaultyDisk;
use std::sync::atomic::Ordering::Relaxed;

#[test]
fn what_the_disk_is_like_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::open(directory.path());
    let events = Arc::clone(&disk.events);
    let buffer = WriteBuffer::new(Arc::new(disk));
    assert_eq!((buffer.syncs_at_once(), buffer.stack_depth().unwrap()), (3, 7));
    assert!(buffer.sync_all_files(100).unwrap() && !buffer.sync_all_files(99).unwrap());
    events.available_bytes.store(12_345, Relaxed);
    assert_eq!(buffer.space().unwrap().available_bytes, 12_345);
    assert!(!buffer.is_read_only());
    events.available_bytes.store(0, Relaxed);
    assert!(buffer.is_read_only());
    buffer.create_directory(DiskDirectory::Staging).unwrap();
    buffer.create_directory(DiskDirectory::Quarantine).unwrap();
    buffer.sync_directory(DiskDirectory::Quarantine).unwrap();
    assert_eq!(events.take_steps(), ["everything", "quarantine"]);
    buffer.database(&DiskPath::Metadata).unwrap().set_len(10).unwrap();
    assert_eq!(buffer.stat(&DiskPath::Metadata).unwrap().length, 10);
}

#[test]
fn names_and_notes_are_those_of_both() {
    let fixture = Fixture::new();
    let buffer = &fixture.buffer;
    let _file = fixture.create();
    let on_disk = DiskPath::Staging(ObjectId(8));
    buffer.create(&on_disk).unwrap();
    let exists = buffer.create(&PATH).unwrap_err();
    assert_eq!(exists.kind(), io::ErrorKind::AlreadyExists);
    let mut names = buffer.list(DiskDirectory::Staging).unwrap();
    names.sort_unstable();
    assert_eq!(names, [OBJECT.to_string(), ObjectId(8).to_string()]);
    assert_eq!(buffer.list(DiskDirectory::ObjectShard(0)).unwrap(), Vec::<String>::new());
    assert_eq!(buffer.note(&on_disk).unwrap(), None);
    buffer.set_note(&on_disk, b"note").unwrap();
    assert_eq!(buffer.note(&on_disk).unwrap().as_deref(), Some(&b"note"[..]));
    buffer.remove(&on_disk).unwrap();
    assert!(buffer.stat(&on_disk).is_err());
}

/// Nothing gives out the number of an object twice, but a store may have been put back from an earlier time.
#[test]
fn the_file_of_somebody_else_stays() {
    let fixture = Fixture::new();
    let file = fixture.create();
    file.write_all_at(b"ours", 0).unwrap();
    let place = fixture.directory.path().join(PATH.relative());
    std::fs::write(&place, b"theirs").unwrap();
    let exists = fixture.buffer.put_on_disk(OBJECT).unwrap_err();
    assert_eq!(exists.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read(&place).unwrap(), b"theirs");
    assert_eq!(fixture.bytes(), b"ours");
    std::fs::remove_file(&place).unwrap();
    fixture.buffer.put_on_disk(OBJECT).unwrap();
    assert_eq!(std::fs::read(&place).unwrap(), b"ours");
    fixture.buffer.put_on_disk(OBJECT).unwrap();
    fixture.buffer.put_on_disk(ObjectId(99)).unwrap();
}

#[test]
fn what_found_no_room_is_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::open(directory.path());
    disk.create_directory(DiskDirectory::Staging).unwrap();
    let events = Arc::clone(&disk.events);
    let buffer = WriteBuffer::new(Arc::new(disk));
    let made = buffer.create_in_memory(OBJECT, BYTES_OF_FILE_MAX, Access::ReadWrite);
    made.unwrap().unwrap().write_all_at(b"ours", 0).unwrap();
    *events.failing_with.lock().unwrap() = Some(libc::ENOSPC);
    let full = buffer.put_on_disk(OBJECT).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    assert!(buffer.holds(OBJECT) && !directory.path().join(PATH.relative()).exists());
    *events.failing_with.lock().unwrap() = None;
    buffer.put_on_disk(OBJECT).unwrap();
    assert_eq!(std::fs::read(directory.path().join(PATH.relative())).unwrap(), b"ours");
}
