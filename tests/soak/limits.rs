//! A directory with a limit, into which far more is written: the oldest files go, whole, the pinned one
//! stays, and what lies outside is the business of the other workers, who would miss it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::sys::{rename, setxattr, sync_directory, write_and_close};
use crate::common::{Mount, eventually, fill};
use crate::work::Worker;

const LIMIT_BYTES: u64 = 1 << 20;
const FILE_BYTES: usize = 100_000;
/// The file that is pinned; those that are written count from 1.
const PINNED: u64 = 0;

/// The directory with a limit.
pub(crate) struct Limits {
    directory: PathBuf,
}

impl Limits {
    pub(crate) fn new(mount: &Mount) -> Limits {
        let directory = mount.files("limited");
        std::fs::create_dir(&directory).unwrap();
        setxattr(&directory, "user.kvfs.quota", LIMIT_BYTES.to_string().as_bytes()).unwrap();
        let pinned = directory.join(PINNED.to_string());
        write_and_close(&pinned, &fill(PINNED, FILE_BYTES)).unwrap();
        setxattr(&pinned, "user.kvfs.pin", b"1").unwrap();
        sync_directory(&directory).unwrap();
        Limits { directory }
    }

    /// While nobody writes: files are whole or gone, and the pinned one is there.
    #[track_caller]
    pub(crate) fn compare_all(&self) {
        let mut is_pinned_there = false;
        for path in self.files() {
            // The daemon may remove it meanwhile.
            let bytes = match std::fs::read(&path) {
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
                outcome => outcome.unwrap(),
            };
            let number = number(&path).unwrap();
            assert!(bytes == fill(number, FILE_BYTES), "{}: other bytes", path.display());
            is_pinned_there |= number == PINNED;
        }
        assert!(is_pinned_there, "the pinned file is gone");
    }

    /// While nobody writes: waits until the limit is kept, for which files have to go.
    pub(crate) fn assert_kept(&self, written: u64) {
        let files_max = usize::try_from(LIMIT_BYTES).unwrap() / FILE_BYTES;
        assert!(written > 2 * files_max as u64, "only {written} files were written");
        eventually("the limit to be kept", || (self.files().len() <= files_max).then_some(()));
        // As long as there is room for them, files stay.
        assert!(self.files().len() > files_max / 2, "{:?}", self.files());
        self.compare_all();
    }

    /// Removes the directory with all that is in it.
    pub(crate) fn remove_all(&self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
        sync_directory(self.directory.parent().unwrap()).unwrap();
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.directory).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| number(path).is_some()).collect()
    }
}

impl Worker {
    /// Writes one file after the other, and removes none.
    pub(crate) fn exceed(self) {
        let soak = Arc::clone(&self.soak);
        let mut number = PINNED;
        while !self.is_over() {
            {
                let _working = soak.pause.read().unwrap();
                number += 1;
                let staged = soak.limits.directory.join(".limited.tmp");
                let publish = || {
                    let _ = std::fs::remove_file(&staged);
                    write_and_close(&staged, &fill(number, FILE_BYTES))?;
                    rename(&staged, soak.limits.directory.join(number.to_string()))
                };
                self.note("write below a limit", publish(), &soak.counts.limited);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A file's number; none for a staged one.
fn number(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.parse().ok()
}
