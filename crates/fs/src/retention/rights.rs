//! What a limit may delete: no more than the owner of the limited directory could. A walk asks when it finds
//! something and the removal asks again with the state held, since limits, owners and modes may have changed in between.

use super::below::NamesBelow;
use super::enforcer::Enforcer;
use super::pass::{Unit, What};
use super::policy::Policy;
use crate::FsError;
use crate::attributes::Place;
use crate::core::rights::User;
use crate::core::state::State;
use kvfs_storage::store::record::{DEPTH_MAX, DirectoryClass, Inode, InodeId, Kind, Time};

/// Why something goes that nobody removes by its path.
#[derive(Clone, Copy, Debug)]
pub(super) enum Right<'a> {
    /// A limit of a directory, and the names below it.
    Limit(&'a Root, &'a Unit, &'a NamesBelow),
    /// A time to live of a file's own, for one of its names.
    OwnTime(InodeId, &'a Place),
    /// The rest of the directory that it is in has gone.
    Directory,
}

impl Right<'_> {
    /// When what goes was used last; what is used later stays.
    pub(super) fn used(self) -> Option<Time> {
        match self {
            Right::Limit(_, unit, _) => Some(unit.used),
            Right::OwnTime(..) | Right::Directory => None,
        }
    }

    /// Whether there is room for the bytes of a file when a name goes of so many: below the limit's directory, or at all.
    pub(super) fn would_free(self, id: InodeId, links: u32) -> bool {
        match self {
            Right::Limit(_, _, names) => names.is_last(id),
            Right::OwnTime(..) | Right::Directory => links <= 1,
        }
    }

    /// A name went, and so many are left. Whether that has made room for its bytes.
    pub(super) fn has_freed(self, id: InodeId, links: u32) -> bool {
        match self {
            Right::Limit(_, _, names) => names.remove(id),
            Right::OwnTime(..) | Right::Directory => links == 0,
        }
    }

    /// Whether what it is about may still go.
    pub(super) fn holds(self, enforcer: &Enforcer<'_>, state: &State) -> Result<bool, FsError> {
        match self {
            Right::Limit(root, unit, _) => {
                let policy = enforcer.retention.policies().directories.get(&root.id).copied();
                Ok(policy == Some(root.policy) && state.may_still_go(root, unit)?)
            }
            Right::OwnTime(id, place) => {
                let time = enforcer.own_time(state, id)?;
                Ok(time.is_some_and(|time| time <= Time::now())
                    && state.owner_may_remove(id, place)?)
            }
            Right::Directory => Ok(true),
        }
    }
}

/// A directory with a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    pub(super) id: InodeId,
    pub(super) class: DirectoryClass,
    pub(super) policy: Policy,
    /// Whoever owns a directory may limit it, and the limit deletes only what its owner could.
    pub(super) owner: u32,
}

impl Root {
    /// Which groups its owner is in is not known here.
    pub(super) fn user(&self) -> User {
        User::of(self.owner)
    }
}

impl State {
    /// Whether the owner of a file, who gave it its time to live, could remove this name of it by its path.
    fn owner_may_remove(&self, id: InodeId, place: &Place) -> Result<bool, FsError> {
        let found = (self.metadata.inode(id)?, self.metadata.inode(place.parent)?);
        let (Some(file), Some(directory)) = found else { return Ok(false) };
        let owner = User::of(file.uid);
        Ok(owner.may_remove(&directory, &file) && self.may_reach(owner, place.parent)?)
    }

    /// Whether a user may enter a directory and each one above it.
    fn may_reach(&self, user: User, directory: InodeId) -> Result<bool, FsError> {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(inode) = self.metadata.inode(at)? else { return Ok(false) };
            let Kind::Directory { parent, .. } = inode.kind else { return Ok(false) };
            if !user.may_enter(&inode) {
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
    fn may_still_go(&self, root: &Root, unit: &Unit) -> Result<bool, FsError> {
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
        let user = root.user();
        // A sequence with a limit of its own goes from a directory above that limit.
        let is_reached = if id == root.id {
            user.may_change(&directory) && self.may_reach(user, above)?
        } else {
            self.may_change_up_to(root, above)?
        };
        Ok(is_reached
            && user.passes_sticky(&directory, inode.uid)
            && (!inode.is_directory() || self.may_empty(root, id, &inode)?))
    }

    /// Whether the owner of a limit may change each directory from one on upwards, to the limited one.
    fn may_change_up_to(&self, root: &Root, directory: InodeId) -> Result<bool, FsError> {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(inode) = self.metadata.inode(at)? else { return Ok(false) };
            let Kind::Directory { parent, .. } = inode.kind else { return Ok(false) };
            if !root.user().may_change(&inode) {
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
        let user = root.user();
        let mut directories = vec![(sequence, inode.clone())];
        while let Some((id, directory)) = directories.pop() {
            if !user.may_change(&directory) {
                return Ok(false);
            }
            // Where no bit is sticky it does not matter whose files there are: directories do.
            let is_sticky = user.removes_only_own(&directory);
            let mut inside = Vec::new();
            self.metadata.entries(id, 0, |_, _, entry| {
                if is_sticky || entry.file_type == libc::S_IFDIR {
                    inside.push(entry.inode);
                }
                true
            })?;
            for inner in inside {
                let Some(named) = self.metadata.inode(inner)? else { continue };
                if !user.passes_sticky(&directory, named.uid) {
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
