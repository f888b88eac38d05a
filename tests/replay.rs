//! `kvfs bench trace --real`: a trace on a mount of its own, with kills, real bytes and figures.
//!
//! Without /dev/fuse the tests that mount are skipped; if `KVFS_REQUIRE` names fuse that is a failure.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "common/skips.rs"]
mod skips;

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// On a disk. None, with the reason printed, where nothing can be mounted.
fn place() -> Option<tempfile::TempDir> {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let missing = opened.err().map(|error| format!("/dev/fuse: {error}"));
    skips::is_there("fuse", missing).then(|| tempfile::tempdir_in("/var/tmp").unwrap())
}

fn line(at: u64, tokens: usize, ids: &[u64]) -> String {
    format!(
        "{{\"timestamp\": {at}, \"input_length\": {tokens}, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n"
    )
}

/// Conversations that share a beginning and go on by turns: 4900 uses of 608 blocks.
fn conversations(directory: &Path) -> PathBuf {
    let mut text = String::new();
    for round in 1..=10_u64 {
        for conversation in 0..20_u64 {
            let own = (0..3 * round).map(|page| 1000 * conversation + 100 + page);
            let ids: Vec<u64> = (0..8).chain(own).collect();
            let (at, tokens) = (round * 1000 + conversation, 512 * ids.len());
            text += &line(at, tokens, &ids);
        }
    }
    let path = directory.join("chat.jsonl");
    std::fs::write(&path, text).unwrap();
    path
}

fn command(trace: &Path, directory: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["bench", "trace", "--real", "--dir"]).arg(directory).arg(trace).args(options);
    command.stdin(Stdio::null());
    command
}

fn assert_nothing_left(directory: &Path) {
    let left: Vec<_> = directory.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(directory.to_str().unwrap()), "{mounts}");
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The value of a figure of the trace.
fn figure(document: &serde_json::Value, name: &str) -> serde_json::Value {
    let name = format!("chat_real_{name}");
    let figures = document["figures"].as_array().unwrap();
    let figure = figures.iter().find(|figure| figure["name"] == name.as_str());
    figure.unwrap_or_else(|| panic!("no {name}"))["value"].clone()
}

/// Replays conversations on tiers of a few hundred pages, while the daemon is killed so often. Whether hits agreed, what it said,
/// and its figures.
fn replayed(place: &Path, kills: &str) -> (bool, String, serde_json::Value) {
    let traces = tempfile::tempdir().unwrap();
    let trace = conversations(traces.path());
    let options = ["--ram", "8M", "--ssd", "32M", "--span", "2", "--kills", kills, "--json"];
    let output = command(&trace, place, &options).output().unwrap();
    let error = said(&output);
    assert!(output.status.success() || error.contains("disagree"), "{error}");
    let document = serde_json::from_slice(&output.stdout).unwrap();
    (output.status.success(), error, document)
}

#[test]
fn real_hits_agree_with_the_simulation() {
    let Some(place) = place() else { return };
    let (agrees, error, document) = replayed(place.path(), "0");
    let value = |name: &str| figure(&document, name).as_f64().unwrap();
    // In tiers of a few hundred pages a batch that leaves is several per cent: the command's own limit is for larger ones.
    assert!(value("disagreement") <= 0.05, "{error}");
    assert_eq!(agrees, value("disagreement") <= 0.02, "{error}");
    let tiers = ["from_ram", "from_ssd", "from_remote"].map(value);
    assert!((tiers.iter().sum::<f64>() - 1.0).abs() < 0.01, "{tiers:?}");
    assert!(tiers.iter().all(|share| *share > 0.0), "each tier serves something: {tiers:?}");
    assert!(value("load_prefix_median") > 0.0);
    assert!(value("load_prefix_p99") >= value("load_prefix_median"));
    // All that was asked is loaded or computed, some of it by two clients at once.
    let per_million = |name: &str| value(&format!("{name}_per_million"));
    let loaded = ["ram", "ssd", "remote"].map(|tier| per_million(&format!("loaded_from_{tier}")));
    let all = loaded.iter().sum::<f64>() + per_million("computed");
    assert!((998_000.0..1_300_000.0).contains(&all), "{all}");
    assert!(per_million("computed") >= 100_000.0, "each block is computed once");
    assert!(per_million("daemon_cpu") > 0.0 && per_million("client_cpu") > 0.0);
    assert_nothing_left(place.path());
}

#[test]
fn kills_lose_nothing_that_was_synced_and_make_no_byte_wrong() {
    let Some(place) = place() else { return };
    // Tiers as small as these are empty for a good part of so short a trace: that hits agree is for the other test.
    let (_, error, document) = replayed(place.path(), "2");
    let told = |name: &str| figure(&document, name);
    assert_eq!(["wrong_bytes", "lost_pages"].map(told), [0.0, 0.0], "{error}");
    let machine = &document["machine"];
    assert!(machine["scaled"].as_str().unwrap().contains("16 tokens"), "{machine}");
    let replayed = machine["replayed"].as_str().unwrap();
    assert!(replayed.contains("200 requests") && replayed.contains("2 kills"), "{replayed}");
    assert_nothing_left(place.path());
}

#[test]
fn ctrl_c_leaves_nothing() {
    let Some(place) = place() else { return };
    let traces = tempfile::tempdir().unwrap();
    let trace = conversations(traces.path());
    let options = ["--ram", "5M", "--ssd", "16M", "--span", "60", "--kills", "0"];
    let mut child = command(&trace, place.path(), &options).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    // It goes on with the requests then.
    let begun = lines.map(Result::unwrap).any(|line| line.contains("different pages"));
    assert!(begun, "{:?}", child.wait());
    std::thread::sleep(Duration::from_secs(1));
    kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_nothing_left(place.path());
}

#[test]
fn what_cannot_be_is_one_line() {
    let Some(place) = place() else { return };
    let traces = tempfile::tempdir().unwrap();
    let trace = conversations(traces.path());
    let refused: [(&[&str], &str); 6] = [
        (&["--requests", "0"], "--requests and --clients are more than 0"),
        (&["--kills", "60", "--requests", "100"], "--kills 60"),
        (&["--ram", "1M"], "--ram is 0"),
        (&["--ssd", "1M"], "--ssd is 16777216"),
        (&["--ssd", "100T"], "bytes are free"),
        (&["--budget", "1G"], "cannot be used with"),
    ];
    for (options, expected) in refused {
        let output = command(&trace, place.path(), options).output().unwrap();
        let error = said(&output);
        assert!(!output.status.success() && error.contains(expected), "{options:?}: {error}");
        assert!(output.stdout.is_empty());
        assert_nothing_left(place.path());
    }
    let output = command(&trace, Path::new("/nowhere"), &[]).output().unwrap();
    assert!(!output.status.success() && said(&output).contains("/nowhere"), "{}", said(&output));
}
