//! What is told of files that move or go without their users asking: `kvfs log` shows it.

use std::io::ErrorKind;

use crate::attributes::Place;
use crate::core::state::State;
use crate::core::{Core, failures, uses};
use crate::history::path_in;
use crate::retention::recorded_use;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::quarantine::{self, Take};
use kvfs_storage::store::record::{Inode, InodeId, ObjectId, Role, Time};
use kvfs_storage::tier::ssd::SsdTier;

/// Makes events that no change took along part of the next commit, once they have waited for one.
pub fn take_waiting_events(core: &Core) {
    failures::tell_due(core);
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

/// A file's bytes are elsewhere now. The path of a page is looked for when somebody reads what happened; that of a plain file
/// now, where that takes no pass over all names.
pub(crate) fn note_move(core: &Core, id: InodeId, event: Event) {
    let (inode, directory, path) = {
        let state = core.state();
        let inode = state.metadata.inode(id).ok().flatten();
        let directory = state.nodes.get(&id).and_then(|node| node.found_in);
        let is_plain =
            inode.as_ref().and_then(Inode::file).is_some_and(|file| file.role == Role::Plain);
        let path = directory.filter(|_| is_plain).and_then(|found| path_in(&state, id, found));
        (inode, directory, path)
    };
    let bytes = inode.as_ref().and_then(Inode::file).map(|file| file.size);
    // What comes nearer is being used just now, which is noted already and tells nothing.
    let comes = matches!(event.what, What::Fetched | What::Promoted);
    let used = inode.and_then(|inode| last_use(core, id, &inode, !comes));
    let event = Event { bytes, directory, used: event.used.or(used), ..event };
    core.store.events.note(event.of(id).at(path));
}

/// When a file was used last, as far as that is known.
pub(crate) fn last_use(
    core: &Core, id: InodeId, inode: &Inode, counts_noted: bool,
) -> Option<Time> {
    let recorded = recorded_use(&core.state(), id, inode).ok();
    let noted = counts_noted.then(|| uses::held(&core.uses).of(id)).flatten();
    recorded.max(noted)
}

/// Of these files, those whose objects are among those that left have left the disk.
pub(crate) fn note_left(
    (core, disk): (&Core, &SsdTier), files: &[(ObjectId, InodeId)], gone: &[ObjectId], reason: &str,
) {
    for (object, id) in files.iter().filter(|(object, _)| gone.contains(object)) {
        let event = Event { uses: disk.uses(*object), ..Event::new(What::Demoted, reason) };
        note_move(core, *id, event);
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
        Ok(bytes) => {
            let event = Event::new(What::Quarantined, why).of(id);
            core.store.events.note(event.with_bytes(bytes));
        }
        // There is nothing to keep.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            log::warn!("object {object}: the damaged copy could not be kept: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted, place};

    #[test]
    fn a_plain_file_that_moves_is_told_by_the_path_that_it_has_then() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        for name in ["another", "one"] {
            unmounted.write(FILES, name, b"bytes");
        }
        let id = unmounted.id_of(FILES, "one").unwrap();
        note_move(&fs.core, id, Event::new(What::Demoted, "test"));
        fs.rename(&place(FILES, "one"), &place(FILES, "two"), 0).unwrap();
        note_move(&fs.core, id, Event::new(What::Demoted, "test"));
        let moves = unmounted.events().into_iter().filter(|event| event.what == What::Demoted);
        let paths: Vec<_> = moves.map(|event| event.path).collect();
        assert_eq!(paths[0].as_deref(), Some("files/one"), "{paths:?}");
        assert_eq!(paths.len(), 2);
    }
}
