//! An inode in use: who holds it, and what is known of its bytes meanwhile.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::attributes::Place;
use kvfs_storage::store::disk::FileStat;
use kvfs_storage::store::record::{InodeId, ObjectId};

/// How soon a release is to be expected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ComingRelease {
    /// At once.
    #[default]
    Soon,
    /// It was waited for and did not come: dup or fork did make more descriptors, or the file is mapped. Nobody
    /// waits for it again until another descriptor is closed.
    Overdue,
    /// The same, and a mapping was written back since: that may have been its end.
    BehindWriteBack,
}

/// What somebody did to a file that becomes another under its last name.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Wanted {
    /// Somebody set its mtime, as programs do that copy times.
    pub(crate) is_dated: bool,
    /// Somebody synced it before it had a name: what it becomes is to be on the disk.
    pub(crate) is_synced: bool,
}

/// An inode that the kernel or an open handle holds.
#[derive(Debug, Default, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is known by itself")]
pub(crate) struct Node {
    /// References that the kernel holds (lookup count).
    pub(crate) lookups: u64,
    /// Handles open for reading only.
    pub(crate) readers: u32,
    /// Handles open for writing.
    pub(crate) writers: u32,
    /// Handles that the daemon serves from a file that the kernel could serve: of a file that was in a pack when the
    /// first of them was opened. The kernel refuses to have handles of both kinds.
    pub(crate) served: u32,
    /// Writers' handles whose descriptor was closed at least once: their release is on its way,
    /// unless dup or fork made more descriptors.
    pub(crate) writers_flushed: u32,
    /// Of the writers that closed all descriptors that are known.
    pub(crate) release: ComingRelease,
    /// A writer's descriptor was closed, and no commit has what was written before. It may be so after an exchange of
    /// the daemon.
    #[serde(skip, default = "is_assumed")]
    pub(crate) is_closed_anew: bool,
    /// The new version that a writer that truncated is making; the old one stays until it is done.
    pub(crate) replacement: Option<ObjectId>,
    /// A page or manifest being written in place: where it will appear.
    pub(crate) pending: Option<Box<Place>>,
    /// It has none of the names any more that the kernel knows: its bytes were published as another inode, or
    /// the daemon took the names away.
    pub(crate) stale: bool,
    /// Why it was refused, as it was told.
    pub(crate) refusal: Option<String>,
    /// The object that was last verified, and what its file was then.
    pub(crate) verified: Option<(ObjectId, FileStat)>,
    /// Tokens of a page that was opened.
    pub(crate) page_tokens: u32,
    /// And its layer.
    pub(crate) page_layer: u32,
    /// The directory in which it was last found.
    pub(crate) found_in: Option<InodeId>,
    /// What its user did that holds for what it becomes as well.
    pub(crate) wanted: Wanted,
    /// Of a directory: the file in it that came to rest last was small enough for a pack. Most likely the next one
    /// will be, too.
    pub(crate) has_small_files: bool,
    /// The kernel has opens of it from a daemon that died, and a backing file for them: it takes no other, and none that the
    /// daemon serves beside them.
    pub(crate) is_left_open: bool,
    /// Writes of a handle from before the daemon were refused, which the kernel may have kept in its cache.
    pub(crate) has_refused_writes: bool,
    /// Serialises appends.
    #[serde(skip)]
    pub(crate) append: Option<Arc<Mutex<()>>>,
    /// Operations that rely on its bytes staying on this machine.
    #[serde(skip)]
    pub(crate) pins: u32,
}

fn is_assumed() -> bool {
    true
}

impl Node {
    /// Every writer closed a descriptor at least once.
    pub(crate) fn all_closed(&self) -> bool {
        self.writers_flushed >= self.writers
    }

    /// No writer's handle is left.
    pub(crate) fn all_released(&self) -> bool {
        self.writers == 0
    }

    /// Every writer closed a descriptor, and the release of the last one is on its way.
    pub(crate) fn is_being_released(&self) -> bool {
        self.is_closed_only() && self.release == ComingRelease::Soon
    }

    /// The same of a file that was mapped, if the mapping that was written back has ended.
    pub(crate) fn may_be_released(&self) -> bool {
        self.is_closed_only() && self.release == ComingRelease::BehindWriteBack
    }

    /// Every writer closed a descriptor, and the release of one did not come yet: it is on its way, or
    /// a mapping, dup or fork keeps the file open.
    pub(crate) fn is_closed_only(&self) -> bool {
        self.all_closed() && !self.all_released()
    }

    /// Handles open.
    pub(crate) fn handles(&self) -> u32 {
        self.readers + self.writers
    }

    /// The daemon serves handles of it from its own descriptors: then it serves all, until the last is closed.
    pub(crate) fn is_served(&self) -> bool {
        self.served > 0
    }

    /// Its bytes must stay where they are.
    pub(crate) fn is_in_use(&self) -> bool {
        self.handles() > 0 || self.pins > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_at_their_end_when_each_has_closed_a_descriptor() {
        fn check(writers: u32, writers_flushed: u32, expected: [bool; 3]) {
            let node = Node { writers, writers_flushed, ..Node::default() };
            let found = [node.all_closed(), node.all_released(), node.is_closed_only()];
            assert_eq!(found, expected, "{writers_flushed} of {writers}");
            let soon = [node.is_being_released(), node.may_be_released()];
            assert_eq!(soon, [expected[2], false]);
            let release = ComingRelease::BehindWriteBack;
            let node = Node { writers, writers_flushed, release, ..Node::default() };
            assert_eq!([node.is_being_released(), node.may_be_released()], [false, expected[2]]);
            let release = ComingRelease::Overdue;
            let node = Node { writers, writers_flushed, release, ..Node::default() };
            assert_eq!([node.is_being_released(), node.may_be_released()], [false; 2]);
        }
        check(0, 0, [true, true, false]);
        check(1, 0, [false, false, false]);
        check(1, 1, [true, false, true]);
        check(2, 1, [false, false, false]);
        check(2, 2, [true, false, true]);
    }

    #[test]
    fn handles_and_pins_keep_bytes_where_they_are() {
        fn check((readers, writers, pins): (u32, u32, u32), handles: u32, is_in_use: bool) {
            let node = Node { readers, writers, pins, ..Node::default() };
            assert_eq!((node.handles(), node.is_in_use()), (handles, is_in_use));
        }
        check((0, 0, 0), 0, false);
        check((2, 0, 0), 2, true);
        check((0, 1, 0), 1, true);
        check((2, 3, 1), 5, true);
        check((0, 0, 1), 0, true);
        let served = |served| Node { served, ..Node::default() }.is_served();
        assert_eq!([0, 1, 2].map(served), [false, true, true]);
    }
}
