//! What is told of files that move or go without their users asking: `kvfs log` shows it.

use std::io::ErrorKind;

use crate::attributes::Place;
use crate::core::Core;
use crate::core::state::State;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::quarantine::{self, Take};
use kvfs_storage::store::record::{Inode, InodeId, ObjectId};

/// Makes events that no change took along part of the next commit, once they have waited for one.
pub fn take_waiting_events(core: &Core) {
    if core.store.events.are_due() {
        take_events(core);
    }
}

/// Makes all events part of the next commit, if there may be one.
pub(crate) fn take_events(core: &Core) {
    let mut state = core.state();
    if state.refusal.is_none() {
        core.store.events.write_to(&mut state.metadata);
    }
}

/// A file's bytes are elsewhere now. Nothing leads from a file to its names, so no path is looked for.
pub(crate) fn note_move(core: &Core, id: InodeId, what: What, reason: &str) {
    let event = Event::new(what, reason).of(id);
    let (bytes, directory) = {
        let state = core.state();
        let inode = state.metadata.inode(id).ok().flatten();
        let bytes = inode.as_ref().and_then(Inode::file).map(|file| file.size);
        (bytes, state.nodes.get(&id).and_then(|node| node.found_in))
    };
    core.store.events.note(Event { bytes, directory, ..event });
}

/// Of these files, those whose objects are among those that left have left the disk.
pub(crate) fn note_left(
    core: &Core, files: &[(ObjectId, InodeId)], gone: &[ObjectId], reason: &str,
) {
    for (_, id) in files.iter().filter(|(object, _)| gone.contains(object)) {
        note_move(core, *id, What::Demoted, reason);
    }
}

/// Something happened to what has, or had, this name.
pub(crate) fn note_at(core: &Core, state: &State, place: &Place, event: Event) {
    let path = state.path(place.parent, &place.name);
    core.store.events.note(event.in_directory(place.parent).at(path));
}

/// Keeps a copy of bytes that are not what was written, for whoever wants to know why.
pub(crate) fn keep_damaged(core: &Core, id: InodeId, object: ObjectId, take: Take, why: &str) {
    match quarantine::put(&core.store, object, take, why) {
        Ok(()) => core.store.events.note(Event::new(What::Quarantined, why).of(id)),
        // There is nothing to keep.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            log::warn!("object {object}: the damaged copy could not be kept: {error}");
        }
    }
}
