//! A remote that is sealed: what is there tells nothing, and who lacks the key is told so.

use std::path::{Path, PathBuf};

use crate::common::mount::{files_below, scratch_directory};
use crate::common::s3_server::{SECRET, SETTLED_WITHIN, Server};
use crate::common::sys::{assert_errno, open, write_and_close};
use crate::common::{Mode, Mount, eventually, fill, within};
use crate::place::{FILE_BYTES, Place, assert_same, complaint, kvfs, printed, tier};

in_both_modes!(
    what_leaves_is_sealed_and_comes_back,
    who_lacks_the_key_is_refused,
    a_new_store_with_the_key_takes_over_the_names,
    after_a_change_of_keys_the_old_objects_are_read,
    damage_in_the_remote_is_never_passed_on,
    a_store_goes_on_behind_the_manifests_that_it_has_published,
    garbage_of_a_sealed_remote_is_collected,
);

/// A key file.
struct Key {
    directory: tempfile::TempDir,
}

impl Key {
    fn new() -> Key {
        let key = Key { directory: scratch_directory() };
        let said = printed(&kvfs(&["remote", "keygen"], &[&key.path()]));
        assert!(said.contains("is lost"), "{said}");
        key
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("key")
    }

    fn options(&self) -> [String; 2] {
        ["--remote-key".to_owned(), self.path().to_str().unwrap().to_owned()]
    }

    /// Puts another key before those that are there.
    fn change(&self) {
        let old = std::fs::read_to_string(self.path()).unwrap();
        let new = std::fs::read_to_string(Key::new().path()).unwrap();
        let keys: Vec<&str> = new.lines().chain(old.lines().skip(1)).collect();
        std::fs::write(self.path(), keys.join("\n")).unwrap();
    }
}

fn place(mode: Mode, key: &Key) -> Place {
    let [option, file] = key.options();
    Place::new(mode, &[&option, &file])
}

fn evict(files: &[(PathBuf, Vec<u8>)]) {
    let paths: Vec<&Path> = files.iter().map(|(path, _)| path.as_path()).collect();
    printed(&kvfs(&["evict"], &paths));
    assert!(paths.iter().all(|path| tier(path) == "remote"));
}

fn blobs(remote: &Path) -> Vec<PathBuf> {
    files_below(&remote.join("blobs"))
}

/// Tries to mount with these options, and fails.
fn refusal(place: &Place, store: &Path, options: &[&str]) -> String {
    let mountpoint = scratch_directory();
    let log = mountpoint.path().join("log");
    let target = mountpoint.path().join("mnt");
    std::fs::create_dir(&target).unwrap();
    let (remote, log) = (place.remote.to_str().unwrap(), log.to_str().unwrap());
    let words = [&["mount", "--log", log, "--remote", remote], options].concat();
    let line = complaint(&kvfs(&words, &[store, &target]));
    assert_eq!(line.trim_end().lines().count(), 1, "{line}");
    line
}

fn what_leaves_is_sealed_and_comes_back(mode: Mode) {
    let key = Key::new();
    let mut place = place(mode, &key);
    let mut files = place.write("secret", 3);
    let same = place.mount.files("same");
    write_and_close(&same, &files[0].1).unwrap();
    files.push((same, files[0].1.clone()));
    place.wait_until_uploaded();
    evict(&files);
    assert_eq!(place.mount.status("remote_sealed"), "yes");
    let stored = blobs(&place.remote);
    assert_eq!(stored.len(), 3, "equal files are one object");
    let known: Vec<&[u8]> = files.iter().map(|(_, bytes)| &bytes[1000..1032]).collect();
    for file in files_below(&place.remote) {
        let bytes = std::fs::read(&file).unwrap();
        for secret in known.iter().copied().chain([b"secret".as_slice(), b"models"]) {
            let holds = bytes.windows(secret.len()).any(|window| window == secret);
            assert!(!holds, "{} holds {:02x?}", file.display(), &secret[..6]);
        }
    }
    assert_same(&files);
    evict(&files);
    place.mount.remount();
    assert_same(&files);
    evict(&files);
    place.mount.crash();
    assert_same(&files);
    assert_eq!(place.mount.status("errors"), "0");
}

fn who_lacks_the_key_is_refused(mode: Mode) {
    let (key, other) = (Key::new(), Key::new());
    let mut place = place(mode, &key);
    place.write("f", 1);
    place.wait_until_uploaded();
    eventually("the names", || (place.mount.status("remote_names") == "published").then_some(()));
    assert!(place.mount.unmount().success());
    let new = scratch_directory();
    let new = new.path().join("store");
    let [option, file] = other.options();
    for store in [place.mount.store(), &new] {
        let line = refusal(&place, store, &[&option, &file]);
        assert!(line.contains("which the key file does not hold"), "{line}");
        let line = refusal(&place, store, &[]);
        assert!(line.contains("--remote-key FILE"), "{line}");
    }
    // A remote that says that it is not sealed gets nothing of a store that seals.
    let marker = place.remote.join("KVFS-REMOTE");
    let text = std::fs::read_to_string(&marker).unwrap();
    let id = text.lines().nth(1).unwrap();
    std::fs::write(&marker, format!("kvfs remote 1\n{id}\n")).unwrap();
    let line = refusal(&place, place.mount.store(), &[]);
    assert!(line.contains("seals what it keeps there"), "{line}");
    let [option, file] = key.options();
    let line = refusal(&place, place.mount.store(), &[&option, &file]);
    assert!(line.contains("is not sealed"), "{line}");
    std::fs::write(&marker, text).unwrap();
    place.mount.mount();
}

fn a_new_store_with_the_key_takes_over_the_names(mode: Mode) {
    let key = Key::new();
    let mut place = place(mode, &key);
    let files = place.write("f", 3);
    place.wait_until_uploaded();
    eventually("the names", || (place.mount.status("remote_names") == "published").then_some(()));
    assert!(place.mount.unmount().success());
    std::fs::remove_dir_all(place.mount.store()).unwrap();
    place.mount.mount();
    assert!(files.iter().all(|(path, _)| tier(path) == "remote"));
    assert_same(&files);
}

fn after_a_change_of_keys_the_old_objects_are_read(mode: Mode) {
    let key = Key::new();
    let mut place = place(mode, &key);
    let old = place.write("old", 2);
    place.wait_until_uploaded();
    evict(&old);
    key.change();
    place.mount.remount();
    assert_same(&old);
    evict(&old);
    let new = place.write("new", 2);
    place.wait_until_uploaded();
    evict(&new);
    assert_same(&old);
    assert_same(&new);
    // Either key alone would take the objects of the other for garbage.
    assert!(place.mount.unmount().success());
    let text = std::fs::read_to_string(key.path()).unwrap();
    for skipped in [1, 2] {
        let one = Key::new();
        let lines = text.lines().enumerate().filter(|(number, _)| *number != skipped);
        let lines: Vec<&str> = lines.map(|(_, line)| line).collect();
        std::fs::write(one.path(), lines.join("\n")).unwrap();
        let [option, file] = one.options();
        let line = refusal(&place, place.mount.store(), &[&option, &file]);
        assert!(line.contains("which the key file does not hold"), "{line}");
    }
    place.mount.mount();
    assert_same(&old);
}

fn damage_in_the_remote_is_never_passed_on(mode: Mode) {
    let key = Key::new();
    let place = place(mode, &key);
    let files = place.write("f", 3);
    place.wait_until_uploaded();
    evict(&files);
    let stored = blobs(&place.remote);
    let bytes: Vec<Vec<u8>> = stored.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let mut flipped = bytes[0].clone();
    flipped[FILE_BYTES / 2] ^= 1;
    for damage in [&bytes[1], &flipped, &bytes[0][..FILE_BYTES / 2].to_vec()] {
        for path in &stored {
            std::fs::write(path, damage).unwrap();
        }
        let opened = files.iter().filter(|(path, expected)| match std::fs::read(path) {
            Ok(bytes) => {
                assert!(bytes == *expected, "other bytes of {}", path.display());
                true
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EIO));
                false
            }
        });
        // Of three objects that all have the bytes of the second, that one is whole.
        assert!(opened.count() <= 1);
    }
}

fn a_store_goes_on_behind_the_manifests_that_it_has_published(mode: Mode) {
    let key = Key::new();
    let mut place = place(mode, &key);
    let names = place.remote.join("names");
    let mut newest = PathBuf::new();
    for round in 0..2 {
        place.write(&format!("round{round}-"), 1);
        place.wait_until_uploaded();
        newest = eventually("another manifest", || {
            files_below(&names).into_iter().max().filter(|found| *found > newest)
        });
    }
    eventually("the commit", || {
        (place.mount.status_number("uncommitted_changes") == 0).then_some(())
    });
    assert!(place.mount.unmount().success());
    let mut manifests = files_below(&names);
    manifests.sort();
    for manifest in &manifests[1..] {
        std::fs::remove_file(manifest).unwrap();
    }
    place.mount.mount();
    place.write("after", 1);
    let next = eventually("the next manifest", || {
        files_below(&names).into_iter().max().filter(|found| *found > manifests[0])
    });
    assert!(next > newest, "{} after {}", next.display(), newest.display());
}

fn garbage_of_a_sealed_remote_is_collected(mode: Mode) {
    let key = Key::new();
    let place = place(mode, &key);
    let files = place.write("f", 3);
    place.wait_until_uploaded();
    evict(&files[1..]);
    std::fs::remove_file(&files[0].0).unwrap();
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 24 * 3600);
    for blob in blobs(&place.remote) {
        crate::common::sys::set_modified(blob, long_ago).unwrap();
    }
    // The manifests from before the deletion are kept for a while.
    for _ in 0..3 {
        printed(&kvfs(&["gc", "--yes"], &[place.mount.path()]));
    }
    assert_eq!(blobs(&place.remote).len(), 2);
    assert_same(&files[1..]);
}

#[test]
fn an_object_store_gets_nothing_but_sealed_objects() {
    crate::require!(fuse, root, s3);
    let (server, key) = (Server::start(), Key::new());
    let [option, file] = key.options();
    let options = ["--remote", "s3://bucket/some/prefix", &option, &file];
    let further = ["--commit-interval", "0.05", "--rebuild-from", "none"];
    let options = [&options[..], &further].concat();
    let environment = server.environment(SECRET);
    let mut mount = Mount::with_environment(Mode::Passthrough, &options, environment);
    let write = |number| {
        // Larger than what is put in one request.
        let (path, bytes) = (mount.files(format!("f{number}")), fill(number, 3 * FILE_BYTES));
        write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    };
    let files: Vec<_> = (0..2).map(write).collect();
    within(SETTLED_WITHIN, "everything to be in the remote", || {
        (mount.status("remote_waiting_files") == "0").then_some(())
    });
    evict(&files);
    let stored = blobs(&server.files());
    assert_eq!(stored.len(), 2);
    for path in &stored {
        let stored = std::fs::read(path).unwrap();
        assert!(stored.starts_with(b"kvfsseal"));
        assert!(
            files.iter().all(|(_, bytes)| {
                !stored.windows(32).any(|window| window == &bytes[1000..1032])
            })
        );
    }
    assert_same(&files);
    evict(&files);
    mount.remount();
    assert_same(&files);
    evict(&files);
    for path in &stored {
        std::fs::remove_file(path).unwrap();
    }
    assert_errno(open(&files[0].0, libc::O_RDONLY), libc::EIO);
}
