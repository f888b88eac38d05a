//! A file that lost its last name while somebody knows its inode: who uses its bytes keeps them.
//!
//! If nobody does, they go with the next commit and not when the kernel forgets the inode, which it may do long after:
//! a client that removes files, syncs and writes others has to find room.

use crate::FsError;
use crate::core::node::Node;
use crate::core::state::State;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId};

/// Takes the bytes off the record, and away from the inode if nobody uses them.
pub(super) fn keep_for_users(
    state: &mut State, id: InodeId, inode: &mut Inode,
) -> Result<(), FsError> {
    let uses = |node: &Node| node.is_in_use() || node.replacement.is_some();
    let is_used = state.sealing.contains(&id) || state.nodes.get(&id).is_some_and(uses);
    let Some(file) = inode.file_mut() else { return Ok(()) };
    file.unsettled = true;
    match file.object {
        Some(object) if is_used => disown(state, object),
        Some(object) => {
            file.object = None;
            state.orphans.push(id);
            if let Some(node) = state.nodes.get_mut(&id) {
                node.verified = None;
            }
            state.drop_object(object)
        }
        None => Ok(()),
    }
}

/// Takes an object whose file somebody still has open off the record, unless it is shared.
fn disown(state: &mut State, object: ObjectId) -> Result<(), FsError> {
    let record = state.metadata.object(object)?;
    if record.is_none_or(|record| record.references <= 1) {
        state.metadata.disown_object(object);
    }
    Ok(())
}
