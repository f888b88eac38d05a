//! A disk that is easily full.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use super::forks::{output, succeed};
use super::mount::scratch_directory;

/// An ext4 of 48 MiB in a file.
pub(crate) struct SmallDisk {
    pub(crate) mountpoint: PathBuf,
    _directory: tempfile::TempDir,
}

impl SmallDisk {
    pub(crate) fn new() -> SmallDisk {
        let directory = scratch_directory();
        let image = directory.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(48 << 20).unwrap();
        succeed(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image));
        let mountpoint = directory.path().join("disk");
        std::fs::create_dir(&mountpoint).unwrap();
        succeed(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mountpoint));
        SmallDisk { mountpoint, _directory: directory }
    }

    /// Takes all the space that is left.
    pub(crate) fn fill_up(&self) -> PathBuf {
        let ballast = self.mountpoint.join("ballast");
        let file = std::fs::File::create(&ballast).unwrap();
        for chunk in [1 << 20, 4096_usize] {
            let mut offset = file.metadata().unwrap().len();
            while file.write_all_at(&vec![1; chunk], offset).is_ok() {
                offset = file.metadata().unwrap().len();
            }
        }
        file.sync_all().unwrap();
        ballast
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if !output(Command::new("umount").arg(&self.mountpoint)).status.success() {
            output(Command::new("umount").arg("-l").arg(&self.mountpoint));
        }
    }
}
