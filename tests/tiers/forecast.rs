//! `kvfs promote --dry-run` and `kvfs evict --dry-run`: nothing moves, and what was told is what moves then.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::common::Mode;
use crate::common::sys::{assert_errno, getxattr, setxattr};
use crate::place::{FILE_BYTES, Place, kvfs, printed, tier};

in_both_modes!(a_dry_run_tells_what_then_moves, memory_is_told_of_too);

/// What a command that may leave some files says in JSON.
fn told(words: &[&str], paths: &[PathBuf]) -> Value {
    let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let output = kvfs(&[words, &["--json"]].concat(), &paths);
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

fn figures(told: &Value) -> [&Value; 5] {
    ["to", "moved_files", "moved_bytes", "there_files", "failed"].map(|name| &told[name])
}

/// What would be done is told, and then done. The paths are those of three files.
fn check(command: &[&str], (from, to): (&str, &str), paths: &[PathBuf]) {
    let before: Vec<String> = paths.iter().map(|path| tier(path)).collect();
    let dry = told(&[command, &["--dry-run"]].concat(), paths);
    assert_eq!((&dry["dry_run"], &dry["to"]), (&json!(true), &json!(to)));
    let bytes = 3 * FILE_BYTES as u64;
    assert_eq!((&dry["moved_files"], &dry["moved_bytes"]), (&json!(3), &json!(bytes)), "{dry:#}");
    let first = json!({ "path": paths[0], "from": from, "to": to, "bytes": FILE_BYTES });
    assert_eq!(dry["files"][0], first);
    assert_eq!((&dry["links"][0]["from"], &dry["links"][0]["files"]), (&json!(from), &json!(3)));
    assert!(dry["seconds"].as_f64().unwrap() > 0.0, "{dry:#}");
    let after: Vec<String> = paths.iter().map(|path| tier(path)).collect();
    assert_eq!(before, after, "a dry run moves nothing");
    let done = told(command, paths);
    assert_eq!(done["dry_run"], false);
    assert_eq!(figures(&done), figures(&dry));
    assert!(paths[..3].iter().all(|path| tier(path) == to));
    let again = told(&[command, &["--dry-run"]].concat(), &paths[..3]);
    assert_eq!((&again["moved_files"], &again["there_files"]), (&json!(0), &json!(3)));
}

fn a_dry_run_tells_what_then_moves(mode: Mode) {
    let place = Place::new(mode, &[]);
    let mut paths: Vec<PathBuf> = place.write("f", 3).into_iter().map(|(path, _)| path).collect();
    printed(&kvfs(&["sync"], &[place.mount.path()]));
    let text = printed(&kvfs(&["evict", "--dry-run"], &[&paths[0]]));
    let line = format!("{}: 4.0 MiB, ssd to remote\n", paths[0].display());
    assert!(text.starts_with(&line), "{text}");
    assert!(text.contains("would be evicted: 1 file, 4.0 MiB; expected: 0."), "{text}");
    assert_errno(getxattr(&paths[0], "user.kvfs.moving"), libc::ENODATA);

    let (pinned, _) = place.write("pinned", 1).remove(0);
    setxattr(&pinned, "user.kvfs.pin", b"1").unwrap();
    paths.push(pinned);
    check(&["evict"], ("ssd", "remote"), &paths);
    assert_eq!(place.mount.metric("kvfs_moves_total{from=\"remote\",to=\"ssd\"}"), 0);
    check(&["promote"], ("remote", "ssd"), &paths);
}

fn memory_is_told_of_too(mode: Mode) {
    let place = Place::new(mode, &["--ram", "64M"]);
    let paths: Vec<PathBuf> = place.write("f", 3).into_iter().map(|(path, _)| path).collect();
    printed(&kvfs(&["sync"], &[place.mount.path()]));
    let all: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    printed(&kvfs(&["evict", "--to", "ssd"], &all));
    check(&["promote"], ("ssd", "ram"), &paths);
    check(&["evict", "--to", "ssd"], ("ram", "ssd"), &paths);
}
