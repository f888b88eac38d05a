//! `--verify first|always|never`: how often an open compares bytes with their checksum.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::common::sys::{assert_errno, open, sync_directory, write_and_close};
use crate::common::{Mode, Mount, fill};

const BYTES: usize = 300_000;

in_both_modes!(the_first_open_after_a_mount, every_open, no_open);

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
