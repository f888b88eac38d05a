//! Which files are below a path.

use super::super::FsError;
use crate::core::Core;
use crate::damage::has_lost_rows;
use kvfs_storage::store::record::{FileRecord, Inode, InodeId, ObjectId};

/// Names that are read from a directory at a time: the state is held meanwhile.
const NAMES_MAX: usize = 1024;

/// Settled files and their objects, and rows that are lost, in the order in which these were made; 16 bytes for each.
pub(super) fn files_below(
    core: &Core, below: InodeId,
) -> Result<Vec<(ObjectId, InodeId)>, FsError> {
    let mut found = Vec::new();
    if below == InodeId::ROOT {
        let snapshot = core.state().metadata.snapshot()?;
        snapshot.for_each::<Inode>(b'I', |id, inode| {
            found.extend(object_of(core, &inode).map(|object| (object, InodeId(id))));
        })?;
    } else {
        let mut waiting = vec![below];
        while let Some(id) = waiting.pop() {
            let inode = core.state().metadata.inode(id)?;
            match inode {
                Some(inode) if inode.is_directory() => add_names(core, id, &mut waiting)?,
                Some(inode) => {
                    found.extend(object_of(core, &inode).map(|object| (object, id)));
                }
                None => {}
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn add_names(core: &Core, directory: InodeId, found: &mut Vec<InodeId>) -> Result<(), FsError> {
    let mut from = 0;
    loop {
        let (mut count, mut last, mut next) = (0, None, None);
        core.state().metadata.entries(directory, from, |offset, _, entry| {
            // Names of one offset stay together.
            if count >= NAMES_MAX && last != Some(offset) {
                next = Some(offset);
                return false;
            }
            found.push(entry.inode);
            (count, last) = (count + 1, Some(offset));
            true
        })?;
        match next {
            Some(offset) => from = offset,
            None => return Ok(()),
        }
    }
}

fn object_of(core: &Core, inode: &Inode) -> Option<ObjectId> {
    let is_wanted = |file: &&FileRecord| file.is_settled() || has_lost_rows(core, inode);
    inode.file().filter(is_wanted).and_then(|file| file.object)
}
