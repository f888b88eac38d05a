//! Room on the disk for the index of prefixes, which may take ten times what the tokens do and can be made anew.
//!
//! It must not be what fills the disk: it leaves some room to everything else, and grows and shrinks by commits for which
//! what `meta.reserve` keeps is enough. Sequences that it has no room for stay noted, and `kvfs status` says so.

use crate::FsError;
use crate::core::Core;
use kvfs_storage::store::disk::Space;

/// Pages between two commits: their records, up to 8 KiB each, are 8 MiB of memory.
const PAGES_PER_COMMIT: usize = 1024;
/// The same where there is little room: three records of each change, most of them in a block of the database of their own,
/// which is written anew; so this takes a MiB.
const PAGES_PER_COMMIT_SHORT: usize = 64;

/// What the disk has for the index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room(Space);

impl Room {
    /// As it is now.
    pub(super) fn of(core: &Core) -> Result<Room, FsError> {
        Ok(Room(core.store.disk.space()?))
    }

    /// Whether the index may grow.
    pub(super) fn is_enough(self) -> bool {
        !self.0.is_nearly_full()
    }

    /// Pages that are put in, or taken out, between two commits.
    pub(super) fn pages_per_commit(self) -> usize {
        // What one commit of many takes is there twice.
        if self.0.available_bytes >= 2 * self.0.nearly_full_bytes() {
            PAGES_PER_COMMIT
        } else {
            PAGES_PER_COMMIT_SHORT
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_nearly_full_takes_less_at_a_time_and_then_nothing() {
        let on = |total_bytes, available_bytes| {
            let room = Room(Space { total_bytes, available_bytes, ..Space::default() });
            (room.is_enough(), room.pages_per_commit())
        };
        assert_eq!(on(1 << 40, 128 << 20), (true, PAGES_PER_COMMIT));
        assert_eq!(on(1 << 40, (128 << 20) - 1), (true, PAGES_PER_COMMIT_SHORT));
        assert_eq!(on(1 << 40, (64 << 20) - 1), (false, PAGES_PER_COMMIT_SHORT));
        assert_eq!(on(64 << 20, 16 << 20), (true, PAGES_PER_COMMIT));
        assert_eq!(on(64 << 20, (8 << 20) - 1), (false, PAGES_PER_COMMIT_SHORT));
    }
}
