//! Room on the disk: what is removed gives it back, and where there is none nothing is lost.

use std::os::unix::fs::FileExt;

use crate::common::disk::SmallDisk;
use crate::common::sys::{open, sync_directory, write_and_close};
use crate::common::{Mode, Mount, eventually, fill};
use crate::{PACK, check, commit, fsck, make, packed, packing};

in_both_modes!(
    room_is_taken_back_while_others_read,
    what_leaves_for_the_remote_comes_back,
    what_is_removed_for_good_is_nowhere_in_the_store,
    the_pack_that_is_written_to_gives_room_back,
);

fn what_is_removed_for_good_is_nowhere_in_the_store(mode: Mode) {
    let mount = packing(mode);
    let secret = b"a prompt that nobody may ever see again";
    std::fs::write(mount.files("secret"), secret).unwrap();
    let kept = make(&mount, 20);
    commit(&mount);
    let is_in_a_pack = || {
        crate::common::mount::files_below(&mount.store().join("packs")).iter().any(|pack| {
            std::fs::read(pack).unwrap().windows(secret.len()).any(|some| some == secret)
        })
    };
    assert!(is_in_a_pack());
    std::fs::remove_file(mount.files("secret")).unwrap();
    eventually("the file to go", || {
        commit(&mount);
        (packed(&mount) == 20).then_some(())
    });
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let ended = crate::common::forks::output(command.args(["gc", "--yes"]).arg(mount.path()));
    let said = String::from_utf8(ended.stdout).unwrap();
    assert!(said.contains("packs: ") && said.contains(" held for nothing, given back"), "{said}");
    assert!(!is_in_a_pack());
    check(&kept);
}

fn room_is_taken_back_while_others_read(mode: Mode) {
    let mut mount = packing(mode);
    let mut files = make(&mount, 300);
    commit(&mount);
    // A pack gets no more from the next mount on.
    mount.remount();
    let before = mount.status_number("pack_bytes");
    let kept = files.split_off(280);
    let held = std::fs::File::open(&kept[4].0).unwrap();
    for (path, _) in &files {
        std::fs::remove_file(path).unwrap();
    }
    // The kernel forgets them when it likes.
    eventually("what was removed to go", || {
        commit(&mount);
        (packed(&mount) == 20).then_some(())
    });
    let on_disk = || {
        let packs = std::fs::read_dir(mount.store().join("packs")).unwrap();
        // One may go between the two questions.
        packs.filter_map(|pack| pack.unwrap().metadata().ok()).map(|pack| pack.len()).sum::<u64>()
    };
    eventually("room to be taken back", || (on_disk() < before / 2).then_some(()));
    check(&kept);
    let mut seen = Vec::new();
    std::io::Read::read_to_end(&mut &held, &mut seen).unwrap();
    assert!(seen == kept[4].1);
    drop(held);
    mount.crash();
    check(&kept);
    assert_eq!(std::fs::read_dir(mount.files("")).unwrap().count(), 20);
    mount.unmount();
    fsck(mount.store(), false);
}

fn what_leaves_for_the_remote_comes_back(mode: Mode) {
    let remote = tempfile::tempdir().unwrap();
    let place = remote.path().to_str().unwrap();
    let mut mount = Mount::with_options(mode, &["--pack", PACK, "--remote", place]);
    let files = make(&mount, 12);
    commit(&mount);
    assert_eq!(packed(&mount), 12);
    let kvfs = |word: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.arg(word).args(files.iter().map(|(path, _)| path));
        crate::common::forks::output(&mut command)
    };
    eventually("the remote to have all", || {
        kvfs("evict").status.success().then_some(())?;
        (packed(&mount) <= 2).then_some(())
    });
    check(&files);
    std::fs::write(&files[4].0, fill(99, 700)).unwrap();
    commit(&mount);
    mount.remount();
    check(&files[5..]);
    assert!(std::fs::read(&files[4].0).unwrap() == fill(99, 700));
    mount.unmount();
    fsck(mount.store(), false);
}

fn the_pack_that_is_written_to_gives_room_back(mode: Mode) {
    let mount = packing(mode);
    let write = |number: u64| {
        let path = mount.files(format!("f{number}"));
        std::fs::write(&path, fill(number, 60_000)).unwrap();
        path
    };
    let paths: Vec<_> = (0..400).map(write).collect();
    commit(&mount);
    assert_eq!(mount.status_number("pack_files"), 1);
    paths.iter().skip(1).for_each(|path| std::fs::remove_file(path).unwrap());
    // The kernel forgets them when it likes, and what it remembers a little longer is copied once.
    eventually("room to come back", || {
        commit(&mount);
        (mount.status_number("pack_bytes") < 4_000_000).then_some(())
    });
    assert!(std::fs::read(&paths[0]).unwrap() == fill(0, 60_000));
}

/// A disk that is full of small files, most of which go: there is nothing to copy the others to.
fn a_full_disk_gives_room_back(mode: Mode) {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::of(96 << 20);
    let options = ["--pack", PACK];
    let mut mount = Mount::of_store_with(mode, &options, &disk.mountpoint.join("store"));
    let mut written = Vec::new();
    for number in 0.. {
        let (path, bytes) = (mount.files(format!("f{number}")), fill(number, 6000));
        if write_and_close(&path, &bytes).is_err() {
            let _ = std::fs::remove_file(path);
            break;
        }
        written.push((path, bytes));
        if number % 500 == 499 && sync_directory(mount.path()).is_err() {
            break;
        }
    }
    assert!(written.len() > 2000, "{} files", written.len());
    // One that stays open keeps its bytes.
    let open = open(&written[1].0, libc::O_RDONLY).unwrap();
    let mut number = 0;
    let gone: Vec<_> = written.extract_if(.., |_| (number += 1, number % 100 != 0).1).collect();
    for (path, _) in &gone {
        std::fs::remove_file(path).unwrap();
    }
    eventually("what is left to be durable", || sync_directory(mount.path()).ok());
    let free = || mount.status_number("free_bytes");
    eventually("room to come back", || (free() > 30 << 20).then_some(()));
    let mut found = vec![0; 7000];
    let length = open.read_at(&mut found, 0).unwrap();
    assert!(found[..length] == gone[1].1);
    drop(open);
    check(&written);
    write_and_close(mount.files("large"), &fill(1, 20 << 20)).unwrap();
    sync_directory(mount.path()).unwrap();
    mount.crash();
    check(&written);
    assert!(mount.unmount().success());
    fsck(mount.store(), false);
}

/// A commit moves new files into directories that need another block, and takes large ones out.
fn removals_make_room_beside_new_files(mode: Mode) {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::with_small_blocks(128 << 20);
    let options = ["--pack", "0"];
    let mut mount = Mount::of_store_with(mode, &options, &disk.mountpoint.join("store"));
    let large: Vec<_> = (0..5).map(|number| mount.files(format!("large{number}"))).collect();
    for path in &large {
        write_and_close(path, &fill(1, 4 << 20)).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let filler = std::fs::File::create(disk.mountpoint.join("filler")).unwrap();
    let free = || nix::sys::statvfs::statvfs(&disk.mountpoint).unwrap().blocks_free() << 10;
    let mut length = 0;
    while free() > 1 << 20 && filler.write_all_at(&[1; 8192], length).is_ok() {
        length += 8192;
    }
    let refused =
        |number: &u32| write_and_close(mount.files(format!("new{number}")), &[2; 100]).is_err();
    assert!((0..20_000).filter(refused).take(10).count() == 10, "the disk is not full");
    for path in &large {
        std::fs::remove_file(path).unwrap();
    }
    eventually("the removal to be durable", || sync_directory(mount.path()).ok());
    eventually("room to come back", || (free() > 8 << 20).then_some(()));
    let kept = (mount.files("kept"), fill(3, 4 << 20));
    write_and_close(&kept.0, &kept.1).unwrap();
    sync_directory(mount.path()).unwrap();
    mount.crash();
    check(&[kept]);
    assert!(!large[0].exists());
    assert!(mount.unmount().success());
    fsck(mount.store(), false);
}

#[test]
fn removals_make_room_beside_new_files_passthrough() {
    removals_make_room_beside_new_files(Mode::Passthrough);
}

#[test]
fn removals_make_room_beside_new_files_served() {
    removals_make_room_beside_new_files(Mode::Served);
}

#[test]
fn a_full_disk_gives_room_back_passthrough() {
    a_full_disk_gives_room_back(Mode::Passthrough);
}

#[test]
fn a_full_disk_gives_room_back_served() {
    a_full_disk_gives_room_back(Mode::Served);
}
