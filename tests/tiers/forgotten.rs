//! A store is mounted without the remote that has some of its bytes: no name is lost by that.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::mount::scratch_directory;
use crate::common::sys::{assert_errno, open, rename, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Mount, eventually, fill, forks};
use crate::place::{Place, assert_same, complaint, tier};

in_both_modes!(
    offline_and_miss_lose_no_name,
    a_mount_that_needs_its_remote_is_refused_without,
    another_remote_is_refused,
    what_changes_offline_is_not_what_the_remote_has,
    a_moved_remote_is_the_same_remote,
);

/// Sends files to the remote.
fn evict(files: &[(PathBuf, Vec<u8>)]) {
    for (path, _) in files {
        setxattr(path, "user.kvfs.tier", b"remote").unwrap();
        eventually("the file to leave", || (tier(path) == "remote").then_some(()));
    }
}

/// Two files that only the remote has, one that is here, and the store unmounted.
fn evicted(mode: Mode, further: &[&str]) -> (Place, Vec<(PathBuf, Vec<u8>)>) {
    let mut place = Place::new(mode, further);
    let files = place.write("f", 3);
    place.wait_until_uploaded();
    std::fs::hard_link(&files[0].0, place.mount.files("linked")).unwrap();
    evict(&files[..2]);
    eventually("their bytes to be gone", || {
        (place.mount.status("remote_only_objects") == "2").then_some(())
    });
    assert!(place.mount.unmount().success());
    (place, files)
}

/// Tries to mount a store in the foreground; a mount that is made is ended.
fn try_mount(store: &Path, options: &[&str]) -> Output {
    let directory = scratch_directory();
    let mountpoint = directory.path().join("mnt");
    std::fs::create_dir(&mountpoint).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.arg("mount").args(options).arg("--log").arg(directory.path().join("log"));
    let output = forks::output(command.arg(store).arg(&mountpoint));
    if output.status.success() {
        forks::succeed(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("umount").arg(&mountpoint));
    }
    output
}

fn offline_and_miss_lose_no_name(mode: Mode) {
    for further in [&[][..], &["--cold", "zstd"]] {
        let (mut place, files) = evicted(mode, further);
        let store = place.mount.store().to_owned();
        let options = [&["--offline", "--on-corrupt", "miss"], further].concat();
        let mut mount = Mount::of_store_with(mode, &options, &store);
        assert_eq!(mount.status("remote_state"), "offline");
        assert_eq!(mount.status("remote_missing"), place.remote.to_str().unwrap());
        assert_eq!(mount.status("remote_only_objects"), "2");
        for name in ["f0", "f1", "linked"] {
            let path = mount.files(name);
            for _ in 0..3 {
                assert_errno(open(&path, libc::O_RDONLY), libc::ENOENT);
                assert_errno(open(&path, libc::O_RDWR), libc::ENOENT);
            }
            assert!(path.exists(), "{name} has lost its name");
            assert_eq!(tier(&path), "remote");
        }
        assert!(std::fs::read(mount.files("f2")).unwrap() == files[2].1);
        assert_eq!(mount.quarantined(), Vec::<PathBuf>::new());
        assert!(mount.unmount().success());
        place.mount.mount();
        assert_same(&files);
        assert!(std::fs::read(place.mount.files("linked")).unwrap() == files[0].1);
        assert_eq!(place.mount.status("errors"), "0");
    }
}

fn a_mount_that_needs_its_remote_is_refused_without(mode: Mode) {
    let (mut place, files) = evicted(mode, &[]);
    let store = place.mount.store().to_owned();
    let remote = place.remote.to_str().unwrap();
    for options in [&[][..], &["--on-corrupt", "miss"], &["--read-only"], &["--cold", "zstd"]] {
        let said = complaint(&try_mount(&store, options));
        let wanted = format!("--remote {remote}");
        assert!(said.contains(&wanted) && said.contains("--offline"), "{said}");
        assert!(said.contains("2 files"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let checked = forks::output(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(&store));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    let mut mount = Mount::of_store_with(mode, &["--offline"], &store);
    for (path, _) in &files[..2] {
        let path = mount.files(path.file_name().unwrap());
        assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
        assert_errno(open(&path, libc::O_RDWR), libc::EIO);
        assert!(path.exists());
    }
    assert!(mount.unmount().success());
    place.mount.mount();
    assert_same(&files);
    // Nothing is needed any more.
    eventually("the records", || (place.mount.status("remote_only_objects") == "0").then_some(()));
    assert!(place.mount.unmount().success());
    assert!(try_mount(&store, &[]).status.success());
}

fn another_remote_is_refused(mode: Mode) {
    let (mut place, files) = evicted(mode, &[]);
    let store = place.mount.store().to_owned();
    let directory = scratch_directory();
    let remote = place.remote.to_str().unwrap();
    let empty = directory.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let other = Place::new(mode, &[]);
    other.write("other", 1);
    other.wait_until_uploaded();
    for wrong in [&empty, &other.remote, &directory.path().join("missing")] {
        let said = complaint(&try_mount(&store, &["--remote", wrong.to_str().unwrap()]));
        assert!(said.contains(&format!("--remote {remote}")), "{said}");
        assert!(said.contains("--offline"), "{said}");
    }
    assert_eq!(std::fs::read_dir(&empty).unwrap().count(), 0, "it was not made a remote");
    place.mount.mount();
    assert_same(&files);
}

/// The file has an old copy in the remote while it is changed; that must not come back.
fn what_changes_offline_is_not_what_the_remote_has(mode: Mode) {
    let (mut place, files) = evicted(mode, &[]);
    let store = place.mount.store().to_owned();
    let mut mount = Mount::of_store_with(mode, &["--offline"], &store);
    let (name, mut bytes) = (files[2].0.file_name().unwrap(), files[2].1.clone());
    bytes[7] ^= 1;
    let file = std::fs::File::options().write(true).open(mount.files(name)).unwrap();
    file.write_all_at(&bytes[7..8], 7).unwrap();
    drop(file);
    // What is thrown away need not be here.
    std::fs::write(mount.files("f1"), b"new").unwrap();
    sync_directory(mount.path()).unwrap();
    assert!(mount.unmount().success());
    place.mount.mount();
    place.wait_until_uploaded();
    let changed = [(files[2].0.clone(), bytes), (files[1].0.clone(), b"new".to_vec())];
    evict(&changed);
    assert_same(&changed);
    assert_same(&files[..1]);
    assert_eq!(place.mount.status("errors"), "0");
}

fn a_moved_remote_is_the_same_remote(mode: Mode) {
    let (place, files) = evicted(mode, &[]);
    let store = place.mount.store().to_owned();
    let moved = place.remote.with_extension("moved");
    rename(&place.remote, &moved).unwrap();
    let options = ["--remote", moved.to_str().unwrap(), "--commit-interval", "0.05"];
    let mut mount = Mount::of_store_with(mode, &options, &store);
    for (path, bytes) in &files {
        assert!(std::fs::read(mount.files(path.file_name().unwrap())).unwrap() == *bytes);
    }
    evict(&[(mount.files("f0"), Vec::new())]);
    assert!(mount.unmount().success());
    let said = complaint(&try_mount(&store, &[]));
    assert!(said.contains(&format!("--remote {}", moved.display())), "{said}");
}

/// Called by mount(8), the line and the code are those of a mount that failed.
#[test]
fn fstab_is_told_what_is_missing() {
    crate::require!(fuse, root);
    let (place, _) = evicted(Mode::Passthrough, &[]);
    let directory = scratch_directory();
    let helper = directory.path().join("mount.kvfs");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kvfs"), &helper).unwrap();
    let mountpoint = directory.path().join("mnt");
    std::fs::create_dir(&mountpoint).unwrap();
    let log = format!("rw,_netdev,log_file={}", directory.path().join("log").display());
    let call = |options: &str| {
        let mut command = Command::new(&helper);
        command.arg(place.mount.store()).arg(&mountpoint).args(["-o", options]);
        forks::output(&mut command)
    };
    let refused = call(&log);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(32), "{said}");
    assert!(said.contains(&format!("--remote {}", place.remote.display())), "{said}");
    let mounted = call(&format!("{log},offline"));
    assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
    forks::succeed(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("umount").arg(&mountpoint));
}

/// Many copies that the disk has as well: a mount does not need their remote.
#[test]
fn a_remote_that_has_nothing_alone_may_be_left_away() {
    crate::require!(fuse, root);
    let mut place = Place::new(Mode::Passthrough, &[]);
    let files: Vec<_> = (0..20)
        .map(|number| {
            let (path, bytes) = (place.mount.files(format!("f{number}")), fill(number, 1000));
            write_and_close(&path, &bytes).unwrap();
            (path, bytes)
        })
        .collect();
    place.wait_until_uploaded();
    assert!(place.mount.unmount().success());
    let mount = Mount::of_store(Mode::Passthrough, place.mount.store());
    for (path, bytes) in &files {
        assert!(std::fs::read(mount.files(path.file_name().unwrap())).unwrap() == *bytes);
    }
}
