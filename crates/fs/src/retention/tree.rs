//! Removing a directory with all that is in it.

use super::enforcer::Enforcer;
use super::remove::{Kept, Removal};
use super::rights::Right;
use crate::FsError;
use crate::attributes::Place;
use crate::core::stale::{mark_stale_without_names, tell_stale, told};
use kvfs_storage::store::record::{Entry, InodeId};

/// What becomes of a file that somebody uses, or that is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InUse {
    /// It goes; whoever has it open keeps its bytes.
    Goes,
    /// It stays, and with it what would be removed after it.
    Stays,
}

/// A directory that is being emptied.
struct Emptied {
    place: Place,
    inode: InodeId,
    /// Names that are still in it; the last one goes first.
    inside: Vec<(Place, Entry)>,
}

impl Enforcer<'_> {
    /// Removes a name, if it is that of a directory with all that is in it. Clients choose how deep that
    /// is, so the directories on the way are kept on the heap.
    pub(crate) fn remove_tree(
        &self, place: &Place, entry: Entry, in_use: InUse,
    ) -> Result<Removal, FsError> {
        let mut removal = Removal::default();
        let mut open: Vec<Emptied> = Vec::new();
        let mut next = Some((place.clone(), entry));
        loop {
            match next {
                Some((place, entry)) if entry.file_type == libc::S_IFDIR => {
                    let inside = self.names_in_order_of_removal(entry.inode)?;
                    open.push(Emptied { place, inode: entry.inode, inside });
                }
                Some((place, entry)) => {
                    let part = self.remove_leaf(&place, entry, in_use)?;
                    removal.files += part.files;
                    removal.bytes += part.bytes;
                    removal.kept = part.kept;
                }
                None => {
                    let Some(Emptied { place, inode, .. }) = open.pop() else {
                        return Ok(removal);
                    };
                    match self.names.remove_directory(&place) {
                        Ok(()) => self.tell_gone((place.parent, inode), in_use)?,
                        Err(FsError::NotEmpty) if in_use == InUse::Stays => {
                            removal.kept = Some(Kept::InUse);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            if removal.kept.is_some() {
                return Ok(removal);
            }
            next = open.last_mut().and_then(|directory| directory.inside.pop());
        }
    }

    /// Removes a name that is no directory's.
    fn remove_leaf(&self, place: &Place, entry: Entry, in_use: InUse) -> Result<Removal, FsError> {
        if entry.file_type == libc::S_IFREG && in_use == InUse::Stays {
            return self.remove_file(entry.inode, place, Right::Directory, None);
        }
        self.names.unlink(place)?;
        self.tell_gone((place.parent, entry.inode), in_use)?;
        Ok(Removal::default())
    }

    /// Directories first: `tokens` stays as long as somebody writes pages. The first to go stands last.
    fn names_in_order_of_removal(
        &self, directory: InodeId,
    ) -> Result<Vec<(Place, Entry)>, FsError> {
        let mut inside = Vec::new();
        self.core.state().metadata.entries(directory, 0, |_, name, inner| {
            inside.push((Place { parent: directory, name: name.to_vec() }, inner));
            true
        })?;
        inside.sort_by_key(|(_, inner)| inner.file_type == libc::S_IFDIR);
        Ok(inside)
    }

    /// A name went. Another one of a file keeps it.
    fn tell_gone(&self, (directory, id): (InodeId, InodeId), in_use: InUse) -> Result<(), FsError> {
        mark_stale_without_names(&mut self.core.state(), id)?;
        match in_use {
            // A request waits for it, which the thread that tells may wait for.
            InUse::Goes => {
                for what in told(directory, id) {
                    self.core.invalidate(what);
                }
            }
            InUse::Stays => tell_stale(self.core, directory, id),
        }
        Ok(())
    }
}
