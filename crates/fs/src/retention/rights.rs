//! What a limit may delete: no more than the owner of the limited directory could. A walk asks when it finds
//! something and the removal asks again, since owners and modes may have changed in between.

use super::pass::{Unit, What};
use crate::FsError;
use crate::attributes::Place;
use crate::core::state::State;
use kvfs_storage::store::record::{DEPTH_MAX, DirectoryClass, Inode, InodeId, Kind};

/// A directory with a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    pub(super) id: InodeId,
    pub(super) class: DirectoryClass,
    /// Whoever owns a directory may limit it, and the limit deletes only what its owner could.
    pub(super) owner: u32,
}

impl Root {
    /// Whether its owner may remove names in a directory below it. Which groups users are in is not
    /// known here.
    pub(super) fn may_change(&self, directory: &Inode) -> bool {
        is_granted(self.owner, directory, 0o3)
    }

    /// Whether its owner may remove just his own names there.
    pub(super) fn is_sticky(&self, directory: &Inode) -> bool {
        self.owner != 0 && directory.mode & 0o1000 != 0 && directory.uid != self.owner
    }

    /// Whether a name in a directory that its owner may change is for him to remove.
    fn may_remove(&self, directory: &Inode, named: &Inode) -> bool {
        !self.is_sticky(directory) || named.uid == self.owner
    }
}

/// Whether a user has these rights (4 reads, 2 changes, 1 enters), whichever groups he is in.
fn is_granted(user: u32, inode: &Inode, rights: u16) -> bool {
    let needed = if inode.uid == user { rights << 6 } else { rights << 3 | rights };
    user == 0 || inode.mode & needed == needed
}

impl State {
    /// Whether the owner of a file, who gave it its time to live, could remove this name of it by its path.
    pub(super) fn owner_may_remove(&self, id: InodeId, place: &Place) -> Result<bool, FsError> {
        let found = (self.metadata.inode(id)?, self.metadata.inode(place.parent)?);
        let (Some(file), Some(directory)) = found else { return Ok(false) };
        let class = DirectoryClass::Root;
        let owner = Root { id: InodeId::ROOT, class, owner: file.uid };
        Ok(owner.may_change(&directory)
            && owner.may_remove(&directory, &file)
            && self.may_enter(file.uid, place.parent)?)
    }

    /// Whether a user may enter a directory and each one above it.
    fn may_enter(&self, user: u32, directory: InodeId) -> Result<bool, FsError> {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(inode) = self.metadata.inode(at)? else { return Ok(false) };
            let Kind::Directory { parent, .. } = inode.kind else { return Ok(false) };
            if !is_granted(user, &inode, 0o1) {
                return Ok(false);
            }
            if at == InodeId::ROOT {
                return Ok(true);
            }
            at = parent;
        }
        Ok(false)
    }

    /// Whether what a walk has found is still for the owner of the limit to remove.
    pub(super) fn may_still_go(&self, root: &Root, unit: &Unit) -> Result<bool, FsError> {
        let limited = self.metadata.inode(root.id)?;
        if limited.is_none_or(|limited| limited.uid != root.owner) {
            return Ok(false);
        }
        if root.owner == 0 {
            return Ok(true);
        }
        let id = match &unit.what {
            What::File(id, _) | What::Sequence(id) => *id,
        };
        let Some(inode) = self.metadata.inode(id)? else { return Ok(false) };
        let above = match (&unit.what, &inode.kind) {
            (What::File(_, place), _) => place.parent,
            (What::Sequence(_), Kind::Directory { parent, .. }) => *parent,
            (What::Sequence(_), _) => return Ok(false),
        };
        let Some(directory) = self.metadata.inode(above)? else { return Ok(false) };
        // A sequence with a limit of its own goes from a directory above that limit.
        let is_reached = if id == root.id {
            root.may_change(&directory) && self.may_enter(root.owner, above)?
        } else {
            self.may_reach(root, above)?
        };
        Ok(root.may_remove(&directory, &inode)
            && is_reached
            && (!inode.is_directory() || self.may_empty(root, id, &inode)?))
    }

    /// Whether the owner of a limit may change each directory from one on upwards, to the limited one.
    fn may_reach(&self, root: &Root, directory: InodeId) -> Result<bool, FsError> {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(inode) = self.metadata.inode(at)? else { return Ok(false) };
            let Kind::Directory { parent, .. } = inode.kind else { return Ok(false) };
            if !root.may_change(&inode) {
                return Ok(false);
            }
            if at == root.id {
                return Ok(true);
            }
            at = parent;
        }
        Ok(false)
    }

    /// Whether everything in a sequence is for the owner of a limit to remove.
    fn may_empty(&self, root: &Root, sequence: InodeId, inode: &Inode) -> Result<bool, FsError> {
        let mut directories = vec![(sequence, inode.clone())];
        while let Some((id, directory)) = directories.pop() {
            if !root.may_change(&directory) {
                return Ok(false);
            }
            // Where no bit is sticky it does not matter whose files there are: directories do.
            let is_sticky = root.is_sticky(&directory);
            let mut inside = Vec::new();
            self.metadata.entries(id, 0, |_, _, entry| {
                if is_sticky || entry.file_type == libc::S_IFDIR {
                    inside.push(entry.inode);
                }
                true
            })?;
            for inner in inside {
                let Some(named) = self.metadata.inode(inner)? else { continue };
                if !root.may_remove(&directory, &named) {
                    return Ok(false);
                }
                if named.is_directory() {
                    directories.push((inner, named));
                }
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfs_storage::store::record::Time;

    #[test]
    fn a_limit_does_what_its_owner_could() {
        let directory = |mode, uid| {
            let class = DirectoryClass::Plain;
            let kind = Kind::Directory { class, parent: InodeId::ROOT, name: Vec::new() };
            let (atime, mtime, ctime) = (Time::default(), Time::default(), Time::default());
            Inode { kind, mode, uid, gid: 8, links: 2, atime, mtime, ctime }
        };
        let root = |owner| Root { id: InodeId::ROOT, class: DirectoryClass::Plain, owner };
        for (mode, uid, expected) in [
            (0o755, 7, true),
            (0o077, 7, false),
            (0o777, 1, true),
            (0o770, 1, false),
            (0o707, 1, false),
        ] {
            assert_eq!(root(7).may_change(&directory(mode, uid)), expected, "{mode:o} {uid}");
            assert!(root(0).may_change(&directory(mode, uid)));
        }
        let sticky = directory(0o1777, 1);
        assert!(!root(7).may_remove(&sticky, &directory(0o755, 1)));
        assert!(root(7).may_remove(&sticky, &directory(0o755, 7)));
        assert!(root(1).may_remove(&sticky, &directory(0o755, 7)));
    }
}
