//! What the kernel would let a user do by path, worked out from owners, groups and modes.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::user::User;

/// Reading (4), writing (2) and entering (1).
fn bits(user: &User, metadata: &Metadata) -> u32 {
    let mode = metadata.mode();
    match user.uid {
        0 => 0o7,
        uid if uid == metadata.uid() => mode >> 6 & 0o7,
        _ if user.is_in(metadata.gid()) => mode >> 3 & 0o7,
        _ => mode & 0o7,
    }
}

/// Whether a user may make and remove names in a directory, once there.
pub(crate) fn may_change(user: &User, directory: &Path) -> bool {
    bits(user, &fs::metadata(directory).unwrap()) & 0o3 == 0o3
}

/// Whether a user may remove a name that `owner` has made from a directory.
pub(crate) fn may_remove(user: &User, directory: &Path, owner: u32) -> bool {
    let metadata = fs::metadata(directory).unwrap();
    let is_sticky = metadata.mode() & 0o1000 != 0;
    let owns = user.uid == 0 || [owner, metadata.uid()].contains(&user.uid);
    may_change(user, directory) && (!is_sticky || owns)
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
