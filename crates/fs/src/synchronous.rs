//! `O_SYNC` and `O_DSYNC`: the kernel syncs the bytes that it writes to a backing file, and tells
//! nobody. So the name is durable, as that of a file that is being written in place, before such an
//! open answers, and recovery finds the length that the bytes have.

use super::{FileSystem, FsError, held_back};
use kvfs_storage::store::record::InodeId;

/// Whether each write through an open with these flags is durable when it returns.
pub fn is_synchronous(flags: i32) -> bool {
    flags & libc::O_DSYNC != 0 && flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// Takes a file out of memory, where syncing it would mean nothing.
pub(super) fn leave_memory(fs: &FileSystem, id: InodeId) -> Result<(), FsError> {
    let Some(ram) = &fs.core.store.ram else { return Ok(()) };
    let object = {
        let state = fs.core.state();
        let inode = state.inode(id)?;
        inode.file().and_then(|file| state.current_object(id, file))
    };
    let Some(object) = object.filter(|object| ram.holds(*object)) else { return Ok(()) };
    // The disk has it then, unless somebody goes on writing.
    held_back::make_all_durable(fs)?;
    ram.drop_clean(object);
    if ram.holds(object) { Err(FsError::InUse) } else { Ok(()) }
}
