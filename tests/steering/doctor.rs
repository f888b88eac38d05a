//! `kvfs doctor` says what a mount would find, and changes nothing.

use std::path::Path;
use std::process::{Command, Output};

use crate::common::mount::{files_below, scratch_directory};
use crate::common::sys::write_and_close;
use crate::common::{Mode, Mount, eventually, forks};

fn doctor(words: &[&str], paths: &[&Path]) -> Output {
    forks::output(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("doctor").args(words).args(paths))
}

/// What it says, and whether all is well.
fn said(output: &Output) -> (String, bool) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (text, output.status.success())
}

#[test]
fn a_machine_that_mounts_is_well() {
    crate::require!(fuse, root);
    let (text, is_well) = said(&doctor(&[], &[]));
    assert!(is_well, "{text}");
    assert!(text.contains("good: /dev/fuse can be opened"), "{text}");
    let is_finding = |line: &str| line.starts_with("good: ") || line.starts_with("note: ");
    assert!(text.lines().all(is_finding) && text.lines().count() >= 4, "{text}");
}

#[test]
fn directories_for_stores_are_told_apart() {
    crate::require!(fuse);
    let mount = Mount::new(Mode::Served);
    let (text, is_well) = said(&doctor(&["--store"], &[mount.store()]));
    assert!(is_well && text.contains("holds a store"), "{text}");
    assert!(text.contains("its disk syncs 4 KiB in"), "{text}");
    let directory = scratch_directory();
    let (text, is_well) = said(&doctor(&["--store"], &[&directory.path().join("new")]));
    assert!(is_well && text.contains("is not there yet: a mount makes it"), "{text}");
    let (text, is_well) = said(&doctor(&["--store"], &[directory.path()]));
    assert!(is_well && text.contains("is empty: a mount makes a store of it"), "{text}");
    assert_eq!(files_below(directory.path()).len(), 0, "nothing is left there");
    std::fs::write(directory.path().join("thesis"), "1").unwrap();
    let output = doctor(&["--json", "--store"], &[directory.path()]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = json["findings"].as_array().unwrap();
    let bad = findings.iter().find(|finding| finding["level"] == "bad").unwrap();
    assert!(bad["what"].as_str().unwrap().ends_with("is neither a store nor empty"), "{bad}");
    assert!(bad["mend"].as_str().unwrap().starts_with("name an empty directory"), "{bad}");
    // What cannot be looked at at all is told with what mends it, too.
    let (text, is_well) = said(&doctor(&["--store"], &[&directory.path().join("thesis")]));
    assert!(!is_well && text.contains("(os error 20): name a directory\n"), "{text}");
    let (text, _) = said(&doctor(&["--store"], &[&directory.path().join("no/new")]));
    assert!(text.contains(": make the directory above it (mkdir -p)"), "{text}");
}

#[test]
fn a_remote_is_tried_and_left_as_it_was() {
    crate::require!(fuse);
    let directory = scratch_directory();
    let [remote, key, other] = ["remote", "key", "other"].map(|name| directory.path().join(name));
    std::fs::create_dir(&remote).unwrap();
    let (text, is_well) = said(&doctor(&["--remote"], &[&remote]));
    assert!(is_well && text.contains("is empty: the first mount makes it a remote"), "{text}");
    assert_eq!(files_below(&remote).len(), 0);

    for path in [&key, &other] {
        forks::succeed(
            Command::new(env!("CARGO_BIN_EXE_kvfs")).args(["remote", "keygen"]).arg(path),
        );
    }
    let words = ["--remote", remote.to_str().unwrap(), "--remote-key", key.to_str().unwrap()];
    let mount = Mount::with_options(Mode::Served, &words);
    write_and_close(mount.files("a"), b"bytes").unwrap();
    eventually("the names to be published", || {
        (mount.try_status("remote_names")? == "published").then_some(())
    });
    drop(mount);
    let before = files_below(&remote);
    let marker = std::fs::read(remote.join("KVFS-REMOTE")).unwrap();
    let (text, is_well) = said(&doctor(&words, &[]));
    assert!(is_well && text.contains("answers: 4 KiB put, read back and deleted in"), "{text}");
    let (text, is_well) = said(&doctor(&["--remote"], &[&remote]));
    assert!(!is_well && text.contains("is sealed: give the file with its key"), "{text}");
    // A new first key is not made known: other stores lack it.
    let old = std::fs::read_to_string(&key).unwrap();
    let new = std::fs::read_to_string(&other).unwrap();
    let keys: Vec<&str> = new.lines().chain(old.lines().skip(1)).collect();
    std::fs::write(&key, keys.join("\n")).unwrap();
    assert!(said(&doctor(&words, &[])).1);
    assert_eq!(files_below(&remote), before);
    assert_eq!(std::fs::read(remote.join("KVFS-REMOTE")).unwrap(), marker);

    std::fs::remove_file(remote.join("KVFS-REMOTE")).unwrap();
    let (text, is_well) = said(&doctor(&words, &[]));
    assert!(!is_well && text.contains("is no remote of kvfs: it has no KVFS-REMOTE"), "{text}");
}
