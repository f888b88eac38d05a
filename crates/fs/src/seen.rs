//! `.kvfs/uses`: what files were used, of a sample of them, for whoever asks what another budget would have done.
//!
//! A use is an open to read, or a file in an answer to `.kvfs/batch`. Reads are the kernel's and are not seen, nor is its page
//! cache. Nothing of this outlives the mount.

use super::FsError;
use super::hits::{Area, PageOpen};
use super::residency::{Residency, tier_here};
use crate::core::Core;
use kvfs_storage::store::record::{ObjectId, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::remote::RemoteError;

/// A file of so many bytes was opened to be read, or a page, which this tier had.
pub(crate) fn note_open(
    core: &Core, area: Area, (tier, bytes): (Tier, u64), page: Option<PageOpen>,
) {
    core.observer.opened(bytes);
    let Some(page) = page.filter(|page| page.tokens > 0) else {
        core.observer.opened_file(tier);
        return core.hits.note_open(area, bytes);
    };
    let restored = core.hits.note_page(core, area, bytes, page);
    core.observer.opened_page(tier, page.tokens);
    core.observer.restored(restored, page.took);
}

/// A file could not be opened to be read, for something that its user did nothing about.
pub(crate) fn note_failed_open(core: &Core, object: ObjectId, error: &FsError) {
    let word = match error {
        FsError::Corrupt => "damaged",
        FsError::Unreadable(_) | FsError::Io(_) | FsError::Store(_) => "unreadable",
        FsError::Remote(RemoteError::Timeout(_) | RemoteError::Slow(_)) => "timeout",
        FsError::Remote(_) => "remote",
        FsError::NoRoom => "full",
        _ => return,
    };
    let is_of_remote = matches!(error, FsError::Remote(_));
    let tier = if is_of_remote { Tier::Remote } else { tier_here(core, object) };
    core.observer.open_failed(tier, word);
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
