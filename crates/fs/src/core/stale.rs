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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::core::orphan::remove_name;
    use crate::unmounted::{FILES, Unmounted, place};

    /// A file whose only name the daemon takes away.
    fn nameless(unmounted: &Unmounted, name: &str) -> InodeId {
        let id = unmounted.write(FILES, name, b"bytes");
        let mut state = unmounted.fs.core.state();
        let mut inode = state.inode(id).unwrap();
        remove_name(&unmounted.fs.core, &mut state, (id, &mut inode), &place(FILES, name)).unwrap();
        id
    }

    fn is_stale(unmounted: &Unmounted, id: InodeId) -> bool {
        unmounted.fs.core.state().nodes.get(&id).is_some_and(|node| node.stale)
    }

    #[test]
    fn a_file_that_lost_its_last_name_goes_unless_somebody_has_it_open() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let named = unmounted.write(FILES, "named", b"bytes");
        mark_stale_without_names(&mut core.state(), named).unwrap();
        assert!(!is_stale(&unmounted, named));
        let id = nameless(&unmounted, "file");
        mark_stale_without_names(&mut core.state(), id).unwrap();
        assert!(is_stale(&unmounted, id));
        assert!(core.state().metadata.inode(id).unwrap().is_none());
        // One that is open goes with its last descriptor.
        let id = unmounted.write(FILES, "open", b"bytes");
        let opened = unmounted.fs.open_file(id, libc::O_RDONLY).unwrap();
        let mut inode = core.state().inode(id).unwrap();
        let removed = place(FILES, "open");
        remove_name(core, &mut core.state(), (id, &mut inode), &removed).unwrap();
        mark_stale_without_names(&mut core.state(), id).unwrap();
        assert!(is_stale(&unmounted, id) && core.state().metadata.inode(id).unwrap().is_some());
        assert!(!let_go_if_stale(&mut core.state(), id).unwrap(), "it is in use");
        assert!(!let_go_if_stale(&mut core.state(), named).unwrap(), "it has a name");
        unmounted.fs.release(opened.handle).unwrap();
        assert!(core.state().metadata.inode(id).unwrap().is_none());
        assert!(unmounted.told.try_iter().any(|what| what == Invalidation::Names(id)));
        assert!(let_go_if_stale(&mut core.state(), id).unwrap());
    }

    #[test]
    fn directories_without_names_stay_for_whoever_works_in_them() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let id = unmounted.make_directory(FILES, "d", (0o755, 0));
        unmounted.fs.remove_directory(&place(FILES, "d")).unwrap();
        mark_stale_without_names(&mut core.state(), id).unwrap();
        assert!(is_stale(&unmounted, id));
        assert!(core.state().metadata.inode(id).unwrap().is_some());
    }

    #[test]
    fn the_kernel_hears_of_the_directory_and_of_the_names() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let expected = [Invalidation::Inode(FILES), Invalidation::Names(InodeId(50))];
        tell_stale(core, FILES, InodeId(50));
        assert_eq!(unmounted.told.try_iter().collect::<Vec<_>>(), expected);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&asked);
        core.on_new_names(crate::AskAnew(Box::new(move |id| noted.lock().unwrap().push(id))));
        tell_stale_at_once(core, FILES, InodeId(50));
        assert_eq!(unmounted.told.try_iter().collect::<Vec<_>>(), expected);
        assert_eq!(*asked.lock().unwrap(), [InodeId(50), FILES]);
    }
}
