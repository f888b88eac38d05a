//! What holds for every disk.

use std::sync::Arc;

use super::*;
use crate::store::local_disk::LocalDisk;

#[test]
fn every_file_of_a_store_has_one_place() {
    let object = ObjectId(0x0123_4567_89ab_cdef);
    let id = "0123456789abcdef";
    for (path, expected) in [
        (DiskPath::Format, "FORMAT".to_owned()),
        (DiskPath::FormatStaging, "FORMAT.tmp".to_owned()),
        (DiskPath::Metadata, "meta.redb".to_owned()),
        (DiskPath::MetadataStaging, "meta.redb.tmp".to_owned()),
        (DiskPath::Reserve, "meta.reserve".to_owned()),
        (DiskPath::Staging(object), format!("staging/{id}")),
        (DiskPath::Scratch(12), "staging/scratch-12".to_owned()),
        (DiskPath::Incoming(object), format!("staging/{id}.in")),
        (DiskPath::Encoding(object), format!("staging/{id}.z")),
        (DiskPath::Object(object), format!("objects/cd/{id}")),
        (DiskPath::Encoded(object), format!("objects/cd/{id}.z")),
        (DiskPath::Ram(object), id.to_owned()),
        (DiskPath::Quarantine("x".to_owned()), "quarantine/x".to_owned()),
    ] {
        let relative = path.relative();
        assert_eq!(relative.to_str(), Some(expected.as_str()));
        let name = expected.rsplit('/').next().unwrap();
        match expected.split('/').next() {
            Some("staging") => assert_eq!(DiskPath::staged(name), Some(path)),
            Some("objects") => assert_eq!(DiskPath::stored(name), Some(path)),
            _ => {}
        }
    }
    for name in ["mine", "scratch-x", "x.in", "x.z", "123.z", ""] {
        assert_eq!((DiskPath::staged(name), DiskPath::stored(name)), (None, None), "{name}");
    }
    for (directory, expected, is_ours) in [
        (DiskDirectory::Store, ".", false),
        (DiskDirectory::Objects, "objects", true),
        (DiskDirectory::ObjectShard(7), "objects/07", true),
        (DiskDirectory::Staging, "staging", true),
        (DiskDirectory::Packs, "packs", false),
        (DiskDirectory::Quarantine, "quarantine", true),
    ] {
        assert_eq!(directory.relative().to_str(), Some(expected));
        assert_eq!(directory.is_ours(), is_ours, "{expected}");
    }
    assert_eq!([shard(ObjectId(0xff)), shard(ObjectId(0x1_0100))], [0, 1]);
}

#[test]
fn memory_takes_half_of_what_is_free() {
    let space = Space { available_bytes: 100, ..Space::default() };
    assert!(space.can_take(50) && !space.can_take(51));
}

#[test]
fn the_same_content_is_that_of_one_file_since_it_was_changed() {
    let mtime = Time { seconds: 5, nanoseconds: 6 };
    let stat = FileStat { length: 1, blocks: 2, mtime, inode: 3 };
    assert!(stat.is_same_content(&FileStat { blocks: 9, ..stat }));
    for other in [
        FileStat { length: 9, ..stat },
        FileStat { mtime: Time::default(), ..stat },
        FileStat { inode: 9, ..stat },
    ] {
        assert!(!stat.is_same_content(&other));
    }
}

/// A disk need not have everything.
#[test]
fn what_a_disk_does_not_do_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let disk = crate::store::faulty_disk::FaultyDisk::open(directory.path());
    let file = disk.create(&DiskPath::Format).unwrap();
    assert_eq!(disk.note(&DiskPath::Format).unwrap(), None);
    let unsupported = disk.set_note(&DiskPath::Format, b"note").unwrap_err();
    assert_eq!(unsupported.kind(), io::ErrorKind::Unsupported);
    assert!(!file.write_waits(0, u64::MAX) && !file.bypass_cache());
    file.populate(0, 1).unwrap();
}

#[test]
fn a_file_without_holes_ends_in_one() {
    let seek = |offset, seek| seek_without_holes(offset, seek, 10).ok();
    assert_eq!((seek(0, Seek::Data), seek(9, Seek::Data)), (Some(0), Some(9)));
    assert_eq!((seek(0, Seek::Hole), seek(9, Seek::Hole)), (Some(10), Some(10)));
    for offset in [-1, 10, 11] {
        assert_eq!((seek(offset, Seek::Data), seek(offset, Seek::Hole)), (None, None));
    }
}

#[test]
fn a_file_is_read_and_copied_as_a_whole_or_from_its_beginning() {
    let directory = tempfile::tempdir().unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    disk.create_directory(DiskDirectory::Staging).unwrap();
    let make = |number| disk.create(&DiskPath::Staging(ObjectId(number))).unwrap();
    let bytes: Vec<u8> = (0..=250).cycle().take(2 * COPY_BYTES + 7).collect();
    let length = bytes.len() as u64;
    let source = make(1);
    source.write_all_at(&bytes, 0).unwrap();
    assert!(read_all(source.as_ref(), length).unwrap() == bytes);
    let too_long = read_all(source.as_ref(), length - 1).unwrap_err();
    assert_eq!(too_long.kind(), io::ErrorKind::InvalidData);
    let target = make(2);
    assert_eq!(copy_all(source.as_ref(), target.as_ref()).unwrap(), length);
    assert!(read_all(target.as_ref(), length).unwrap() == bytes);
    let beginning = make(3);
    assert_eq!(copy_beginning(source.as_ref(), beginning.as_ref(), 10).unwrap(), 10);
    assert_eq!(read_all(beginning.as_ref(), length).unwrap(), bytes[..10]);
    // Into memory the kernel does not copy.
    let buffer = crate::store::buffer::WriteBuffer::new(Arc::new(
        LocalDisk::open(directory.path()).unwrap(),
    ));
    let in_memory =
        buffer.create_in_memory(ObjectId(9), length, Access::ReadWrite).unwrap().unwrap();
    assert_eq!(copy_all(source.as_ref(), in_memory.as_ref()).unwrap(), length);
    assert!(buffer.holds(ObjectId(9)) && read_all(in_memory.as_ref(), length).unwrap() == bytes);
    let by_hand = make(4);
    assert_eq!(copy_by_hand(source.as_ref(), by_hand.as_ref(), length).unwrap(), length);
    assert!(read_all(by_hand.as_ref(), length).unwrap() == bytes);
    let short = copy_by_hand(source.as_ref(), by_hand.as_ref(), length + 1).unwrap_err();
    assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn what_a_process_lacks_tells_nothing_of_a_file() {
    let is_told = |code| is_of_file(&io::Error::from_raw_os_error(code));
    assert!(is_told(libc::EIO) && is_told(libc::ENOENT) && is_told(libc::EBADMSG));
    for code in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EINTR] {
        assert!(!is_told(code), "{code}");
    }
    assert!(is_of_file(&io::ErrorKind::UnexpectedEof.into()));
}

#[test]
fn a_disk_is_nearly_full_below_an_eighth_of_a_small_one_and_64_mib_of_others() {
    let is_nearly_full = |total_bytes, available_bytes| {
        Space { total_bytes, available_bytes, ..Space::default() }.is_nearly_full()
    };
    for (total, bound) in [(80 << 20, 10 << 20), (1 << 40, NEARLY_FULL_BYTES)] {
        assert!(is_nearly_full(total, bound - 1));
        assert!(!is_nearly_full(total, bound) && !is_nearly_full(total, bound + 1));
    }
}
