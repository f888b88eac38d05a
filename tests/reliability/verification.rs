//! `--verify first|always|never`: how often an open compares bytes with their checksum.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::common::sys::{assert_errno, open, sync_directory, write_and_close};
use crate::common::{Mode, Mount, fill};

const BYTES: usize = 300_000;

in_both_modes!(
    the_first_open_after_a_mount,
    every_open,
    no_open,
    whoever_changes_dates_and_rights_hides_no_damage,
    what_is_damaged_is_not_changed,
);

/// A durable file, and where its bytes are.
fn prepared(mode: Mode, verify: &str) -> (Mount, PathBuf, PathBuf) {
    let mut mount = Mount::with_options(mode, &["--verify", verify]);
    let path = mount.files("f");
    write_and_close(&path, &fill(1, BYTES)).unwrap();
    sync_directory(mount.path()).unwrap();
    let [object] = &mount.objects()[..] else { panic!("one file, one object") };
    let object = object.clone();
    mount.remount();
    (mount, path, object)
}

/// A bit of the disk flips: neither length nor times of the file change.
fn damage(object: &PathBuf) {
    let before = std::fs::metadata(object).unwrap();
    let file = open(object, libc::O_RDWR).unwrap();
    file.write_all_at(b"damage", 100_000).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
}

fn the_first_open_after_a_mount(mode: Mode) {
    let (mut mount, path, object) = prepared(mode, "first");
    assert!(std::fs::read(&path).unwrap() == fill(1, BYTES));
    damage(&object);
    // Known to be right, and not looked at again.
    drop(open(&path, libc::O_RDONLY).unwrap());
    mount.remount();
    assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
}

/// Such a change falls between the look at the record and the comparison, and has nothing to do with the bytes.
fn whoever_changes_dates_and_rights_hides_no_damage(mode: Mode) {
    let (mut mount, path, object) = prepared(mode, "first");
    damage(&object);
    let other = mount.files("other");
    let change = |round: u32| {
        let metadata = std::fs::metadata(&path).unwrap();
        let mut rights = metadata.permissions();
        std::os::unix::fs::PermissionsExt::set_mode(
            &mut rights,
            [0o600, 0o644][round as usize % 2],
        );
        std::fs::set_permissions(&path, rights).unwrap();
        if std::fs::hard_link(&path, &other).is_ok() {
            std::fs::remove_file(&other).unwrap();
        }
    };
    for _ in 0..10 {
        mount.remount();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let opened = std::thread::scope(|scope| {
            scope.spawn(|| {
                let rounds =
                    (0..).take_while(|_| !ended.load(std::sync::atomic::Ordering::Relaxed));
                rounds.for_each(change);
            });
            std::thread::sleep(std::time::Duration::from_millis(5));
            let opened: Vec<_> = (0..3).map(|_| open(&path, libc::O_RDONLY)).collect();
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
            opened
        });
        for outcome in opened {
            assert_errno(outcome, libc::EIO);
        }
    }
}

/// Afterwards nobody could tell what was damage and what was written.
fn what_is_damaged_is_not_changed(mode: Mode) {
    let (mut mount, path, object) = prepared(mode, "first");
    damage(&object);
    for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_WRONLY | libc::O_APPEND] {
        assert_errno(open(&path, flags), libc::EIO);
    }
    assert_errno(nix::unistd::truncate(&path, 200_000).map_err(std::io::Error::from), libc::EIO);
    mount.remount();
    assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
    // All bytes are others.
    std::fs::write(&path, b"new").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

fn every_open(mode: Mode) {
    let (mount, path, object) = prepared(mode, "always");
    for _ in 0..2 {
        assert!(std::fs::read(&path).unwrap() == fill(1, BYTES));
    }
    damage(&object);
    for _ in 0..2 {
        assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
    }
    assert_eq!(mount.metric("kvfs_checksum_errors_total{tier=\"ssd\"}"), 2);
}

fn no_open(mode: Mode) {
    let (mut mount, path, object) = prepared(mode, "never");
    damage(&object);
    drop(open(&path, libc::O_RDONLY).unwrap());
    assert_eq!(mount.status("errors"), "0");
    // A length is compared all the same.
    assert!(mount.unmount().success());
    open(&object, libc::O_RDWR).unwrap().set_len(1000).unwrap();
    mount.mount();
    assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
    assert!(
        std::fs::read_to_string(mount.join(".kvfs/config")).unwrap().contains("verify = \"never\"")
    );
}
