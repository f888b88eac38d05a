//! A store on read-only media can be mounted for reading and checked, and nothing else.

use std::fs::Permissions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::SystemTime;

use kvfs::reader::longest_prefix;

use crate::common::disk::SmallDisk;
use crate::common::forks::{self, succeed};
use crate::common::mount::{files_below, scratch_directory};
use crate::common::sys::{
    assert_errno, getxattr, open, removexattr, rename, set_modified, setxattr, sync_directory,
    write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually, fill};
use crate::full::every_kind_of_write;
use crate::writer::Sequence;

const LARGE: usize = 300_000;
const READ_ONLY: &[&str] = &["--read-only"];

/// Makes both tests of a scenario.
macro_rules! on_read_only_media {
    ($($scenario:ident),+ $(,)?) => {
        $(mod $scenario {
            #[test]
            fn passthrough() {
                crate::require!(fuse, root, r#loop);
                super::$scenario(crate::common::Mode::Passthrough);
            }
            #[test]
            fn served() {
                crate::require!(fuse, root, r#loop);
                super::$scenario(crate::common::Mode::Served);
            }
        })+
    };
}

on_read_only_media!(
    everything_can_be_read_and_nothing_changed,
    what_a_crash_left_is_read_as_far_as_it_was_committed,
    what_is_only_encoded_comes_into_memory,
    what_only_the_remote_has_comes_into_memory,
    a_damaged_file_fails_and_keeps_its_name,
);

fn kvfs(words: &[&str], paths: &[&Path]) -> Output {
    forks::output(Command::new(env!("CARGO_BIN_EXE_kvfs")).args(words).args(paths))
}

#[track_caller]
fn assert_refused(outcome: &Output) {
    let text = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert_eq!(outcome.status.code(), Some(1), "{text}");
    assert!(text.contains("read-only filesystem") && text.contains("--read-only"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[track_caller]
fn assert_checked(store: &Path) -> String {
    let outcome = kvfs(&["fsck"], &[store]);
    let text = String::from_utf8_lossy(&[outcome.stdout, outcome.stderr].concat()).into_owned();
    assert!(outcome.status.success() && text.contains("no errors"), "{text}");
    text
}

/// One of everything: files, a page and a tail of each layer, their tokens, attributes, links.
fn fill_store(mount: &Mount) -> (Model, Sequence) {
    let model = Model::small();
    model.install(mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(mount, &model, &(0..40).collect::<Vec<u32>>());
    for sequence in ["a", "b", "rows"] {
        model.layer(mount, sequence, 0);
    }
    write_and_close(mount.files("kept"), &fill(8, LARGE)).unwrap();
    write_and_close(mount.files("in place"), &fill(9, LARGE)).unwrap();
    setxattr(mount.files("kept"), "user.label", b"mine").unwrap();
    std::os::unix::fs::symlink("kept", mount.files("link")).unwrap();
    std::fs::create_dir(mount.files("empty")).unwrap();
    (model, sequence)
}

fn assert_readable(mount: &Mount, model: &Model, sequence: &Sequence) {
    assert!(std::fs::read(mount.files("kept")).unwrap() == fill(8, LARGE));
    assert!(std::fs::read(mount.files("link")).unwrap() == fill(8, LARGE));
    assert_eq!(getxattr(mount.files("kept"), "user.label").unwrap(), "mine");
    assert_eq!(getxattr(mount.files("kept"), "user.kvfs.tier").unwrap(), "ssd");
    let mut names: Vec<_> = std::fs::read_dir(mount.files("")).unwrap().collect();
    names.retain(|entry| entry.as_ref().unwrap().file_name() != "new");
    assert_eq!(names.len(), 4);
    for layer in 0..2 {
        let page = sequence.page(mount, model, layer, 0);
        assert_eq!(std::fs::read(page).unwrap().len(), model.page(0, 0, 1).len());
        let tail = model.tail_path(mount, "chat", layer, 32);
        assert_eq!(std::fs::read(tail).unwrap().len(), model.row_bytes() * 8);
    }
    let prompt: Vec<u32> = (0..37).chain([7]).collect();
    let found = longest_prefix(&model.directory(mount), &prompt).unwrap();
    assert_eq!((found.tokens, found.sequence), (37, Some(model.sequence(mount, "chat"))));
}

/// What a program can ask for beside what needs space.
fn every_other_change(mount: &Mount, model: &Model, sequence: &Sequence) {
    let (kept, rofs) = (mount.files("kept"), libc::EROFS);
    for flags in [libc::O_RDWR, libc::O_WRONLY | libc::O_APPEND, libc::O_RDONLY | libc::O_TRUNC] {
        assert_errno(open(&kept, flags), rofs);
    }
    let directory = model.directory(mount);
    for name in ["slots/new.bin", "slots/chat.bin", "prefixes/new", ".kvfs/status"] {
        let at = if name.starts_with('.') { mount.path() } else { &directory };
        assert_errno(open(at.join(name), libc::O_WRONLY | libc::O_CREAT), rofs);
    }
    let block = format!("blocks/{}.000", "0".repeat(64));
    assert_errno(open(directory.join(block), libc::O_WRONLY | libc::O_CREAT), rofs);
    let tail = model.tail_path(mount, "chat", 0, 32);
    assert_errno(open(tail, libc::O_WRONLY | libc::O_APPEND), rofs);
    assert_errno(std::fs::remove_file(&kept), rofs);
    assert_errno(std::fs::remove_file(sequence.page(mount, model, 0, 0)), rofs);
    assert_errno(std::fs::remove_dir(mount.files("empty")), rofs);
    assert_errno(rename(&kept, mount.files("moved")), rofs);
    assert_errno(rename(&kept, mount.files("in place")), rofs);
    assert_errno(std::fs::set_permissions(&kept, Permissions::from_mode(0o600)), rofs);
    assert_errno(std::os::unix::fs::chown(&kept, Some(1001), None), rofs);
    assert_errno(set_modified(&kept, SystemTime::UNIX_EPOCH), rofs);
    let made = nix::unistd::mkfifo(&mount.files("pipe"), nix::sys::stat::Mode::S_IRWXU);
    assert_eq!(made, Err(nix::errno::Errno::EROFS));
    assert_errno(setxattr(&kept, "user.kvfs.pin", b"1"), rofs);
    assert_errno(setxattr(&kept, "user.kvfs.tier", b"ram"), rofs);
    assert_errno(removexattr(&kept, "user.label"), rofs);
    assert_errno(removexattr(&kept, "user.kvfs.pin"), rofs);
    assert_errno(setxattr(mount.path(), "user.kvfs.gc", b"collect"), rofs);
    assert_errno(setxattr(mount.files(""), "user.kvfs.quota", b"1"), rofs);
    let removed = nix::unistd::truncate(&kept, 0);
    assert_eq!(removed, Err(nix::errno::Errno::EROFS));
    assert_eq!(kept.metadata().unwrap().mode() & 0o777, 0o644);
}

/// Ext4 that has given up after an error says so in none of the flags of its mount.
#[test]
fn a_disk_that_has_given_up_can_be_read_and_checked() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store(Mode::Served, &store);
    let (model, sequence) = fill_store(&mount);
    assert!(mount.unmount().success());
    disk.make_read_only();
    let log = mount.beside("log");
    let words = ["mount", "--foreground", "--log", log.to_str().unwrap()];
    assert_refused(&kvfs(&words, &[&store, mount.path()]));
    assert_refused(&kvfs(&["fsck", "--repair"], &[&store]));
    assert_checked(&store);
    let mount = Mount::of_store_with(Mode::Served, READ_ONLY, &store);
    assert_readable(&mount, &model, &sequence);
}

fn everything_can_be_read_and_nothing_changed(mode: Mode) {
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store(mode, &store);
    let (model, sequence) = fill_store(&mount);
    assert!(mount.unmount().success());
    disk.remount("ro");
    let log = mount.beside("log");
    let words = ["mount", "--foreground", "--log", log.to_str().unwrap()];
    assert_refused(&kvfs(&words, &[&store, mount.path()]));
    for words in [&["fsck", "--repair"], &["fsck", "--rebuild"]] {
        assert_refused(&kvfs(words, &[&store]));
    }
    assert_checked(&store);
    let mut mount = Mount::of_store_with(mode, READ_ONLY, &store);
    assert_eq!(mount.status("state"), "read-only media");
    assert_eq!(mount.metric("kvfs_degraded"), 0);
    for (what, outcome) in every_kind_of_write(&mount, &model, "before") {
        let code = crate::common::sys::errno(&outcome);
        assert_eq!(code, libc::EROFS, "{what}: {outcome:?}");
    }
    every_other_change(&mount, &model, &sequence);
    assert_readable(&mount, &model, &sequence);
    let slot = std::fs::read(model.directory(&mount).join("slots/chat.bin")).unwrap();
    assert!(!slot.is_empty());
    // Nothing is there to be synced, and that is no error.
    open(mount.files("kept"), libc::O_RDONLY).unwrap().sync_all().unwrap();
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.status("uncommitted_changes"), "0");
    assert_eq!(mount.status("errors"), "0");
    let outcome = kvfs(&["fsck"], &[&store]);
    let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
    assert!(outcome.status.success(), "both only read: {text}");
    assert!(mount.unmount().success(), "{}", mount.log());
    assert!(!mount.log().contains("ERROR"), "{}", mount.log());
    // Where it can be written again, nothing is different, and the option refuses clients the same.
    disk.remount("rw");
    let mut mount = Mount::of_store_with(mode, READ_ONLY, &store);
    every_other_change(&mount, &model, &sequence);
    assert_readable(&mount, &model, &sequence);
    assert_eq!(mount.status("state"), "ok");
    assert!(mount.unmount().success(), "{}", mount.log());
    let mount = Mount::of_store(mode, &store);
    assert_readable(&mount, &model, &sequence);
    assert_eq!(mount.status("state"), "ok");
}

fn what_a_crash_left_is_read_as_far_as_it_was_committed(mode: Mode) {
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(mode, &["--commit-interval", "3600"], &store);
    let (model, sequence) = fill_store(&mount);
    sync_directory(mount.path()).unwrap();
    // Found in the index, which a crash does not forget.
    assert_readable(&mount, &model, &sequence);
    sync_directory(mount.path()).unwrap();
    let grown = open(mount.files("in place"), libc::O_RDWR).unwrap();
    grown.write_all_at(b"more", LARGE as u64).unwrap();
    drop(grown);
    write_and_close(mount.files("lost"), &fill(1, LARGE)).unwrap();
    mount.kill();
    succeed(Command::new("umount").arg("-l").arg(mount.path()));
    disk.remount("ro");
    let told = assert_checked(&store);
    assert!(told.contains("the next mount tidies up"), "{told}");
    let mut mount = Mount::of_store_with(mode, READ_ONLY, &store);
    assert_readable(&mount, &model, &sequence);
    assert!(!mount.files("lost").exists());
    assert_eq!(mount.files("in place").metadata().unwrap().len(), LARGE as u64 + 4);
    assert_eq!(mount.status("state"), "read-only media");
    let mut another = Mount::of_store_with(mode, READ_ONLY, &store);
    assert_readable(&another, &model, &sequence);
    assert!(mount.unmount().success() && another.unmount().success());
    assert!(!mount.log().contains("ERROR"), "{}", mount.log());
    disk.remount("rw");
    let mount = Mount::of_store(mode, &store);
    assert_readable(&mount, &model, &sequence);
}

fn what_is_only_encoded_comes_into_memory(mode: Mode) {
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let options = ["--cold", "zstd:1", "--ssd", "16M", "--commit-interval", "0.05"];
    let mut mount = Mount::of_store_with(mode, &options, &store);
    let bytes = vec![7; 4 << 20];
    for number in 0..5 {
        write_and_close(mount.files(number.to_string()), &bytes).unwrap();
    }
    let is_encoded = |path: &PathBuf| getxattr(path, "user.kvfs.encoding").unwrap() != "raw";
    let paths = (0..5).map(|number| mount.files(number.to_string()));
    let path = eventually("a file to be encoded", || paths.clone().find(is_encoded));
    let name = path.file_name().unwrap();
    assert!(mount.unmount().success());
    disk.remount("ro");
    assert_checked(&store);
    let mut mount = Mount::of_store_with(mode, READ_ONLY, &store);
    assert_errno(open(mount.files(name), libc::O_RDONLY), libc::EROFS);
    assert!(mount.unmount().success());
    let mount = Mount::of_store_with(mode, &["--read-only", "--ram", "8M"], &store);
    assert!(std::fs::read(mount.files(name)).unwrap() == bytes);
    assert_eq!(getxattr(mount.files(name), "user.kvfs.tier").unwrap(), "ram");
}

fn what_only_the_remote_has_comes_into_memory(mode: Mode) {
    let (disk, elsewhere) = (SmallDisk::new(), scratch_directory());
    let store = disk.mountpoint.join("store");
    let remote = elsewhere.path().to_str().unwrap();
    let mut mount = Mount::of_store_with(mode, &["--remote", remote], &store);
    let bytes = fill(8, LARGE);
    write_and_close(mount.files("far"), &bytes).unwrap();
    let evicted = kvfs(&["evict"], &[&mount.files("far")]);
    assert!(evicted.status.success(), "{}", String::from_utf8_lossy(&evicted.stderr));
    assert_eq!(getxattr(mount.files("far"), "user.kvfs.tier").unwrap(), "remote");
    assert!(mount.unmount().success());
    let before = files_below(elsewhere.path());
    disk.remount("ro");
    let mut mount = Mount::of_store_with(mode, &["--read-only", "--remote", remote], &store);
    assert_errno(open(mount.files("far"), libc::O_RDONLY), libc::EROFS);
    assert!(mount.unmount().success());
    let options = ["--read-only", "--remote", remote, "--ram", "8M"];
    let mut mount = Mount::of_store_with(mode, &options, &store);
    assert!(std::fs::read(mount.files("far")).unwrap() == bytes);
    assert!(mount.unmount().success());
    assert_eq!(files_below(elsewhere.path()), before, "it publishes nothing");
}

fn a_damaged_file_fails_and_keeps_its_name(mode: Mode) {
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store(mode, &store);
    write_and_close(mount.files("damaged"), &fill(8, LARGE)).unwrap();
    assert!(mount.unmount().success());
    let object = mount.objects().pop().unwrap();
    open(object, libc::O_WRONLY).unwrap().write_all_at(b"damage", 1000).unwrap();
    disk.remount("ro");
    for (word, code) in [("eio", libc::EIO), ("miss", libc::ENOENT)] {
        let options = ["--read-only", "--on-corrupt", word];
        let mut mount = Mount::of_store_with(mode, &options, &store);
        for _ in 0..2 {
            assert_errno(open(mount.files("damaged"), libc::O_RDONLY), code);
            assert!(mount.files("damaged").exists());
        }
        assert_ne!(mount.status("errors"), "0");
        // What happens is told as long as the mount lives: the one before left nothing.
        let told = kvfs(&["log", "--json"], &[mount.path()]);
        let told = String::from_utf8(told.stdout).unwrap();
        assert!((1..=2).contains(&told.lines().count()), "{told}");
        assert!(told.lines().all(|line| line.contains("damaged")), "{told}");
        assert!(mount.unmount().success());
    }
    assert_eq!(kvfs(&["fsck"], &[&store]).status.code(), Some(3));
}
