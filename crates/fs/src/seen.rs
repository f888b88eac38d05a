//! `.kvfs/uses`: what files were used, of a sample of them, for whoever asks what another budget would have done.
//!
//! A use is an open to read, or a file in an answer to `.kvfs/batch`. Reads are the kernel's and are not seen, nor is its page
//! cache. Nothing of this outlives the mount.

use super::residency::Residency;
use crate::core::Core;
use kvfs_storage::store::record::{ObjectId, Role};
use kvfs_storage::tier::counters::Tier;

/// A file of so many bytes, and tokens if it is a page, was opened, which this tier had.
pub(crate) fn note_open(core: &Core, tier: Tier, (bytes, tokens): (u64, u32)) {
    core.observer.opened(bytes);
    if tokens > 0 {
        core.observer.opened_page(tier, tokens);
    }
}

/// A client opens an object, or gets its bytes without: what decides which copies stay counts that once, whether
/// or not the kernel still has its file.
pub(crate) fn note_use_of_tiers(residency: Residency<'_>, object: ObjectId, bytes: u64) {
    if let Some(ram) = &residency.core.store.ram {
        ram.used(object);
    }
    if let Some(tiers) = residency.tiers
        && tiers.copies.note_use(object, bytes)
    {
        tiers.counters.opened_after_leaving(Tier::Ssd);
    }
}

/// A file was opened that has these bytes, of a known role unless the kernel had it still.
pub(crate) fn note_use(core: &Core, object: ObjectId, role: Option<Role>, bytes: u64) {
    let in_memory = core.store.ram.as_ref().is_some_and(|ram| ram.holds(object));
    core.sample.used(object, role, bytes, in_memory);
}
