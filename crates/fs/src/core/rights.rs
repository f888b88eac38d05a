//! What modes grant to somebody of whom not everything is known.
//!
//! The kernel checks who walks through directories. Here it is asked for somebody who does not: the reader of a
//! slot, the owner of a limit or of a time to live. Which groups a user is in is not known but for one at most, so
//! where that matters the answer is no.

use crate::attributes::Caller;
use kvfs_storage::store::record::Inode;

const READ: u16 = 0o4;
const ENTER: u16 = 0o1;
/// What making and removing names in a directory takes.
const CHANGE: u16 = 0o3;

/// What is known of a right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grant {
    Yes,
    No,
    /// It depends on whether the user is in the group.
    Unknown,
}

/// A user, as far as known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    uid: Option<u32>,
    /// A group that this user is in.
    gid: Option<u32>,
}

impl From<Caller> for User {
    fn from(caller: Caller) -> Self {
        Self { uid: Some(caller.uid), gid: Some(caller.gid) }
    }
}

impl User {
    /// Somebody of whom nothing is known.
    pub(crate) const ANYBODY: Self = Self { uid: None, gid: None };

    /// Somebody in a group.
    pub(crate) fn in_group(gid: u32) -> Self {
        Self { uid: None, gid: Some(gid) }
    }

    /// A user whose groups are not known.
    pub(crate) fn of(uid: u32) -> Self {
        Self { uid: Some(uid), gid: None }
    }

    /// Whether all these rights are granted.
    fn has(self, rights: u16, inode: &Inode) -> bool {
        let (group, others) = (inode.mode >> 3, inode.mode);
        let granted = match self.uid {
            Some(0) => return true,
            Some(uid) if uid == inode.uid => inode.mode >> 6,
            _ if self.gid == Some(inode.gid) => group,
            // In this group or not: what both may.
            _ => group & others,
        };
        granted & rights == rights
    }

    /// The same, and whether it is known.
    fn granted(self, rights: u16, inode: &Inode) -> Grant {
        let may_be_in_group =
            self.uid.is_none_or(|uid| uid != inode.uid) && self.gid != Some(inode.gid);
        let has_either = [inode.mode >> 3, inode.mode].iter().any(|bits| bits & rights == rights);
        if self.has(rights, inode) {
            Grant::Yes
        } else if may_be_in_group && has_either {
            Grant::Unknown
        } else {
            Grant::No
        }
    }

    /// Whether a file may be read, if that is known.
    pub(crate) fn may_certainly_read(self, file: &Inode) -> Grant {
        self.granted(READ, file)
    }

    /// Whether paths through a directory may be followed, if that is known.
    pub(crate) fn may_certainly_enter(self, directory: &Inode) -> Grant {
        self.granted(ENTER, directory)
    }

    /// Whether a file may be read.
    pub(crate) fn may_read(self, file: &Inode) -> bool {
        self.has(READ, file)
    }

    /// Whether paths through a directory may be followed.
    pub(crate) fn may_enter(self, directory: &Inode) -> bool {
        self.has(ENTER, directory)
    }

    /// Whether names in a directory may be made, and removed as far as its sticky bit lets.
    pub(crate) fn may_change(self, directory: &Inode) -> bool {
        self.has(CHANGE, directory)
    }

    /// Whether the sticky bit of a directory keeps everybody else's names in it.
    pub(crate) fn removes_only_own(self, directory: &Inode) -> bool {
        directory.mode & 0o1000 != 0 && self.uid != Some(0) && self.uid != Some(directory.uid)
    }

    /// Whether the sticky bit of a directory lets this user remove what `owner` has put there.
    pub(crate) fn passes_sticky(self, directory: &Inode, owner: u32) -> bool {
        !self.removes_only_own(directory) || self.uid == Some(owner)
    }

    /// Whether a name in a directory may be removed.
    pub(crate) fn may_remove(self, directory: &Inode, named: &Inode) -> bool {
        self.may_change(directory) && self.passes_sticky(directory, named.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfs_storage::store::record::{DirectoryClass, InodeId, Kind, Time};

    fn inode(mode: u16, uid: u32, gid: u32) -> Inode {
        let class = DirectoryClass::Plain;
        let kind = Kind::Directory { class, parent: InodeId::ROOT, name: Vec::new() };
        let (atime, mtime, ctime) = (Time::default(), Time::default(), Time::default());
        Inode { kind, mode, uid, gid, links: 1, atime, mtime, ctime }
    }

    #[test]
    fn who_may_change_and_remove() {
        fn check(
            user: User, (mode, uid, gid): (u16, u32, u32), named: u32, expected: (bool, bool),
        ) {
            let (directory, named) = (inode(mode, uid, gid), inode(0o644, named, 1));
            let found = (user.may_change(&directory), user.may_remove(&directory, &named));
            assert_eq!(found, expected, "{user:?}: {mode:o} {uid} {gid}");
        }
        let user = User::from(Caller { uid: 7, gid: 8 });
        check(user, (0o755, 7, 1), 1, (true, true));
        check(user, (0o755, 1, 8), 1, (false, false));
        check(user, (0o775, 1, 8), 1, (true, true));
        check(user, (0o777, 1, 1), 1, (true, true));
        check(user, (0o707, 1, 1), 1, (false, false));
        // The owner's own bits count for the owner, even if others may more.
        check(user, (0o077, 7, 8), 1, (false, false));
        check(user, (0o1777, 1, 1), 1, (true, false));
        check(user, (0o1777, 1, 1), 7, (true, true));
        check(user, (0o1777, 7, 1), 1, (true, true));
        check(User::of(0), (0o1700, 1, 1), 1, (true, true));

        let alone = User::of(7);
        check(alone, (0o755, 7, 8), 1, (true, true));
        check(alone, (0o077, 7, 8), 1, (false, false));
        check(alone, (0o777, 1, 8), 1, (true, true));
        check(alone, (0o770, 1, 8), 1, (false, false));
        check(alone, (0o707, 1, 8), 1, (false, false));
        check(alone, (0o1777, 1, 8), 1, (true, false));
        check(alone, (0o1777, 1, 8), 7, (true, true));
        check(alone, (0o1777, 7, 8), 1, (true, true));
    }

    #[test]
    fn what_only_the_kernel_knows_of_a_group_is_unknown() {
        fn check((uid, gid): (u32, u32), mode: u16, expected: Grant) {
            let (user, inode) = (User::from(Caller { uid, gid }), inode(mode, 1, 8));
            assert_eq!(user.may_certainly_read(&inode), expected, "{uid} {gid} {mode:o}");
            assert_eq!(user.may_certainly_enter(&inode), expected, "{uid} {gid} {mode:o}");
        }
        check((0, 0), 0, Grant::Yes);
        check((1, 1), 0o700, Grant::Yes);
        check((1, 8), 0o077, Grant::No);
        check((1, 1), 0o077, Grant::No);
        check((7, 8), 0o070, Grant::Yes);
        check((7, 8), 0o707, Grant::No);
        check((7, 9), 0o055, Grant::Yes);
        check((7, 9), 0o700, Grant::No);
        check((7, 9), 0o770, Grant::Unknown);
        check((7, 9), 0o707, Grant::Unknown);
    }

    #[test]
    fn who_may_read_and_enter() {
        let all = [User::of(0), User::of(1), User::of(7), User::in_group(8), User::ANYBODY];
        for (mode, readers, entrants) in [
            (0o755, [true; 5], [true; 5]),
            (0o740, [true, true, false, true, false], [true, true, false, false, false]),
            (0o704, [true, true, false, false, false], [true, true, false, false, false]),
            (0o055, [true, false, true, true, true], [true, false, true, true, true]),
            (0o711, [true, true, false, false, false], [true; 5]),
            (0, [true, false, false, false, false], [true, false, false, false, false]),
        ] {
            let inode = inode(mode, 1, 8);
            assert_eq!(all.map(|user| user.may_read(&inode)), readers, "{mode:o}");
            assert_eq!(all.map(|user| user.may_enter(&inode)), entrants, "{mode:o}");
        }
    }
}
