//! Packs that cannot be opened when somebody reads in them: removed below the mount, or for want of descriptors.

use super::faults::faulty;
use super::*;
use crate::store::faulty_disk::Call;

const NO_DESCRIPTOR: i32 = libc::EMFILE;

fn path(object: u64) -> DiskPath {
    DiskPath::Object(ObjectId(object))
}

fn code<T>(outcome: io::Result<T>) -> Option<i32> {
    outcome.map(drop).unwrap_err().raw_os_error()
}

/// Moves a pack, or the directory of it, while nobody has it open.
fn rename(pack: &Pack, from: &Path, to: &Path) {
    pack.close_all();
    nix::fcntl::renameat(nix::fcntl::AT_FDCWD, from, nix::fcntl::AT_FDCWD, to).unwrap();
}

#[test]
fn what_was_in_a_removed_pack_is_missing_as_it_is_after_the_next_mount() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 1..=3 {
        mount.pack(object, &[7; 100]);
    }
    mount.packs.end().unwrap();
    mount.pack(4, &[8; 100]);
    mount.disk.set_note(&path(4), b"note").unwrap();
    let pack = mount.packs.index().pack(1).unwrap();
    let held = mount.disk.open(&path(1), Access::Read).unwrap();
    std::fs::remove_file(directory.path().join("packs/00000001")).unwrap();
    let mut buffer = [0; 100];
    assert_eq!(held.read_at(&mut buffer, 0).unwrap(), 100, "somebody has it open");
    pack.close_all();
    assert_eq!(code(held.read_at(&mut buffer, 0)), Some(libc::EIO), "and its name is there");
    for object in 1..=3 {
        let opened = mount.disk.open(&path(object), Access::Read).unwrap_err();
        let known = mount.disk.stat(&path(object)).unwrap_err();
        assert_eq!((opened.kind(), known.kind()), [io::ErrorKind::NotFound; 2].into());
        assert!(!mount.packs.holds(ObjectId(object)));
    }
    assert_eq!((mount.objects(), mount.read(4).unwrap()), (vec![4], vec![8; 100]));
    assert_eq!(mount.packs.packed().packs, 1);
    mount.pack(1, b"anew");
    assert_eq!(mount.read(1).unwrap(), b"anew");
    mount.packs.end().unwrap();
    let mount = Mount::new(directory.path());
    assert_eq!((mount.objects(), mount.read(1).unwrap()), (vec![1, 4], b"anew".to_vec()));
}

#[test]
fn another_file_in_the_place_of_a_pack_is_not_read() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, &[7; 100]);
    mount.packs.end().unwrap();
    mount.pack(2, &[8; 100]);
    mount.packs.end().unwrap();
    let held = mount.disk.open(&path(1), Access::Read).unwrap();
    let name = |number: u32| directory.path().join(format!("packs/{number:08x}"));
    let own = std::fs::read(name(1)).unwrap();
    let replace = |bytes: &[u8]| {
        mount.packs.index().pack(1).unwrap().close_all();
        std::fs::remove_file(name(1)).unwrap();
        std::fs::write(name(1), bytes).unwrap();
    };
    replace(&std::fs::read(name(2)).unwrap());
    for _ in 0..2 {
        assert_eq!(code(held.read_at(&mut [0; 100], 0)), Some(libc::EIO));
        assert_eq!(code(mount.disk.open(&path(1), Access::Read)), Some(libc::EIO));
        assert_eq!(code(mount.packs.unpack(ObjectId(1))), Some(libc::EIO));
    }
    // From a backup.
    replace(&own);
    let mut found = [0; 100];
    assert_eq!(held.read_at(&mut found, 0).unwrap(), 100);
    assert_eq!((found, mount.read(1).unwrap()), ([7; 100], vec![7; 100]));
}

/// It has the number of the pack, is as long and as complete, and may have the same objects.
#[test]
fn a_pack_that_is_cut_while_it_is_open_is_told_to_who_opens_a_file_in_it() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in [1, 2] {
        mount.pack(object, &[7; 100]);
    }
    mount.packs.end().unwrap();
    let held = mount.disk.open(&path(1), Access::Read).unwrap();
    let end = mount.packs.index().get(ObjectId(1)).unwrap().end();
    let pack = std::fs::File::options().write(true).open(directory.path().join("packs/00000001"));
    let pack = pack.unwrap();
    pack.set_len(end).unwrap();
    assert_eq!(mount.read(1).unwrap(), [7; 100]);
    let cut = |object| mount.disk.open(&path(object), Access::Read).unwrap_err().kind();
    assert_eq!(cut(2), io::ErrorKind::UnexpectedEof);
    pack.set_len(end - 1).unwrap();
    assert_eq!(cut(1), io::ErrorKind::UnexpectedEof);
    assert!(held.read_at(&mut [0; 100], 0).is_err());
}

#[test]
fn a_pack_of_another_store_is_neither_copied_nor_removed() {
    for (removed, first) in [(3, 11), (4, 11), (3, 1)] {
        let [directory, other] = [store(), store()];
        for (place, first, byte) in [(&directory, 1, 7), (&other, first, 8)] {
            let mount = Mount::new(place.path());
            for object in first..first + 4 {
                mount.pack(object, &vec![byte; 40_000]);
            }
            mount.packs.end().unwrap();
        }
        let [name, theirs] = [&directory, &other].map(|place| place.path().join("packs/00000001"));
        let [own, theirs] = [&name, &theirs].map(|name| std::fs::read(name).unwrap());
        let (mount, events) = faulty(directory.path());
        for object in 1..=removed {
            mount.disk.remove(&path(object)).unwrap();
        }
        let replace = |bytes: &[u8]| {
            mount.packs.index().pack(1).unwrap().close_all();
            std::fs::write(&name, bytes).unwrap();
        };
        replace(&theirs);
        let told = mount.packs.compact_all().unwrap_err().to_string();
        assert_eq!(told, "packs/00000001 cannot be read: it is not the one that was there");
        events.available_bytes.store(0, Ordering::Relaxed);
        mount.packs.make_holes_if_full().unwrap();
        events.available_bytes.store(u64::MAX, Ordering::Relaxed);
        assert!(std::fs::read(&name).unwrap() == theirs, "nothing was cut out of it");
        replace(&own);
        mount.packs.compact_all().unwrap();
        assert!(!name.exists());
        let left = (removed < 4).then(|| vec![7; 40_000]);
        assert_eq!(mount.read(4), left);
    }
}

#[test]
fn what_is_adopted_in_a_pack_that_is_lost_by_then_is_missing() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, b"adopted");
    let appended = mount.append(2, b"not yet");
    mount.packs.sync().unwrap();
    mount.packs.writer().turn().unwrap();
    mount.packs.index().pack(1).unwrap().close_all();
    std::fs::remove_file(directory.path().join("packs/00000001")).unwrap();
    assert_eq!(mount.read(1), None);
    mount.packs.adopt(&appended);
    mount.packs.note_adopted(&appended);
    assert_eq!((mount.read(2), mount.packs.holds(ObjectId(2))), (None, false));
    assert_eq!(mount.packs.packed().objects, 0);
}

#[test]
fn the_index_of_a_pack_vouches_for_a_record_whose_header_is_damaged() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 1..=2 {
        mount.pack(object, &[7; 100]);
    }
    mount.packs.end().unwrap();
    mount.packs.index().pack(1).unwrap().close_all();
    let name = directory.path().join("packs/00000001");
    let file = std::fs::File::options().write(true).open(name).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"damage", 30).unwrap();
    assert_eq!(mount.read(1).unwrap(), [7; 100]);
    assert!(mount.packs.unpack(ObjectId(1)).unwrap());
    assert_eq!(mount.packs.packed().objects, 1);
    mount.packs.compact_all().unwrap();
    assert_eq!(mount.read(2).unwrap(), [7; 100]);
}

/// What came in the place of its objects meanwhile counts.
#[test]
fn a_lost_pack_that_comes_back_brings_nothing_old_back() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 1..=4 {
        mount.pack(object, b"old");
    }
    mount.packs.end().unwrap();
    mount.write(1, b"being changed");
    let pack = mount.packs.index().pack(1).unwrap();
    let places = ["packs/00000001", "away"].map(|name| directory.path().join(name));
    let rename = |from: &Path, to: &Path| rename(&pack, from, to);
    rename(&places[0], &places[1]);
    assert_eq!(mount.read(2), None);
    // Published, packed anew, fetched from elsewhere, and removed.
    mount.disk.rename(&DiskPath::Staging(ObjectId(1)), &path(1)).unwrap();
    mount.pack(2, b"new");
    let fetched = mount.disk.create(&DiskPath::Staging(ObjectId(3))).unwrap();
    fetched.write_all_at(b"fetched", 0).unwrap();
    mount.disk.rename(&DiskPath::Staging(ObjectId(3)), &path(3)).unwrap();
    assert!(mount.disk.remove(&path(4)).is_err(), "it has no file");
    mount.packs.compact_all().unwrap();
    mount.packs.end().unwrap();
    rename(&places[1], &places[0]);
    let mount = Mount::new(directory.path());
    let read = |object| mount.read(object);
    assert_eq!(read(1).unwrap(), b"being changed");
    assert_eq!(
        (read(2).unwrap(), read(3).unwrap(), read(4)),
        (b"new".to_vec(), b"fetched".to_vec(), None)
    );
}

#[test]
fn packs_that_are_away_for_a_while_come_back() {
    let directory = store();
    let mount = Mount::new(directory.path());
    mount.pack(1, &[7; 100]);
    mount.packs.end().unwrap();
    let pack = mount.packs.index().pack(1).unwrap();
    let places = ["packs", "elsewhere"].map(|name| directory.path().join(name));
    let rename = |from: &Path, to: &Path| rename(&pack, from, to);
    mount.pack(2, &[8; 100]);
    mount.disk.remove(&path(2)).unwrap();
    mount.packs.end().unwrap();
    rename(&places[0], &places[1]);
    let failed = mount.disk.open(&path(1), Access::Read).unwrap_err();
    assert!(!is_of_file(&failed) && failed.to_string().starts_with("packs/ cannot be listed: "));
    assert!(mount.packs.compact().is_err());
    rename(&places[1], &places[0]);
    assert_eq!(mount.read(1).unwrap(), [7; 100]);
    assert_eq!(mount.packs.packed().packs, 2);
    assert!(mount.packs.compact().unwrap());
}

/// They are open, and so everything in them could be read.
#[test]
fn packs_that_lost_their_names_while_they_were_open_are_found() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 1..=3 {
        mount.pack(object, &[u8::try_from(object).unwrap(); 100]);
        mount.packs.end().unwrap();
    }
    let mount = Mount::new(directory.path());
    let names = [1, 2, 3].map(|number| directory.path().join(format!("packs/{number:08x}")));
    mount.packs.look_for_lost().unwrap();
    assert_eq!([1, 2, 3].map(|object| mount.read(object).unwrap()[0]), [1, 2, 3]);
    std::fs::remove_file(&names[0]).unwrap();
    let away = directory.path().join("away");
    for (from, to) in [(&names[1], &away), (&names[2], &names[1]), (&away, &names[2])] {
        nix::fcntl::renameat(nix::fcntl::AT_FDCWD, from, nix::fcntl::AT_FDCWD, to).unwrap();
    }
    assert_eq!([1, 2, 3].map(|object| mount.read(object).unwrap()[0]), [1, 2, 3]);
    mount.packs.look_for_lost().unwrap();
    assert_eq!(
        mount.disk.open(&path(1), Access::Read).unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    for object in [2, 3] {
        assert_eq!(code(mount.disk.open(&path(object), Access::Read)), Some(libc::EIO));
    }
}

/// What is copied out of a pack is gone from its name, and not from another's that lies there.
#[test]
fn packs_that_changed_places_while_they_were_open_are_not_rewritten() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 0..4 {
        mount.pack(object, &[7; 1000]);
        if object % 2 == 1 {
            mount.packs.end().unwrap();
        }
    }
    let mount = Mount::new(directory.path());
    mount.disk.remove(&path(0)).unwrap();
    let names = [1, 2].map(|number| directory.path().join(format!("packs/{number:08x}")));
    let exchange = || {
        nix::fcntl::renameat2(
            nix::fcntl::AT_FDCWD,
            &names[0],
            nix::fcntl::AT_FDCWD,
            &names[1],
            nix::fcntl::RenameFlags::RENAME_EXCHANGE,
        )
        .unwrap();
    };
    exchange();
    assert!(mount.packs.compact_all().is_err());
    exchange();
    assert_eq!([1, 2, 3].map(|object| mount.read(object).unwrap().len()), [1000; 3]);
    mount.packs.compact_all().unwrap();
    assert_eq!([1, 2, 3].map(|object| mount.read(object).unwrap().len()), [1000; 3]);
}

#[test]
fn a_pack_that_was_cut_or_changed_gives_no_other_bytes() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 1..=3 {
        mount.pack(object, &[u8::try_from(object).unwrap(); 1000]);
    }
    let held = mount.disk.open(&path(3), Access::Read).unwrap();
    let name = directory.path().join("packs/00000001");
    let file = std::fs::File::options().write(true).open(name).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"damage", 500).unwrap();
    file.set_len(2 * 1088 + 100).unwrap();
    let cut = held.read_at(&mut [0; 1000], 0).unwrap_err();
    assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
    // What is changed must not become what somebody has written.
    assert_eq!(code(mount.packs.unpack(ObjectId(1))), Some(libc::EIO));
    assert!(mount.packs.unpack(ObjectId(2)).unwrap());
    assert!(!directory.path().join("staging/0000000000000001").exists());
}

#[test]
fn a_pack_that_cannot_be_rewritten_keeps_nobody_from_the_others() {
    let directory = store();
    let mount = Mount::new(directory.path());
    for object in 0..6 {
        mount.pack(object, &[7; 1000]);
        if object % 2 == 1 {
            mount.packs.end().unwrap();
        }
    }
    for object in [0, 2, 4] {
        mount.disk.remove(&path(object)).unwrap();
    }
    mount.packs.write_dead().unwrap();
    let name = |number: u32| directory.path().join(format!("packs/{number:08x}"));
    let file = std::fs::File::options().write(true).open(name(1)).unwrap();
    file.set_len(500).unwrap();
    std::fs::remove_file(name(2)).unwrap();
    mount.packs.index().pack(2).unwrap().close_all();
    let told = mount.packs.compact_all().unwrap_err().to_string();
    assert!(told.starts_with("packs/00000001 cannot be read: "), "{told}");
    assert!(name(1).exists() && !name(3).exists());
    let mut times = 0;
    while mount.packs.compact().unwrap() {
        times += 1;
        assert!(times <= 2, "each is tried once");
    }
    assert_eq!((mount.read(3), mount.read(5).unwrap()), (None, vec![7; 1000]));
}

#[test]
fn a_lack_of_descriptors_hides_nothing() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    mount.pack(1, &[7; 100]);
    mount.disk.set_note(&path(1), b"note").unwrap();
    mount.packs.end().unwrap();
    let pack = mount.packs.index().pack(1).unwrap();
    let held = mount.disk.open(&path(1), Access::Read).unwrap();
    let fail = |failing: Option<&DiskPath>| {
        pack.close_all();
        let failing = failing.map(|path| (Call::Open, path.clone(), NO_DESCRIPTOR));
        *events.failing_call.lock().unwrap() = failing;
    };
    fail(Some(&DiskPath::Pack(1)));
    let mut buffer = [0; 100];
    assert_eq!(code(held.read_at(&mut buffer, 0)), Some(NO_DESCRIPTOR));
    assert_eq!(code(mount.disk.open(&path(1), Access::Read)), Some(NO_DESCRIPTOR));
    assert_eq!(code(mount.disk.note(&path(1))), Some(NO_DESCRIPTOR));
    assert_eq!(code(mount.packs.unpack(ObjectId(1))), Some(NO_DESCRIPTOR));
    let refused = Packs::open(Arc::clone(&mount.packs.disk)).unwrap_err().to_string();
    assert!(refused.starts_with("packs/00000001: Too many open files"), "{refused}");
    assert!(mount.packs.holds(ObjectId(1)));
    fail(None);
    assert_eq!(mount.read(1).unwrap(), [7; 100]);
    // What somebody changes meanwhile is not what is in the pack.
    mount.write(1, b"changed");
    fail(Some(&DiskPath::Staging(ObjectId(1))));
    assert_eq!(code(held.read_at(&mut buffer, 0)), Some(NO_DESCRIPTOR));
    assert_eq!(code(held.stat()), Some(NO_DESCRIPTOR));
    fail(None);
    assert_eq!(held.read_at(&mut buffer, 0).unwrap(), 7);
}

#[test]
fn who_syncs_a_packed_object_takes_no_error_from_whoever_added_to_its_pack() {
    let directory = store();
    let (mount, events) = faulty(directory.path());
    mount.pack(1, &[7; 100]);
    let held = mount.disk.open(&path(1), Access::Read).unwrap();
    events.take_steps();
    mount.append(2, &[8; 100]);
    events.fail_to_sync(Some("packs/00000001"));
    held.sync().unwrap();
    assert!(mount.packs.sync().is_err());
    assert!(events.take_steps().is_empty());
}
