//! Whoever changes a packed file, and whoever has it open meanwhile.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Barrier;

use crate::common::sys::{close, map, open, rename, set_modified, setxattr};
use crate::common::{Mode, Model, fill};
use crate::{check, commit, fsck, make, packed, packing};

in_both_modes!(
    who_reads_and_who_writes_open_at_the_same_time,
    a_file_changes_in_place_before_the_eyes_of_its_readers,
    what_is_synced_survives_and_what_is_not_may_be_lost_whole,
    versions_are_not_mixed_up,
    a_packed_file_becomes_a_tail,
    handles_of_all_kinds_at_once,
);

fn a_file_changes_in_place_before_the_eyes_of_its_readers(mode: Mode) {
    let mut mount = packing(mode);
    let mut files = make(&mount, 6);
    commit(&mount);
    assert_eq!(packed(&mount), 6);
    let (path, bytes) = files[4].clone();
    let reader = File::open(&path).unwrap();
    let mapped = map(&reader);
    assert!(mapped[..] == bytes);
    let writer = open(&path, libc::O_RDWR).unwrap();
    assert_eq!(packed(&mount), 5, "it has a file of its own");
    writer.write_all_at(b"changed", 5000).unwrap();
    let mut seen = [0; 7];
    reader.read_exact_at(&mut seen, 5000).unwrap();
    assert_eq!(&seen, b"changed");
    assert_eq!(&mapped[5000..5007], b"changed");
    let another = File::open(&path).unwrap();
    another.read_exact_at(&mut seen, 5000).unwrap();
    assert_eq!(&seen, b"changed");
    files[4].1[5000..5007].copy_from_slice(b"changed");
    close(writer).unwrap();
    drop((reader, another, mapped));
    commit(&mount);
    check(&files);
    mount.crash();
    check(&files);
    // The kernel serves it now, where it can.
    let writer = open(&path, libc::O_RDWR).unwrap();
    writer.write_all_at(b"again", 0).unwrap();
    close(writer).unwrap();
    files[4].1[..5].copy_from_slice(b"again");
    commit(&mount);
    mount.remount();
    check(&files);
    mount.unmount();
    fsck(mount.store(), false);
}

fn what_is_synced_survives_and_what_is_not_may_be_lost_whole(mode: Mode) {
    let mut mount = packing(mode);
    let files = make(&mount, 6);
    commit(&mount);
    let synced = open(&files[2].0, libc::O_RDWR).unwrap();
    synced.write_all_at(b"synced", 0).unwrap();
    synced.sync_all().unwrap();
    let each = File::options().write(true).custom_flags(libc::O_DSYNC).open(&files[3].0).unwrap();
    each.write_all_at(b"each write", 0).unwrap();
    let lost = open(&files[4].0, libc::O_RDWR).unwrap();
    lost.write_all_at(b"perhaps", 0).unwrap();
    mount.crash();
    let read = |number: usize| std::fs::read(&files[number].0).unwrap();
    assert_eq!((&read(2)[..6], &read(3)[..10]), (&b"synced"[..], &b"each write"[..]));
    let found = read(4);
    assert!(found[..7] == *b"perhaps" || found == files[4].1);
    assert!(found[7..] == files[4].1[7..]);
    mount.unmount();
    fsck(mount.store(), false);
}

/// The kernel keeps bytes of files that the daemon serves, and must not show those of another version.
fn versions_are_not_mixed_up(mode: Mode) {
    let mut mount = packing(mode);
    let path = mount.files("file");
    for version in 0..6 {
        let bytes = fill(version, 9000);
        if version % 3 == 2 {
            // In place, by whoever has nothing open before or after.
            let writer = open(&path, libc::O_WRONLY).unwrap();
            writer.write_all_at(&bytes, 0).unwrap();
            close(writer).unwrap();
        } else {
            std::fs::write(&path, &bytes).unwrap();
        }
        commit(&mount);
        let reader = File::open(&path).unwrap();
        assert!(map(&reader)[..] == bytes, "version {version}");
        assert!(std::fs::read(&path).unwrap() == bytes, "version {version}");
    }
    mount.remount();
    assert!(std::fs::read(&path).unwrap() == fill(5, 9000));
}

fn a_packed_file_becomes_a_tail(mode: Mode) {
    let mut mount = packing(mode);
    let model = Model::small();
    model.install(&mount);
    let tail = model.tail_path(&mount, "chat", 0, 0);
    let temporary = tail.with_file_name(".restored");
    std::fs::write(&temporary, model.rows(1, 3)).unwrap();
    commit(&mount);
    let then = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    set_modified(&temporary, then).unwrap();
    setxattr(&temporary, "user.note", b"kept").unwrap();
    rename(&temporary, &tail).unwrap();
    assert_eq!(std::fs::metadata(&tail).unwrap().modified().unwrap(), then);
    let appending = File::options().append(true).open(&tail).unwrap();
    std::io::Write::write_all(&mut &appending, &model.rows(9, 1)).unwrap();
    appending.sync_all().unwrap();
    mount.crash();
    assert!(std::fs::read(&tail).unwrap() == [model.rows(1, 3), model.rows(9, 1)].concat());
}

/// Readers of a packed file, writers, those who cut it and those who copy from it, in changing order.
fn handles_of_all_kinds_at_once(mode: Mode) {
    let mount = packing(mode);
    for round in 0..8 {
        let path = mount.files(format!("file-{round}"));
        let bytes = fill(round, 12_000);
        std::fs::write(&path, &bytes).unwrap();
        commit(&mount);
        let readers: Vec<File> = (0..=round % 3).map(|_| File::open(&path).unwrap()).collect();
        let copy = mount.files("copy");
        std::fs::copy(&path, &copy).unwrap();
        assert!(std::fs::read(&copy).unwrap() == bytes);
        let length = if round % 2 == 0 {
            nix::unistd::truncate(&path, 6000).unwrap();
            6000
        } else {
            12_000
        };
        let writer = open(&path, libc::O_RDWR).unwrap();
        let other = open(&path, libc::O_RDWR | libc::O_APPEND).unwrap();
        writer.write_all_at(b"one", 100).unwrap();
        std::io::Write::write_all(&mut &other, b"the end").unwrap();
        let late = File::open(&path).unwrap();
        for reader in readers.iter().chain([&late, &writer]) {
            let mut seen = vec![0; length + 20];
            let count = reader.read_at(&mut seen, 0).unwrap();
            assert_eq!(count, length + 7, "round {round}");
            assert_eq!((&seen[100..103], &seen[length..count]), (&b"one"[..], &b"the end"[..]));
        }
        if round % 3 == 0 {
            drop(readers);
            std::fs::remove_file(&path).unwrap();
            let mut seen = [0; 3];
            late.read_exact_at(&mut seen, 100).unwrap();
            assert_eq!(&seen, b"one");
        }
    }
    assert_eq!(mount.status("errors"), "0");
}

/// A file is taken out of its pack while somebody opens it there: the kernel wants all of its handles to be of one kind.
fn who_reads_and_who_writes_open_at_the_same_time(mode: Mode) {
    let mount = packing(mode);
    let files = make(&mount, 300);
    commit(&mount);
    for (path, _) in &files {
        let begin = Barrier::new(3);
        std::thread::scope(|scope| {
            for flags in [libc::O_RDONLY, libc::O_RDWR, libc::O_RDONLY] {
                let begin = &begin;
                scope.spawn(move || {
                    begin.wait();
                    let file = open(path, flags);
                    begin.wait();
                    file.unwrap();
                });
            }
        });
    }
    check(&files);
}
