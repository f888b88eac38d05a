//! What the kernel would let a user do by path, worked out from owners, groups and modes.

use std::fmt::{Debug, Formatter};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::user::User;

/// What decides who may do what.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owned {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mode: u32,
}

impl Debug for Owned {
    fn fmt(&self, to: &mut Formatter<'_>) -> std::fmt::Result {
        write!(to, "{:4o} {:4} {:4}", self.mode, self.uid, self.gid)
    }
}

impl From<&Metadata> for Owned {
    fn from(metadata: &Metadata) -> Owned {
        Owned { uid: metadata.uid(), gid: metadata.gid(), mode: metadata.mode() & 0o7777 }
    }
}

impl Owned {
    /// Reading (4), writing (2) and entering (1).
    pub(crate) fn grants(self, user: &User) -> u32 {
        match user.uid {
            0 => 0o7,
            uid if uid == self.uid => self.mode >> 6 & 0o7,
            _ if user.is_in(self.gid) => self.mode >> 3 & 0o7,
            _ => self.mode & 0o7,
        }
    }

    /// Whether a user may remove a name that `owner` has made from this directory.
    pub(crate) fn lets_remove(self, user: &User, owner: u32) -> bool {
        let is_sticky = self.mode & 0o1000 != 0;
        let owns = user.uid == 0 || [owner, self.uid].contains(&user.uid);
        self.grants(user) & 0o3 == 0o3 && (!is_sticky || owns)
    }
}

fn bits(user: &User, metadata: &Metadata) -> u32 {
    Owned::from(metadata).grants(user)
}

/// Whether a user may make and remove names in a directory, once there.
pub(crate) fn may_change(user: &User, directory: &Path) -> bool {
    bits(user, &fs::metadata(directory).unwrap()) & 0o3 == 0o3
}

/// Whether a user may remove a name that `owner` has made from a directory.
pub(crate) fn may_remove(user: &User, directory: &Path, owner: u32) -> bool {
    Owned::from(&fs::metadata(directory).unwrap()).lets_remove(user, owner)
}

/// Whether a user may enter all directories from `root` on to a path, `root` included and the path not.
pub(crate) fn may_reach(user: &User, root: &Path, path: &str) -> bool {
    let mut at = root.to_owned();
    for part in Path::new(path).components() {
        if bits(user, &fs::metadata(&at).unwrap()) & 0o1 == 0 {
            return false;
        }
        at.push(part);
    }
    true
}

/// Whether a user may put a directory in the place of a name, with all that is in it.
pub(crate) fn may_replace(user: &User, directory: &Path, name: &str) -> bool {
    let Ok(replaced) = fs::symlink_metadata(directory.join(name)) else {
        return may_change(user, directory);
    };
    may_remove(user, directory, replaced.uid()) && may_empty(user, &directory.join(name))
}

fn may_empty(user: &User, path: &Path) -> bool {
    if !fs::symlink_metadata(path).unwrap().is_dir() {
        return true;
    }
    fs::read_dir(path).unwrap().all(|entry| {
        let inner = entry.unwrap().path();
        let owner = fs::symlink_metadata(&inner).unwrap().uid();
        may_remove(user, path, owner) && may_empty(user, &inner)
    })
}
