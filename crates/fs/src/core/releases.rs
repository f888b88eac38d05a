//! Releases that were taken from the kernel and are not done yet.
//!
//! `close()` returns when its release is on its way; a lookup that the same program makes next may overtake
//! it, on another thread of the daemon. So whoever needs to know whether a writer is gone asks here as well.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::core::node::Node;
use kvfs_storage::store::record::InodeId;

/// How many releases of each inode are in hand.
#[derive(Clone, Debug, Default)]
pub struct Releases(Arc<Mutex<HashMap<InodeId, u32>>>);

impl Releases {
    /// To be called where the request comes in, before anything is waited for.
    pub fn begin(&self, inode: InodeId) -> Release {
        *self.in_hand().entry(inode).or_default() += 1;
        Release { releases: self.clone(), inode }
    }

    /// Whether the release of a file's last writer is in hand, or is known to be on its way here.
    pub(crate) fn is_awaited(&self, node: &Node, inode: InodeId) -> bool {
        node.is_being_released() || node.may_be_released() || self.is_last_in_hand(node, inode)
    }

    /// Whether a release is in hand and no writer would be left behind it.
    pub(crate) fn is_last_in_hand(&self, node: &Node, inode: InodeId) -> bool {
        node.is_closed_only() && self.is_in_hand(inode)
    }

    fn is_in_hand(&self, inode: InodeId) -> bool {
        self.in_hand().contains_key(&inode)
    }

    fn in_hand(&self) -> std::sync::MutexGuard<'_, HashMap<InodeId, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A release that is in hand until this is dropped.
#[derive(Debug)]
pub struct Release {
    releases: Releases,
    inode: InodeId,
}

impl Drop for Release {
    fn drop(&mut self) {
        let mut in_hand = self.releases.in_hand();
        if let Some(count) = in_hand.get_mut(&self.inode) {
            *count -= 1;
            if *count == 0 {
                in_hand.remove(&self.inode);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::node::ComingRelease;

    #[test]
    fn each_release_counts_until_it_is_done() {
        let releases = Releases::default();
        let [file, other] = [InodeId(7), InodeId(8)];
        let first = releases.begin(file);
        let second = releases.begin(file);
        assert!(releases.is_in_hand(file) && !releases.is_in_hand(other));
        drop(first);
        assert!(releases.is_in_hand(file));
        drop(second);
        assert!(!releases.is_in_hand(file));
    }

    #[test]
    fn the_release_of_the_last_writer_is_awaited_while_it_is_on_its_way() {
        let (releases, file) = (Releases::default(), InodeId(7));
        let node = |writers, writers_flushed, release| Node {
            writers,
            writers_flushed,
            release,
            ..Node::default()
        };
        let check = |node: &Node, expected: (bool, bool)| {
            let found = (releases.is_awaited(node, file), releases.is_last_in_hand(node, file));
            assert_eq!(found, expected, "{node:?}");
        };
        let (writing, gone) = (node(2, 1, ComingRelease::Soon), node(0, 0, ComingRelease::Soon));
        let closed = [ComingRelease::Soon, ComingRelease::Overdue, ComingRelease::BehindWriteBack]
            .map(|release| node(2, 2, release));
        check(&writing, (false, false));
        check(&gone, (false, false));
        for (node, awaited) in closed.iter().zip([true, false, true]) {
            check(node, (awaited, false));
        }
        let _release = releases.begin(file);
        check(&writing, (false, false));
        check(&gone, (false, false));
        for node in &closed {
            check(node, (true, true));
        }
    }
}
