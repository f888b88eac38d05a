//! Removing a directory with all that is in it.

use super::remove::{Kept, Removal};
use crate::fs::attributes::Place;
use crate::fs::{FileSystem, FsError, Invalidation};
use crate::store::record::Entry;

/// What becomes of a file that somebody uses, or that is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) enum InUse {
    /// It goes; whoever has it open keeps its bytes.
    Goes,
    /// It stays, and with it what would be removed after it.
    Stays,
}

impl FileSystem {
    /// Removes a name, if it is that of a directory with all that is in it.
    pub(in crate::fs) fn remove_tree(
        &self, place: &Place, entry: Entry, in_use: InUse,
    ) -> Result<Removal, FsError> {
        match (entry.file_type, in_use) {
            (libc::S_IFDIR, _) => {}
            (libc::S_IFREG, InUse::Stays) => return self.remove_file(entry.inode, place, None),
            _ => {
                self.unlink(place)?;
                self.tell_gone(place, in_use);
                return Ok(Removal::default());
            }
        }
        let mut inside = Vec::new();
        self.state().metadata.entries(entry.inode, 0, |_, name, inner| {
            inside.push((Place { parent: entry.inode, name: name.to_vec() }, inner));
            true
        })?;
        // Directories first: `tokens` stays as long as somebody writes pages.
        inside.sort_by_key(|(_, inner)| inner.file_type != libc::S_IFDIR);
        let mut removal = Removal::default();
        for (place, inner) in inside {
            let part = self.remove_tree(&place, inner, in_use)?;
            removal.files += part.files;
            removal.bytes += part.bytes;
            removal.kept = part.kept;
            if removal.kept.is_some() {
                return Ok(removal);
            }
        }
        match self.remove_directory(place) {
            Ok(()) => self.tell_gone(place, in_use),
            Err(FsError::NotEmpty) if in_use == InUse::Stays => removal.kept = Some(Kept::InUse),
            Err(error) => return Err(error),
        }
        Ok(removal)
    }

    fn tell_gone(&self, place: &Place, in_use: InUse) {
        match in_use {
            // A request waits for it, which the thread that tells may wait for.
            InUse::Goes => self.invalidate(Invalidation::Name(place.clone())),
            InUse::Stays => self.tell_removed(place),
        }
    }
}
