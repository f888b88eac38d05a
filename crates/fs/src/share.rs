//! How much of the processor uploads and encodings get: an inference machine has better uses for it, until the disk
//! is full or the only copy has long been here.

use kvfs_os::Share;

use super::FileSystem;
use super::tiers::Tiers;

/// A file that waits longer for the remote has waited for the processor: names are published every ten seconds.
const WAITS_LONG_SECONDS: u64 = 30;

/// The share of what uploads and encodes next. Not what others leave, even where nobody waits yet: of processors that an
/// engine keeps spinning that is nothing, and whoever began so would be no further when the disk is full.
pub(super) fn of_moving(fs: &FileSystem, tiers: &Tiers) -> Share {
    let budget_bytes = tiers.copies.disk().budget_bytes();
    let is_behind = budget_bytes.is_some_and(|budget| fs.ssd_used_bytes() > budget);
    if is_behind || fs.lacking_in_remote().seconds >= WAITS_LONG_SECONDS {
        Share::Quarter
    } else {
        Share::Tenth
    }
}
