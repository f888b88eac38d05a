//! The demo, as a user runs it: what it says, how it ends, and that it leaves nothing behind.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

mod common;

/// The demo, with a directory for its temporary files. Without optimisation the whole prompt
/// would take minutes.
fn demo(temporary: &Path) -> Command {
    let mut command = Command::new(common::example("demo"));
    command.env("TMPDIR", temporary);
    command.env("CARGO_BIN_EXE_kvfs", env!("CARGO_BIN_EXE_kvfs"));
    command.stdin(Stdio::null());
    if cfg!(debug_assertions) {
        command.arg("--quick");
    }
    command
}

#[track_caller]
fn assert_nothing_left(temporary: &Path) {
    let left: Vec<_> = temporary.read_dir().unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(temporary.to_str().unwrap()), "{mounts}");
}

/// What a program printed, for the message of a failed test.
fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn every_step_succeeds() {
    require!(fuse, rsync);
    let directory = common::mount::scratch_directory();
    let output = demo(directory.path()).output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let lines: &[&str] = if cfg!(debug_assertions) {
        &[
            "0 of the 310 prompt tokens computed again",
            "0000256.tail filled up and was sealed as 0000256.safetensors",
            "261 of 325 tokens found; exactly the 64 from 128 on computed again and written back",
        ]
    } else {
        &[
            "0 of the 1250 prompt tokens computed again",
            "0001024.tail filled up and was sealed as 0001024.safetensors",
            "1033 of 1289 tokens found; exactly the 256 from 512 on computed again and written back",
        ]
    };
    for line in lines.iter().chain(&[
        "     kind: page",
        "     state: ok",
        "26 files of",
        "the second rsync moved nothing",
        "All as without interruption.",
    ]) {
        assert!(said.contains(line), "{line:?} is missing in\n{said}");
    }
    assert_nothing_left(directory.path());
}

#[test]
fn an_interrupted_demo_cleans_up() {
    require!(fuse, rsync);
    let directory = common::mount::scratch_directory();
    let mut command = demo(directory.path());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mounted = lines.find(|line| line.as_ref().unwrap().contains("$ kvfs create"));
    assert!(mounted.is_some());
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    kill(pid, Signal::SIGINT).unwrap();
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{error}\n{rest:#?}");
    assert!(error.ends_with(": interrupted\n"), "{error}");
    assert_nothing_left(directory.path());
}

#[test]
fn a_failure_names_the_step() {
    require!(fuse, rsync);
    let directory = common::mount::scratch_directory();
    let mut command = demo(directory.path());
    let output = command.env("CARGO_BIN_EXE_kvfs", "/bin/false").output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let expected = "demo: step \"The same, with the cache in a mount\": false ended with";
    assert!(said.contains(expected), "{said}");
    assert_nothing_left(directory.path());
}

#[test]
fn what_is_missing_is_said_in_one_line() {
    require!(fuse);
    let directory = common::mount::scratch_directory();
    let output = demo(directory.path()).env("PATH", "/nowhere").output();
    let output = output.unwrap();
    let expected = "demo: rsync is missing: install it with mount-scripts/setup.sh\n";
    assert_eq!(said(&output), expected);
    assert_eq!(output.status.code(), Some(1));
    assert_nothing_left(directory.path());
}

/// Runs the small model over the first 600 tokens of its prompt.
fn tiny_llama(further: &[&str]) -> Command {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
    let mut command = Command::new(common::example("tiny_llama"));
    command.arg("--model").arg(&fixture).arg("--prompt").arg(fixture.join("prompt.txt"));
    command.args(["--prompt-tokens", "600"]).args(further);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A mount with the model's directory, for pages of 128 tokens.
fn tiny_llama_mount() -> (common::Mount, PathBuf) {
    let mount = common::Mount::new(common::Mode::Passthrough);
    let model = mount.join("models/tiny-llama");
    let geometry = ["--layers", "4", "--kv-heads", "2", "--head-dim", "64", "--page-tokens", "128"];
    let mut create = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let created = create.arg("create").arg(&model).args(geometry).output().unwrap();
    assert!(created.status.success(), "{}", said(&created));
    (mount, model)
}

#[test]
fn a_decode_process_follows_the_process_that_computes_the_prompt() {
    require!(fuse, root);
    let (_mount, model) = tiny_llama_mount();
    let sequence = model.join("sequences/followed");
    let cache = ["--cache", sequence.to_str().unwrap()];
    let follow = tiny_llama(&[&cache[..], &["--tokens", "8", "--follow", "120"]].concat());
    let compute = tiny_llama(&[&cache[..], &["--tokens", "0"]].concat());
    let [follower, computer] =
        [follow, compute].map(|mut command| common::forks::spawn(&mut command).unwrap());
    let prefill = computer.wait_with_output().unwrap();
    assert!(prefill.status.success(), "{}", said(&prefill));
    let decode = follower.wait_with_output().unwrap();
    let text = said(&decode);
    assert!(decode.status.success(), "{text}");
    // Four pages of each of four layers; the last 88 tokens are in the tails.
    assert!(text.contains("followed 16 pages while they were written"), "{text}");
    assert!(text.contains("of 600 prompt tokens came from it"), "{text}");
    let alone = tiny_llama(&["--tokens", "8"]).output().unwrap();
    assert_eq!(decode.stdout, alone.stdout);
}

#[test]
fn what_a_full_context_drops_is_restored_and_not_computed() {
    require!(fuse, root);
    let (mut mount, model) = tiny_llama_mount();
    let sequence = model.join("sequences/chat");
    let cache = ["--cache", sequence.to_str().unwrap()];
    // Full after 40 tokens, and again after 318 more.
    let context = ["--context", "640", "--tokens", "370"];
    let shifted = tiny_llama(&[&cache[..], &context].concat()).output().unwrap();
    let text = said(&shifted);
    assert!(shifted.status.success(), "{text}");
    for line in
        ["dropped tokens 4 to 322, kept in chat.1", "dropped tokens 4 to 322, kept in chat.2"]
    {
        assert!(text.contains(line), "{line:?} is missing in\n{text}");
    }
    // The logits were compared as well.
    assert!(text.contains("what was dropped: 640 tokens: restored in"), "{text}");
    // In memory K is rotated and written anew.
    let alone = tiny_llama(&context).output().unwrap();
    assert_eq!(shifted.stdout, alone.stdout);

    // What is held in memory while the snapshot is made is in the files afterwards.
    let tokens = std::fs::read(sequence.join("tokens")).unwrap();
    assert_eq!(tokens.len(), 4 * (600 + 370 - 1));
    let generated: Vec<u8> = tokens.chunks(4).skip(600).map(|id| id[0]).collect();
    assert_eq!(generated, shifted.stdout[..369]);

    // The prompt comes again.
    mount.remount();
    let again = tiny_llama(&[&cache[..], &["--tokens", "8"]].concat()).output().unwrap();
    let text = said(&again);
    assert!(text.contains("restored 600 tokens from chat.1"), "{text}");
    assert!(text.contains("600 of 600 prompt tokens came from it, 0 were computed"), "{text}");
    assert_eq!(again.stdout[..8], shifted.stdout[..8]);
}
