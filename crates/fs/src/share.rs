//! How much of the processor uploads and encodings get: an inference machine has better uses for it, until the disk
//! is full or the only copy has long been here.

use kvfs_os::{Share, in_background};

use super::demotion::Demotion;
use super::residency::ssd_used_bytes;
use super::tiers::lacking_in_remote;

/// A file that waits longer for the remote has waited for the processor: names are published every ten seconds.
const WAITS_LONG_SECONDS: u64 = 30;

/// Files encoded at a time: each takes up to three times its size of memory.
const ENCODINGS_AT_ONCE: usize = 2;

/// The share of what uploads and encodes next. Not what others leave, even where nobody waits yet: of processors that an
/// engine keeps spinning that is nothing, and whoever began so would be no further when the disk is full.
pub(super) fn of_moving(demotion: &Demotion<'_>) -> Share {
    let &Demotion { core, tiers, .. } = demotion;
    let budget_bytes = tiers.copies.disk().budget_bytes();
    let used_bytes = || ssd_used_bytes(core, Some(tiers));
    let is_behind = budget_bytes.is_some_and(|budget| used_bytes() > budget);
    if is_behind || lacking_in_remote(core, Some(tiers)).seconds >= WAITS_LONG_SECONDS {
        Share::Quarter
    } else {
        Share::Tenth
    }
}

/// Encodes each of these beside what others do, a few at a time; those that were left when the mount ended are left out.
pub(super) fn on_each<'a, T: Sync, R: Send>(
    demotion: &Demotion<'_>, all: &'a [T], encode: impl Fn(&T) -> R + Sync,
) -> Vec<(&'a T, R)> {
    let encode = |item: &T| (!demotion.tiers.is_closing()).then(|| encode(item));
    let outcomes = in_background(ENCODINGS_AT_ONCE, of_moving(demotion), all, encode);
    all.iter().zip(outcomes).filter_map(|(item, outcome)| Some((item, outcome?))).collect()
}
