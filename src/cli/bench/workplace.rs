//! A temporary directory with a store, a mountpoint and the plain files to compare with.

use std::fs;
use std::path::{Path, PathBuf};

/// Removed when dropped.
#[derive(Debug)]
pub(super) struct Workplace {
    path: PathBuf,
}

impl Workplace {
    /// Makes it on the filesystem of `directory`.
    pub(super) fn make(directory: Option<&Path>) -> Result<Workplace, String> {
        let variable = || std::env::var_os("TMPDIR").map(PathBuf::from);
        let directory = directory.map(Path::to_path_buf).or_else(variable);
        let directory = directory.unwrap_or_else(|| PathBuf::from("/var/tmp"));
        let directory = directory
            .canonicalize()
            .map_err(|error| format!("{}: {error}", directory.display()))?;
        let kind = nix::sys::statfs::statfs(&directory)
            .map_err(|error| format!("{}: {error}", directory.display()))?
            .filesystem_type();
        if kind == nix::sys::statfs::TMPFS_MAGIC {
            return Err(format!(
                "{} is in memory: name a directory on a disk (--dir)",
                directory.display()
            ));
        }
        let path = directory.join(format!("kvfs-bench-{}", std::process::id()));
        let workplace = Workplace { path };
        for path in [workplace.path.clone(), workplace.mount(), workplace.native()] {
            fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(workplace)
    }

    /// The directory itself.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The store.
    pub(super) fn store(&self) -> PathBuf {
        self.path.join("store")
    }

    /// Where it is mounted.
    pub(super) fn mount(&self) -> PathBuf {
        self.path.join("mount")
    }

    /// Plain files.
    pub(super) fn native(&self) -> PathBuf {
        self.path.join("native")
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        // A mount that is still there must not be emptied.
        if fs::remove_dir(self.mount()).is_ok() {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
