//! pjdfstest (`cargo install pjdfstest --version 0.2.2`), the POSIX conformance suite, on `files/`.
//! What may fail is in `pjdfstest.expected`, and exactly that has to.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Mode, Mount};

/// The whole suite has 398 tests. On ext4 13 of them are skipped, which mount the filesystem anew,
/// and here also the one that makes as many hard links as `pathconf` promises: FUSE promises 2^31.
const TESTS: usize = 398;
const SKIPPED_MAX: usize = 14;

/// Sleeps between changes are longer than a tick of the clock that ext4 stamps files with (4 ms).
/// The users are those that every Linux has.
const CONFIGURATION: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}
[settings]
naptime = 0.02
allow_remount = false
[dummy_auth]
entries = [["nobody", "NOBODY_GROUP"], ["daemon", "daemon"]]
"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// Name and verdict of each test; whatever else is printed, backtraces for one, is passed over.
fn parse(output: &str) -> BTreeMap<String, Verdict> {
    let lines = output.lines().filter_map(|line| {
        let (name, verdict) = line.split_once(char::is_whitespace)?;
        let verdict = match verdict.trim() {
            "ok" => Verdict::Passed,
            "FAILED" => Verdict::Failed,
            "skipped" => Verdict::Skipped,
            _ => return None,
        };
        name.contains("::").then(|| (name.to_owned(), verdict))
    });
    lines.collect()
}

fn expected_failures() -> BTreeSet<String> {
    let lines = include_str!("pjdfstest.expected").lines().map(str::trim);
    let names = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    names.map(str::to_owned).collect()
}

/// The suite renames and links across filesystems as well.
fn second_filesystem() -> tempfile::TempDir {
    tempfile::Builder::new().tempdir_in("/dev/shm").unwrap()
}

fn configuration(mount: &Mount) -> PathBuf {
    let groups = std::fs::read_to_string("/etc/group").unwrap();
    let has_nobody = groups.lines().any(|line| line.starts_with("nobody:"));
    let group = if has_nobody { "nobody" } else { "nogroup" };
    let path = mount.beside("pjdfstest.toml");
    std::fs::write(&path, CONFIGURATION.replace("NOBODY_GROUP", group)).unwrap();
    path
}

/// A short way to `files/`: a socket's path may have 107 bytes only.
fn short_way_to(mount: &Mount) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::Builder::new().prefix("k").tempdir_in("/tmp");
    let directory = directory.unwrap();
    let everybody = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), everybody).unwrap();
    let path = directory.path().join("f");
    std::os::unix::fs::symlink(mount.files(""), &path).unwrap();
    (directory, path)
}

/// The suite also acts as other users, who must be able to reach the mount.
fn open_the_way_to(path: &Path) {
    for directory in path.ancestors().skip(1) {
        let metadata = std::fs::metadata(directory).unwrap();
        let mode = metadata.permissions().mode();
        if mode & 0o001 == 0 {
            let permissions = std::fs::Permissions::from_mode(mode | 0o011);
            std::fs::set_permissions(directory, permissions).unwrap();
        }
    }
}

fn run(mode: Mode) {
    require!(fuse, root, pjdfstest);
    let mount = Mount::new(mode);
    open_the_way_to(mount.path());
    let other = second_filesystem();
    let (_directory, files) = short_way_to(&mount);
    let output = Command::new("pjdfstest")
        .arg("-c")
        .arg(configuration(&mount))
        .arg("-s")
        .arg(other.path())
        .arg("-p")
        .arg(files)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let verdicts = parse(&text);
    let with = |wanted: Verdict| -> BTreeSet<String> {
        let found = verdicts.iter().filter(|(_, verdict)| **verdict == wanted);
        found.map(|(name, _)| name.clone()).collect()
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(verdicts.len(), TESTS, "{text}\n{errors}");
    assert_eq!(with(Verdict::Failed), expected_failures(), "{text}");
    let skipped = with(Verdict::Skipped);
    assert!(skipped.len() <= SKIPPED_MAX, "skipped: {skipped:?}");
}

#[test]
fn passthrough() {
    run(Mode::Passthrough);
}

#[test]
fn served() {
    run(Mode::Served);
}

#[test]
fn the_output_is_read_whatever_stands_between() {
    let text = "chmod::a::b      ok\nBacktrace:\n  8: _start\nopen::c          FAILED\n\tpanicked: x ok\n\
                link::d      skipped\n\trequires features: x\n\nSummary: 1 failed, 3 total\n";
    let verdicts: Vec<_> = parse(text).into_iter().collect();
    assert_eq!(
        verdicts,
        [
            ("chmod::a::b".to_owned(), Verdict::Passed),
            ("link::d".to_owned(), Verdict::Skipped),
            ("open::c".to_owned(), Verdict::Failed),
        ]
    );
}
