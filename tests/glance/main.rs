//! What people look at while a mount is used: `kvfs status`, `kvfs map`, `kvfs top`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod map;
mod progress;
mod status;
mod stopped;
mod terminal;
mod top;

use std::path::Path;
use std::process::{Command, Output};

use common::forks::output;

/// Calls the program.
fn kvfs(words: &[&str], paths: &[&Path]) -> Output {
    output(Command::new(env!("CARGO_BIN_EXE_kvfs")).args(words).args(paths))
}

#[track_caller]
fn printed(ended: &Output) -> String {
    assert!(ended.status.success(), "{}", complaint(ended));
    String::from_utf8(ended.stdout.clone()).unwrap()
}

fn complaint(ended: &Output) -> String {
    String::from_utf8_lossy(&ended.stderr).into_owned()
}
