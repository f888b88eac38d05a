//! Files of a real filesystem.

use super::*;
use crate::store::disk::is_damage;
use crate::store::record::ObjectId;

#[test]
fn a_planted_symbolic_link_leads_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    disk.create_directory(DiskDirectory::Staging).unwrap();
    let path = DiskPath::Staging(ObjectId(7));
    std::os::unix::fs::symlink("/etc/passwd", directory.path().join(path.relative())).unwrap();
    for access in [Access::Read, Access::ReadWrite] {
        assert!(is_damage(&disk.open(&path, access).unwrap_err()), "it is no regular file");
    }
    // Nor does a directory that is one.
    let path = DiskPath::Quarantine("7".to_owned());
    std::fs::create_dir(directory.path().join("aside")).unwrap();
    std::fs::write(directory.path().join("aside/7"), b"").unwrap();
    std::os::unix::fs::symlink("aside", directory.path().join("quarantine")).unwrap();
    assert_eq!(disk.open(&path, Access::Read).unwrap_err().raw_os_error(), Some(libc::ELOOP));
}

#[test]
fn all_files_are_synced_at_once_where_the_filesystem_does_it_itself() {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let in_memory = LocalDisk::open(memory.path()).unwrap();
    assert!(!in_memory.sync_all_files(SYNCED_TOGETHER_MIN).unwrap(), "tmpfs keeps nothing");
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    assert!(!disk.sync_all_files(SYNCED_TOGETHER_MIN - 1).unwrap(), "few files");
    // Others may have more to write than what is waited for.
    if disk.syncs_as_a_whole().unwrap() && waiting_bytes() < Some(SYNCED_TOGETHER_BYTES_MAX / 4) {
        assert!(disk.sync_all_files(SYNCED_TOGETHER_MIN).unwrap());
    }
}

#[test]
fn a_file_is_read_written_and_told_as_the_filesystem_does() {
    let directory = tempfile::tempdir().unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    disk.create_directory(DiskDirectory::Staging).unwrap();
    disk.create_directory(DiskDirectory::Staging).unwrap();
    let [path, other] = [7, 8].map(|number| DiskPath::Staging(ObjectId(number)));
    let file = disk.create(&path).unwrap();
    assert_eq!(disk.create(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    file.write_all_at(b"0123456789", 2).unwrap();
    let mut bytes = [b'-'; 4];
    assert_eq!((file.read_at(&mut bytes, 1).unwrap(), &bytes), (4, b"\x00012"));
    assert_eq!((file.read_at(&mut bytes, 10).unwrap(), &bytes), (2, b"8912"));
    file.set_length(6).unwrap();
    let mtime = Time { seconds: 5, nanoseconds: 6000 };
    file.set_modified(mtime).unwrap();
    file.sync().unwrap();
    let stat = file.stat().unwrap();
    let metadata = std::fs::metadata(directory.path().join(path.relative())).unwrap();
    let expected = FileStat { length: 6, blocks: metadata.blocks(), mtime, inode: metadata.ino() };
    assert_eq!((stat, disk.stat(&path).unwrap()), (expected, expected));
    assert_eq!(metadata.mode() & 0o777, 0o600);
    assert_eq!((file.seek(0, Seek::Data).unwrap(), file.seek(0, Seek::Hole).unwrap()), (0, 6));
    file.allocate(Allocation { mode: 0, offset: 0, length: 9000 }).unwrap();
    assert_eq!(file.stat().unwrap().length, 9000);
    file.populate(0, u64::MAX).unwrap();
    file.populate(10_000, 10).unwrap();
    let target = disk.create(&other).unwrap();
    assert_eq!(file.copy_to(2, target.as_ref(), 1, 4).unwrap(), 4);
    assert_eq!(crate::store::disk::read_all(target.as_ref(), 9).unwrap(), b"\x000123");
    disk.rename(&other, &path).unwrap();
    assert_eq!(disk.list(DiskDirectory::Staging).unwrap(), [ObjectId(7).to_string()]);
    disk.remove(&path).unwrap();
    assert!(disk.stat(&path).is_err() && disk.remove(&path).is_err());
    assert_eq!(disk.list(DiskDirectory::Staging).unwrap(), Vec::<String>::new());
    assert!(file.descriptor().is_some());
}

#[test]
fn what_is_ours_may_be_missing_and_what_is_not_may_not() {
    let directory = tempfile::tempdir().unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    assert_eq!(disk.list(DiskDirectory::Objects).unwrap(), Vec::<String>::new());
    let missing = disk.list(DiskDirectory::Packs).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    assert!(disk.sync_directory(DiskDirectory::Objects).is_err());
    // What is in its place is told.
    std::fs::write(directory.path().join("objects"), b"").unwrap();
    assert!(disk.list(DiskDirectory::Objects).is_err());
    std::fs::remove_file(directory.path().join("objects")).unwrap();
    std::os::unix::fs::symlink("x", directory.path().join("staging")).unwrap();
    disk.create_directory(DiskDirectory::Staging).unwrap();
    assert!(disk.create_directory(DiskDirectory::ObjectShard(0)).is_err(), "nothing is above it");
    let stat = nix::sys::statvfs::statvfs(directory.path()).unwrap();
    let space = disk.space().unwrap();
    let block = stat.fragment_size();
    assert_eq!(space.total_bytes, stat.blocks() * block);
    assert_eq!(space.inodes_total, stat.files());
    assert!(space.available_bytes <= space.free_bytes && space.free_bytes <= space.total_bytes);
    assert!(space.available_bytes > block && space.inodes_free <= space.inodes_total);
    assert!(!disk.is_on_read_only_media().unwrap() && !disk.has_given_up());
    assert!(!disk.is_read_only());
    assert_eq!(disk.syncs_at_once(), SYNCS_AT_ONCE);
}

#[test]
fn a_note_lies_beside_the_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    let path = DiskPath::Quarantine("x".to_owned());
    disk.create_directory(DiskDirectory::Quarantine).unwrap();
    assert!(disk.note(&path).is_err() && disk.set_note(&path, b"x").is_err());
    disk.create(&path).unwrap();
    assert_eq!(disk.note(&path).unwrap(), None);
    for note in [&b"first"[..], b"second", b""] {
        disk.set_note(&path, note).unwrap();
        assert_eq!(disk.note(&path).unwrap().as_deref(), Some(note));
    }
    assert_eq!(disk.stat(&path).unwrap().length, 0);
}

#[test]
fn who_has_a_file_open_is_seen() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    let path = DiskPath::Quarantine("x".to_owned());
    disk.create_directory(DiskDirectory::Quarantine).unwrap();
    let writer = disk.create(&path).unwrap();
    writer.write_all_at(b"bytes", 0).unwrap();
    let file = disk.open(&path, Access::Read).unwrap();
    assert!(!file.is_at_rest().unwrap() && !file.is_unused().unwrap());
    drop(writer);
    let reader = disk.open(&path, Access::Read).unwrap();
    assert!(file.is_at_rest().unwrap() && !file.is_unused().unwrap());
    assert!(reader.write_all_at(b"x", 0).is_err(), "it is open for reading");
    drop(reader);
    assert!(file.is_unused().unwrap());
    assert_eq!(file.map_at_rest().unwrap()[..], *b"bytes");
    disk.open(&path, Access::ReadWrite).unwrap().write_all_at(b"B", 0).unwrap();
    assert_eq!(crate::store::disk::read_all(file.as_ref(), 5).unwrap(), b"Bytes");
    let anonymous = anonymous_file(c"x").unwrap();
    anonymous.write_all_at(b"bytes", 0).unwrap();
    assert_eq!(anonymous.stat().unwrap().length, 5);
}

#[test]
fn what_is_opened_is_a_regular_file() {
    let directory = tempfile::tempdir().unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    let object = DiskPath::Object(ObjectId(0x700));
    for path in [DiskPath::Pack(7), DiskPath::Staging(ObjectId(7)), object, DiskPath::Format] {
        let place = directory.path().join(path.relative());
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        for access in [Access::Read, Access::ReadWrite] {
            nix::unistd::mkfifo(&place, Mode::S_IRWXU).unwrap();
            assert!(disk.open(&path, access).is_err());
            std::fs::remove_file(&place).unwrap();
            std::fs::create_dir(&place).unwrap();
            assert!(disk.open(&path, access).is_err());
            std::fs::remove_dir(&place).unwrap();
        }
        disk.create(&path).unwrap();
        disk.open(&path, Access::Read).unwrap();
    }
}

#[test]
fn who_looks_whether_a_file_is_in_use_keeps_nobody_from_opening_it() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let disk = LocalDisk::open(directory.path()).unwrap();
    disk.create_directory(DiskDirectory::Staging).unwrap();
    let path = DiskPath::Staging(ObjectId(7));
    drop(disk.create(&path).unwrap());
    let looked_at = disk.open(&path, Access::Read).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                looked_at.is_unused().unwrap();
            }
        });
        let outcome = (0..20_000).try_for_each(|_| disk.open(&path, Access::ReadWrite).map(drop));
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        outcome.unwrap();
    });
}

#[test]
fn numbers_of_the_kernel_are_those_of_here() {
    assert_eq!(time(5, 6), Time { seconds: 5, nanoseconds: 6 });
    assert_eq!(time(-5, -6), Time { seconds: -5, nanoseconds: 0 });
    assert_eq!(signed(7).unwrap(), 7);
    let beyond = signed(u64::MAX).unwrap_err();
    assert_eq!(beyond.raw_os_error(), Some(libc::EFBIG));
}
