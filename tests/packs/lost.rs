//! Names whose bytes are gone, and bytes whose names are: what can still be done with them.

use std::fs::{self, File, FileTimes};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::common;
use crate::common::sys::{assert_errno, open};
use crate::common::{Mode, Mount, fill};
use crate::{check, commit, fsck, make, packing};

in_both_modes!(
    lost_bytes_can_be_written_anew,
    packs_that_are_lost_under_a_mount_are_told_of,
    what_a_remote_has_takes_the_place_of_lost_packs,
    packs_that_are_away_for_a_while_are_no_damage,
    a_store_whose_packs_are_away_is_not_mounted,
    a_packed_file_without_a_name_has_its_times_set,
    a_file_that_was_cut_and_synced_is_as_old_after_a_crash,
    a_file_that_was_written_to_and_synced_is_as_old_after_a_crash,
);

/// The packs, and a file of its own, were removed below the store.
fn lost_bytes_can_be_written_anew(mode: Mode) {
    let mut mount = packing(mode);
    let mut files = make(&mount, 12);
    files.push((mount.files("large"), fill(1, 100_000)));
    fs::write(&files[12].0, &files[12].1).unwrap();
    commit(&mount);
    assert!(mount.unmount().success());
    let packs = fs::read_dir(mount.store().join("packs")).unwrap();
    let packs = packs.map(|pack| pack.unwrap().path()).filter(|path| path.is_file());
    packs.chain(mount.objects()).for_each(|path| fs::remove_file(path).unwrap());
    mount.mount();
    // Nothing of those can be lost but the name.
    let empty = files.extract_if(.., |(_, bytes)| bytes.is_empty());
    empty.for_each(|(path, _)| fs::remove_file(path).unwrap());
    for (number, (path, bytes)) in (0..).zip(&mut files) {
        let path: &Path = path;
        assert_errno(open(path, libc::O_RDONLY), libc::EIO);
        let longer = File::options().write(true).open(path);
        assert_errno(longer.and_then(|file| file.set_len(200_000)), libc::EIO);
        *bytes = fill(number + 100, 3000);
        fs::write(path, &bytes).unwrap();
    }
    check(&files);
    commit(&mount);
    mount.crash();
    check(&files);
    assert!(mount.unmount().success());
    fsck(mount.store(), false);
}

/// One was removed, one was cut, and one has another in its place: none of their bytes, no others, and no name less.
fn packs_that_are_lost_under_a_mount_are_told_of(mode: Mode) {
    let mut mount = packing(mode);
    let mut files = make_twelve_packs(&mut mount);
    let packs = lose_three(&mount);
    let kept = files.split_off(6);
    for pair in files.chunks(2) {
        drop_from_cache(&pair[0].0);
        assert_errno(fs::read(&pair[0].0), libc::EIO);
        assert_errno(File::options().append(true).open(&pair[1].0), libc::EIO);
        let cut = File::options().write(true).open(&pair[1].0);
        assert_errno(cut.and_then(|file| file.set_len(10)), libc::EIO);
    }
    check(&kept);
    assert_eq!(mount.status("state"), "degraded");
    assert!(mount.status_number("damaged_files") >= 3, "{}", mount.status("damaged_files"));
    let scrub = |exit: i32| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
        let ended = common::forks::output(command.arg("scrub").arg(mount.path()));
        let said = String::from_utf8(ended.stdout).unwrap();
        assert_eq!(ended.status.code(), Some(exit), "{said}");
    };
    scrub(3);
    assert!(mount.status_number("damaged_files") >= 6, "{}", mount.status("damaged_files"));
    // Others can be rewritten, and room be taken back.
    for (path, _) in &kept[..8] {
        fs::remove_file(path).unwrap();
    }
    crate::common::eventually("room to be taken back", || {
        commit(&mount);
        (!packs[3].exists()).then_some(())
    });
    check(&kept[8..]);
    for (path, _) in &files {
        fs::write(path, b"anew").unwrap();
    }
    commit(&mount);
    scrub(0);
    assert_eq!(mount.status("state"), "ok");
    mount.remount();
    check(&kept[8..]);
}

/// Two files in each of them, and a mount that has so few descriptors that only the last packs stay open.
fn make_twelve_packs(mount: &mut Mount) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    for number in 0..12 {
        for name in ["read", "written"] {
            let (path, bytes) = (mount.files(format!("{name}{number}")), fill(number, 5000));
            fs::write(&path, &bytes).unwrap();
            files.push((path, bytes));
        }
        commit(mount);
        mount.remount();
    }
    assert!(mount.unmount().success());
    mount.set_open_files_max(64);
    mount.mount();
    check(&files);
    files
}

/// Removes the first pack, cuts the second and puts the fourth in the place of the third. Returns all four.
fn lose_three(mount: &Mount) -> Vec<PathBuf> {
    let packs: Vec<_> =
        (1..=4).map(|number| mount.store().join(format!("packs/{number:08x}"))).collect();
    fs::remove_file(&packs[0]).unwrap();
    File::options().write(true).open(&packs[1]).unwrap().set_len(300).unwrap();
    let other = mount.store().join("packs/other");
    fs::copy(&packs[3], &other).unwrap();
    common::sys::rename(&other, &packs[2]).unwrap();
    packs
}

fn what_a_remote_has_takes_the_place_of_lost_packs(mode: Mode) {
    let remote = tempfile::tempdir().unwrap();
    let place = remote.path().to_str().unwrap();
    let mut mount = Mount::with_options(mode, &["--pack", "64K", "--remote", place]);
    let mut files = make_twelve_packs(&mut mount);
    let mut sync = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let synced = common::forks::output(sync.args(["sync", "--remote"]).arg(mount.path()));
    assert!(synced.status.success(), "{synced:?}");
    lose_three(&mount);
    for pair in files.chunks_mut(2) {
        drop_from_cache(&pair[0].0);
        check(&pair[..1]);
        fs::OpenOptions::new().append(true).open(&pair[1].0).unwrap().write_all(b"more").unwrap();
        pair[1].1.extend(b"more");
    }
    check(&files);
    assert_eq!(mount.status("damaged_files"), "0");
    mount.remount();
    check(&files);
    assert!(mount.unmount().success());
    fsck(mount.store(), false);
}

/// Names that would go with damaged bytes stay, and so do copies.
fn packs_that_are_away_for_a_while_are_no_damage(mode: Mode) {
    let remote = tempfile::tempdir().unwrap();
    let place = remote.path().to_str().unwrap();
    let options = ["--pack", "64K", "--on-corrupt", "miss", "--verify", "always"];
    for options in [&options[..], &[&options[..], &["--remote", place]].concat()] {
        let mut mount = Mount::with_options(mode, options);
        let files = make_twelve_packs(&mut mount);
        let packs = ["packs", "away"].map(|name| mount.store().join(name));
        common::sys::rename(&packs[0], &packs[1]).unwrap();
        for (path, _) in &files {
            drop_from_cache(path);
        }
        let read = files.iter().filter(|(path, _)| fs::read(path).is_ok()).count();
        assert!(read < files.len(), "{read}");
        common::sys::rename(&packs[1], &packs[0]).unwrap();
        check(&files);
        assert_eq!(mount.status("damaged_files"), "0");
        mount.remount();
        check(&files);
    }
}

/// A mount without it would forget what is in it, and give its packs' numbers to others.
fn a_store_whose_packs_are_away_is_not_mounted(mode: Mode) {
    let mut mount = packing(mode);
    let files = make(&mount, 12);
    commit(&mount);
    assert!(mount.unmount().success());
    let packs = ["packs", "away"].map(|name| mount.store().join(name));
    common::sys::rename(&packs[0], &packs[1]).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let refused = common::forks::output(command.arg("mount").arg(mount.store()).arg(mount.path()));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && said.contains("packs is missing, and the store has"),
        "{said}"
    );
    assert!(!packs[0].exists());
    common::sys::rename(&packs[1], &packs[0]).unwrap();
    mount.mount();
    check(&files);
}

/// What the kernel has of a file's bytes goes.
fn drop_from_cache(path: &Path) {
    let file = File::open(path);
    if let Ok(file) = file {
        let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        nix::fcntl::posix_fadvise(&file, 0, 0, advice).unwrap();
    }
}

/// Whoever has it open, if only to read, may set them, as on a local disk.
fn a_packed_file_without_a_name_has_its_times_set(mode: Mode) {
    let mount = packing(mode);
    let files = make(&mount, 6);
    commit(&mount);
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
    for (path, bytes) in files {
        let opened = open(&path, libc::O_RDONLY).unwrap();
        fs::remove_file(&path).unwrap();
        opened.set_times(FileTimes::new().set_accessed(then).set_modified(then)).unwrap();
        let found = opened.metadata().unwrap();
        assert_eq!((found.modified().unwrap(), found.len()), (then, bytes.len() as u64));
        let proc = format!("/proc/self/fd/{}", opened.as_raw_fd());
        assert!(fs::read(proc).unwrap() == bytes);
    }
    commit(&mount);
    assert_eq!(mount.status("state"), "ok");
}

/// Its file was made before it was needed, and is older on the disk.
fn a_file_that_was_cut_and_synced_is_as_old_after_a_crash(mode: Mode) {
    let mut mount = Mount::new(mode);
    let paths = ["cut", "new"].map(|name| mount.files(name));
    fs::write(&paths[0], b"bytes").unwrap();
    commit(&mount);
    // Until the files for the next writers are surely older.
    std::thread::sleep(Duration::from_millis(100));
    let opened = paths.each_ref().map(|path| {
        let mut options = File::options();
        options.read(true).write(true).create(true).custom_flags(libc::O_TRUNC);
        options.open(path).unwrap()
    });
    for file in &opened {
        file.sync_all().unwrap();
    }
    commit(&mount);
    let before = paths.each_ref().map(dates);
    mount.kill();
    drop(opened);
    mount.mount();
    assert_eq!(paths.each_ref().map(dates), before);
}

fn a_file_that_was_written_to_and_synced_is_as_old_after_a_crash(mode: Mode) {
    let mut mount = Mount::new(mode);
    let paths = ["small", "large"].map(|name| mount.files(name));
    paths
        .iter()
        .zip([100, 100_000])
        .for_each(|(path, size)| fs::write(path, fill(1, size)).unwrap());
    commit(&mount);
    std::thread::sleep(Duration::from_millis(100));
    let opened = paths.each_ref().map(|path| open(path, libc::O_RDWR).unwrap());
    for file in &opened {
        file.write_all_at(b"new", 0).unwrap();
        file.sync_all().unwrap();
    }
    let before = paths.each_ref().map(dates);
    mount.kill();
    drop(opened);
    mount.mount();
    assert_eq!(paths.each_ref().map(dates), before);
}

/// When a file was changed, in content and in anything.
fn dates(path: &PathBuf) -> [(i64, i64); 2] {
    let found = fs::metadata(path).unwrap();
    [(found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec())]
}
