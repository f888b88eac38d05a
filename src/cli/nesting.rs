//! Places of a mount that must not lie in one another: what a mount hides, or serves itself, is no place for what
//! it needs.
//!
//! Symbolic links are followed as far as anything is there, also one that leads nowhere yet. What is mounted is
//! compared by where it lies on its filesystem, so that a directory bound elsewhere is recognised.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use kvfs_os::mountinfo::{Mount, top_at};

/// As many links as the kernel follows.
const LINKS_MAX: usize = 40;

/// Both paths of a mount, as the kernel spells them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a> {
    /// The store.
    pub store: &'a Path,
    /// The mountpoint.
    pub mountpoint: &'a Path,
    /// All mounts.
    pub mounts: &'a [Mount],
}

impl Places<'_> {
    /// A daemon that reads its store through its own mount waits for itself.
    pub(super) fn check(self) -> Result<(), String> {
        let (store, mountpoint) = (self.store.display(), self.mountpoint.display());
        if self.store == self.mountpoint {
            Err(format!("{store} cannot be both store and mountpoint"))
        } else if self.is_inside(self.mountpoint, self.store) {
            Err(format!("mountpoint {mountpoint} is inside the store {store}: move it out"))
        } else {
            self.check_visible("store", self.store)
        }
    }

    /// Refuses what the mount would hide.
    pub(super) fn check_visible(self, what: &str, path: &Path) -> Result<(), String> {
        if !self.is_inside(path, self.mountpoint) {
            return Ok(());
        }
        let (path, mountpoint) = (path.display(), self.mountpoint.display());
        Err(format!(
            "{what} {path} is inside the mountpoint {mountpoint}, which would hide it: move it out"
        ))
    }

    /// A daemon that keeps bytes in its own mount has them nowhere, and one that keeps them in its store frees nothing.
    pub(super) fn check_remote(self, remote: &Path) -> Result<(), String> {
        let remote = resolve(remote, self.mounts);
        self.check_visible("remote", &remote)?;
        let (place, store) = (remote.display(), self.store.display());
        if self.is_inside(&remote, self.store) {
            return Err(format!(
                "remote {place} is inside the store {store}, which is the daemon's alone: move it out"
            ));
        }
        Ok(())
    }

    fn is_inside(self, path: &Path, above: &Path) -> bool {
        let on_filesystem = |path: &Path| {
            let mount = path.ancestors().find_map(|ancestor| top_at(self.mounts, ancestor))?;
            let rest = path.strip_prefix(&mount.mountpoint).ok()?;
            Some((mount.device.clone(), mount.root.join(rest)))
        };
        path.starts_with(above)
            || match (on_filesystem(path), on_filesystem(above)) {
                (Some((device, path)), Some((other, above))) => {
                    device == other && path.starts_with(above)
                }
                _ => false,
            }
    }
}

/// Filesystems that ask somebody who may be away. Whoever looks hangs then, and a mount does not wait for its remote.
const ASK_OTHERS: [&str; 11] =
    ["9p", "afs", "autofs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "lustre", "nfs", "smb"];

/// A path without symbolic links, as far as anything is there. On what others serve it stays as it is written.
pub(super) fn resolve(path: &Path, mounts: &[Mount]) -> PathBuf {
    let mut found = PathBuf::new();
    let mut links_left = LINKS_MAX;
    let mut rest = parts(path);
    while let Some(part) = rest.pop() {
        if part == ".." {
            found.pop();
        }
        if part == "." || part == ".." {
            continue;
        }
        let next = found.join(&part);
        match links_left.checked_sub(1) {
            Some(fewer) if !asks_others(&next, mounts) => match next.read_link() {
                Ok(target) => {
                    links_left = fewer;
                    rest.extend(parts(&target));
                }
                Err(_) => found = next,
            },
            _ => found = next,
        }
    }
    found
}

/// The parts of a path, the last one first. That of the root takes the place of what is before it.
fn parts(path: &Path) -> Vec<OsString> {
    let mut parts: Vec<OsString> =
        path.components().map(|part| part.as_os_str().to_owned()).collect();
    parts.reverse();
    parts
}

fn asks_others(path: &Path, mounts: &[Mount]) -> bool {
    let mount = path.ancestors().find_map(|ancestor| top_at(mounts, ancestor));
    // Who serves the root serves this program.
    mount
        .filter(|mount| mount.mountpoint != Path::new("/"))
        .is_some_and(|mount| ASK_OTHERS.iter().any(|kind| mount.kind.starts_with(kind)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn places<'a>(store: &'a str, mountpoint: &'a str, mounts: &'a [Mount]) -> Places<'a> {
        Places { store: Path::new(store), mountpoint: Path::new(mountpoint), mounts }
    }

    fn mount(device: &str, kind: &str, mountpoint: &str) -> Mount {
        Mount {
            device: device.to_owned(),
            root: "/".into(),
            mountpoint: mountpoint.into(),
            kind: kind.to_owned(),
            source: "/dev/sda".into(),
        }
    }

    #[test]
    fn nested_paths_are_refused() {
        fn check(store: &str, mountpoint: &str, good: bool) {
            let outcome = places(store, mountpoint, &[]).check();
            assert_eq!(outcome.is_ok(), good, "{store} {mountpoint}");
        }
        check("/srv/kv", "/mnt/kv", true);
        check("/srv/kv", "/srv/kv2", true);
        check("/srv/kv", "/srv/kv", false);
        check("/srv/kv", "/srv/kv/mnt", false);
        check("/mnt/kv/store", "/mnt/kv", false);
        check("/srv/kv", "/", false);
    }

    #[test]
    fn remotes_in_the_way_are_refused() {
        fn check(remote: &str, expected: &str) {
            let said = places("/nowhere/kv", "/nowhere/mnt", &[]).check_remote(Path::new(remote));
            let said = said.err().unwrap_or_default();
            assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{said}");
        }
        check("/nowhere/remote", "");
        check("/nowhere/kv2", "");
        check("/nowhere/mnt", "is inside the mountpoint /nowhere/mnt");
        check("/nowhere/mnt/files/r", "is inside the mountpoint /nowhere/mnt");
        check("/nowhere/x/../mnt/r", "is inside the mountpoint /nowhere/mnt");
        check("/nowhere/kv/r", "is inside the store /nowhere/kv");
        check("/nowhere/kv", "is inside the store /nowhere/kv");
        // A remote has directories of its own, and leaves others alone.
        check("/nowhere", "");
    }

    #[test]
    fn directories_that_are_bound_elsewhere_are_recognised() {
        let bound = |device: &str, mountpoint: &str| Mount {
            root: "/kv/objects".into(),
            ..mount(device, "ext4", mountpoint)
        };
        let mounts = [
            mount("8:1", "ext4", "/nowhere"),
            bound("8:1", "/nowhere/bound"),
            bound("8:2", "/nowhere/other"),
        ];
        let places = places("/nowhere/kv", "/nowhere/mnt", &mounts);
        let inside = places.check_remote(Path::new("/nowhere/bound/r")).unwrap_err();
        assert!(inside.contains("is inside the store"), "{inside}");
        assert_eq!(places.check_remote(Path::new("/nowhere/other/r")), Ok(()));
        assert_eq!(places.check(), Ok(()));
    }

    #[test]
    fn links_are_followed_also_where_they_lead_nowhere_yet() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        symlink("mnt/files", base.join("link")).unwrap();
        symlink("round", base.join("round")).unwrap();
        let check = |from: &str, mounts: &[Mount], expected: &str| {
            assert_eq!(resolve(&base.join(from), mounts), base.join(expected), "{from}");
        };
        check("link/r", &[], "mnt/files/r");
        std::fs::create_dir_all(base.join("mnt/files")).unwrap();
        check("link/r", &[], "mnt/files/r");
        check("link/../r", &[], "mnt/r");
        check("round/r", &[], "round/r");
        symlink("./../link", base.join("mnt/back")).unwrap();
        check("mnt/back/r", &[], "mnt/files/r");
        // Nobody asks a server for that.
        let mount = |kind: &str| mount("0:50", kind, base.join("mnt").to_str().unwrap());
        check("mnt/back/r", &[mount("nfs4")], "mnt/back/r");
        check("mnt/back/r", &[mount("ext4")], "mnt/files/r");
    }
}
