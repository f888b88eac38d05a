//! A mount whose remote is a directory beside it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::mount::scratch_directory;
use crate::common::sys::{getxattr, sync_directory, write_and_close};
use crate::common::{Mode, Mount, eventually, fill, forks};

pub(crate) const FILE_BYTES: usize = 4 << 20;
/// Four files fit.
pub(crate) const BUDGET: &str = "20M";
pub(crate) const BUDGET_BYTES: u64 = 20 << 20;

/// A mount, and the directory that it has as its remote.
pub(crate) struct Place {
    pub(crate) mount: Mount,
    pub(crate) remote: PathBuf,
    _directory: tempfile::TempDir,
}

impl Place {
    /// Without a budget for the disk, unless `further` sets one.
    pub(crate) fn new(mode: Mode, further: &[&str]) -> Place {
        let directory = scratch_directory();
        let remote = directory.path().join("remote");
        std::fs::create_dir(&remote).unwrap();
        let place = remote.to_str().unwrap();
        let options = ["--remote", place, "--commit-interval", "0.05"];
        let mount = Mount::with_options(mode, &[&options, further].concat());
        Place { mount, remote, _directory: directory }
    }

    /// With a budget for the disk.
    pub(crate) fn with_budget(mode: Mode, further: &[&str]) -> Place {
        Place::new(mode, &[&["--ssd", BUDGET], further].concat())
    }

    /// Writes files of different bytes.
    pub(crate) fn write(&self, name: &str, count: u64) -> Vec<(PathBuf, Vec<u8>)> {
        let write = |number| {
            let path = self.mount.files(format!("{name}{number}"));
            let bytes = fill(number + name.len() as u64 * 1000, FILE_BYTES);
            write_and_close(&path, &bytes).unwrap();
            (path, bytes)
        };
        (0..count).map(write).collect()
    }

    /// Takes so much of the disk that nothing must leave, but no file fits any more.
    pub(crate) fn fill_up(&self) {
        let low = BUDGET_BYTES / 100 * 90;
        let used = eventually("demotion to end", || {
            let used = self.mount.status_number("ssd_used_bytes");
            (used <= low).then_some(used)
        });
        let ballast = low + (512 << 10) - used;
        let bytes = fill(99, usize::try_from(ballast).unwrap());
        write_and_close(self.mount.files("ballast"), &bytes).unwrap();
        sync_directory(self.mount.path()).unwrap();
    }

    /// Waits until the disk holds no more than it should: from 95 per cent on something leaves.
    pub(crate) fn wait_until_it_fits(&self) {
        eventually("the disk to have room", || {
            let used = self.mount.status_number("ssd_used_bytes");
            let waiting = self.mount.status_number("remote_waiting_files");
            (used <= BUDGET_BYTES / 100 * 95 && waiting == 0).then_some(())
        });
    }

    /// Waits until the remote has everything.
    pub(crate) fn wait_until_uploaded(&self) {
        eventually("the remote to have everything", || {
            let waiting = self.mount.status_number("remote_waiting_files");
            (waiting == 0 && self.mount.status_number("uncommitted_changes") == 0).then_some(())
        });
    }
}

/// Runs `kvfs`.
pub(crate) fn kvfs(words: &[&str], paths: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::output(command.args(words).args(paths))
}

/// What a program that ended well printed.
#[track_caller]
pub(crate) fn printed(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// What a program that failed said.
#[track_caller]
pub(crate) fn complaint(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

pub(crate) fn tier(path: &Path) -> String {
    getxattr(path, "user.kvfs.tier").unwrap()
}

pub(crate) fn assert_same(files: &[(PathBuf, Vec<u8>)]) {
    for (path, bytes) in files {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
}
