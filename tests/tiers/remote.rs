//! A shared directory behind a mount.

use std::os::unix::fs::FileExt;

use crate::common::sys::{assert_errno, map, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, eventually};
use crate::place::{Place, assert_same, complaint, kvfs, printed, tier};

in_both_modes!(
    what_does_not_fit_leaves_and_comes_back,
    without_the_remote_an_open_fails_and_the_rest_goes_on,
    without_the_remote_an_open_may_count_as_a_miss,
    a_changed_file_is_not_what_the_remote_has,
    a_mapped_file_stays,
    a_place_that_was_emptied_takes_nothing_over,
);

fn what_does_not_fit_leaves_and_comes_back(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--cold", "zstd"]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let gone = files.iter().filter(|(path, _)| tier(path) == "remote").count();
    assert!((3..=6).contains(&gone), "{gone} of 8 files left");
    for file in &files {
        assert_same(std::slice::from_ref(file));
        assert_eq!(tier(&file.0), "ssd");
    }
    place.wait_until_it_fits();
    place.mount.remount();
    assert_same(&files);
    place.mount.crash();
    assert_same(&files);
    assert_eq!(place.mount.status("errors"), "0");
}

fn without_the_remote_an_open_fails_and_the_rest_goes_on(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let hidden = place.remote.with_extension("hidden");
    rename(&place.remote, &hidden).unwrap();
    place.mount.remount();
    for (path, bytes) in &files {
        if tier(path) == "remote" {
            let error = open(path, libc::O_RDONLY).unwrap_err();
            let errno = error.raw_os_error();
            assert!(matches!(errno, Some(libc::EIO | libc::ETIMEDOUT)), "{error}");
        } else {
            assert!(std::fs::read(path).unwrap() == *bytes);
        }
    }
    write_and_close(place.mount.files("new"), b"new").unwrap();
    sync_directory(place.mount.path()).unwrap();
    assert!(place.mount.status("remote_state").starts_with("down: "));
    rename(&hidden, &place.remote).unwrap();
    eventually("the remote to be back", || {
        (place.mount.status("remote_state") == "up").then_some(())
    });
    assert_same(&files);
}

fn without_the_remote_an_open_may_count_as_a_miss(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--on-corrupt", "miss"]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let hidden = place.remote.with_extension("hidden");
    rename(&place.remote, &hidden).unwrap();
    place.mount.remount();
    let (mut missed, mut read) = (0, 0);
    for (path, bytes) in &files {
        if tier(path) == "remote" {
            assert_errno(open(path, libc::O_RDONLY), libc::ENOENT);
            missed += 1;
        } else {
            assert!(std::fs::read(path).unwrap() == *bytes);
            read += 1;
        }
    }
    assert!(missed > 0 && read > 0);
    // Nothing is given up.
    rename(&hidden, &place.remote).unwrap();
    eventually("the remote to be back", || {
        (place.mount.status("remote_state") == "up").then_some(())
    });
    assert_same(&files);
}

fn a_changed_file_is_not_what_the_remote_has(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let (path, bytes) = files.iter().find(|(path, _)| tier(path) == "remote").unwrap();
    let mut bytes = bytes.clone();
    bytes[7] ^= 1;
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&bytes[7..8], 7).unwrap();
    drop(file);
    assert!(std::fs::read(path).unwrap() == bytes);
    place.write("more", 5);
    place.wait_until_it_fits();
    assert!(std::fs::read(path).unwrap() == bytes);
    place.mount.remount();
    assert!(std::fs::read(path).unwrap() == bytes);
}

fn a_mapped_file_stays(mode: Mode) {
    let place = Place::with_budget(mode, &[]);
    let first = place.write("first", 1);
    let (path, bytes) = &first[0];
    let mapped = map(&open(path, libc::O_RDONLY).unwrap());
    place.write("f", 8);
    place.wait_until_it_fits();
    // Without passthrough the kernel has the bytes in its own cache.
    if mode == Mode::Passthrough {
        assert_eq!(tier(path), "ssd");
    }
    assert!(mapped[..] == bytes[..]);
    drop(mapped);
}

/// What was verified there is gone: nothing leaves the disk for it any more, and nothing is called synced.
fn a_place_that_was_emptied_takes_nothing_over(mode: Mode) {
    let place = Place::new(mode, &[]);
    let files = place.write("f", 3);
    let root = place.mount.path().to_owned();
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    let hidden = place.remote.with_extension("hidden");
    std::fs::create_dir(&hidden).unwrap();
    let move_all = |from: &std::path::Path, to: &std::path::Path| {
        for entry in from.read_dir().unwrap() {
            let entry = entry.unwrap();
            rename(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    move_all(&place.remote, &hidden);
    let paths: Vec<_> = files.iter().map(|(path, _)| path.as_path()).collect();
    let said = complaint(&kvfs(&["evict"], &paths));
    assert!(said.contains("the remote is down"), "{said}");
    assert_same(&files);
    assert!(files.iter().all(|(path, _)| tier(path) == "ssd"));
    eventually("the remote to count as down", || {
        place.mount.status("remote_state").starts_with("down").then_some(())
    });
    let later = place.write("later", 1);
    let synced = kvfs(&["sync", "--remote", "--timeout", "2"], &[&root]);
    assert_eq!(synced.status.code(), Some(1), "{synced:?}");
    // What a store made there since is nobody's.
    std::fs::remove_dir_all(&place.remote).unwrap();
    rename(&hidden, &place.remote).unwrap();
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    printed(&kvfs(&["evict"], &paths));
    assert_same(&files);
    assert_same(&later);
}
