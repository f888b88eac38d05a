//! `kvfs gc`: unreferenced objects go, and nothing else.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::common::sys::{assert_errno, getxattr, open, set_modified, setxattr};
use crate::common::{Mode, Mount, eventually};
use crate::place::{Place, complaint, kvfs, printed};

in_both_modes!(
    a_deleted_file_leaves_the_remote,
    files_without_a_record_leave_the_store,
    what_cannot_be_collected_is_said,
    what_a_store_named_stays_until_somebody_says_that_it_is_gone,
);

/// Every file below a directory.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(files_below(&path)) } else { files.push(path) }
    }
    files
}

fn a_deleted_file_leaves_the_remote(mode: Mode) {
    let place = Place::new(mode, &[]);
    let files = place.write("f", 3);
    let kept: Vec<_> = files[1..].iter().map(|(path, _)| path.as_path()).collect();
    place.wait_until_uploaded();
    printed(&kvfs(&["evict"], &kept));
    let blobs = place.remote.join("blobs");
    assert_eq!(files_below(&blobs).len(), 3);
    std::fs::remove_file(&files[0].0).unwrap();
    let collect = |words: &[&str]| printed(&kvfs(words, &[place.mount.path()]));
    let said = collect(&["gc", "--yes"]);
    assert!(said.contains("1 stores, ") && said.contains(" 0 deleted (0 bytes)"), "{said}");
    let long_ago = SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    for blob in files_below(&blobs) {
        set_modified(blob, long_ago).unwrap();
    }
    // The manifests from before the deletion are kept for a while.
    for _ in 0..2 {
        let said = collect(&["gc", "--dry-run"]);
        assert!(said.contains("would be deleted"), "{said}");
        assert_eq!(files_below(&blobs).len(), 3);
    }
    let said = collect(&["gc", "--yes"]);
    assert!(said.contains(" 1 deleted (4.0 MiB)"), "{said}");
    assert!(said.ends_with("store: 0 objects deleted\n"), "{said}");
    assert_eq!(files_below(&blobs).len(), 2);
    for (path, bytes) in &files[1..] {
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
}

fn files_without_a_record_leave_the_store(mode: Mode) {
    let mount = Mount::with_own_files(mode, &["--commit-interval", "0.05"]);
    let (open_path, kept) = (mount.files("open"), mount.files("kept"));
    std::fs::write(&open_path, b"still read").unwrap();
    std::fs::write(&kept, b"kept").unwrap();
    printed(&kvfs(&["sync"], &[mount.path()]));
    let reader = open(&open_path, libc::O_RDONLY).unwrap();
    std::fs::remove_file(&open_path).unwrap();
    printed(&kvfs(&["sync"], &[mount.path()]));
    let shard = mount.objects()[0].parent().unwrap().to_owned();
    let orphan = shard.join("0000000000000001");
    std::fs::write(&orphan, b"left by a crash").unwrap();
    let said = printed(&kvfs(&["gc", "--dry-run"], &[mount.path()]));
    assert_eq!(said, "store: 1 objects would be deleted\n");
    assert!(orphan.exists());
    let said = printed(&kvfs(&["gc", "--yes"], &[mount.path()]));
    assert_eq!(said, "store: 1 objects deleted\n");
    assert!(!orphan.exists());
    assert_eq!(std::io::read_to_string(reader).unwrap(), "still read");
    assert_eq!(std::fs::read(&kept).unwrap(), b"kept");
}

fn what_cannot_be_collected_is_said(mode: Mode) {
    const GC: &str = "user.kvfs.gc";
    let place = Place::new(mode, &[]);
    assert_errno(getxattr(place.mount.path(), GC), libc::ENODATA);
    assert_errno(setxattr(place.mount.path(), GC, b"all"), libc::EINVAL);
    assert_errno(setxattr(place.mount.files(""), GC, b"collect"), libc::EOPNOTSUPP);
    // A manifest that cannot be read may name anything.
    place.write("f", 1);
    place.wait_until_uploaded();
    printed(&kvfs(&["gc", "--yes"], &[place.mount.path()]));
    for manifest in files_below(&place.remote.join("names")) {
        std::fs::write(manifest, b"garbage").unwrap();
    }
    let ended = kvfs(&["gc", "--yes"], &[place.mount.path()]);
    let said = crate::place::complaint(&ended);
    assert!(said.contains("nothing was deleted"), "{said}");
    assert!(place.mount.errors().iter().any(|line| line.contains("garbage was not collected")));
}

/// A listing without the names of a store that was seen is short, or somebody removed them.
fn what_a_store_named_stays_until_somebody_says_that_it_is_gone(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    place.write("own", 1);
    place.wait_until_uploaded();
    let remote = place.remote.clone();
    let options = [
        "--remote",
        remote.to_str().unwrap(),
        "--rebuild-from",
        "none",
        "--commit-interval",
        "0.05",
    ];
    let mut other = Mount::with_options(mode, &options);
    std::fs::write(other.files("theirs"), crate::common::fill(77, 1 << 20)).unwrap();
    eventually("the names", || {
        let is_done = other.status("remote_waiting_files") == "0"
            && other.status("remote_names") == "published";
        is_done.then_some(())
    });
    assert!(other.unmount().success());
    let collect = |mount: &Mount, words: &[&str]| kvfs(words, &[mount.path()]);
    printed(&collect(&place.mount, &["gc", "--yes"]));
    let names = remote.join("names");
    let ids = || -> Vec<String> {
        let entries = std::fs::read_dir(&names).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let listed = printed(&kvfs(&["remote", "ls", "--json", remote.to_str().unwrap()], &[]));
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let stores = listed["stores"].as_array().unwrap();
    let theirs = stores.iter().find(|store| store["bytes"] == 1 << 20).unwrap();
    let id = theirs["store"].as_str().unwrap();
    assert_eq!((ids().len(), stores.len()), (2, 2));

    let aside = remote.join("aside");
    crate::common::sys::rename(names.join(id), &aside).unwrap();
    let long_ago = SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    let blobs = || files_below(&remote.join("blobs"));
    for blob in blobs() {
        set_modified(blob, long_ago).unwrap();
    }
    let forget = ["gc", "--yes", "--forget-store", id];
    for mounted_again in [false, true] {
        if mounted_again {
            place.mount.remount();
        }
        let told = complaint(&collect(&place.mount, &["gc", "--yes"]));
        assert!(told.contains("nothing was deleted") && told.contains(id), "{told}");
        assert!(told.contains(&format!("kvfs gc --forget-store {id}")), "{told}");
        assert_eq!((told.trim_end().lines().count(), blobs().len()), (1, 2), "{told}");
    }
    let unknown = "00000000000000000000000000000007";
    let told = complaint(&collect(&place.mount, &["gc", "--yes", "--forget-store", unknown]));
    assert!(told.contains(&format!("no names of a store {unknown} were seen")), "{told}");
    crate::common::sys::rename(&aside, names.join(id)).unwrap();
    let told = complaint(&collect(&place.mount, &forget));
    assert!(told.contains("has names there"), "{told}");
    printed(&collect(&place.mount, &["gc", "--yes"]));
    assert_eq!(blobs().len(), 2);

    std::fs::remove_dir_all(names.join(id)).unwrap();
    let said = printed(&collect(&place.mount, &["gc", "--dry-run", "--forget-store", id]));
    assert!(said.contains(" 1 would be deleted (1.0 MiB)"), "{said}");
    assert!(complaint(&collect(&place.mount, &["gc", "--yes"])).contains(id), "it was only looked");
    let said = printed(&collect(&place.mount, &forget));
    assert!(said.contains(" 1 deleted (1.0 MiB)"), "{said}");
    place.mount.remount();
    printed(&collect(&place.mount, &["gc", "--yes"]));
    assert_eq!(blobs().len(), 1);
}
