//! Files that lost their last name while somebody knows their inodes: who uses their bytes keeps them, until the last handle is
//! closed and the kernel forgets the inode.
//!
//! The kernel may do so long after the last close, and a FORGET comes behind a sync that was sent later. On a disk that is nearly full that
//! is too late: a client that removes files, syncs and writes others has to find room. There bytes that nobody uses go with
//! the next commit. An open that found the name a moment before hears that the inode is stale, and the kernel looks the name up again;
//! it does so once only, which is why this is not done where there is room.

use crate::FsError;
use crate::core::Core;
use crate::core::node::Node;
use crate::core::stale::mark_stale;
use crate::core::state::State;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId};

/// Inodes that are looked at before others may have the state.
const AT_A_TIME: usize = 256;

/// Takes the bytes of a file without names off the record.
pub(super) fn disown_bytes(
    state: &mut State, id: InodeId, inode: &mut Inode,
) -> Result<(), FsError> {
    let Some(file) = inode.file_mut() else { return Ok(()) };
    file.unsettled = true;
    match file.object {
        Some(object) => {
            state.orphans.push(id);
            disown(state, object)
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

/// Where the disk is nearly full, [`let_unused_go`]; elsewhere the kernel forgets in time.
pub(crate) fn make_room(core: &Core, let_go: impl Fn(InodeId)) -> Result<(), FsError> {
    if core.state().orphans.is_empty() {
        return Ok(());
    }
    // A disk that does not tell keeps no commit from being made.
    if core.store.disk.space().is_ok_and(|space| space.is_nearly_full()) {
        return let_unused_go(core, let_go);
    }
    core.state().orphans.clear();
    Ok(())
}

/// The next commit removes the bytes that nobody uses of the files that lost their last name since the last one. `let_go` has the kernel
/// close what it keeps of such a file.
pub(crate) fn let_unused_go(core: &Core, let_go: impl Fn(InodeId)) -> Result<(), FsError> {
    let orphans = std::mem::take(&mut core.state().orphans);
    for some in orphans.chunks(AT_A_TIME) {
        let mut state = core.state();
        let mut gone = Vec::new();
        for id in some {
            if let_bytes_go(&mut state, *id)? {
                gone.push(*id);
            }
        }
        drop(state);
        gone.into_iter().for_each(&let_go);
    }
    Ok(())
}

/// Whether they go. Those that are in use go when the kernel forgets the inode.
fn let_bytes_go(state: &mut State, id: InodeId) -> Result<bool, FsError> {
    let uses = |node: &Node| node.is_in_use() || node.replacement.is_some();
    let is_unused = state.nodes.get(&id).is_some_and(|node| !uses(node));
    if !is_unused || state.sealing.contains(&id) || state.unsettled.contains_key(id) {
        return Ok(false);
    }
    let Some(inode) = state.metadata.inode(id)?.filter(|inode| inode.links == 0) else {
        return Ok(false);
    };
    mark_stale(state, id);
    state.drop_orphan(id, &inode)?;
    Ok(true)
}
