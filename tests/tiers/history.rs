//! Where the bytes of a file went, and why, is told.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::common::forks::succeed;
use crate::common::mount::scratch_directory;
use crate::common::sys::{getxattr, setxattr, write_and_close};
use crate::common::{Mode, Model, Mount, eventually};
use crate::place::{Place, kvfs, printed, tier};

in_both_modes!(
    moves_are_told_of_the_file_that_moved,
    what_cannot_be_moved_is_told_once_with_all_that_waits,
);
in_served_mode!(the_path_of_a_move_is_shortened_as_others_are);

fn whats(path: &Path) -> Vec<String> {
    events(path).iter().map(|event| event["what"].as_str().unwrap().to_owned()).collect()
}

fn moves_are_told_of_the_file_that_moved(mode: Mode) {
    let mut place = Place::new(mode, &["--ram", "16M"]);
    let model = Model::small();
    model.install(&place.mount);
    let path = model.page_path(&place.mount, "a", 0, 0);
    write_and_close(&path, &model.page(0, 0, 0)).unwrap();
    let other = model.page_path(&place.mount, "a", 0, 32);
    write_and_close(&other, &model.page(0, 32, 32)).unwrap();
    assert_eq!(tier(&path), "ram");
    // It was written in a second before.
    std::thread::sleep(Duration::from_millis(1100));
    let read_from = succeed(Command::new("date").args(["-u", "+%FT%T"]));
    assert!(std::fs::read(&path).is_ok());
    printed(&kvfs(&["evict"], &[&path]));
    eventually("the page to leave", || (tier(&path) == "remote").then_some(()));
    let told = eventually("both to be told", || {
        let told = whats(&path);
        (told.len() >= 2).then_some(told)
    });
    assert_eq!(told, ["demoted", "evicted"], "the disk's copy goes first");
    for event in events(&path) {
        let used = event["used"].as_str().unwrap();
        assert!(read_from.trim() <= used, "{event}, read at {read_from}");
        // It was used when it came there, and when it was read.
        assert!(event["uses"].as_u64().unwrap() >= 1, "{event}");
        assert_eq!(event["bytes"], 8192);
    }
    assert!(events(&path)[1]["uses"].as_u64().unwrap() >= 2, "memory saw it come and read");
    let text = printed(&kvfs(&["explain"], &[&path]));
    assert!(text.contains("where: only in the remote: 1 file, 8.0 KiB; reading moves"), "{text}");
    assert!(text.contains("somebody asked for it (8.0 KiB, 2 uses, last used "), "{text}");
    assert!(std::fs::read(&path).is_ok());
    setxattr(&path, "user.kvfs.tier", b"ram").unwrap();
    let told = whats(&path);
    assert_eq!(told[2..], ["fetched", "promoted"]);
    assert_eq!(whats(&other), [] as [&str; 0]);
    assert_eq!(whats(path.parent().unwrap()), told);
    // Moves are not worth a commit of their own, but a mount that ends has them.
    place.mount.remount();
    assert_eq!(whats(&path), told);
    assert_eq!(getxattr(&path, "user.kvfs.tier").unwrap(), "ssd");
}

/// What happened to a path and below it.
fn events(path: &Path) -> Vec<Value> {
    let text = printed(&kvfs(&["log", "--json"], &[path]));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn what_cannot_be_moved_is_told_once_with_all_that_waits(mode: Mode) {
    let directory = scratch_directory();
    let remote = directory.path().join("not there");
    let remote = remote.to_str().unwrap();
    let options = ["--remote", remote, "--commit-interval", "0.05", "--rebuild-from", "none"];
    let mut mount = Mount::with_options(mode, &options);
    let failed = |mount: &Mount| {
        let all = events(mount.path()).into_iter();
        all.filter(|event| event["what"] == "failed").collect::<Vec<_>>()
    };
    let first = eventually("the failure", || failed(&mount).pop());
    let reason = first["reason"].as_str().unwrap();
    assert!(reason.starts_with("objects do not reach the remote: "), "{reason}");
    let errors = || std::fs::read_to_string(mount.path().join(".kvfs/errors")).unwrap();
    assert!(errors().contains(reason));
    // It is tried again each five seconds, and a file fails with the others that wait.
    write_and_close(mount.files("waiting"), b"bytes").unwrap();
    std::thread::sleep(Duration::from_secs(11));
    assert_eq!(failed(&mount).len(), 1);
    mount.remount();
    let told = eventually("the failure of the next mount", || {
        let failed = failed(&mount);
        (failed.len() == 2).then_some(failed)
    });
    assert_eq!(told[0], first, "the store remembers it");
}

fn the_path_of_a_move_is_shortened_as_others_are(mode: Mode) {
    let place = Place::new(mode, &["--ram", "16M"]);
    let model = Model::small();
    model.install(&place.mount);
    // Each letter is shown as five.
    let path = model.page_path(&place.mount, &"\u{1}".repeat(250), 0, 0);
    write_and_close(&path, &model.page(0, 0, 0)).unwrap();
    printed(&kvfs(&["evict"], &[&path]));
    let told = eventually("its moves to be told", || {
        let text = printed(&kvfs(&["log", "--json"], &[&path]));
        (text.lines().count() >= 2).then_some(text)
    });
    for line in told.lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        let path = event["path"].as_str().unwrap();
        assert!(path.len() <= 1024 && path.starts_with("..."), "{path}");
        assert!(path.ends_with(r"\u{1}/000/0000000.safetensors"), "{path}");
    }
}
