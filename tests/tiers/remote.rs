//! A shared directory behind a mount.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::mount::scratch_directory;
use crate::common::sys::{getxattr, map, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Mount, eventually, fill};

in_both_modes!(
    what_does_not_fit_leaves_and_comes_back,
    without_the_remote_an_open_fails_and_the_rest_goes_on,
    a_changed_file_is_not_what_the_remote_has,
    a_mapped_file_stays,
);

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
    pub(crate) fn new(mode: Mode, further: &[&str]) -> Place {
        let directory = scratch_directory();
        let remote = directory.path().join("remote");
        std::fs::create_dir(&remote).unwrap();
        let place = remote.to_str().unwrap();
        let options = ["--remote", place, "--ssd", BUDGET, "--commit-interval", "0.05"];
        let mount = Mount::with_options(mode, &[&options, further].concat());
        Place { mount, remote, _directory: directory }
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

    /// Waits until the disk holds no more than it should.
    pub(crate) fn wait_until_it_fits(&self) {
        eventually("the disk to have room", || {
            let used = self.mount.status_number("ssd_used_bytes");
            let waiting = self.mount.status_number("remote_waiting_files");
            (used <= BUDGET_BYTES && waiting == 0).then_some(())
        });
    }
}

pub(crate) fn tier(path: &Path) -> String {
    getxattr(path, "user.kvfs.tier").unwrap()
}

pub(crate) fn assert_same(files: &[(PathBuf, Vec<u8>)]) {
    for (path, bytes) in files {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
}

fn what_does_not_fit_leaves_and_comes_back(mode: Mode) {
    let mut place = Place::new(mode, &["--cold", "zstd"]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let gone = files.iter().filter(|(path, _)| tier(path) == "remote").count();
    assert!((3..=6).contains(&gone), "{gone} of 8 files left");
    for file in &files {
        assert_same(std::slice::from_ref(file));
        assert_eq!(tier(&file.0), "ssd");
    }
    place.wait_until_it_fits();
    place.mount.remount();
    assert_same(&files);
    place.mount.crash();
    assert_same(&files);
    assert_eq!(place.mount.status("errors"), "0");
}

fn without_the_remote_an_open_fails_and_the_rest_goes_on(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let hidden = place.remote.with_extension("hidden");
    rename(&place.remote, &hidden).unwrap();
    place.mount.remount();
    for (path, bytes) in &files {
        if tier(path) == "remote" {
            let error = open(path, libc::O_RDONLY).unwrap_err();
            let errno = error.raw_os_error();
            assert!(matches!(errno, Some(libc::EIO | libc::ETIMEDOUT)), "{error}");
        } else {
            assert!(std::fs::read(path).unwrap() == *bytes);
        }
    }
    write_and_close(place.mount.files("new"), b"new").unwrap();
    sync_directory(place.mount.path()).unwrap();
    assert!(place.mount.status("remote_state").starts_with("down: "));
    rename(&hidden, &place.remote).unwrap();
    eventually("the remote to be back", || {
        (place.mount.status("remote_state") == "up").then_some(())
    });
    assert_same(&files);
}

fn a_changed_file_is_not_what_the_remote_has(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let (path, bytes) = files.iter().find(|(path, _)| tier(path) == "remote").unwrap();
    let mut bytes = bytes.clone();
    bytes[7] ^= 1;
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&bytes[7..8], 7).unwrap();
    drop(file);
    assert!(std::fs::read(path).unwrap() == bytes);
    place.write("more", 5);
    place.wait_until_it_fits();
    assert!(std::fs::read(path).unwrap() == bytes);
    place.mount.remount();
    assert!(std::fs::read(path).unwrap() == bytes);
}

fn a_mapped_file_stays(mode: Mode) {
    let place = Place::new(mode, &[]);
    let first = place.write("first", 1);
    let (path, bytes) = &first[0];
    let mapped = map(&open(path, libc::O_RDONLY).unwrap());
    place.write("f", 8);
    place.wait_until_it_fits();
    // Without passthrough the kernel has the bytes in its own cache.
    if mode == Mode::Passthrough {
        assert_eq!(tier(path), "ssd");
    }
    assert!(mapped[..] == bytes[..]);
    drop(mapped);
}
