//! To whom a sequence is open, for what finds it by its content or shows it in another form.
//!
//! The kernel checks the directories on a path for whoever walks through them. Nobody walks through a
//! sequence's to a slot or to the answer of a question, so here it is asked instead whom they would
//! let in. Of users only owner and group are known and not which groups they are in, so where that
//! matters the answer is no.

use std::path::{Component, Path};

use crate::core::rights::User;
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
        self.bits & !self.let_in(inode) == 0
    }

    fn narrow(&mut self, inode: &Inode) {
        self.bits &= self.let_in(inode);
    }

    /// Which of them a file or directory lets in, whosesoever it is. That the owner of a sequence is in its
    /// group is all that is known of the groups of users.
    fn let_in(self, inode: &Inode) -> u16 {
        let owner = User::from(Caller { uid: self.uid, gid: self.gid });
        let users = [(owner, 0o400), (User::in_group(self.gid), 0o040), (User::ANYBODY, OTHERS)];
        let is_let_in = |user: User| {
            if inode.is_directory() { user.may_enter(inode) } else { user.may_read(inode) }
        };
        users.into_iter().filter(|(user, _)| is_let_in(*user)).map(|(_, bit)| bit).sum()
    }
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
        includes_askers(self, model, readers)
    }

    /// The same for one of its files: whoever is told of it must be able to read it.
    pub(super) fn lets_askers_read(
        &self, model: InodeId, sequence: InodeId, file: InodeId,
    ) -> Result<bool, FsError> {
        let directory = self.inode(sequence)?;
        let mut readers = Readers { uid: directory.uid, gid: directory.gid, bits: 0o444 };
        readers.narrow(&self.inode(file)?);
        includes_askers(self, model, readers)
    }
}

/// Whether all who may ask in the directory of a model are among these.
fn includes_askers(state: &State, model: InodeId, readers: Readers) -> Result<bool, FsError> {
    let model = state.inode(model)?;
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

/// Opens the files of sequences for what shows them in another form.
pub(super) trait Files: std::fmt::Debug {
    /// The bytes of a file that all readers of a sequence may read, from whichever tier, checked as
    /// for everybody.
    fn whole_file(
        &self, place: (InodeId, &str), readers: Readers,
    ) -> Result<Option<Vec<u8>>, FsError>;

    /// Fills `to` with what a file has from a place on; returns how much.
    fn read_file(&self, id: InodeId, offset: u64, to: &mut [u8]) -> Result<usize, FsError>;

    /// A file was read for whoever has opened something with these flags of open(2).
    fn note_use_of(&self, id: InodeId, flags: i32);
}

impl Files for FileSystem {
    fn whole_file(
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
        let opened = self.open_file(inode, libc::O_RDONLY).map_err(FsError::after_lookup)?;
        let handle = opened.handle;
        let mut bytes = vec![0; usize::try_from(size).map_err(|_| FsError::TooLarge)?];
        let outcome = self.read(handle, 0, &mut bytes);
        self.release(handle)?;
        bytes.truncate(outcome.map_err(FsError::after_lookup)?);
        Ok(Some(bytes))
    }

    fn read_file(&self, id: InodeId, offset: u64, to: &mut [u8]) -> Result<usize, FsError> {
        let opened = self.open_file(id, libc::O_RDONLY).map_err(FsError::after_lookup)?;
        let outcome = self.read(opened.handle, offset, to);
        self.release(opened.handle)?;
        outcome.map_err(FsError::after_lookup)
    }

    fn note_use_of(&self, id: InodeId, flags: i32) {
        self.retention.note_use(&self.core, id, flags);
    }
}

/// Directories that are looked at before one of them is removed for a user; beyond that he does it himself.
const DIRECTORIES_MAX: usize = 4096;

impl State {
    /// Whether a user may put something else in the place of a directory's name: make it if it is not
    /// there, and else remove what has it, with everything that is in it.
    pub(super) fn may_replace(
        &self, caller: Caller, parent: InodeId, name: &[u8],
    ) -> Result<bool, FsError> {
        if caller.uid == 0 {
            return Ok(true);
        }
        let (user, above) = (User::from(caller), self.inode(parent)?);
        let Some(entry) = self.entry(parent, name)? else {
            return Ok(user.may_change(&above));
        };
        let replaced = self.inode(entry.inode)?;
        if !user.may_remove(&above, &replaced) {
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
                if !user.may_remove(&directory, &inode) {
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
        let (user, mut at) = (User::from(caller), InodeId::ROOT);
        for part in path.components() {
            let Component::Normal(name) = part else { return Ok(None) };
            let directory = self.inode(at)?;
            if !directory.is_directory() || !user.may_enter(&directory) {
                return Ok(None);
            }
            match self.entry(at, name.as_encoded_bytes())? {
                Some(entry) => at = entry.inode,
                None => return Ok(None),
            }
        }
        let inode = self.inode(at)?;
        let is_plain = inode.file().is_some_and(|file| matches!(file.role, Role::Plain));
        Ok((is_plain && user.may_read(&inode)).then_some(at))
    }
}

#[cfg(test)]
mod tests;
