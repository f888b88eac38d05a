//! `kvfs demo` as a user runs it: what it says, how it ends in a pipe and on a terminal, and that nothing of it stays.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/skips.rs"]
mod skips;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// README.md says that it takes seconds. A debug build computes the prompt many times slower, and beside other tests.
const DEMO_MAX: Duration = Duration::from_secs(if cfg!(debug_assertions) { 180 } else { 10 });

/// None, with the reason printed, where nothing can be mounted.
fn place() -> Option<tempfile::TempDir> {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let missing = opened.err().map(|error| format!("/dev/fuse: {error}"));
    skips::is_there("fuse", missing).then(|| tempfile::tempdir().unwrap())
}

/// Mount namespaces are for root.
fn can_unshare() -> bool {
    let made = Command::new("unshare").args(["-m", "true"]).output();
    let is_made = made.is_ok_and(|made| made.status.success());
    skips::is_there("unshare", (!is_made).then(|| "unshare -m fails".to_owned()))
}

/// A command with the directory for temporary files, and a setting from outside that must not reach the mount.
fn command(program: &str, temporary: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("TMPDIR", temporary).env("KVFS_CONFIG", "/nowhere/kvfs.toml");
    command.stdin(Stdio::null());
    command
}

fn demo(temporary: &Path) -> Command {
    let mut command = command(env!("CARGO_BIN_EXE_kvfs"), temporary);
    command.arg("demo");
    command
}

/// Runs a shell with a mount namespace of its own; `$0` is the program.
fn unshared(temporary: &Path, script: &str) -> Output {
    let mut command = command("unshare", temporary);
    command.args(["-m", "sh", "-euc", script, env!("CARGO_BIN_EXE_kvfs")]).output().unwrap()
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[track_caller]
fn assert_nothing_left(temporary: &Path) {
    let left: Vec<_> = temporary.read_dir().unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(temporary.to_str().unwrap()), "{mounts}");
    for process in Path::new("/proc").read_dir().unwrap().map(Result::unwrap) {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let is_daemon = line.contains("kvfs mount") && line.contains(temporary.to_str().unwrap());
        assert!(!is_daemon, "{line}");
    }
}

#[test]
fn every_step_succeeds_and_nothing_stays() {
    let Some(place) = place() else { return };
    let begun = Instant::now();
    let (status, told, error) = said(&demo(place.path()).output().unwrap());
    let took = begun.elapsed();
    assert_eq!((status, &*error), (Some(0), ""), "{told}");
    eprintln!("kvfs demo took {took:.1?} of {DEMO_MAX:?}");
    assert!(took <= DEMO_MAX, "{took:?}\n{told}");
    for line in [
        "alice: 1152 tokens computed in ",
        "  tokens: 1024\n",
        "  sequence: mnt/models/toy/sequences/alice\n",
        "bob: 1024 tokens restored in ",
        "carol: 1024 tokens restored in ",
        "evicted 36 files",
        "  remote: 36 files",
        "bit for bit what it was",
        "1152 tokens restored in ",
        "times as long as restoring them.",
        "The mount and everything in it are removed.\n",
    ] {
        assert!(told.contains(line), "{line:?} is missing in\n{told}");
    }
    let shared = told.lines().filter(|line| line.trim_start().starts_with("-rw-r--r-- 3 "));
    assert_eq!(shared.count(), 8, "{told}");
    assert_nothing_left(place.path());
}

#[test]
fn a_signal_at_any_step_leaves_nothing() {
    let Some(place) = place() else { return };
    for (signal, step) in [
        (Signal::SIGINT, "$ kvfs mount"),
        (Signal::SIGHUP, "$ kvfs create"),
        (Signal::SIGTERM, "$ kvfs evict"),
    ] {
        let mut child = demo(place.path());
        let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(step)), "{step}");
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        let code = child.wait().unwrap().code();
        let line = "kvfs: interrupted: the mount and everything in it are removed\n";
        assert_eq!((code, &*error), (Some(128 + signal as i32), line), "{step}: {rest:#?}");
        assert_nothing_left(place.path());
    }
}

#[test]
fn on_a_terminal_the_mount_stays_until_enter_is_pressed() {
    let Some(place) = place() else { return };
    // Ctrl-C, which a terminal turns into a signal, and Enter.
    for (key, code) in [("\u{3}", 130), ("\n", 0)] {
        let line = format!("{} demo", env!("CARGO_BIN_EXE_kvfs"));
        let mut child = command("script", place.path())
            .args(["-qec", &line, "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let named = lines.find_map(|line| Some(PathBuf::from(line.trim().strip_prefix("cd ")?)));
        let model = named.unwrap().join("mnt/models/toy");
        assert!(lines.any(|line| line.contains("python3")));
        let prompt = model.join("../../../bob.tokens");
        let mut asked = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        let asked = asked.arg("match").arg("--tokens").arg(prompt).arg(&model).output().unwrap();
        assert!(said(&asked).1.contains("tokens: 1152\n"), "{asked:?}");
        if key == "\n" {
            run_python_of_readme(&model.join("../../.."));
        }
        // Whoever uses it does not keep it.
        let used = File::open(model.join("sequences/bob/000/0000000.safetensors")).unwrap();
        child.stdin.as_mut().unwrap().write_all(key.as_bytes()).unwrap();
        let rest: Vec<String> = lines.collect();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{rest:#?}");
        assert_nothing_left(place.path());
        drop(used);
    }
}

/// What README.md tells to type into Python.
fn python_of_readme() -> String {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let text = std::fs::read_to_string(readme).unwrap();
    let (_, block) = text.split_once("```python\n").unwrap();
    block.split_once("```").unwrap().0.to_owned()
}

/// Runs it in the directory of a demonstration, where the wheel is installed.
fn run_python_of_readme(directory: &Path) {
    let named = std::env::var_os("KVFS_TEST_WHEEL").map(PathBuf::from);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = named.unwrap_or_else(|| root.join("target/test-tools/wheel/bin/python"));
    let can = Command::new(&python).args(["-c", "import kvfs, numpy"]).output();
    let missing = !can.is_ok_and(|can| can.status.success());
    if !skips::is_there("wheel", missing.then(|| "no wheel is installed".to_owned())) {
        return;
    }
    let checked = "assert sequence.path.name == 'bob' and tokens == 1152, (sequence, tokens)\n\
                   assert k.shape == (4, 128, 64), k.shape\n\
                   assert len(sequence) == 1153, len(sequence)\n";
    let mut run = Command::new(python);
    run.arg("-c").arg(python_of_readme() + checked).current_dir(directory);
    let (status, _, error) = said(&run.output().unwrap());
    assert_eq!(status, Some(0), "{error}");
}

#[test]
fn what_cannot_be_is_one_line() {
    let Some(place) = place() else { return };
    let (status, _, error) = said(&demo(place.path()).arg("fast").output().unwrap());
    assert!(status == Some(2) && error.contains("unexpected argument 'fast'"), "{error}");
    let (status, told, error) = said(&demo(&place.path().join("absent")).output().unwrap());
    assert_eq!((status, &*told), (Some(1), ""));
    assert!(error.ends_with("absent: ENOENT: No such file or directory: set TMPDIR\n"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");

    let broken = "\"$0\" demo | true; true";
    let mut shell = command("sh", place.path());
    let (_, _, error) =
        said(&shell.args(["-c", broken, env!("CARGO_BIN_EXE_kvfs")]).output().unwrap());
    assert!(error.lines().count() <= 1, "{error}");
    assert_nothing_left(place.path());
}

#[test]
fn without_a_device_or_room_it_is_one_line_too() {
    let Some(place) = place() else { return };
    if !can_unshare() {
        return;
    }
    let none = "mount -t tmpfs none /dev; mknod /dev/null c 1 3; exec \"$0\" demo";
    let (status, told, error) = said(&unshared(place.path(), none));
    assert_eq!((status, &*told, error.lines().count()), (Some(1), "", 1), "{error}");
    assert!(error.starts_with("kvfs: /dev/fuse is missing: "), "{error}");

    let small = "mount -t tmpfs -o size=1m none \"$TMPDIR\"; exec \"$0\" demo";
    let (status, told, error) = said(&unshared(place.path(), small));
    assert_eq!((status, &*told, error.lines().count()), (Some(1), "", 1), "{error}");
    assert!(error.contains("1.0 MiB are free, and this takes 64.0 MiB: set TMPDIR"), "{error}");

    // It becomes full while the prompt is computed.
    let fills = "mount -t tmpfs -o size=80m none \"$TMPDIR\"; \"$0\" demo >\"$TMPDIR/told\" & pid=$!; \
                 until grep -qs 'kvfs create' \"$TMPDIR/told\"; do sleep 0.01; done; \
                 dd if=/dev/zero of=\"$TMPDIR/filler\" bs=1M status=none 2>/dev/null || true; \
                 status=0; wait $pid || status=$?; ls \"$TMPDIR\"; exit $status";
    let (status, left, error) = said(&unshared(place.path(), fills));
    assert_eq!((status, &*left), (Some(1), "filler\ntold\n"), "{error}");
    assert!(error.contains("demo, step 1") && error.contains("No space left"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}
