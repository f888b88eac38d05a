//! What a path and a name in a directory are to a user, as the kernel would tell him, without a request for each.

use crate::FsError;
use crate::core::Core;
use crate::core::rights::{Grant, User};
use crate::core::state::State;
use crate::hits::Area;
use kvfs_page::batch::Status;
use kvfs_page::names;
use kvfs_storage::store::record::{DirectoryClass, FileRecord, Inode, InodeId};

/// A directory that may be entered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Directory {
    id: InodeId,
    is_model: bool,
}

/// A file under a name.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) id: InodeId,
    pub(super) inode: Inode,
    pub(super) file: FileRecord,
}

impl Directory {
    /// What it counts for.
    pub(super) fn area(self, core: &Core, state: &State) -> Area {
        core.hits.areas.of(state, Some(self.id))
    }

    /// Follows a path from the root. `None` where only the kernel knows whether the user may: it depends on a group
    /// that he may be in. Symbolic links are not followed.
    pub(super) fn find(
        state: &State, user: User, path: &[u8],
    ) -> Result<Option<Directory>, FsError> {
        let mut at = InodeId::ROOT;
        let mut directory = Directory { id: at, is_model: false };
        for part in path.split(|byte| *byte == b'/') {
            if directory.is_virtual_name(part) {
                return Err(FsError::Invalid);
            }
            // What lies behind is told to nobody who may not be allowed to go there.
            if !is_certainly_open(state, user, at)? {
                return Ok(None);
            }
            at = state.entry(at, part)?.ok_or(FsError::NotFound)?.inode;
            let (_, class) = state.directory(at)?;
            directory = Directory { id: at, is_model: class == DirectoryClass::Model };
        }
        Ok(is_certainly_open(state, user, at)?.then_some(directory))
    }

    /// Whether a name is one of those that a model's directory has without an entry.
    fn is_virtual_name(self, name: &[u8]) -> bool {
        let virtual_names = [names::PREFIXES, names::SLOTS, names::BLOCKS];
        self.is_model && virtual_names.iter().any(|known| known.as_bytes() == name)
    }

    /// The ordinary file under a name, or why there is none to tell of.
    pub(super) fn look_up(
        self, state: &State, name: &[u8],
    ) -> Result<Result<Named, Status>, FsError> {
        // A page that is being written appears with the lookup of a name.
        if self.is_virtual_name(name) || state.is_pending(self.id, name) {
            return Ok(Err(Status::Other));
        }
        let Some(entry) = state.entry(self.id, name)? else { return Ok(Err(Status::Absent)) };
        // Its lookup may take the name away.
        if state.damaged.contains_key(&entry.inode) {
            return Ok(Err(Status::Other));
        }
        let inode = state.inode(entry.inode)?;
        let Some(file) = inode.file().cloned() else { return Ok(Err(Status::Other)) };
        Ok(Ok(Named { id: entry.inode, inode, file }))
    }
}

/// Whether it is known that paths through a directory may be followed; an error if it is known that they may not.
fn is_certainly_open(state: &State, user: User, id: InodeId) -> Result<bool, FsError> {
    let (directory, _) = state.directory(id)?;
    match user.may_certainly_enter(&directory) {
        Grant::Yes => Ok(true),
        Grant::No => Err(FsError::NoAccess),
        Grant::Unknown => Ok(false),
    }
}
