//! Files move when somebody asks, and stay when they are pinned.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::common::sys::{
    assert_errno, getxattr, listxattr, map, open, removexattr, rename, setxattr, sync_directory,
    write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually};
use crate::faults::files_below;
use crate::place::{FILE_BYTES, Place, complaint, kvfs, printed, tier};

in_both_modes!(
    a_file_leaves_and_comes_back_on_request,
    directories_move_whole_and_rows_stay,
    a_file_in_use_stays_and_is_reported,
    a_wish_ends_when_the_file_changes,
    what_cannot_move_is_refused,
    memory_takes_what_is_promoted,
    a_pinned_file_stays_where_it_is,
    pins_outlive_the_mount,
    a_pin_stays_where_the_same_page_comes_again,
    a_page_that_is_away_is_renamed_without_its_bytes,
    what_is_not_permitted_is_not_called_pinned,
    a_mount_for_reading_fetches_and_uploads_nothing,
);

const TIER: &str = "user.kvfs.tier";
const PIN: &str = "user.kvfs.pin";
const MOVING: &str = "user.kvfs.moving";

/// Asks for a tier. The release of a file that was just closed may be on its way.
fn ask(path: &Path, tier: &str) {
    eventually("the file to be at rest", || match setxattr(path, TIER, tier.as_bytes()) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => None,
        outcome => {
            outcome.unwrap();
            Some(())
        }
    });
}

fn a_file_leaves_and_comes_back_on_request(mode: Mode) {
    let place = Place::new(mode, &[]);
    let files = place.write("f", 2);
    let (path, bytes) = &files[0];
    ask(path, "remote");
    eventually("the file to leave", || (tier(path) == "remote").then_some(()));
    assert_errno(getxattr(path, MOVING), libc::ENODATA);
    assert_eq!(tier(&files[1].0), "ssd", "nobody asked the other one to go");
    eventually("its bytes to be gone", || (place.mount.objects().len() == 1).then_some(()));
    setxattr(path, TIER, b"remote").unwrap();
    setxattr(path, TIER, b"ssd").unwrap();
    assert_eq!(tier(path), "ssd");
    assert!(std::fs::read(path).unwrap() == *bytes);
    assert_eq!(place.mount.metric("kvfs_moves_total{from=\"remote\",to=\"ssd\"}"), 1);
    assert_eq!(place.mount.status("errors"), "0");
}

fn directories_move_whole_and_rows_stay(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    let mut pages = Vec::new();
    for (layer, start) in [(0, 0), (0, 32), (1, 0), (1, 32)] {
        let path = model.page_path(&place.mount, "a", layer, start);
        let bytes = model.page(layer, start, start + u64::from(layer));
        write_and_close(&path, &bytes).unwrap();
        pages.push((path, bytes));
    }
    let tail = model.tail_path(&place.mount, "a", 0, 64);
    write_and_close(&tail, &model.rows(7, 3)).unwrap();
    write_and_close(model.tokens_path(&place.mount, "a"), &[0; 8]).unwrap();
    let sequence = model.sequence(&place.mount, "a");
    write_and_close(sequence.join("positions.json"), b"{}").unwrap();

    assert_eq!(printed(&kvfs(&["evict"], &[&sequence])), "evicted 4 files\n");
    assert!(pages.iter().all(|(path, _)| tier(path) == "remote"));
    assert_eq!(tier(&tail), "ssd");
    place.mount.crash();
    // The disk may have a copy again whose removal the crash came before.
    printed(&kvfs(&["evict"], &[&sequence]));
    assert!(pages.iter().all(|(path, _)| tier(path) == "remote"));
    assert_eq!(printed(&kvfs(&["promote"], &[&sequence])), "promoted 4 files\n");
    for (path, bytes) in &pages {
        assert_eq!(tier(path), "ssd");
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
    let said = complaint(&kvfs(&["evict"], &[&tail, &pages[0].0]));
    assert!(said.contains("tail: files of this kind do not move"), "{said}");
    assert_eq!(tier(&pages[0].0), "remote", "the others move all the same");
}

fn a_file_in_use_stays_and_is_reported(mode: Mode) {
    let place = Place::new(mode, &[]);
    let files = place.write("f", 2);
    let (path, bytes) = &files[0];
    let reader = open(path, libc::O_RDONLY).unwrap();
    let mapped = map(&reader);
    let said = complaint(&kvfs(&["evict", "--to", "remote"], &[path, &files[1].0]));
    assert!(said.contains("f0: somebody has it open or mapped"), "{said}");
    assert_eq!((tier(path), tier(&files[1].0)), ("ssd".to_owned(), "remote".to_owned()));
    assert_errno(getxattr(path, MOVING), libc::ENODATA);
    // Asked without a deadline, it leaves after the last close.
    setxattr(path, TIER, b"remote").unwrap();
    eventually("it to be found in use", || {
        (getxattr(path, MOVING).ok()? == "in_use").then_some(())
    });
    assert!(mapped[..] == bytes[..]);
    drop((mapped, reader));
    eventually("the file to leave", || (tier(path) == "remote").then_some(()));
    assert!(std::fs::read(path).unwrap() == *bytes);
}

fn a_wish_ends_when_the_file_changes(mode: Mode) {
    let place = Place::new(mode, &[]);
    let (path, mut bytes) = place.write("f", 1).remove(0);
    place.wait_until_uploaded();
    let reader = open(&path, libc::O_RDONLY).unwrap();
    setxattr(&path, TIER, b"remote").unwrap();
    assert!(getxattr(&path, MOVING).is_ok());
    let writer = std::fs::File::options().write(true).open(&path).unwrap();
    assert_errno(getxattr(&path, MOVING), libc::ENODATA);
    assert_errno(setxattr(&path, TIER, b"remote"), libc::EBUSY);
    bytes[9] ^= 1;
    writer.write_all_at(&bytes[9..10], 9).unwrap();
    drop((reader, writer));
    place.wait_until_uploaded();
    assert_eq!(place.mount.status("remote_asked_files"), "0");
    assert_eq!(tier(&path), "ssd");
    assert!(std::fs::read(&path).unwrap() == bytes);
    // Asked again and withdrawn.
    let reader = open(&path, libc::O_RDONLY).unwrap();
    setxattr(&path, TIER, b"remote").unwrap();
    removexattr(&path, TIER).unwrap();
    assert_errno(removexattr(&path, TIER), libc::ENODATA);
    drop(reader);
    // A removed file takes its wish along.
    let kept = open(&path, libc::O_RDONLY).unwrap();
    setxattr(&path, TIER, b"remote").unwrap();
    std::fs::remove_file(&path).unwrap();
    eventually("the wish to end", || {
        (place.mount.status("remote_asked_files") == "0").then_some(())
    });
    drop(kept);
}

fn what_cannot_move_is_refused(mode: Mode) {
    let place = Place::new(mode, &[]);
    let (path, _) = place.write("f", 1).remove(0);
    for word in ["", "disk", "remote ", "REMOTE"] {
        assert_errno(setxattr(&path, TIER, word.as_bytes()), libc::EINVAL);
    }
    let directory = path.parent().unwrap();
    assert_errno(setxattr(&path, TIER, b"ram"), libc::EOPNOTSUPP);
    assert_errno(setxattr(directory, TIER, b"disk"), libc::EINVAL);
    assert_errno(setxattr(directory, TIER, b"ram"), libc::EOPNOTSUPP);
    assert_errno(setxattr(&path, "user.kvfs.encoding", b"raw"), libc::EOPNOTSUPP);
    assert_errno(setxattr(directory, PIN, b"yes"), libc::EINVAL);
    assert_errno(setxattr(&path, PIN, b"yes"), libc::EINVAL);
    let model = Model::small();
    model.install(&place.mount);
    let manifest = model.directory(&place.mount).join("manifest.json");
    assert_errno(setxattr(manifest, TIER, b"remote"), libc::EOPNOTSUPP);

    let alone = crate::common::Mount::new(mode);
    let path = alone.files("f");
    write_and_close(&path, &vec![7; FILE_BYTES]).unwrap();
    assert_errno(setxattr(&path, TIER, b"remote"), libc::EOPNOTSUPP);
    assert_errno(setxattr(&path, TIER, b"ram"), libc::EOPNOTSUPP);
    setxattr(&path, TIER, b"ssd").unwrap();
    let said = complaint(&kvfs(&["evict", "--to", "remote"], &[&path]));
    assert!(said.contains("the mount has no remote"), "{said}");
    let said = complaint(&kvfs(&["promote"], &[Path::new("/")]));
    assert!(said.contains("is not in a mount of kvfs"), "{said}");
}

fn memory_takes_what_is_promoted(mode: Mode) {
    let place = Place::new(mode, &["--ram", "12M"]);
    let files = place.write("f", 4);
    let paths: Vec<_> = files.iter().map(|(path, _)| path.as_path()).collect();
    assert_eq!(printed(&kvfs(&["promote"], &paths[..2])), "promoted 2 files\n");
    for (path, bytes) in &files[..2] {
        assert_eq!(tier(path), "ram");
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
    assert_eq!(place.mount.metric("kvfs_moves_total{from=\"ssd\",to=\"ram\"}"), 2);
    // What is written in place afterwards is neither lost nor mixed up with the disk's copy.
    let mut bytes = files[0].1.clone();
    bytes[70_000] ^= 1;
    let writer = std::fs::File::options().write(true).open(paths[0]).unwrap();
    writer.write_all_at(&bytes[70_000..70_001], 70_000).unwrap();
    drop(writer);
    assert!(std::fs::read(paths[0]).unwrap() == bytes);
    printed(&kvfs(&["evict", "--to", "ssd"], &paths[..2]));
    assert_eq!(tier(paths[0]), "ssd");
    assert!(std::fs::read(paths[0]).unwrap() == bytes);
    // Beyond the budget something leaves memory again, which is never exceeded.
    printed(&kvfs(&["promote"], &paths));
    assert!(place.mount.status_number("ram_used_bytes") <= 12 << 20);
    printed(&kvfs(&["evict"], &paths));
    assert!(paths.iter().all(|path| tier(path) == "remote"));
    assert_eq!(place.mount.status("ram_used_bytes"), "0");
    assert!(std::fs::read(paths[0]).unwrap() == bytes);
    assert_eq!(place.mount.status("errors"), "0");
}

fn a_pinned_file_stays_where_it_is(mode: Mode) {
    let place = Place::new(mode, &["--ssd", "20M", "--ram", "12M"]);
    let (pinned, bytes) = place.write("pinned", 1).remove(0);
    assert_errno(getxattr(&pinned, PIN), libc::ENODATA);
    setxattr(&pinned, PIN, b"1").unwrap();
    assert_eq!(getxattr(&pinned, PIN).unwrap(), "1");
    assert!(listxattr(&pinned).unwrap().is_empty());
    assert_errno(setxattr(&pinned, TIER, b"remote"), libc::EPERM);
    ask(&pinned, "ram");
    let others = place.write("f", 8);
    for (path, _) in &others {
        ask(path, "ram");
    }
    eventually("the others to make room", || {
        (place.mount.status_number("ssd_used_bytes") <= 20 << 20).then_some(())
    });
    assert_eq!(tier(&pinned), "ram");
    ask(&pinned, "ssd");
    assert_eq!(tier(&pinned), "ssd");
    assert!(std::fs::read(&pinned).unwrap() == bytes);
    let said = complaint(&kvfs(&["evict"], &[&pinned]));
    assert!(said.contains("it is pinned"), "{said}");
    setxattr(&pinned, PIN, b"0").unwrap();
    assert_errno(removexattr(&pinned, PIN), libc::ENODATA);
    printed(&kvfs(&["evict"], &[&pinned]));
    assert_eq!(tier(&pinned), "remote");
}

fn pins_outlive_the_mount(mode: Mode) {
    let mut place = Place::new(mode, &["--ssd", "20M"]);
    let (pinned, bytes) = place.write("pinned", 1).remove(0);
    setxattr(&pinned, PIN, b"1").unwrap();
    place.mount.remount();
    assert_eq!(getxattr(&pinned, PIN).unwrap(), "1");
    place.write("f", 8);
    eventually("the others to make room", || {
        (place.mount.status_number("ssd_used_bytes") <= 20 << 20).then_some(())
    });
    assert_eq!(tier(&pinned), "ssd");
    assert!(std::fs::read(&pinned).unwrap() == bytes);
    removexattr(&pinned, PIN).unwrap();
    ask(&pinned, "remote");
    eventually("the file to leave", || (tier(&pinned) == "remote").then_some(()));
}

fn a_pin_stays_where_the_same_page_comes_again(mode: Mode) {
    let mut place = Place::new(mode, &["--ram", "12M"]);
    let model = Model::small();
    model.install(&place.mount);
    let page = model.page(0, 0, 1);
    let path = model.page_path(&place.mount, "a", 0, 0);
    let again = path.with_file_name(".again");
    write_and_close(&path, &page).unwrap();
    let write_again = |path: &Path, pin: bool| {
        write_and_close(&again, &page).unwrap();
        if pin {
            setxattr(&again, PIN, b"1").unwrap();
        }
        let inode = std::fs::metadata(path).unwrap().ino();
        rename(&again, path).unwrap();
        assert_eq!(std::fs::metadata(path).unwrap().ino(), inode, "the page that was there stays");
    };
    setxattr(&path, PIN, b"1").unwrap();
    write_again(&path, false);
    assert_eq!(getxattr(&path, PIN).unwrap(), "1");
    removexattr(&path, PIN).unwrap();
    write_again(&path, true);
    assert_eq!(getxattr(&path, PIN).unwrap(), "1");
    sync_directory(place.mount.path()).unwrap();
    place.mount.crash();
    assert_eq!(getxattr(&path, PIN).unwrap(), "1");
}

/// Without its bytes: they are in no remote at that time.
fn a_page_that_is_away_is_renamed_without_its_bytes(mode: Mode) {
    let place = Place::new(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    let page = model.page(0, 0, 1);
    let path = model.page_path(&place.mount, "a", 0, 0);
    write_and_close(&path, &page).unwrap();
    ask(&path, "remote");
    eventually("the page to leave", || {
        (place.mount.status("remote_only_objects") == "1").then_some(())
    });
    let (blobs, hidden) = (place.remote.join("blobs"), place.remote.join("hidden"));
    rename(&blobs, &hidden).unwrap();
    let there = model.page_path(&place.mount, "b", 0, 0);
    rename(&path, &there).unwrap();
    let aside = place.mount.files("aside");
    rename(&there, &aside).unwrap();
    rename(&aside, &there).unwrap();
    assert_errno(std::fs::read(&there), libc::EIO);
    assert_eq!(tier(&there), "remote");
    rename(&hidden, &blobs).unwrap();
    assert!(std::fs::read(&there).unwrap() == page);
}

fn what_is_not_permitted_is_not_called_pinned(mode: Mode) {
    let place = Place::new(mode, &[]);
    // The kernel allows attributes of files and directories alone.
    let pipe = place.mount.files("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let said = complaint(&kvfs(&["evict"], &[&pipe]));
    assert!(said.contains("not permitted") && !said.contains("pinned"), "{said}");
}

fn a_mount_for_reading_fetches_and_uploads_nothing(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    let files = place.write("f", 3);
    place.wait_until_uploaded();
    for (path, _) in &files[..2] {
        printed(&kvfs(&["evict"], &[path]));
    }
    assert!(place.mount.unmount().success());
    let before = files_below(&place.remote);
    let options = ["--remote", place.remote.to_str().unwrap(), "--read-only"];
    let mount = Mount::of_store_with(mode, &options, place.mount.store());
    eventually("the remote", || (mount.status("remote_state") == "up").then_some(()));
    for (path, bytes) in &files {
        let path = mount.files(path.file_name().unwrap());
        assert!(std::fs::read(&path).unwrap() == *bytes);
        assert_errno(setxattr(&path, TIER, b"remote"), libc::EROFS);
    }
    assert_errno(open(mount.files("new"), libc::O_WRONLY | libc::O_CREAT), libc::EROFS);
    assert_eq!(mount.status("errors"), "0");
    let said = complaint(&kvfs(&["sync", "--remote"], &[mount.path()]));
    assert!(said.contains("is mounted read-only: it sends nothing to its remote"), "{said}");
    drop(mount);
    assert_eq!(files_below(&place.remote), before, "it publishes nothing");
    place.mount.mount();
    crate::place::assert_same(&files);
}

/// Files of more than 1 GiB have no checksum at rest: they get one to move.
#[test]
fn a_file_without_a_checksum_gets_one_and_moves() {
    crate::require!(fuse);
    let place = Place::new(Mode::Passthrough, &["--cold", "zstd:1"]);
    let path = place.mount.files("large");
    let length = (1 << 30) + 4096;
    let file = std::fs::File::create_new(&path).unwrap();
    file.set_len(length).unwrap();
    file.write_all_at(b"end", length - 3).unwrap();
    drop(file);
    crate::common::sys::sync_directory(place.mount.path()).unwrap();
    printed(&kvfs(&["evict"], &[&path]));
    assert_eq!(tier(&path), "remote");
    let mut found = [0; 4];
    open(&path, libc::O_RDONLY).unwrap().read_exact_at(&mut found, length - 4).unwrap();
    assert_eq!(&found, b"\0end");
}
