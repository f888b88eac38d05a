//! What the remote was given and does not have any more: parts of the names, all that came after an older
//! state of it, a manifest that somebody else put in the place of the store's own.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::disk::SmallDisk;
use crate::common::mount::{files_below, scratch_directory};
use crate::common::sys::{getxattr, rename, write_and_close};
use crate::common::{Mode, Mount, eventually, fill, forks};
use crate::place::{kvfs, printed};

in_both_modes!(
    lost_parts_of_the_names_are_sent_again,
    lost_parts_of_the_names_are_sent_again_after_a_mount,
    what_an_older_state_of_the_remote_lacks_is_sent_again,
    lost_copies_are_sent_again_while_the_names_stay,
    another_directory_in_the_place_of_the_remote_is_noticed,
    names_of_an_older_publication_are_told,
    a_copy_of_a_store_publishes_nothing,
    a_remote_that_takes_nothing_is_told,
    what_was_refused_is_tried_again_when_the_remote_is_back,
);

/// A remote that is sealed or not, and stores that use it.
struct Shared {
    remote: PathBuf,
    options: Vec<String>,
    directory: tempfile::TempDir,
}

impl Shared {
    fn new(is_sealed: bool) -> Shared {
        let directory = scratch_directory();
        let remote = directory.path().join("remote");
        std::fs::create_dir(&remote).unwrap();
        let mut options = vec!["--remote".to_owned(), remote.to_str().unwrap().to_owned()];
        if is_sealed {
            let key = directory.path().join("key");
            printed(&kvfs(&["remote", "keygen"], &[&key]));
            options.extend(["--remote-key".to_owned(), key.to_str().unwrap().to_owned()]);
        }
        Shared { remote, options, directory }
    }

    fn options(&self) -> Vec<&str> {
        let common = ["--commit-interval", "0.05"];
        self.options.iter().map(String::as_str).chain(common).collect()
    }

    fn mount(&self, mode: Mode) -> Mount {
        Mount::with_options(mode, &self.options())
    }

    /// A new store has all files of another one that was unmounted, whose disk is lost.
    fn assert_rebuilt(&self, mode: Mode, files: &[(PathBuf, Vec<u8>)]) {
        let rebuilt = self.mount(mode);
        for (name, bytes) in files {
            let path = rebuilt.files(name);
            assert!(std::fs::read(&path).unwrap() == *bytes, "{}", path.display());
        }
    }

    /// Copies all that the remote has into an empty directory beside it.
    fn copy_remote(&self) -> PathBuf {
        let copy = self.directory.path().join("copy");
        forks::succeed(Command::new("cp").arg("-a").arg(&self.remote).arg(&copy));
        copy
    }

    /// Puts an older state back, in place.
    fn put_back(&self, older: &Path) {
        forks::succeed(
            Command::new("rsync")
                .args(["-a", "--delete"])
                .arg(format!("{}/", older.display()))
                .arg(format!("{}/", self.remote.display())),
        );
    }
}

/// Files of different bytes, by their names.
fn put(mount: &Mount, directory: &str, count: u64) -> Vec<(PathBuf, Vec<u8>)> {
    std::fs::create_dir_all(mount.files(directory)).unwrap();
    let write = |number: u64| {
        let name = Path::new(directory).join(number.to_string());
        let bytes = fill(number + directory.len() as u64 * 1000, 20_000);
        write_and_close(mount.files(&name), &bytes).unwrap();
        (name, bytes)
    };
    (0..count).map(write).collect()
}

fn sync_remote(mount: &Mount) {
    printed(&kvfs(&["sync", "--remote", "--timeout", "60s"], &[mount.path()]));
}

/// Loses some parts, and cuts others off.
fn damage_parts(remote: &Path) {
    let parts = files_below(&remote.join("chunks"));
    assert!(!parts.is_empty());
    for (index, part) in parts.iter().enumerate() {
        if index % 2 == 0 {
            std::fs::File::options().write(true).open(part).unwrap().set_len(0).unwrap();
        } else {
            std::fs::remove_file(part).unwrap();
        }
    }
}

fn lost_parts_of_the_names_are_sent_again(mode: Mode) {
    for is_sealed in [false, true] {
        let shared = Shared::new(is_sealed);
        let mut mount = shared.mount(mode);
        let mut files = put(&mount, "old", 40);
        sync_remote(&mount);
        damage_parts(&shared.remote);
        // Neither a change that leaves them as they are,
        files.extend(put(&mount, "new", 1));
        sync_remote(&mount);
        damage_parts(&shared.remote);
        // nor none.
        sync_remote(&mount);
        assert!(mount.errors().iter().any(|line| line.contains("parts of this store's names")));
        assert_eq!(mount.status("state"), "ok");
        assert!(mount.unmount().success());
        shared.assert_rebuilt(mode, &files);
    }
}

fn lost_parts_of_the_names_are_sent_again_after_a_mount(mode: Mode) {
    let shared = Shared::new(false);
    let mut mount = shared.mount(mode);
    let files = put(&mount, "old", 40);
    sync_remote(&mount);
    assert!(mount.unmount().success());
    damage_parts(&shared.remote);
    mount.mount();
    sync_remote(&mount);
    mount.crash();
    damage_parts(&shared.remote);
    sync_remote(&mount);
    assert!(mount.unmount().success());
    shared.assert_rebuilt(mode, &files);
}

fn what_an_older_state_of_the_remote_lacks_is_sent_again(mode: Mode) {
    crate::require!(rsync);
    for is_sealed in [false, true] {
        let shared = Shared::new(is_sealed);
        let mut mount = shared.mount(mode);
        let mut files = put(&mount, "one", 3);
        sync_remote(&mount);
        let older = shared.copy_remote();
        files.extend(put(&mount, "second", 3));
        sync_remote(&mount);
        let gone = put(&mount, "gone", 1);
        sync_remote(&mount);
        let gone = mount.files(&gone[0].0);
        printed(&kvfs(&["evict"], &[&gone]));
        assert_eq!(getxattr(&gone, "user.kvfs.tier").unwrap(), "remote");

        shared.put_back(&older);
        sync_remote(&mount);
        // Of what had no other copy that is told, before anybody opens it.
        let reason = mount.status("state_reason");
        assert!(reason.contains("1 files are damaged"), "{reason}");
        assert!(std::fs::read(&gone).is_err());
        std::fs::remove_file(&gone).unwrap();
        sync_remote(&mount);
        assert_eq!(mount.status("state"), "ok");
        assert!(mount.unmount().success());
        shared.assert_rebuilt(mode, &files);
    }
}

fn lost_copies_are_sent_again_while_the_names_stay(mode: Mode) {
    let shared = Shared::new(false);
    let mut mount = shared.mount(mode);
    let files = put(&mount, "one", 40);
    let gone = put(&mount, "gone", 1);
    sync_remote(&mount);
    let gone = mount.files(&gone[0].0);
    printed(&kvfs(&["evict"], &[&gone]));
    let blobs = shared.remote.join("blobs");
    for directory in blobs.read_dir().unwrap() {
        std::fs::remove_dir_all(directory.unwrap().path()).unwrap();
    }
    sync_remote(&mount);
    assert!(mount.errors().iter().any(|line| line.contains("its copy in the remote is gone")));
    assert!(mount.status("state_reason").contains("1 files are damaged"));
    // What is lost is not looked for again and again.
    let errors = mount.status("errors");
    sync_remote(&mount);
    assert_eq!(mount.status("errors"), errors);
    std::fs::remove_file(&gone).unwrap();
    sync_remote(&mount);
    assert!(mount.unmount().success());
    shared.assert_rebuilt(mode, &files);
}

fn another_directory_in_the_place_of_the_remote_is_noticed(mode: Mode) {
    let shared = Shared::new(false);
    let mut mount = shared.mount(mode);
    let mut files = put(&mount, "one", 3);
    sync_remote(&mount);
    let older = shared.copy_remote();
    files.extend(put(&mount, "second", 3));
    sync_remote(&mount);
    let away = shared.directory.path().join("away");
    rename(&shared.remote, &away).unwrap();
    let asked = kvfs(&["sync", "--remote", "--timeout", "1s"], &[mount.path()]);
    assert_eq!(asked.status.code(), Some(1));
    assert!(mount.status("remote_state").starts_with("down"), "{}", mount.status("remote_state"));
    assert!(mount.log().contains("was it moved away"));

    rename(&older, &shared.remote).unwrap();
    files.extend(put(&mount, "third one", 3));
    sync_remote(&mount);
    let paths: Vec<PathBuf> = files.iter().map(|(name, _)| mount.files(name)).collect();
    let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    printed(&kvfs(&["evict"], &paths));
    std::fs::remove_dir_all(&away).unwrap();
    for (name, bytes) in &files {
        assert!(std::fs::read(mount.files(name)).unwrap() == *bytes, "{}", name.display());
    }
    assert!(mount.unmount().success());
    shared.assert_rebuilt(mode, &files);
}

fn names_of_an_older_publication_are_told(mode: Mode) {
    let shared = Shared::new(false);
    let mut mount = shared.mount(mode);
    put(&mount, "one", 3);
    sync_remote(&mount);
    put(&mount, "second", 3);
    sync_remote(&mount);
    assert!(mount.unmount().success());
    let newest = files_below(&shared.remote.join("names")).pop().unwrap();
    std::fs::write(newest, b"damaged").unwrap();
    let rebuilt = shared.mount(mode);
    assert!(rebuilt.files("one/0").exists() && !rebuilt.files("second/0").exists());
    let told = rebuilt.errors();
    assert!(told.iter().any(|line| line.contains("those of an older publication")), "{told:?}");
}

fn a_copy_of_a_store_publishes_nothing(mode: Mode) {
    let shared = Shared::new(false);
    let mut mount = shared.mount(mode);
    let mut files = put(&mount, "one", 3);
    sync_remote(&mount);
    assert!(mount.unmount().success());
    let copy = shared.directory.path().join("store");
    forks::succeed(Command::new("cp").arg("-a").arg(mount.store()).arg(&copy));
    mount.mount();
    files.extend(put(&mount, "second", 3));
    sync_remote(&mount);

    let copied = Mount::of_store_with(mode, &shared.options(), &copy);
    put(&copied, "copied", 2);
    let reason = eventually("the copy to be told", || {
        copied.try_status("state_reason").filter(|why| why.contains("somebody else publishes"))
    });
    assert!(reason.contains("needs an id of its own"), "{reason}");
    let waits = kvfs(&["sync", "--remote", "--timeout", "1s"], &[copied.path()]);
    assert_eq!(waits.status.code(), Some(1));
    // Nor once it is mounted again, nor does the first one suffer.
    drop(copied);
    let copied = Mount::of_store_with(mode, &shared.options(), &copy);
    eventually("the copy to be told again", || {
        copied.try_status("state_reason").filter(|why| why.contains("somebody else publishes"))
    });
    // A mount that is killed before, and after, it publishes is still the store's own.
    for round in 0..3 {
        mount.crash();
        files.extend(put(&mount, &"x".repeat(8 + round), 1));
        sync_remote(&mount);
        mount.crash();
    }
    sync_remote(&mount);
    assert_eq!(mount.status("state"), "ok");
    drop(copied);
    assert!(mount.unmount().success());
    shared.assert_rebuilt(mode, &files);
}

fn a_remote_that_takes_nothing_is_told(mode: Mode) {
    crate::require!(root, r#loop);
    let disk = SmallDisk::new();
    let remount = |option: &str| {
        let option = format!("remount,{option}");
        forks::succeed(Command::new("mount").args(["-o", &option]).arg(&disk.mountpoint));
    };
    let remote = disk.mountpoint.join("remote");
    std::fs::create_dir(&remote).unwrap();
    let options = ["--remote", remote.to_str().unwrap(), "--commit-interval", "0.05"];
    let mount = Mount::with_options(mode, &options);
    put(&mount, "one", 3);
    sync_remote(&mount);
    remount("ro");
    put(&mount, "second", 3);
    let reason = eventually("the state to tell", || {
        let reason = mount.try_status("state_reason")?;
        reason.contains("objects do not reach the remote").then_some(reason)
    });
    assert!(reason.contains("Read-only file system"), "{reason}");
    remount("rw");
    sync_remote(&mount);
    assert_eq!(mount.status("state"), "ok");
}

/// Something lies in the remote where its objects would, until somebody tidies up.
fn what_was_refused_is_tried_again_when_the_remote_is_back(mode: Mode) {
    let shared = Shared::new(false);
    let mut mount = shared.mount(mode);
    sync_remote(&mount);
    let blobs = shared.remote.join("blobs");
    drop(std::fs::remove_dir_all(&blobs));
    std::fs::write(&blobs, b"not a directory").unwrap();
    let files = put(&mount, "refused", 3);
    eventually("the files to be refused", || {
        (mount.status("remote_given_up_files") == "3").then_some(())
    });
    let reason = mount.status("state_reason");
    assert!(reason.contains("3 files cannot be brought into the remote"), "{reason}");
    std::fs::remove_file(&blobs).unwrap();
    let elsewhere = shared.remote.with_extension("elsewhere");
    rename(&shared.remote, &elsewhere).unwrap();
    eventually("the remote to be away", || {
        mount.status("remote_state").starts_with("down: ").then_some(())
    });
    rename(&elsewhere, &shared.remote).unwrap();
    eventually("the files to be taken", || {
        (mount.status("remote_given_up_files") == "0").then_some(())
    });
    sync_remote(&mount);
    assert!(mount.unmount().success());
    shared.assert_rebuilt(mode, &files);
}
