//! Files that lost their last name while somebody knows their inodes: who uses their bytes keeps them, until the last handle is
//! closed and the kernel forgets the inode.
//!
//! The kernel may do so long after the last close, and a FORGET comes behind a sync that was sent later. On a disk that is nearly full, or
//! has less room than they take, that is too late: a client that removes files, syncs and writes others has to find room. There bytes that
//! nobody uses go with the next commit. An open that found the name a moment before hears that the inode is stale, and the kernel looks the name up again;
//! it does so once only, which is why this is not done where there is room.

use std::time::{Duration, Instant};

use crate::FsError;
use crate::attributes::Place;
use crate::core::Core;
use crate::core::idle::lets_go;
use crate::core::node::Node;
use crate::core::stale::mark_stale;
use crate::core::state::State;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId};

/// For so long after the disk had too little room somebody may still be making room, in portions.
const SHORT_FOR: Duration = Duration::from_secs(60);

/// Inodes that are looked at before others may have the state.
const AT_A_TIME: usize = 256;

/// Removes a name of a file; how many bytes it has. With the last one the file goes, as soon as nobody holds it.
pub(crate) fn remove_name(
    core: &Core, state: &mut State, (id, inode): (InodeId, &mut Inode), place: &Place,
) -> Result<u64, FsError> {
    let size = state.attributes_of(&core.store, id, inode).map_or(0, |shown| shown.size);
    state.remove_name(place, id);
    state.touch_directory(place.parent, 0)?;
    state.drop_link(id, inode)?;
    Ok(size)
}

/// Takes the bytes of a file without names off the record.
pub(super) fn disown_bytes(
    state: &mut State, id: InodeId, inode: &mut Inode,
) -> Result<(), FsError> {
    let Some(file) = inode.file_mut() else { return Ok(()) };
    file.unsettled = true;
    match file.object {
        Some(object) => {
            let bytes = disown(state, object)?;
            state.orphans.insert(id, bytes);
            Ok(())
        }
        None => Ok(()),
    }
}

/// Takes an object whose file somebody still has open off the record, unless it is shared. Returns how many bytes go with it, as far
/// as its record tells.
fn disown(state: &mut State, object: ObjectId) -> Result<u64, FsError> {
    let record = state.metadata.object(object)?;
    if record.as_ref().is_some_and(|record| record.references > 1) {
        return Ok(0);
    }
    state.metadata.disown_object(object);
    Ok(record.map_or(0, |record| record.length))
}

/// Where the disk has little room beside what they take, or had a moment ago, [`let_unused_go`]; elsewhere the kernel forgets in time.
pub(crate) fn make_room(core: &Core) -> Result<(), FsError> {
    if core.state().orphans.is_empty() {
        return Ok(());
    }
    // A disk that does not tell keeps no commit from being made.
    let Ok(space) = core.store.disk.space() else { return Ok(()) };
    let was_short = {
        let mut state = core.state();
        let held_bytes: u64 = state.orphans.values().sum();
        if space.is_nearly_full() || space.available_bytes < held_bytes {
            note_short(&mut state);
        }
        was_room_short(&state)
    };
    if was_short { let_unused_go(core) } else { Ok(()) }
}

/// The disk has too little room, or refuses more.
pub(crate) fn note_short(state: &mut State) {
    state.short_since = Some(Instant::now());
}

/// Whether the disk has too little room for files that are to go, or had a moment ago.
pub(crate) fn was_room_short(state: &State) -> bool {
    state.short_since.is_some_and(|since| since.elapsed() < SHORT_FOR)
}

/// The next commit removes the bytes of all files without a name that nobody uses. The kernel closes what it keeps of such a
/// file.
pub(crate) fn let_unused_go(core: &Core) -> Result<(), FsError> {
    let orphans: Vec<InodeId> = core.state().orphans.keys().copied().collect();
    for some in orphans.chunks(AT_A_TIME) {
        let mut state = core.state();
        let mut gone = Vec::new();
        for id in some {
            if let_bytes_go(&mut state, *id)? {
                gone.push(*id);
            }
        }
        drop(state);
        for id in gone {
            lets_go(core, id);
        }
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
