//! Remotes that are away, full, foreign, damaged or silent: files on the disk do not notice, and
//! what the remote alone has is either right or an error.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::disk::SmallDisk;
use crate::common::forks::{output, succeed};
use crate::common::mount::scratch_directory;
use crate::common::sys::{assert_errno, open, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill};
use crate::place::{BUDGET, BUDGET_BYTES, FILE_BYTES, Place, assert_same, complaint, kvfs, tier};

in_both_modes!(
    a_remote_that_is_not_there_yet_is_waited_for,
    what_is_no_remote_is_left_alone,
    damaged_copies_are_errors_and_never_wrong_bytes,
    stores_that_share_a_remote_keep_one_copy_and_mend_a_damaged_one,
    tar_restores_files_that_are_only_remote,
    garbage_beside_the_copies_disturbs_nothing,
    a_budget_below_one_file_lets_it_leave_and_come_back,
);

/// Lets a file system go when the test ends.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        output(Command::new("umount").arg("-l").arg(&self.0));
    }
}

/// Everything below a directory that is no directory.
pub(crate) fn files_below(directory: &Path) -> Vec<PathBuf> {
    let (mut files, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(path.read_dir().unwrap().map(|entry| entry.unwrap().path()));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn options<'a>(remote: &'a Path, further: &[&'a str]) -> Vec<&'a str> {
    let common = ["--remote", remote.to_str().unwrap(), "--ssd", BUDGET];
    [&common, ["--commit-interval", "0.05", "--rebuild-from", "none"].as_slice(), further].concat()
}

fn assert_local_files_work(mount: &Mount, name: &str) {
    let path = mount.files(name);
    write_and_close(&path, b"local").unwrap();
    sync_directory(mount.path()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"local");
}

fn is_up(mount: &Mount) -> Option<()> {
    (mount.status("remote_state") == "up").then_some(())
}

fn a_remote_that_is_not_there_yet_is_waited_for(mode: Mode) {
    let directory = scratch_directory();
    let remote = directory.path().join("remote");
    let mount = Mount::with_options(mode, &options(&remote, &[]));
    assert_local_files_work(&mount, "early");
    eventually("the reason", || mount.status("remote_state").starts_with("down: ").then_some(()));
    std::fs::create_dir(&remote).unwrap();
    eventually("the remote", || is_up(&mount));
    eventually("the file to be there", || (mount.status("remote_objects") == "1").then_some(()));
}

fn what_is_no_remote_is_left_alone(mode: Mode) {
    let directory = scratch_directory();
    for name in ["photo.jpg", "blobs", "KVFS-REMOTE.bak"] {
        std::fs::write(directory.path().join(name), fill(7, 5000)).unwrap();
    }
    let before = files_below(directory.path());
    let mount = Mount::with_options(mode, &options(directory.path(), &[]));
    assert_local_files_work(&mount, "local");
    eventually("the reason", || mount.status("remote_state").starts_with("down: ").then_some(()));
    assert_eq!(files_below(directory.path()), before);
    // Half of a remote's own marker is none either.
    std::fs::write(directory.path().join("KVFS-REMOTE"), "kvfs-rem").unwrap();
    drop(mount);
    let mount = Mount::with_options(mode, &options(directory.path(), &[]));
    assert_local_files_work(&mount, "local");
    eventually("the reason", || mount.status("remote_state").starts_with("down: ").then_some(()));
}

fn damaged_copies_are_errors_and_never_wrong_bytes(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let blobs = files_below(&place.remote.join("blobs"));
    let healthy: Vec<Vec<u8>> = blobs.iter().map(|blob| std::fs::read(blob).unwrap()).collect();
    for (index, blob) in blobs.iter().enumerate() {
        let mut bytes = healthy[index].clone();
        match index % 3 {
            0 => bytes[FILE_BYTES / 2] ^= 1,
            1 => bytes.truncate(FILE_BYTES - 1),
            _ => bytes.push(0),
        }
        std::fs::write(blob, bytes).unwrap();
    }
    place.mount.remount();
    let mut refused = 0;
    for (path, bytes) in &files {
        if tier(path) == "remote" {
            refused += 1;
            assert_errno(open(path, libc::O_RDONLY), libc::EIO);
            assert_errno(open(path, libc::O_RDWR), libc::EIO);
            assert_eq!(tier(path), "remote", "nothing of it became visible");
        } else {
            assert!(std::fs::read(path).unwrap() == *bytes);
        }
    }
    assert!(refused >= 3);
    // A scrub fetches nothing, and knows what those who opened them found.
    let said = kvfs(&["scrub"], &[place.mount.path()]);
    assert_eq!(said.status.code(), Some(3), "{said:?}");
    let errors = place.mount.errors();
    assert!(errors.iter().any(|line| line.contains("files/f")), "{errors:?}");
    assert_eq!(place.mount.staging(), Vec::<PathBuf>::new());
    for (blob, bytes) in blobs.iter().zip(&healthy) {
        std::fs::write(blob, bytes).unwrap();
    }
    assert_same(&files);
}

fn stores_that_share_a_remote_keep_one_copy_and_mend_a_damaged_one(mode: Mode) {
    let directory = scratch_directory();
    let remote = directory.path().join("remote");
    std::fs::create_dir(&remote).unwrap();
    let first = Mount::with_options(mode, &options(&remote, &[]));
    let bytes = fill(7, FILE_BYTES);
    write_and_close(first.files("same"), &bytes).unwrap();
    let has_one = |mount: &Mount| {
        let is_there = mount.status("remote_objects") == "1";
        (is_there && mount.status("remote_waiting_files") == "0").then_some(())
    };
    eventually("the first copy", || has_one(&first));
    let blobs = files_below(&remote.join("blobs"));
    assert_eq!(blobs.len(), 1);
    let mut damaged = bytes.clone();
    damaged[99] ^= 0x80;
    std::fs::write(&blobs[0], damaged).unwrap();

    let second = Mount::with_options(mode, &options(&remote, &[]));
    write_and_close(second.files("other name"), &bytes).unwrap();
    eventually("the second copy", || has_one(&second));
    assert_eq!(files_below(&remote.join("blobs")), blobs, "the same bytes are stored once");
    assert!(std::fs::read(&blobs[0]).unwrap() == bytes, "what was damaged is right again");
}

fn tar_restores_files_that_are_only_remote(mode: Mode) {
    crate::require!(tar);
    let place = Place::with_budget(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    assert!(files.iter().any(|(path, _)| tier(path) == "remote"));
    let target = scratch_directory();
    let archive = target.path().join("archive.tar");
    let pack = ["-S", "-C", place.mount.path().to_str().unwrap(), "-cf"];
    succeed(Command::new("tar").args(pack).arg(&archive).arg("files"));
    succeed(Command::new("tar").arg("-C").arg(target.path()).arg("-xf").arg(&archive));
    for (path, bytes) in &files {
        let name = path.file_name().unwrap();
        assert!(std::fs::read(target.path().join("files").join(name)).unwrap() == *bytes);
    }
}

/// Every directory of the remote, and itself.
fn directories_below(directory: &Path) -> Vec<PathBuf> {
    let entries = directory.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let inner = entries.filter(|path| path.is_dir()).flat_map(|path| directories_below(&path));
    [directory.to_owned()].into_iter().chain(inner.collect::<Vec<_>>()).collect()
}

fn garbage_beside_the_copies_disturbs_nothing(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--cold", "zstd:1"]);
    let mut files = place.write("f", 6);
    place.wait_until_it_fits();
    eventually("the names to be published", || {
        (place.mount.status("remote_names") == "published").then_some(())
    });
    let blob = files_below(&place.remote.join("blobs")).remove(0);
    let blob = blob.file_name().unwrap().to_str().unwrap();
    let garbage =
        ["core", ".tmp-1234", "notes.txt", "\u{fc}ber", &blob[1..], &format!("{blob}.bak")];
    let mut planted = Vec::new();
    for directory in directories_below(&place.remote) {
        for (seed, name) in (0..).zip(garbage) {
            planted.push(directory.join(name));
            std::fs::write(directory.join(name), fill(seed, 3000)).unwrap();
        }
        std::fs::create_dir(directory.join("zz")).unwrap();
    }
    files.extend(place.write("more", 2));
    place.wait_until_it_fits();
    eventually("the names to be published", || {
        (place.mount.status("remote_names") == "published").then_some(())
    });
    assert_same(&files);
    // An empty store finds everything among it.
    assert!(place.mount.unmount().success());
    std::fs::remove_dir_all(place.mount.store()).unwrap();
    place.mount.mount();
    assert!(place.mount.log().contains("rebuilt from the names of store"));
    assert_same(&files);
    assert_eq!(place.mount.status("errors"), "0");
    assert!(planted.iter().all(|path| path.exists()), "what is not ours is left alone");
}

/// The smallest budget that is accepted, and a file that exceeds it.
fn a_budget_below_one_file_lets_it_leave_and_come_back(mode: Mode) {
    let place = Place::new(mode, &["--ssd", "16M"]);
    let (path, bytes) = (place.mount.files("large"), fill(5, 5 * FILE_BYTES));
    write_and_close(&path, &bytes).unwrap();
    for _ in 0..2 {
        eventually("the file to leave", || {
            (place.mount.status("remote_only_objects") == "1").then_some(())
        });
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
    assert_eq!(place.mount.status("errors"), "0");
}

/// A remote on a tmpfs of its own.
fn small_remote(directory: &Path, size: &str) -> (PathBuf, Mounted) {
    let remote = directory.join("remote");
    std::fs::create_dir(&remote).unwrap();
    let size = format!("size={size}");
    succeed(Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(&remote));
    (remote.clone(), Mounted(remote))
}

fn remount(remote: &Path, how: &str) {
    let how = format!("remount,{how}");
    succeed(Command::new("mount").args(["-o", &how]).arg(remote));
}

fn write_files(mount: &Mount, name: &str, count: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let write = |number| {
        let path = mount.files(format!("{name}{number}"));
        let bytes = fill(number + name.len() as u64 * 1000, FILE_BYTES);
        write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    };
    (0..count).map(write).collect()
}

fn all_named(mount: &Mount) -> Option<()> {
    (mount.status("remote_waiting_files") == "0").then_some(())
}

#[test]
fn a_full_remote_takes_what_it_can_and_goes_on_when_there_is_room() {
    crate::require!(fuse, root);
    let directory = scratch_directory();
    let (remote, _mounted) = small_remote(directory.path(), "14M");
    let mount = Mount::with_options(Mode::Passthrough, &options(&remote, &[]));
    let files = write_files(&mount, "f", 8);
    eventually("the failure to be told", || (mount.status("errors") != "0").then_some(()));
    assert!(mount.errors().iter().any(|line| line.contains("do not reach the remote")));
    assert_same(&files);
    let held = mount.status_number("remote_objects");
    assert!(held <= 3, "{held} of 4 MiB in 14 MiB");
    let (stays, _) = files.iter().rfind(|(path, _)| tier(path) == "ssd").unwrap();
    let begun = Instant::now();
    let refusal = complaint(&kvfs(&["evict"], &[stays]));
    assert!(refusal.contains("cannot be brought into the remote"), "{refusal}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    setxattr(stays, "user.kvfs.tier", b"ssd").unwrap();
    assert_local_files_work(&mount, "local");
    remount(&remote, "size=64M");
    eventually("everything to be there", || all_named(&mount));
    assert_eq!(mount.status("remote_objects"), "9");
    assert_same(&files);
}

#[test]
fn a_read_only_remote_serves_and_takes_nothing() {
    crate::require!(fuse, root);
    let directory = scratch_directory();
    let (remote, _mounted) = small_remote(directory.path(), "64M");
    let mount = Mount::with_options(Mode::Passthrough, &options(&remote, &[]));
    let files = write_files(&mount, "f", 8);
    eventually("everything to be there", || all_named(&mount));
    eventually("the disk to have room", || {
        (mount.status_number("remote_only_objects") > 2).then_some(())
    });
    remount(&remote, "ro");
    assert_same(&files);
    let more = write_files(&mount, "more", 2);
    eventually("the failure to be told", || (mount.status("errors") != "0").then_some(()));
    assert_same(&more);
    remount(&remote, "rw");
    eventually("everything to be there", || all_named(&mount));
    assert_same(&files);
}

#[test]
fn a_full_disk_refuses_what_would_come_back_and_shows_nothing_of_it() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let directory = scratch_directory();
    let remote = directory.path().join("remote");
    std::fs::create_dir(&remote).unwrap();
    let store = disk.mountpoint.join("store");
    let mount = Mount::of_store_with(Mode::Passthrough, &options(&remote, &[]), &store);
    let files = write_files(&mount, "f", 6);
    eventually("everything to be there", || all_named(&mount));
    eventually("the disk to have room", || {
        (mount.status_number("remote_only_objects") > 1).then_some(())
    });
    let ballast = disk.fill_up();
    let gone = files.iter().filter(|(path, _)| tier(path) == "remote");
    for (path, _) in gone.clone() {
        assert_errno(open(path, libc::O_RDONLY), libc::ENOSPC);
        assert_eq!(tier(path), "remote");
    }
    assert!(gone.count() >= 2);
    assert_eq!(mount.staging(), Vec::<PathBuf>::new());
    std::fs::remove_file(ballast).unwrap();
    assert_same(&files);
}

/// Token files and tails go with the names of all files.
#[test]
fn a_token_file_that_cannot_be_read_keeps_no_names_of_others_from_the_remote() {
    crate::require!(fuse, root);
    let remote = scratch_directory();
    let mut mount = Mount::with_options(Mode::Passthrough, &options(remote.path(), &[]));
    let model = Model::small();
    model.install(&mount);
    std::fs::create_dir(model.sequence(&mount, "damaged")).unwrap();
    let tokens = fill(7, 400);
    write_and_close(model.tokens_path(&mount, "damaged"), &tokens).unwrap();
    eventually("the names to be there", || all_published(&mount));
    let is_it = |path: &PathBuf| std::fs::read(path).is_ok_and(|bytes| bytes == tokens);
    let file = files_below(mount.store()).into_iter().find(is_it).unwrap();
    // It can be opened, and a read of it fails.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    for name in ["one", "two"] {
        write_and_close(mount.files(name), name.as_bytes()).unwrap();
        eventually("names of others to be there", || all_published(&mount));
    }
    assert!(mount.unmount().success());
}

fn all_published(mount: &Mount) -> Option<()> {
    let is_published =
        mount.status("remote_names_changes") == mount.status("remote_names_published");
    (is_published && all_named(mount).is_some()).then_some(())
}

/// The remote lies in another mount, whose daemon is stopped: every call on it hangs.
#[test]
fn a_remote_that_hangs_delays_nobody_but_who_needs_it() {
    crate::require!(fuse, root);
    // Who waits for a stopped daemon with rings cannot be killed.
    let outer = Mount::with_options(Mode::Served, &["--no-io-uring"]);
    let remote = outer.files("remote");
    std::fs::create_dir(&remote).unwrap();
    let mut mount = Mount::with_options(Mode::Passthrough, &options(&remote, &[]));
    let files = write_files(&mount, "f", 8);
    eventually("everything to be there", || all_named(&mount));
    eventually("the disk to have room", || {
        let used = mount.status_number("ssd_used_bytes");
        (used <= BUDGET_BYTES / 100 * 95 && mount.status_number("remote_only_objects") > 2)
            .then_some(())
    });
    let resumed = Resumed::after_stopping(&outer);
    let (gone, here): (Vec<_>, Vec<_>) =
        files.iter().cloned().partition(|(path, _)| tier(path) == "remote");
    let start = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| open(&gone[0].0, libc::O_RDONLY));
        std::thread::sleep(Duration::from_millis(200));
        let since = Instant::now();
        assert_same(&here);
        assert_local_files_work(&mount, "local");
        // A dozen files of 4 MiB are checked and read.
        let at_once = since.elapsed();
        assert!(at_once < Duration::from_secs(2), "files on the disk took {at_once:?}");
        assert_errno(waiting.join().unwrap(), libc::ETIMEDOUT);
    });
    let waited = start.elapsed();
    assert!((20..50).contains(&waited.as_secs()), "the deadline is 30 s, it took {waited:?}");
    assert!(mount.status("remote_state").starts_with("down: "));
    let start = Instant::now();
    assert!(mount.unmount().success());
    let ended = start.elapsed();
    assert!(ended < Duration::from_secs(15), "the unmount took {ended:?}");
    drop(resumed);
    mount.mount();
    assert_same(&files);
}

/// A stopped process goes on when the test ends.
pub(crate) struct Resumed(Pid);

impl Resumed {
    /// Stops the daemon of a mount, at a moment at which it has taken no request: who waits for one that was taken cannot be
    /// killed.
    pub(crate) fn after_stopping(mount: &Mount) -> Resumed {
        let daemon = Pid::from_raw(i32::try_from(mount.pid()).unwrap());
        let device = std::fs::metadata(mount.path()).unwrap().dev();
        let control = mount.beside("connections");
        std::fs::create_dir_all(&control).unwrap();
        succeed(Command::new("mount").args(["-t", "fusectl", "fusectl"]).arg(&control));
        let waiting = control.join(nix::sys::stat::minor(device).to_string()).join("waiting");
        eventually("no request to be under way", || {
            kill(daemon, Signal::SIGSTOP).unwrap();
            let is_quiet = std::fs::read_to_string(&waiting).unwrap().trim() == "0";
            if !is_quiet {
                kill(daemon, Signal::SIGCONT).unwrap();
            }
            is_quiet.then_some(())
        });
        succeed(Command::new("umount").arg(&control));
        Resumed(daemon)
    }
}

impl Drop for Resumed {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}
