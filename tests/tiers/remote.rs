//! A shared directory behind a mount.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::sys::{assert_errno, map, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, eventually};
use crate::place::{Place, assert_same, complaint, kvfs, printed, tier};

in_both_modes!(
    what_does_not_fit_leaves_and_comes_back,
    small_pages_leave_like_large_ones,
    what_was_used_last_stays_after_a_mount,
    without_the_remote_an_open_fails_and_the_rest_goes_on,
    without_the_remote_an_open_may_count_as_a_miss,
    a_changed_file_is_not_what_the_remote_has,
    a_mapped_file_stays,
    a_place_that_was_emptied_takes_nothing_over,
    what_was_being_written_at_a_crash_reaches_the_remote,
    what_an_emptied_place_took_is_uploaded_again,
    a_copy_that_is_gone_is_made_again_before_the_disks_goes,
    copies_that_are_not_whole_are_seen_before_the_disks_goes,
    names_outlive_an_emptied_place,
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

/// Pages of 36 KiB: what two KV heads need for 32 tokens. They lie in packs.
fn small_pages_leave_like_large_ones(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--ram", "8M"]);
    let model = Model::with(|fields| (fields.page_tokens, fields.head_dim) = (32, 128));
    model.install(&place.mount);
    let write = |number: u64| {
        let start = number * u64::from(model.page_tokens());
        let (path, bytes) =
            (model.page_path(&place.mount, "chat", 0, start), model.page(0, start, number));
        write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    };
    let pages: Vec<_> = (0..800).map(write).collect();
    assert!((32 << 10..64 << 10).contains(&pages[0].1.len()), "{} bytes", pages[0].1.len());
    sync_directory(place.mount.path()).unwrap();
    place.wait_until_it_fits();
    assert!(place.mount.status_number("remote_only_objects") >= 200);
    place.mount.remount();
    place.wait_until_it_fits();
    assert_same(&pages);
    assert_eq!(place.mount.status("errors"), "0");
}

fn what_was_used_last_stays_after_a_mount(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let mut files = place.write("f", 4);
    place.wait_until_uploaded();
    assert_same(&files[..1]);
    place.mount.remount();
    files.extend(place.write("further", 1));
    place.wait_until_uploaded();
    place.wait_until_it_fits();
    let tiers: Vec<String> = files.iter().map(|(path, _)| tier(path)).collect();
    assert_eq!((&*tiers[0], &*tiers[1]), ("ssd", "remote"), "the first was used last: {tiers:?}");
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
    restore(&hidden, &place.remote);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    printed(&kvfs(&["evict"], &paths));
    assert_same(&files);
    assert_same(&later);
}

/// Recovery finds its size, and the next commit its checksum: without one nothing would ever move it.
fn what_was_being_written_at_a_crash_reaches_the_remote(mode: Mode) {
    use std::os::unix::fs::OpenOptionsExt;
    let mut place = Place::new(mode, &[]);
    let path = place.mount.files("written");
    let mut options = std::fs::File::options();
    options.write(true).create_new(true).custom_flags(libc::O_DSYNC);
    let file = options.open(&path).unwrap();
    file.write_all_at(&[7; 4096], 0).unwrap();
    place.mount.kill();
    drop(file);
    place.mount.mount();
    printed(&kvfs(&["sync", "--remote", "--timeout", "20"], &[place.mount.path()]));
    printed(&kvfs(&["evict"], &[&path]));
    assert_eq!(tier(&path), "remote");
    assert!(std::fs::read(&path).unwrap() == [7; 4096]);
}

fn move_all(from: &Path, to: &Path) {
    for entry in from.read_dir().unwrap() {
        let entry = entry.unwrap();
        rename(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// What was hidden has its place again, and what came there meanwhile is gone.
fn restore(hidden: &Path, remote: &Path) {
    std::fs::remove_dir_all(remote).unwrap();
    rename(hidden, remote).unwrap();
}

/// The place of a remote, emptied; gives where everything is.
fn empty(place: &Place) -> PathBuf {
    let hidden = place.remote.with_extension("hidden");
    std::fs::create_dir(&hidden).unwrap();
    move_all(&place.remote, &hidden);
    hidden
}

/// A file that went to an emptied place, and was found there, is nowhere when the remote is back.
fn what_an_emptied_place_took_is_uploaded_again(mode: Mode) {
    let place = Place::new(mode, &[]);
    let root = place.mount.path().to_owned();
    place.write("f", 1);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    let hidden = empty(&place);
    // Nothing waits, and yet nobody can say that the remote has everything.
    let synced = kvfs(&["sync", "--remote", "--timeout", "2"], &[&root]);
    assert_eq!(synced.status.code(), Some(1), "{synced:?}");
    restore(&hidden, &place.remote);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    let hidden = empty(&place);
    let later = place.write("later", 3);
    eventually("the remote to count as down", || {
        place.mount.status("remote_state").starts_with("down").then_some(())
    });
    restore(&hidden, &place.remote);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    let paths: Vec<_> = later.iter().map(|(path, _)| path.as_path()).collect();
    printed(&kvfs(&["evict"], &paths));
    assert!(paths.iter().all(|path| tier(path) == "remote"));
    assert_same(&later);
}

/// Only the marker is back: what the remote had is asked for before the last copy here goes.
fn a_copy_that_is_gone_is_made_again_before_the_disks_goes(mode: Mode) {
    let place = Place::new(mode, &[]);
    let root = place.mount.path().to_owned();
    let files = place.write("f", 3);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    std::fs::remove_dir_all(place.remote.join("blobs")).unwrap();
    std::fs::create_dir(place.remote.join("blobs")).unwrap();
    let paths: Vec<_> = files.iter().map(|(path, _)| path.as_path()).collect();
    kvfs(&["evict"], &paths);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    let errors = place.mount.errors();
    // Found before one of them leaves, or by a look at copies by turns.
    let is_told = |line: &String| {
        line.contains("is made again") || line.contains("its copy in the remote is gone")
    };
    assert!(errors.iter().any(is_told), "{errors:?}");
    printed(&kvfs(&["evict"], &paths));
    assert!(paths.iter().all(|path| tier(path) == "remote"));
    assert_same(&files);
}

/// Where the remote's server lost a part of an object, the last good copy is the disk's. What is in the way of one keeps
/// no other from leaving.
fn copies_that_are_not_whole_are_seen_before_the_disks_goes(mode: Mode) {
    let place = Place::new(mode, &[]);
    let root = place.mount.path().to_owned();
    let files = place.write("f", 4);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    let shards = std::fs::read_dir(place.remote.join("blobs")).unwrap().flatten();
    let blobs = shards.flat_map(|shard| std::fs::read_dir(shard.path()).unwrap().flatten());
    let blobs: Vec<_> = blobs.map(|blob| blob.path()).collect();
    let blob_of = |index: usize| {
        let mut found = blobs.iter().filter(|blob| std::fs::read(blob).unwrap() == files[index].1);
        found.next().unwrap()
    };
    let (cut, emptied, blocked) = (blob_of(0), blob_of(1), blob_of(2));
    std::fs::File::options().write(true).open(cut).unwrap().set_len(100).unwrap();
    std::fs::write(emptied, "").unwrap();
    std::fs::remove_file(blocked).unwrap();
    std::fs::create_dir(blocked).unwrap();
    let paths: Vec<_> = files.iter().map(|(path, _)| path.as_path()).collect();
    kvfs(&["evict"], &paths);
    assert_eq!(tier(paths[2]), "ssd");
    eventually("what cannot be brought there to be told", || {
        let reason = place.mount.status("state_reason");
        reason.contains("not a file").then_some(())
    });
    for (index, path) in paths.iter().enumerate().filter(|(index, _)| *index != 2) {
        printed(&kvfs(&["evict"], &[path]));
        assert_eq!(tier(path), "remote", "{index}");
    }
    assert_same(&files);
}

/// A miss is one as long as the place is empty; the names stay.
fn names_outlive_an_emptied_place(mode: Mode) {
    let place = Place::new(mode, &["--on-corrupt", "miss"]);
    let root = place.mount.path().to_owned();
    let files = place.write("f", 2);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    let paths: Vec<_> = files.iter().map(|(path, _)| path.as_path()).collect();
    printed(&kvfs(&["evict"], &paths));
    let hidden = empty(&place);
    for path in &paths {
        assert_errno(open(path, libc::O_RDONLY), libc::ENOENT);
    }
    assert_eq!(place.mount.status("state"), "degraded");
    assert_eq!(place.mount.status("damaged_files"), "0");
    restore(&hidden, &place.remote);
    printed(&kvfs(&["sync", "--remote"], &[&root]));
    assert_same(&files);
}
