//! Files in memory are like those of a disk, until they are on one.

mod layer;
mod room;

use super::*;
use crate::store::disk::{Seek, read_all};
use crate::store::local_disk::LocalDisk;

const OBJECT: ObjectId = ObjectId(7);
const PATH: DiskPath = DiskPath::Staging(OBJECT);
const BYTES_OF_FILE_MAX: u64 = 4096;

struct Fixture {
    directory: tempfile::TempDir,
    buffer: WriteBuffer,
}

impl Fixture {
    fn new() -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        for made in [DiskDirectory::Staging, DiskDirectory::Objects, DiskDirectory::ObjectShard(0)]
        {
            disk.create_directory(made).unwrap();
        }
        Fixture { directory, buffer: WriteBuffer::new(Arc::new(disk)) }
    }

    fn create(&self) -> Box<dyn DiskFile> {
        let made = self.buffer.create_in_memory(OBJECT, BYTES_OF_FILE_MAX, Access::ReadWrite);
        made.unwrap().expect("there is room")
    }

    fn open(&self, access: Access) -> Box<dyn DiskFile> {
        self.buffer.open(&PATH, access).unwrap()
    }

    fn is_on_disk(&self) -> bool {
        self.directory.path().join(PATH.relative()).exists()
    }

    fn bytes(&self) -> Vec<u8> {
        read_all(self.open(Access::Read).as_ref(), u64::MAX).unwrap()
    }
}

#[test]
fn open_files_in_memory_are_counted_once_each() {
    let fixture = Fixture::new();
    let open_files = || fixture.buffer.open_files();
    let file = fixture.create();
    assert_eq!(open_files(), 1);
    drop((fixture.open(Access::Read), fixture.open(Access::ReadWrite)));
    assert_eq!(open_files(), 1);
    drop(file);
    assert_eq!(open_files(), 0);
    let reader = fixture.open(Access::Read);
    assert_eq!(open_files(), 1);
    fixture.buffer.remove(&PATH).unwrap();
    assert_eq!(open_files(), 1, "it has no name");
    drop(reader);
    assert_eq!(open_files(), 0);
    let file = fixture.create();
    fixture.buffer.put_on_disk(OBJECT).unwrap();
    assert_eq!(open_files(), 0, "it has its descriptors");
    drop((fixture.open(Access::Read), file));
    assert_eq!(open_files(), 0);
}

/// Whoever opens a file and whoever removes it wait for each other in one order.
#[test]
fn files_are_opened_while_they_are_removed_written_out_and_closed() {
    let fixture = Fixture::new();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let (fixture, is_over) = (&fixture, &is_over);
    std::thread::scope(|scope| {
        for access in [Access::Read, Access::ReadWrite] {
            scope.spawn(move || {
                // Not for ever, should the other thread fail.
                for _ in 0..1_000_000 {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    drop(fixture.buffer.open(&PATH, access));
                    let _ = fixture.buffer.stat(&PATH);
                }
            });
        }
        for turn in 0..3000 {
            let file = fixture.create();
            file.write_all_at(b"bytes", 0).unwrap();
            if turn % 8 == 0 {
                fixture.buffer.put_on_disk(OBJECT).unwrap();
            }
            drop(file);
            fixture.buffer.remove(&PATH).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!((fixture.buffer.open_files(), fixture.buffer.used_bytes()), (0, 0));
}

#[test]
fn a_small_file_never_touches_the_disk() {
    let fixture = Fixture::new();
    let file = fixture.create();
    file.write_all_at(b"behind a hole", 10).unwrap();
    let reader = fixture.open(Access::Read);
    assert!(!reader.is_at_rest().unwrap() && !reader.is_unused().unwrap());
    drop(file);
    assert!(reader.is_at_rest().unwrap() && reader.is_unused().unwrap());
    assert_eq!(fixture.bytes(), [&[0; 10][..], b"behind a hole"].concat());
    assert_eq!(fixture.buffer.stat(&PATH).unwrap().length, 23);
    assert!(!fixture.is_on_disk());
    assert_eq!(reader.write_all_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EBADF));
    // Readers keep what was removed, and then the memory is free.
    fixture.buffer.remove(&PATH).unwrap();
    assert_eq!(read_all(reader.as_ref(), u64::MAX).unwrap().len(), 23);
    let missing = fixture.buffer.open(&PATH, Access::Read).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    assert_eq!(fixture.buffer.remove(&PATH).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(fixture.buffer.used_bytes(), 23);
    drop(reader);
    assert_eq!(fixture.buffer.used_bytes(), 0);
}

#[test]
fn what_grows_goes_on_on_the_disk_for_everybody() {
    let fixture = Fixture::new();
    let writer = fixture.create();
    writer.write_all_at(&[1; 4096], 0).unwrap();
    let (reader, other) = (fixture.open(Access::Read), fixture.open(Access::ReadWrite));
    assert!(writer.write_waits(4000, 97) && !writer.write_waits(4000, 96));
    writer.write_all_at(&[2; 97], 4000).unwrap();
    assert!(!writer.write_waits(4000, 97), "it is on the disk");
    assert!(fixture.is_on_disk() && fixture.buffer.used_bytes() == 0);
    other.write_all_at(&[3], 0).unwrap();
    let expected = [&[3][..], &[1; 3999], &[2; 97]].concat();
    assert_eq!(read_all(reader.as_ref(), u64::MAX).unwrap(), expected);
    assert_eq!(fixture.bytes(), expected);
    assert!(!reader.is_at_rest().unwrap());
    drop(writer);
    assert!(!reader.is_at_rest().unwrap(), "another writer is left");
    drop(other);
    assert!(reader.is_at_rest().unwrap());
    let direct = fixture.open(Access::ReadWrite);
    assert!(!reader.is_at_rest().unwrap(), "somebody has the file of the disk open");
    drop(direct);
}

#[test]
fn what_has_no_name_gets_none_on_the_disk() {
    let fixture = Fixture::new();
    let writer = fixture.create();
    writer.write_all_at(b"kept", 0).unwrap();
    fixture.buffer.remove(&PATH).unwrap();
    writer.set_length(BYTES_OF_FILE_MAX + 1).unwrap();
    assert!(!fixture.is_on_disk());
    let mut bytes = [0; 4];
    assert_eq!(writer.read_at(&mut bytes, 0).unwrap(), 4);
    assert_eq!((&bytes, writer.stat().unwrap().length), (b"kept", BYTES_OF_FILE_MAX + 1));
}

#[test]
fn a_sync_and_a_rename_put_it_on_the_disk_as_old_as_it_was() {
    let object = DiskPath::Object(OBJECT);
    for is_synced in [true, false] {
        let fixture = Fixture::new();
        let writer = fixture.create();
        writer.write_all_at(b"bytes", 0).unwrap();
        let modified = Time { seconds: 1_000_000, nanoseconds: 4_000 };
        writer.set_modified(modified).unwrap();
        if is_synced {
            fixture.open(Access::Read).sync().unwrap();
            assert!(fixture.is_on_disk() && !fixture.buffer.holds(OBJECT));
            // Whoever had it open may write on.
            writer.write_all_at(b"B", 0).unwrap();
            writer.set_modified(modified).unwrap();
        }
        fixture.buffer.rename(&PATH, &object).unwrap();
        let stat = fixture.buffer.stat(&object).unwrap();
        assert_eq!((stat.mtime, stat.length), (modified, 5));
        writer.write_all_at(b"!", 5).unwrap();
        let file = fixture.buffer.open(&object, Access::Read).unwrap();
        let expected: &[u8] = if is_synced { b"Bytes!" } else { b"bytes!" };
        assert_eq!(read_all(file.as_ref(), u64::MAX).unwrap(), expected);
    }
}

#[test]
fn without_room_a_file_is_one_of_the_disk() {
    let fixture = Fixture::new();
    let make = |number, bytes: u64| {
        let object = ObjectId(number);
        let made = fixture.buffer.create_in_memory(object, u64::MAX, Access::ReadWrite).unwrap();
        let file = made.map(|file| file.set_length(bytes).map(|()| file));
        file.transpose().unwrap()
    };
    let first = make(1, BYTES_MAX - 10).expect("there is room");
    let second = make(2, 11).expect("there is room");
    assert!(!fixture.buffer.holds(ObjectId(2)), "it did not fit");
    assert_eq!(second.stat().unwrap().length, 11);
    let third = make(3, 10).expect("there is room");
    assert!(fixture.buffer.holds(ObjectId(3)));
    assert!(make(4, 0).is_none());
    drop((first, second, third));
    for number in [1, 3] {
        fixture.buffer.remove(&DiskPath::Staging(ObjectId(number))).unwrap();
    }
    assert_eq!(fixture.buffer.used_bytes(), 0);
}

#[test]
fn ends_of_holes_and_copies_are_told_as_a_disk_does() {
    let fixture = Fixture::new();
    let file = fixture.create();
    file.write_all_at(b"0123456789", 0).unwrap();
    assert_eq!(file.seek(3, Seek::Data).unwrap(), 3);
    assert_eq!(file.seek(3, Seek::Hole).unwrap(), 10);
    assert_eq!(file.seek(10, Seek::Data).unwrap_err().raw_os_error(), Some(libc::ENXIO));
    // Into itself.
    assert_eq!(file.copy_to(6, file.as_ref(), 1, 100).unwrap(), 4);
    assert_eq!(fixture.bytes(), b"0678956789");
}

#[test]
fn what_is_read_changed_and_told_in_memory_is_what_a_disk_does() {
    let fixture = Fixture::new();
    let file = fixture.create();
    file.write_all_at(b"0123456789", 0).unwrap();
    file.write_all_at(b"ab", 2).unwrap();
    let mut bytes = [b'-'; 4];
    assert_eq!((file.read_at(&mut bytes, 1).unwrap(), &bytes), (4, b"1ab4"));
    assert_eq!((file.read_at(&mut bytes, 8).unwrap(), &bytes), (2, b"89b4"));
    assert_eq!(
        (file.read_at(&mut bytes, 10).unwrap(), file.read_at(&mut bytes, 99).unwrap()),
        (0, 0)
    );
    assert_eq!(file.seek(9, Seek::Data).unwrap(), 9);
    let before = file.stat().unwrap();
    assert_eq!((before.length, before.blocks, before.inode), (10, 1, 3 << 62 | 7));
    file.set_modified(Time::default()).unwrap();
    assert_eq!(file.stat().unwrap().mtime, Time::default());
    file.write_all_at(&[1], 512).unwrap();
    let after = file.stat().unwrap();
    assert_eq!((after.length, after.blocks), (513, 2));
    assert!(after.mtime > Time::default());
    file.set_modified(Time::default()).unwrap();
    file.set_length(3).unwrap();
    assert!(file.stat().unwrap().mtime > Time::default());
    file.set_length(5).unwrap();
    assert_eq!(fixture.bytes(), b"01a\0\0");
    assert_eq!(fixture.buffer.used_bytes(), 5);
    assert!(file.map_at_rest().is_none() && file.descriptor().is_none());
    assert!(!file.bypass_cache(), "whoever writes need not align anything");
    file.populate(0, 100).unwrap();
    let target = fixture.buffer.create(&DiskPath::Object(OBJECT)).unwrap();
    assert_eq!(file.copy_to(1, target.as_ref(), 2, 2).unwrap(), 2);
    assert_eq!(file.copy_to(9, target.as_ref(), 0, 2).unwrap(), 0);
    assert_eq!(read_all(target.as_ref(), u64::MAX).unwrap(), b"\0\x001a");
    let beyond = file.write_all_at(b"x", u64::MAX).unwrap_err();
    assert_eq!(beyond.raw_os_error(), Some(libc::EFBIG));
    assert!(!fixture.is_on_disk());
}

#[test]
fn on_the_disk_all_of_it_is_asked_of_the_disk() {
    let fixture = Fixture::new();
    let file = fixture.create();
    file.write_all_at(b"0123456789", 0).unwrap();
    let [reader, writer] = [Access::Read, Access::ReadWrite].map(|access| fixture.open(access));
    writer.allocate(crate::store::disk::Allocation { mode: 0, offset: 0, length: 20 }).unwrap();
    assert!(fixture.is_on_disk() && !fixture.buffer.holds(OBJECT));
    assert_eq!(reader.stat().unwrap().length, 20);
    assert!(reader.stat().unwrap().inode != 3 << 62 | 7);
    writer.set_length(12).unwrap();
    writer.set_modified(Time::default()).unwrap();
    assert_eq!((file.stat().unwrap().length, file.stat().unwrap().mtime), (12, Time::default()));
    let mut bytes = [b'-'; 4];
    assert_eq!((reader.read_at(&mut bytes, 8).unwrap(), &bytes), (4, b"89\0\0"));
    assert_eq!(reader.seek(3, Seek::Hole).unwrap(), 12);
    reader.populate(0, 100).unwrap();
    let target = fixture.buffer.create(&DiskPath::Object(OBJECT)).unwrap();
    assert_eq!(reader.copy_to(1, target.as_ref(), 0, 3).unwrap(), 3);
    assert_eq!(read_all(target.as_ref(), u64::MAX).unwrap(), b"123");
    assert_eq!(reader.map_at_rest().unwrap()[..3], *b"012");
    for refused in [reader.set_length(1), reader.write_all_at(b"x", 0)] {
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
    let allocation = crate::store::disk::Allocation { mode: 0, offset: 0, length: 30 };
    assert_eq!(reader.allocate(allocation).unwrap_err().raw_os_error(), Some(libc::EBADF));
    assert_eq!(reader.stat().unwrap().length, 12);
}

#[test]
fn who_has_it_open_is_counted_wherever_it_lies() {
    for is_on_disk in [false, true] {
        let fixture = Fixture::new();
        let writer = fixture.create();
        writer.write_all_at(b"bytes", 0).unwrap();
        let reader = fixture.open(Access::Read);
        let second = fixture.open(Access::ReadWrite);
        let third = fixture.open(Access::Read);
        if is_on_disk {
            fixture.buffer.put_on_disk(OBJECT).unwrap();
        }
        let is_so = |at_rest, unused| {
            let found = (reader.is_at_rest().unwrap(), reader.is_unused().unwrap());
            assert_eq!(found, (at_rest, unused), "{is_on_disk}");
        };
        is_so(false, false);
        drop(writer);
        is_so(false, false);
        drop(second);
        is_so(true, false);
        drop(third);
        is_so(true, true);
        assert_eq!(fixture.is_on_disk(), is_on_disk);
        if is_on_disk {
            let outsider = fixture.buffer.below.open(&PATH, Access::Read).unwrap();
            is_so(true, false);
            drop(outsider);
            is_so(true, true);
        }
    }
}
