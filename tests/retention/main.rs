//! Limits of directories: what goes beyond them, in which order, and what stays.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
#[path = "../prefixes/writer.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod writer;

mod clock;
mod command;
mod explained;
mod files;
mod followed;
mod history;
mod killed;
mod others;
mod sequences;
mod trees;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Mount, eventually, fill};

/// Files of this many bytes.
const FILE_BYTES: usize = 100_000;

/// Writes files one after the other, so that each was used later than the one before, and waits until
/// the daemon has heard that they are closed: what is in use stays.
fn write_files(mount: &Mount, directory: &Path, count: u64) -> Vec<PathBuf> {
    let write = |number: u64| {
        let path = directory.join(format!("block-{number:03}.bin"));
        fs::write(&path, fill(number, FILE_BYTES)).unwrap();
        path
    };
    let files = (0..count).map(write).collect();
    // The look itself is one.
    eventually("files to be closed", || (mount.status_number("open_files") <= 1).then_some(()));
    files
}

fn limit(path: &Path, name: &str, number: u64) {
    common::sys::setxattr(path, &format!("user.kvfs.{name}"), number.to_string().as_bytes())
        .unwrap();
}

/// Waits until the last walk over a directory found it within its limit, and nothing more goes.
fn wait_until_gone(path: &Path) {
    eventually("a file to go", || (!path.exists()).then_some(()));
}

fn removed(mount: &Mount, reason: &str) -> u64 {
    mount.metric(&format!("kvfs_retention_removed_files_total{{reason=\"{reason}\"}}"))
}

/// Waits until two more walks have ended, of whatever happened before.
fn settle() {
    std::thread::sleep(std::time::Duration::from_millis(2500));
}
