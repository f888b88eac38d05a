//! Everything that can be known to go wrong before a daemon is started.
//!
//! Each check says what is wrong, where, and what to do; the kernel would say EINVAL, or say
//! nothing until the first file is opened.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};

use kvfs_os::mountinfo::{self, Mount};
use nix::unistd::geteuid;

use super::config::{self, MountConfig};
use super::nesting::{self, Places};
use super::output::Failure;
use super::stale;
use super::unmount::fusermount;
use crate::tier::remote::RemoteSpec;

const FUSE_DEVICE: &str = "/dev/fuse";
const FUSE_CONFIG: &str = "/etc/fuse.conf";

/// Checks a mount, clears a stale one, and gives back the configuration with both paths as the
/// kernel spells them.
pub(crate) fn check(config: &MountConfig) -> Result<MountConfig, Failure> {
    config::check_memory(config.options.ram_bytes).map_err(Failure::Usage)?;
    let checked = check_paths(config)?;
    device().map_err(Failure::Failed)?;
    privileges(config.options.allow_other).map_err(Failure::Failed)?;
    stale::clear(&checked.options.mountpoint)?;
    stale::wait_for_flush(&checked.options.store)?;
    directory(&checked.options.mountpoint, config.nonempty).map_err(Failure::Failed)?;
    Ok(checked)
}

/// The part of [`check`] that changes nothing.
pub(crate) fn check_paths(config: &MountConfig) -> Result<MountConfig, Failure> {
    let store = canonical_store(&config.options.store).map_err(Failure::Failed)?;
    let mounts = mountinfo::read()
        .map_err(|error| Failure::Failed(format!("/proc/self/mountinfo: {error}")))?;
    let mountpoint =
        find_mountpoint(&config.options.mountpoint, &mounts).map_err(Failure::Failed)?;
    let places = Places { store: &store, mountpoint: &mountpoint, mounts: &mounts };
    check_places(places, config).map_err(Failure::Failed)?;
    let mut checked = config.clone();
    checked.options.store = store;
    checked.options.mountpoint = mountpoint;
    Ok(checked)
}

/// The store need not exist yet, but the directory it will be in must.
fn canonical_store(path: &Path) -> Result<PathBuf, String> {
    let explain = |error: io::Error| format!("store {}: {error}", path.display());
    match path.canonicalize() {
        Ok(store) if store.is_dir() => Ok(store),
        Ok(store) => Err(format!("store {} is not a directory", store.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(explain(error));
            };
            let parent = parent.canonicalize().map_err(|error| {
                format!("store {}: {}: {error}", path.display(), parent.display())
            })?;
            Ok(parent.join(name))
        }
        Err(error) => Err(explain(error)),
    }
}

/// What the daemon needs is neither hidden by its mount nor served by it.
fn check_places(places: Places<'_>, config: &MountConfig) -> Result<(), String> {
    places.check()?;
    let remote = config.options.remote.as_ref().map(|remote| &remote.place);
    if let Some(RemoteSpec::Directory(path)) = remote {
        places.check_remote(path)?;
    }
    match &config.log_file {
        Some(path) => places.check_visible("log", &nesting::resolve(path, places.mounts)),
        None => Ok(()),
    }
}

fn find_mountpoint(path: &Path, mounts: &[Mount]) -> Result<PathBuf, String> {
    mountinfo::canonical(path, mounts).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            format!("mountpoint {} does not exist: make the directory first", path.display())
        }
        _ => format!("mountpoint {}: {error}", path.display()),
    })
}

/// Whether anybody can mount here.
pub(super) fn device() -> Result<(), String> {
    match OpenOptions::new().read(true).write(true).open(FUSE_DEVICE) {
        Ok(_) => Ok(()),
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) =>
        {
            Err(format!(
                "{FUSE_DEVICE} is missing: load the kernel module (modprobe fuse), or give the \
                 container the device (--device {FUSE_DEVICE} --cap-add SYS_ADMIN)"
            ))
        }
        Err(error) => Err(format!(
            "{FUSE_DEVICE} cannot be opened: {error}: run as root, let users open it (chmod 666), \
             or allow it in the container"
        )),
    }
}

fn privileges(allow_other: bool) -> Result<(), String> {
    if geteuid().is_root() {
        return Ok(());
    }
    if fusermount().is_none() {
        return Err("fusermount3 is not installed, and only root can mount without it: install \
                    fuse3"
            .to_owned());
    }
    let config = std::fs::read_to_string(FUSE_CONFIG).unwrap_or_default();
    if allow_other && !allows_other(&config) {
        return Err(format!(
            "allow_other is for root only unless {FUSE_CONFIG} has a line user_allow_other"
        ));
    }
    Ok(())
}

pub(super) fn allows_other(config: &str) -> bool {
    config.lines().any(|line| line.trim() == "user_allow_other")
}

fn directory(mountpoint: &Path, nonempty: bool) -> Result<(), String> {
    let place = mountpoint.display();
    if !mountpoint.is_dir() {
        return Err(format!("mountpoint {place} is not a directory"));
    }
    if nonempty {
        return Ok(());
    }
    let mut entries = mountpoint
        .read_dir()
        .map_err(|error| format!("mountpoint {place} cannot be listed: {error}"))?;
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(format!(
            "mountpoint {place} is not empty: choose an empty directory, or hide what is in it \
             with -o nonempty"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_allow_other() {
        fn check(config: &str, expected: bool) {
            assert_eq!(allows_other(config), expected, "{config}");
        }
        check("", false);
        check("# user_allow_other\n#user_allow_other", false);
        check("mount_max = 9\n user_allow_other \n", true);
    }

    #[test]
    fn mountpoints() {
        let base = tempfile::tempdir().unwrap();
        let check = |nonempty, expected: &str| {
            let outcome = directory(base.path(), nonempty);
            let line = outcome.err().unwrap_or_default();
            assert!(line.contains(expected) && line.is_empty() == expected.is_empty(), "{line}");
        };
        check(false, "");
        std::fs::write(base.path().join("file"), "").unwrap();
        check(false, "is not empty");
        check(true, "");
        let missing = find_mountpoint(&base.path().join("absent"), &[]).unwrap_err();
        assert!(missing.ends_with("does not exist: make the directory first"), "{missing}");
        let file = directory(&base.path().join("file"), false).unwrap_err();
        assert!(file.ends_with("is not a directory"), "{file}");
    }

    #[test]
    fn a_store_may_be_missing_but_not_its_directory() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().canonicalize().unwrap();
        assert_eq!(canonical_store(&path.join("new")), Ok(path.join("new")));
        assert!(canonical_store(&path.join("no/new")).is_err());
        std::fs::write(path.join("file"), "").unwrap();
        let line = canonical_store(&path.join("file")).unwrap_err();
        assert!(line.ends_with("is not a directory"), "{line}");
    }
}
