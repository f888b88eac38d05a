//! Where the bytes of a file went, and why, is told.

use std::path::Path;

use serde_json::Value;

use crate::common::sys::{getxattr, setxattr, write_and_close};
use crate::common::{Mode, Model, eventually};
use crate::place::{Place, kvfs, printed, tier};

in_both_modes!(moves_are_told_of_the_file_that_moved);
in_served_mode!(the_path_of_a_move_is_shortened_as_others_are);

fn whats(path: &Path) -> Vec<String> {
    let text = printed(&kvfs(&["log", "--json"], &[path]));
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.map(|event| event["what"].as_str().unwrap().to_owned()).collect()
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
    printed(&kvfs(&["evict"], &[&path]));
    eventually("the page to leave", || (tier(&path) == "remote").then_some(()));
    let told = eventually("both to be told", || {
        let told = whats(&path);
        (told.len() >= 2).then_some(told)
    });
    assert_eq!(told, ["demoted", "evicted"], "the disk's copy goes first");
    let text = printed(&kvfs(&["explain"], &[&path]));
    assert!(text.contains("where: only in the remote: 1 file, 8.0 KiB; reading moves"), "{text}");
    assert!(text.contains("somebody asked for it (8.0 KiB)"), "{text}");
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
