//! The Python package: pytest over `python/tests`, with the wheel installed in an environment of its own.
//!
//! `mount-scripts/test.sh` builds the wheel of this tree and installs it there.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::process::Command;

use common::require::wheel_python;

/// Runs one file of tests.
fn pytest(file: &str) {
    require!(fuse, root, wheel);
    let scratch = common::mount::scratch_directory();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/tests");
    let mut run = Command::new(wheel_python());
    run.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]).arg(tests.join(file));
    // Not where the package's sources lie: what is installed is to be tested.
    let run = run.current_dir(scratch.path()).env("KVFS_TEST_DIR", scratch.path());
    let output = run.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    eprintln!("{said}");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn mounts() {
    pytest("test_mount.py");
}

#[test]
fn sequences() {
    pytest("test_sequence.py");
}

#[test]
fn tails() {
    pytest("test_tail.py");
}

#[test]
fn prefixes() {
    pytest("test_prefix.py");
}

#[test]
fn streams() {
    pytest("test_stream.py");
}

#[test]
fn arrays() {
    pytest("test_arrays.py");
}

#[test]
fn files() {
    pytest("test_files.py");
}

#[test]
fn attention() {
    pytest("test_attend.py");
}

#[test]
fn bad_input() {
    pytest("test_bad_input.py");
}
