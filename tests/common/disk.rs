//! A disk that is easily full, and that loses its power.

use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::eventually;
use super::forks::{output, succeed};
use super::mount::scratch_directory;

/// What the disk is formatted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Ext4,
    Xfs,
}

/// A filesystem in a file.
pub(crate) struct SmallDisk {
    pub(crate) mountpoint: PathBuf,
    image: PathBuf,
    _directory: tempfile::TempDir,
}

impl SmallDisk {
    /// One of 48 MiB.
    pub(crate) fn new() -> SmallDisk {
        SmallDisk::of(48 << 20)
    }

    pub(crate) fn of(bytes: u64) -> SmallDisk {
        SmallDisk::with(Format::Ext4, bytes)
    }

    /// XFS wants 300 MiB at least.
    pub(crate) fn with(format: Format, bytes: u64) -> SmallDisk {
        let options: &[&str] = match format {
            Format::Ext4 => &["-q", "-m", "0"],
            Format::Xfs => &["-q"],
        };
        SmallDisk::made(format, options, bytes)
    }

    /// Ext4 with blocks of 1 KiB: a directory is soon as long as its blocks are.
    pub(crate) fn with_small_blocks(bytes: u64) -> SmallDisk {
        SmallDisk::made(Format::Ext4, &["-q", "-m", "0", "-b", "1024"], bytes)
    }

    fn made(format: Format, options: &[&str], bytes: u64) -> SmallDisk {
        let directory = scratch_directory();
        let image = directory.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        let mut make = match format {
            Format::Ext4 => Command::new("mkfs.ext4"),
            Format::Xfs => Command::new("mkfs.xfs"),
        };
        succeed(make.args(options).arg(&image));
        let mountpoint = directory.path().join("disk");
        std::fs::create_dir(&mountpoint).unwrap();
        let disk = SmallDisk { mountpoint, image, _directory: directory };
        disk.mount();
        disk
    }

    fn mount(&self) {
        succeed(Command::new("mount").args(["-o", "loop"]).arg(&self.image).arg(&self.mountpoint));
    }

    /// From now on nothing reaches the disk, not even what its journal holds.
    pub(crate) fn cut_power(&self) {
        super::sys::shut_down(&self.mountpoint).unwrap();
    }

    /// Whoever writes to the disk waits, where no signal reaches it, until what this gives is dropped. After a minute the
    /// disk thaws by itself, even if the test was killed: whoever looks at a process that waits for it, as `ps` does,
    /// would wait as well.
    pub(crate) fn freeze(&self) -> Frozen {
        const THAW: &str = r#"timeout 60 cat; ended=$?; fsfreeze --unfreeze "$1" && exit "$ended""#;
        let mut thaw = Command::new("sh");
        thaw.args(["-c", THAW, "thaw"]).arg(&self.mountpoint);
        // Signals for the test's group do not end it.
        thaw.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let thaw = thaw.spawn().unwrap();
        succeed(Command::new("fsfreeze").arg("--freeze").arg(&self.mountpoint));
        Frozen(thaw)
    }

    /// The disk comes back with what it had when its power was cut.
    pub(crate) fn restore_power(&self) {
        eventually("the disk not to be busy", || {
            output(Command::new("umount").arg(&self.mountpoint)).status.success().then_some(())
        });
        self.mount();
    }

    /// The filesystem gives up: it refuses every change from now on, as after an error of the disk.
    /// Only ext4.
    pub(crate) fn make_read_only(&self) {
        succeed(Command::new("mount").args(["-o", "remount,abort"]).arg(&self.mountpoint));
    }

    /// Unmounts it, and mounts it again with an option: `ro` or `rw`.
    pub(crate) fn remount(&self, option: &str) {
        eventually("the disk not to be busy", || {
            output(Command::new("umount").arg(&self.mountpoint)).status.success().then_some(())
        });
        let options = format!("loop,{option}");
        let mut mount = Command::new("mount");
        succeed(mount.args(["-o", &options]).arg(&self.image).arg(&self.mountpoint));
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

/// A disk that answers nobody who writes to it.
pub(crate) struct Frozen(Child);

impl Drop for Frozen {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let ended = self.0.wait().unwrap();
        assert!(
            std::thread::panicking() || ended.success(),
            "the disk has thawed by itself: {ended}"
        );
    }
}
