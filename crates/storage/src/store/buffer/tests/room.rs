//! How much there is room for.

use super::*;
use crate::store::faulty_disk::FaultyDisk;
use std::sync::atomic::Ordering::Relaxed;

fn make(buffer: &WriteBuffer, number: u64) -> Option<Box<dyn DiskFile>> {
    buffer.create_in_memory(ObjectId(number), u64::MAX, Access::ReadWrite).unwrap()
}

#[test]
fn a_disk_without_room_for_all_of_them_gets_them_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::open(directory.path());
    let events = Arc::clone(&disk.events);
    let buffer = WriteBuffer::new(Arc::new(disk));
    events.available_bytes.store(2 * BYTES_MAX - 2, Relaxed);
    assert!(make(&buffer, 1).is_none() && !buffer.holds(ObjectId(1)));
    events.available_bytes.store(2 * BYTES_MAX, Relaxed);
    assert!(make(&buffer, 1).is_some() && buffer.holds(ObjectId(1)));
    assert!(make(&buffer, 1).is_none(), "it is there");
}

#[test]
fn there_are_so_many_files_at_most() {
    let fixture = Fixture::new();
    let buffer = &fixture.buffer;
    for number in 0..FILES_MAX as u64 {
        assert!(make(buffer, number).is_some());
    }
    assert!(make(buffer, u64::MAX).is_none());
    buffer.remove(&DiskPath::Staging(ObjectId(3))).unwrap();
    assert!(make(buffer, u64::MAX).is_some());
}

#[test]
fn a_write_waits_where_it_goes_to_the_disk() {
    let fixture = Fixture::new();
    let other = make(&fixture.buffer, 1).unwrap();
    other.set_length(BYTES_MAX - 10).unwrap();
    let file = fixture.create();
    assert!(!file.write_waits(0, 10) && file.write_waits(0, 11) && file.write_waits(5, 6));
    file.write_all_at(b"01234", 0).unwrap();
    // What is overwritten takes no more room.
    assert!(!file.write_waits(0, 10) && !file.write_waits(2, 8) && file.write_waits(0, 11));
    assert!(file.write_waits(u64::MAX, 1));
    file.set_length(10).unwrap();
    assert_eq!(fixture.buffer.used_bytes(), BYTES_MAX);
    assert!(make(&fixture.buffer, 2).is_none());
    file.set_length(9).unwrap();
    assert!(make(&fixture.buffer, 2).is_some());
    assert!(fixture.buffer.holds(OBJECT));
}
