//! Whether somebody uses the bytes of a file: by a handle, or by a descriptor or mapping of which only the kernel knows.

use std::io;

use crate::core::Core;
use crate::core::node::Node;
use crate::core::state::State;
use kvfs_storage::store::disk::{Access, DiskPath};
use kvfs_storage::store::record::{InodeId, ObjectId};

/// Makes the kernel close what it keeps open for the next reader, which would keep the space; whether it did.
pub(crate) fn lets_go(core: &Core, id: InodeId) -> bool {
    core.let_go.get().is_none_or(|let_go| let_go.0(id))
}

/// Whether nobody uses the disk's copy of a file's object, nor relies on it.
pub(crate) fn is_idle(core: &Core, state: &State, id: InodeId, object: ObjectId) -> bool {
    let is_idle = !state.nodes.get(&id).is_some_and(Node::is_in_use)
        && !state.unsettled.contains_key(id)
        && !state.sealing.contains(&id);
    let is_unused = || match core.store.disk.open(&DiskPath::Object(object), Access::Read) {
        Ok(file) => file.is_unused().unwrap_or(false),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    is_idle && is_unused()
}

/// Whether nobody has the copies open that [`is_idle`] does not look at: the one in memory, and one that was not
/// committed yet.
pub(crate) fn is_unmapped(core: &Core, object: ObjectId) -> bool {
    let in_memory = core.store.ram.as_ref().and_then(|ram| ram.open_copy(object, Access::Read));
    let staged = core.store.disk.open(&DiskPath::Staging(object), Access::Read);
    let files = [in_memory, Some(staged)].into_iter().flatten();
    files.filter_map(Result::ok).all(|file| file.is_unused().unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::unmounted::{FILES, Unmounted};
    use kvfs_storage::tier::ram::LetGo;

    fn object_of(unmounted: &Unmounted, id: InodeId) -> ObjectId {
        let inode = unmounted.fs.core.state().inode(id).unwrap();
        inode.file().unwrap().object.unwrap()
    }

    #[test]
    fn who_uses_a_file_in_any_way_keeps_it_from_being_idle() {
        let unmounted = Unmounted::new();
        let (fs, core) = (&unmounted.fs, &unmounted.fs.core);
        let id = unmounted.write(FILES, "file", b"bytes");
        fs.commit().unwrap();
        let object = object_of(&unmounted, id);
        let is_idle = || super::is_idle(core, &core.state(), id, object);
        assert!(is_idle());
        // A handle, of which the disk knows nothing.
        core.state().nodes.entry(id).or_default().readers += 1;
        assert!(!is_idle());
        core.state().nodes.entry(id).or_default().readers -= 1;
        core.state().unsettled.insert(id, object);
        assert!(!is_idle());
        core.state().unsettled.remove(id);
        core.state().sealing.insert(id);
        assert!(!is_idle());
        core.state().sealing.remove(&id);
        // A mapping, of which the daemon knows nothing.
        let open = core.store.open_object(object, Access::Read).unwrap();
        assert!(!is_idle());
        drop(open);
        assert!(is_idle());
        core.store.unlink_object(object).unwrap().free();
        assert!(is_idle(), "no copy is there to be used");
    }

    #[test]
    fn the_kernel_is_asked_to_let_go_if_it_keeps_anything() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        assert!(lets_go(core, InodeId(7)), "nothing is kept");
        unmounted.fs.on_leaving(LetGo(Arc::new(|id| id == InodeId(7))));
        assert!(lets_go(core, InodeId(7)));
        assert!(!lets_go(core, InodeId(8)));
    }
}
