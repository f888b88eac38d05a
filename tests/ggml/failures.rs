//! What goes wrong is said in one line, and the engine lives or ends in good order.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::disk::SmallDisk;
use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount, eventually};
use crate::engine::command;
use crate::gguf::Model;
use crate::program::{Link, library, run};

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
    assert_says(&text, "KVFS_KV names no mount: the engine goes on without kvfs");
}

/// The daemon of the mount has died.
#[test]
fn mount_gone() {
    require!(fuse, llama, cc);
    let mut mount = Mount::new(Mode::Served);
    mount.kill();
    for cache in [mount.path(), &mount.join("files/elsewhere")] {
        let (code, text) = errors(Some(cache), "--flash on");
        assert_eq!(code, Some(0), "{text}");
        assert_says(&text, "its daemon is gone: mount the store again");
    }
}

/// An engine that has a version of ggml, and nothing else.
#[test]
fn unknown_version() {
    require!(cc);
    let directory = scratch_directory();
    let program = directory.path().join("unknown");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ggml/unknown.c");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Werror", "-rdynamic"]).arg(source).arg("-o").arg(&program);
    run(cc.arg("-ldl"));
    let said = |strict| {
        let mut command = Command::new(&program);
        command.arg(library(Link::Shared)).env("KVFS_KV", directory.path());
        let output = run(command.env("KVFS_GGML", strict));
        String::from_utf8_lossy(&output.stderr).trim_end().to_owned()
    };
    assert_eq!(
        said(""),
        "kvfs: the engine's ggml 0.99.0 is not one that this kvfs can work with: the engine has no \
         ggml_backend_buffer_init: build it with GGML_BACKEND_DL=ON"
    );
    assert_eq!(
        said("strict"),
        "kvfs: the engine has ggml 0.99.0; this kvfs knows 0.9.7, 0.15.3, 0.17.0, 0.19.0, 0.23.0, \
         0.25.1, 0.25.3, and KVFS_GGML=strict lets no other in"
    );
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

/// A disk without room for the cache: the engine says so when it makes the context, not by a
/// signal when it stores a row.
#[test]
fn full_disk() {
    require!(fuse, root, r#loop, llama, cc);
    let disk = SmallDisk::new();
    let mount = Mount::of_store(Mode::Passthrough, &disk.mountpoint.join("store"));
    // 2 KiB for each token.
    let (code, text) = errors(Some(mount.path()), "--flash on --context 131072");
    assert_eq!(code, Some(1), "{text}");
    assert_says(&text, "no space for 33554432 bytes of the KV cache: free some");
    let (code, text) = errors(Some(mount.path()), "--flash on --context 512");
    assert_eq!(code, Some(0), "{text}");
}

/// A pipe holds 64 KiB, and the engine's buffer a few more; a step prints about 20 bytes of 650,000.
const LINES_BEHIND_BYTES: usize = 128 << 10;

/// The daemon is killed while the engine runs: the cache is mapped from the backing files, which
/// are still there.
#[test]
fn the_daemon_is_killed() {
    require!(fuse, root, llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let mut mount = Mount::new(Mode::Passthrough);
    let mut engine =
        command(&path, "--flash on --predict 32000 --context 32768", Some(mount.path()));
    let mut engine = engine.stdout(Stdio::piped()).spawn().unwrap();
    let file = mount.join("files/llama/0/cache_v_l3");
    let written = || std::fs::read(&file).is_ok_and(|bytes| bytes.iter().any(|byte| *byte != 0));
    eventually("the engine to store rows", || written().then_some(()));
    mount.kill();
    // More than can have been on its way.
    let mut lines = vec![0; LINES_BEHIND_BYTES];
    engine.stdout.take().unwrap().read_exact(&mut lines).expect("the engine died with the daemon");
    engine.kill().unwrap();
    engine.wait().unwrap();
}
