//! To whom a sequence is open, for what finds it by its content or shows it in another form.
//!
//! The kernel checks the directories on a path for whoever walks through them. Nobody walks through a
//! sequence's to a slot or to the answer of a question, so here it is asked instead whom they would
//! let in. Of users only owner and group are known and not which groups they are in, so where that
//! matters the answer is no.

use std::path::{Component, Path};

use crate::core::state::State;
use crate::{Caller, FileSystem, FsError};
use kvfs_page::{Geometry, Layer, names};
use kvfs_storage::store::record::{Inode, InodeId, Kind, Role};

/// The bits that let group and others read.
const SHARED: u16 = 0o044;
const OTHERS: u16 = 0o004;

/// Owner and group of a sequence's directory, and who of owner, group and others may read what is
/// in it, as the bits of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Readers {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) bits: u16,
}

impl Readers {
    /// For what the daemon reads for itself and shows to nobody.
    pub(super) const NOBODY: Self = Self { uid: 0, gid: 0, bits: 0 };

    /// Whether all of them may read this as well.
    pub(super) fn may_read(self, inode: &Inode) -> bool {
        self.bits & !granted(inode, self.uid, self.gid) == 0
    }

    fn narrow(&mut self, inode: &Inode) {
        self.bits &= granted(inode, self.uid, self.gid);
    }
}

/// Who of the owner `uid`, the group `gid` and all others is let in by an inode, whosesoever it is. That the
/// owner of a sequence is in its group is all that is known of the groups of users.
fn granted(inode: &Inode, uid: u32, gid: u32) -> u16 {
    let lets_in = if inode.is_directory() { (inode.mode & 0o111) << 2 } else { inode.mode & 0o444 };
    let to_all = if lets_in & SHARED == SHARED { 0o444 } else { 0 };
    let group = if inode.gid == gid { lets_in } else { to_all };
    let owner = if inode.uid == uid { lets_in } else { group << 3 };
    owner & 0o400 | group & 0o040 | to_all & OTHERS
}

impl State {
    /// Who may read a sequence: its directory, those above it up to the model's, and its tokens.
    pub(super) fn readers_of(&self, sequence: InodeId) -> Result<Readers, FsError> {
        let directory = self.inode(sequence)?;
        let mut readers = Readers { uid: directory.uid, gid: directory.gid, bits: 0o444 };
        readers.narrow(&directory);
        if let Some(tokens) = self.entry(sequence, names::TOKENS.as_bytes())? {
            readers.narrow(&self.inode(tokens.inode)?);
        }
        if let Kind::Directory { parent, .. } = directory.kind {
            readers.narrow(&self.inode(parent)?);
        }
        Ok(readers)
    }

    /// The same, and the directories of its layers.
    pub(super) fn readers_of_layers(
        &self, sequence: InodeId, geometry: &Geometry,
    ) -> Result<Readers, FsError> {
        let mut readers = self.readers_of(sequence)?;
        for layer in (0..geometry.num_layers()).map(Layer) {
            if let Some(entry) = self.entry(sequence, names::format_layer(layer).as_bytes())? {
                readers.narrow(&self.inode(entry.inode)?);
            }
        }
        Ok(readers)
    }

    /// Whether a sequence is open to everybody who may ask in the directory of its model. One that is
    /// not is found by nobody: an answer would tell others what was said in it.
    pub(super) fn is_open_to_askers(
        &self, model: InodeId, sequence: InodeId, geometry: &Geometry,
    ) -> Result<bool, FsError> {
        let readers = self.readers_of_layers(sequence, geometry)?;
        let model = self.inode(model)?;
        let mut askers = (model.mode & 0o111) << 2 & SHARED;
        // The model's owner is somebody else here; root is let in everywhere.
        let owner_is_other = model.uid != readers.uid && model.uid != 0;
        let group_is_other = model.gid != readers.gid && askers != 0;
        if owner_is_other || group_is_other || askers & OTHERS != 0 {
            askers = SHARED;
        }
        // What is above a sequence, or somebody else's file in it, may be closed to its owner too.
        if readers.uid != 0 {
            askers |= 0o400;
        }
        Ok(askers & !readers.bits == 0)
    }
}

impl FileSystem {
    /// The bytes of a file that all readers of a sequence may read, from whichever tier, checked as
    /// for everybody.
    pub(super) fn whole_file(
        &self, (directory, name): (InodeId, &str), readers: Readers,
    ) -> Result<Option<Vec<u8>>, FsError> {
        let (inode, size) = {
            let state = self.core.state();
            let Some(entry) = state.entry(directory, name.as_bytes())? else { return Ok(None) };
            if !readers.may_read(&state.inode(entry.inode)?) {
                return Err(FsError::NotPermitted);
            }
            (entry.inode, state.attributes(&self.core.store, entry.inode)?.size)
        };
        let handle = self.open_file(inode, libc::O_RDONLY)?.handle;
        let mut bytes = vec![0; usize::try_from(size).map_err(|_| FsError::TooLarge)?];
        let outcome = self.read(handle, 0, &mut bytes);
        self.release(handle)?;
        bytes.truncate(outcome?);
        Ok(Some(bytes))
    }
}

/// Directories that are looked at before one of them is removed for a user; beyond that he does it himself.
const DIRECTORIES_MAX: usize = 4096;

impl Caller {
    /// Which of reading (4), changing (2) and entering (1) an inode's mode grants. Of groups only the one that
    /// the request came with is known: in others this user may be, or not, so what counts is what both may.
    fn rights(self, inode: &Inode) -> u16 {
        match self.uid {
            0 => 0o7,
            uid if uid == inode.uid => inode.mode >> 6 & 0o7,
            _ if self.gid == inode.gid => inode.mode >> 3 & 0o7,
            _ => inode.mode >> 3 & inode.mode & 0o7,
        }
    }

    /// Whether names in a directory are for this user to make.
    fn may_change(self, directory: &Inode) -> bool {
        self.rights(directory) & 0o3 == 0o3
    }

    /// Whether a name in a directory is for this user to remove.
    pub(crate) fn may_remove(self, directory: &Inode, named: &Inode) -> bool {
        self.may_change(directory) && self.passes_sticky(directory, named.uid)
    }

    /// Whether the sticky bit of a directory lets this user remove what `owner` has put there.
    pub(super) fn passes_sticky(self, directory: &Inode, owner: u32) -> bool {
        let is_sticky = directory.mode & 0o1000 != 0;
        !is_sticky || self.uid == 0 || [owner, directory.uid].contains(&self.uid)
    }
}

impl State {
    /// Whether a user may put something else in the place of a directory's name: make it if it is not
    /// there, and else remove what has it, with everything that is in it.
    pub(super) fn may_replace(
        &self, caller: Caller, parent: InodeId, name: &[u8],
    ) -> Result<bool, FsError> {
        if caller.uid == 0 {
            return Ok(true);
        }
        let above = self.inode(parent)?;
        let Some(entry) = self.entry(parent, name)? else {
            return Ok(caller.may_change(&above));
        };
        let replaced = self.inode(entry.inode)?;
        if !caller.may_remove(&above, &replaced) {
            return Ok(false);
        }
        let mut directories = vec![(entry.inode, replaced)];
        let mut looked_at = 0;
        while let Some((id, directory)) = directories.pop() {
            looked_at += 1;
            if looked_at > DIRECTORIES_MAX {
                return Ok(false);
            }
            let mut inside = Vec::new();
            self.metadata.entries(id, 0, |_, _, entry| {
                inside.push(entry);
                true
            })?;
            for entry in inside {
                let inode = self.inode(entry.inode)?;
                if !caller.may_remove(&directory, &inode) {
                    return Ok(false);
                }
                if inode.is_directory() {
                    directories.push((entry.inode, inode));
                }
            }
        }
        Ok(true)
    }

    /// The ordinary file that a user finds, and may read, at a path from the root. Whether there is
    /// another one is not told.
    pub(super) fn readable_file(
        &self, caller: Caller, path: &Path,
    ) -> Result<Option<InodeId>, FsError> {
        let mut at = InodeId::ROOT;
        for part in path.components() {
            let Component::Normal(name) = part else { return Ok(None) };
            let directory = self.inode(at)?;
            if !directory.is_directory() || caller.rights(&directory) & 0o1 == 0 {
                return Ok(None);
            }
            match self.entry(at, name.as_encoded_bytes())? {
                Some(entry) => at = entry.inode,
                None => return Ok(None),
            }
        }
        let inode = self.inode(at)?;
        let is_plain = inode.file().is_some_and(|file| matches!(file.role, Role::Plain));
        Ok((is_plain && caller.rights(&inode) & 0o4 != 0).then_some(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfs_storage::store::record::{DirectoryClass, Time};

    fn inode(is_directory: bool, mode: u16, uid: u32, gid: u32) -> Inode {
        let class = DirectoryClass::Plain;
        let kind = if is_directory {
            Kind::Directory { class, parent: InodeId::ROOT, name: Vec::new() }
        } else {
            Kind::Symlink { target: Vec::new() }
        };
        let (atime, mtime, ctime) = (Time::default(), Time::default(), Time::default());
        Inode { kind, mode, uid, gid, links: 1, atime, mtime, ctime }
    }

    #[test]
    fn who_may_change_and_remove() {
        fn check(caller: Caller, directory: (u16, u32, u32), named: u32, expected: (bool, bool)) {
            let (mode, uid, gid) = directory;
            let (directory, named) = (inode(true, mode, uid, gid), inode(false, 0o644, named, 1));
            let found = (caller.may_change(&directory), caller.may_remove(&directory, &named));
            assert_eq!(found, expected, "{mode:o} {uid} {gid}");
        }
        let caller = Caller { uid: 7, gid: 8 };
        check(caller, (0o755, 7, 1), 1, (true, true));
        check(caller, (0o755, 1, 8), 1, (false, false));
        check(caller, (0o775, 1, 8), 1, (true, true));
        check(caller, (0o777, 1, 1), 1, (true, true));
        check(caller, (0o707, 1, 1), 1, (false, false));
        // The owner's own bits count for the owner, even if others may more.
        check(caller, (0o077, 7, 8), 1, (false, false));
        check(caller, (0o1777, 1, 1), 1, (true, false));
        check(caller, (0o1777, 1, 1), 7, (true, true));
        check(caller, (0o1777, 7, 1), 1, (true, true));
        check(Caller { uid: 0, gid: 0 }, (0o1700, 1, 1), 1, (true, true));
    }

    #[test]
    fn who_is_let_in() {
        fn check(is_directory: bool, (mode, uid, gid): (u16, u32, u32), expected: u16) {
            let inode = inode(is_directory, mode, uid, gid);
            assert_eq!(granted(&inode, 7, 8), expected, "{mode:o} {uid} {gid}");
        }
        check(false, (0o644, 7, 8), 0o444);
        check(false, (0o640, 7, 8), 0o440);
        check(false, (0o600, 7, 8), 0o400);
        // Others may be in its group.
        check(false, (0o604, 7, 8), 0o400);
        // Somebody else's.
        check(false, (0o644, 1, 1), 0o444);
        check(false, (0o640, 1, 8), 0o440);
        check(false, (0o604, 1, 8), 0);
        check(true, (0o700, 1, 1), 0);
        check(false, (0o600, 1, 1), 0);
        // Of directories it counts who may enter.
        check(true, (0o711, 7, 8), 0o444);
        check(true, (0o744, 7, 8), 0o400);
    }
}
