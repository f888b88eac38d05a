//! `.kvfs/uses`: what files were used, of a sample of them, for whoever asks what another budget would have done.
//!
//! A use is an open to read, or a file in an answer to `.kvfs/batch`. Reads are the kernel's and are not seen, nor is its page
//! cache. Nothing of this outlives the mount.

use super::FileSystem;
use crate::core::Core;
use kvfs_storage::store::record::{ObjectId, Role};

/// A file was opened that has these bytes. The tiers have heard of it.
pub(crate) fn note_use(core: &Core, object: ObjectId, role: Role, bytes: u64) {
    let in_memory = core.store.ram.as_ref().is_some_and(|ram| ram.holds(object));
    core.sample.used(object, Some(role), bytes, in_memory);
}

/// The same where the kernel had the file still: nobody opened it, so the tiers hear of it here.
pub(crate) fn note_held_use(fs: &FileSystem, object: ObjectId, bytes: u64) {
    let in_memory = fs.core.store.ram.as_ref().is_some_and(|ram| ram.note_use(object));
    fs.core.sample.used(object, None, bytes, in_memory);
    if let Some(tiers) = &fs.tiers {
        tiers.copies.note_use(object, bytes);
    }
}
