//! `kvfs config` and `mount -o remount`: what a mount that is used can be told, by whom, and that a refusal changes
//! nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod budgets;
mod doctor;
mod others;
mod refused;
mod remount;
mod service;
mod values;

use std::path::Path;
use std::process::{Command, Output};

use common::Mount;
use common::forks::output;

/// Calls the program.
fn kvfs(words: &[&str], path: &Path) -> Output {
    output(Command::new(env!("CARGO_BIN_EXE_kvfs")).args(words).arg(path))
}

fn complaint(ended: &Output) -> String {
    String::from_utf8_lossy(&ended.stderr).into_owned()
}

/// Changes settings of a mount.
#[track_caller]
fn set(mount: &Mount, settings: &[&str]) {
    let ended = kvfs(&[&["config", "set"], settings].concat(), mount.path());
    assert!(ended.status.success(), "{settings:?}: {}", complaint(&ended));
    assert!(ended.stdout.is_empty());
}

/// All settings as the mount shows them, with where they come from.
#[track_caller]
fn shown(mount: &Mount) -> String {
    let ended = kvfs(&["config", "show", "--origin"], mount.path());
    assert!(ended.status.success(), "{}", complaint(&ended));
    String::from_utf8(ended.stdout).unwrap()
}

/// The value of one setting and where it comes from.
#[track_caller]
fn setting(mount: &Mount, name: &str) -> (String, String) {
    let shown = shown(mount);
    let mut rows = shown.lines().map(|line| line.split("  ").filter(|word| !word.is_empty()));
    let mut row =
        rows.find(|row| row.clone().next().is_some_and(|word| word.trim() == name)).unwrap();
    let mut next = || row.by_ref().next().unwrap_or_default().trim().to_owned();
    let _ = next();
    (next(), next())
}

/// Settings that must be refused with such a line, and change nothing.
#[track_caller]
fn assert_refused(mount: &Mount, settings: &[&str], expected: &str) {
    let before = shown(mount);
    let ended = kvfs(&[&["config", "set"], settings].concat(), mount.path());
    let line = complaint(&ended);
    assert!(!ended.status.success(), "{settings:?} was accepted");
    assert!(line.contains(expected), "{settings:?}: {line}");
    assert_eq!(line.lines().count(), 1, "{line}");
    assert_eq!(shown(mount), before, "{settings:?}");
}
