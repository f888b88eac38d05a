//! Which sequences other machines may hear of: those that everybody may find and read here.
//!
//! Users of other machines are not known here, nor the users of this one there. So what only some may read stays
//! on its machine: the store that has it publishes no prefix of it, and the one that asks looks again.

use kvfs_page::names;
use kvfs_storage::store::database::Snapshot;
use kvfs_storage::store::record::{Entry, Inode, InodeId, Kind};
use kvfs_storage::store::{StoreError, keys};

/// Directories above a sequence: its model's `sequences/`, the model's, `models/` and the root, and room for
/// more to come.
const DIRECTORIES_ABOVE_MAX: usize = 8;

/// Records of a store, wherever they are.
pub(crate) trait Records {
    /// Why they could not be read.
    type Error;

    /// What an inode is.
    fn inode(&self, id: InodeId) -> Result<Option<Inode>, Self::Error>;

    /// What a name in a directory stands for.
    fn entry(&self, parent: InodeId, name: &str) -> Result<Option<InodeId>, Self::Error>;
}

impl Records for Snapshot {
    type Error = StoreError;

    fn inode(&self, id: InodeId) -> Result<Option<Inode>, StoreError> {
        self.get(&keys::inode(id))
    }

    fn entry(&self, parent: InodeId, name: &str) -> Result<Option<InodeId>, StoreError> {
        let entry: Option<Entry> = self.get(&keys::entry(parent, name.as_bytes()))?;
        Ok(entry.map(|entry| entry.inode))
    }
}

/// Whether everybody may find a sequence, through all directories above it, and read its tokens.
pub(crate) fn is_open_to_all<R: Records>(records: &R, sequence: InodeId) -> Result<bool, R::Error> {
    let Some(directory) = records.inode(sequence)? else { return Ok(false) };
    let Some(tokens) = records.entry(sequence, names::TOKENS)? else { return Ok(false) };
    let is_readable = records.inode(tokens)?.is_some_and(|tokens| grants_all(&tokens, 0o4));
    if !is_readable || !grants_all(&directory, 0o5) {
        return Ok(false);
    }
    let mut parent = parent_of(&directory);
    for _ in 0..DIRECTORIES_ABOVE_MAX {
        let Some(id) = parent else { return Ok(false) };
        let Some(above) = records.inode(id)?.filter(may_all_enter) else { return Ok(false) };
        if id == InodeId::ROOT {
            return Ok(true);
        }
        parent = parent_of(&above);
    }
    Ok(false)
}

/// Whether everybody may enter a directory.
pub(super) fn may_all_enter(directory: &Inode) -> bool {
    directory.is_directory() && grants_all(directory, 0o1)
}

/// Whether an inode grants everybody these rights (4 reads, 1 enters), its owner too: he is among those who ask
/// there. Root needs none.
pub(super) fn grants_all(inode: &Inode, rights: u16) -> bool {
    let owner = if inode.uid == 0 { 0 } else { rights << 6 };
    let needed = owner | rights << 3 | rights;
    inode.mode & needed == needed
}

fn parent_of(directory: &Inode) -> Option<InodeId> {
    match directory.kind {
        Kind::Directory { parent, .. } => Some(parent),
        _ => None,
    }
}
