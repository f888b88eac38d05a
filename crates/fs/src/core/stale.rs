//! Names that the daemon takes away, or gives to another, without being asked by the kernel, which keeps a name for a
//! day.
//!
//! The kernel is told to drop such names where it can do so without waiting ([`Invalidation::Names`]). It may keep
//! them all the same: then whoever comes by one asks for the attributes of the inode, hears that it is stale, and the
//! kernel looks the name up again (`LOOKUP_REVAL` in fs/namei.c). So nobody waits for the lock of a directory, which
//! somebody may hold who waits for the daemon: a daemon that is killed meanwhile never ends, and everybody hangs.

use std::time::Duration;

use crate::core::Core;
use crate::core::node::Node;
use crate::core::state::State;
use crate::{FsError, Invalidation};
use kvfs_storage::store::record::InodeId;

/// How long the removal of names waits for the kernel to hear of them.
const TELL_PATIENCE: Duration = Duration::from_secs(10);

/// The daemon took a name of an inode away. With the last one it is stale, and the bytes of a file go at once, unless
/// somebody has it open: the kernel may remember the inode for as long as it likes.
pub(crate) fn mark_stale_without_names(state: &mut State, id: InodeId) -> Result<(), FsError> {
    let inode = state.metadata.inode(id)?;
    if inode.as_ref().is_some_and(|inode| inode.links > 0) {
        return Ok(());
    }
    mark_stale(state, id);
    match inode {
        Some(inode) if inode.file().is_some() && !is_in_use(state, id) => {
            state.drop_orphan(id, &inode)
        }
        _ => Ok(()),
    }
}

/// The last descriptor of a stale inode may be closed: then its bytes go. Whether it is time for the kernel to drop its
/// names, which it keeps while they are in use.
pub(crate) fn let_go_if_stale(state: &mut State, id: InodeId) -> Result<bool, FsError> {
    let is_stale = state.nodes.get(&id).is_some_and(|node| node.stale && !node.is_in_use());
    if is_stale {
        mark_stale_without_names(state, id)?;
    }
    Ok(is_stale)
}

/// An inode has none of the names any more that the kernel knows.
pub(crate) fn mark_stale(state: &mut State, id: InodeId) {
    if let Some(node) = state.nodes.get_mut(&id) {
        node.stale = true;
    }
}

fn is_in_use(state: &State, id: InodeId) -> bool {
    state.nodes.get(&id).is_some_and(Node::is_in_use)
}

/// Has the kernel hear that a directory lost a name of an inode; not where a request waits that the kernel may wait for.
pub(crate) fn tell_stale(core: &Core, directory: InodeId, id: InodeId) {
    for what in told(directory, id) {
        if core.invalidations.send_timeout(what, TELL_PATIENCE).is_err() {
            log::warn!("the kernel was not told that inode {} has lost a name", id.0);
        }
    }
}

/// The same, and whoever asks by a path hears of it from now on: what the kernel remembers of the inode's attributes
/// does not outlive the operation. Only attributes are dropped here, which waits for nobody.
pub(crate) fn tell_stale_at_once(core: &Core, directory: InodeId, id: InodeId) {
    if let Some(crate::AskAnew(ask_anew)) = core.ask_anew.get() {
        ask_anew(id);
        ask_anew(directory);
    }
    tell_stale(core, directory, id);
}

/// What the kernel is to forget then: it lists the directory anew as well.
pub(crate) fn told(directory: InodeId, id: InodeId) -> [Invalidation; 2] {
    [Invalidation::Inode(directory), Invalidation::Names(id)]
}
