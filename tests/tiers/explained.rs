//! What would leave a tier before a file is told, and is what leaves.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::sys::{getxattr, setxattr};
use crate::common::{Mode, eventually};
use crate::place::{FILE_BYTES, Place, kvfs, printed, tier};

in_both_modes!(what_is_told_to_leave_first_leaves_first);

/// Files and bytes that leave a tier before a file.
fn before(path: &Path, tier: &str) -> Option<(u64, u64)> {
    let told = printed(&kvfs(&["explain", "--json"], &[path]));
    let told: Value = serde_json::from_str(&told).unwrap();
    let of_tier = told["leaving"].as_array().unwrap().iter().find(|one| one["tier"] == tier)?;
    assert_eq!(of_tier["has_more_before"], false);
    Some((of_tier["files_before"].as_u64().unwrap(), of_tier["bytes_before"].as_u64().unwrap()))
}

fn in_order(files: &[(PathBuf, Vec<u8>)], tier: &str) -> Vec<PathBuf> {
    let mut ranked: Vec<_> =
        files.iter().map(|(path, _)| (before(path, tier).unwrap(), path.clone())).collect();
    ranked.sort();
    for (place, ((count, bytes), path)) in (0..).zip(&ranked) {
        assert_eq!((*count, *bytes), (place, place * FILE_BYTES as u64), "{}", path.display());
    }
    ranked.into_iter().map(|(_, path)| path).collect()
}

fn what_is_told_to_leave_first_leaves_first(mode: Mode) {
    // Room for five files in memory, and for four on the disk.
    let place = Place::with_budget(mode, &["--ram", "22M"]);
    let files = place.write("f", 4);
    place.wait_until_uploaded();
    for (path, _) in &files {
        setxattr(path, "user.kvfs.tier", b"ram").unwrap();
    }
    let order = in_order(&files, "ram");
    let words = printed(&kvfs(&["explain"], &[&order[0]]));
    assert!(words.contains("order: it is the next to leave memory"), "{words}");
    let words = printed(&kvfs(&["explain"], &[&order[2]]));
    assert!(words.contains("order: 2 files, 8.0 MiB leave memory before it"), "{words}");
    // The disk has its own order, of what the remote has.
    eventually("all to be able to leave the disk", || {
        files.iter().all(|(path, _)| before(path, "ssd").is_some()).then_some(())
    });
    in_order(&files, "ssd");
    // What is pinned leaves for nobody.
    setxattr(&order[3], "user.kvfs.pin", b"1").unwrap();
    assert_eq!(before(&order[3], "ram"), None);
    assert!(getxattr(&order[3], "user.kvfs.rank").is_err());
    printed(&kvfs(&["config", "set", "ram=14M"], &[place.mount.path()]));
    eventually("one to leave", || (tier(&order[0]) != "ram").then_some(()));
    assert_eq!(tier(&order[1]), "ram");
    assert_eq!(tier(&order[2]), "ram");
}
