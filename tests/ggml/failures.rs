//! What goes wrong is said in one line, and the engine lives or ends in good order.

use std::path::Path;

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::engine::command;
use crate::gguf::Model;

/// What the engine wrote to standard error, and how it ended.
fn errors(cache: Option<&Path>, arguments: &str) -> (Option<i32>, String) {
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let output = command(&path, arguments, cache).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[track_caller]
fn assert_says(text: &str, line: &str) {
    assert!(text.contains(line), "not said: {line}\n{text}");
}

/// No mount: the engine goes on without the backend.
#[test]
fn no_mount() {
    require!(llama, cc);
    let directory = scratch_directory();
    let (code, text) = errors(Some(directory.path()), "--flash on");
    assert_eq!(code, Some(0), "{text}");
    assert_says(&text, "not in a kvfs mount: mount the store first");
    let (code, text) = errors(Some(Path::new("")), "--flash on");
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("kvfs:"), "without the variable nothing is done or said: {text}");
}

/// Attention that runs elsewhere is not passed over in silence.
#[test]
fn attention_elsewhere() {
    require!(fuse, llama, cc);
    let mount = Mount::new(Mode::Served);
    let (code, text) = errors(Some(mount.path()), "--flash off");
    assert_eq!(code, Some(0), "{text}");
    assert_says(&text, "attention runs elsewhere: turn flash attention on");
}
