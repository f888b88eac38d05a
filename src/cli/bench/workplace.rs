//! A temporary directory with a store, a mountpoint and the plain files to compare with.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::interrupt;

/// Counts those of this process.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Removed when dropped.
#[derive(Debug)]
pub(super) struct Workplace {
    path: PathBuf,
}

impl Workplace {
    /// Makes it on the filesystem of `directory`, which must not be in memory.
    pub(super) fn make(directory: Option<&Path>) -> Result<Workplace, String> {
        let directory = Self::directory(directory)?;
        let kind = nix::sys::statfs::statfs(&directory)
            .map_err(|error| format!("{}: {error}", directory.display()))?
            .filesystem_type();
        if kind == nix::sys::statfs::TMPFS_MAGIC {
            return Err(format!(
                "{} is in memory: name a directory on a disk (--dir)",
                directory.display()
            ));
        }
        Self::make_in(&directory)
    }

    /// The same, also in memory: for figures that have nothing to do with a disk.
    pub(super) fn make_anywhere(directory: Option<&Path>) -> Result<Workplace, String> {
        Self::make_in(&Self::directory(directory)?)
    }

    fn directory(directory: Option<&Path>) -> Result<PathBuf, String> {
        let variable = || std::env::var_os("TMPDIR").map(PathBuf::from);
        let directory = directory.map(Path::to_path_buf).or_else(variable);
        let directory = directory.unwrap_or_else(|| PathBuf::from("/var/tmp"));
        let directory = directory
            .canonicalize()
            .map_err(|error| format!("{}: {error}", directory.display()))?;
        Ok(directory)
    }

    fn make_in(directory: &Path) -> Result<Workplace, String> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("kvfs-bench-{}-{number}", std::process::id()));
        interrupt::workplace_begins(&path);
        let workplace = Workplace { path };
        let (mount, native) = (workplace.mount(), workplace.native());
        for path in [workplace.path.clone(), mount, native, workplace.remote()] {
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
        mount(&self.path)
    }

    /// A directory to be the remote.
    pub(super) fn remote(&self) -> PathBuf {
        self.path.join("remote")
    }

    /// Plain files.
    pub(super) fn native(&self) -> PathBuf {
        self.path.join("native")
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        remove(&self.path);
        interrupt::workplace_ends(&self.path);
    }
}

/// Where the store of a workplace is mounted.
pub(super) fn mount(workplace: &Path) -> PathBuf {
    workplace.join("mount")
}

/// Where a workplace may have a tmpfs.
pub(super) fn tmpfs(workplace: &Path) -> PathBuf {
    workplace.join("tmpfs")
}

/// Removes a workplace with all that is in it.
pub(super) fn remove(workplace: &Path) {
    let device = |path: &Path| fs::symlink_metadata(path).map(|found| found.dev());
    let is_mounted = match device(&mount(workplace)) {
        Ok(found) => device(workplace).is_ok_and(|device| device != found),
        // Of a daemon that has died.
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    };
    // A mount that is still there must not be emptied.
    if !is_mounted {
        let _ = fs::remove_dir_all(workplace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_plain_directory_go_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let workplace = Workplace::make_anywhere(Some(directory.path())).unwrap();
        fs::create_dir(workplace.mount().join("models")).unwrap();
        fs::write(workplace.mount().join("models/page"), "K, V").unwrap();
        drop(workplace);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
