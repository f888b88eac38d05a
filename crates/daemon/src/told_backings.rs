//! Backing files that the kernel has, told in memory that outlives this daemon.
//!
//! The kernel refuses a second backing file for an inode as long as one of its opens lasts. So the daemon after one
//! that died must know the first.
//!
//! ```text
//! word 0      backing files that are not told, for want of room
//! from 1 on   four words for each: inode, device and number of the file, and 1 << 63 | is open << 33 |
//!             is sealed << 32 | the kernel's number; 0 for none
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvfs_os::SharedWords;
use kvfs_storage::store::record::InodeId;

/// So many are told: an inode has one. A file that is open in more inodes than these has the daemon not replaced if it dies.
const TOLD_MAX: usize = 1 << 16;
const WORDS: usize = 1 + 4 * TOLD_MAX;

const IS_THERE: u64 = 1 << 63;
const IS_OPEN: u64 = 1 << 33;
const IS_SEALED: u64 = 1 << 32;

/// See the module.
#[derive(Debug)]
pub(super) struct ToldBackings {
    words: Arc<SharedWords>,
    /// Slots that were used and are not.
    free: Vec<usize>,
    used: usize,
    not_told: u64,
}

/// A backing file as it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) inode: InodeId,
    /// Device, and number there.
    pub(super) file: (u64, u64),
    pub(super) id: u32,
    pub(super) is_sealed: bool,
    /// Some open of the inode uses it.
    pub(super) is_open: bool,
}

/// Where one is told; `None` for want of room.
pub(super) type Slot = Option<usize>;

impl ToldBackings {
    /// Memory for it.
    pub(super) fn memory() -> io::Result<Arc<SharedWords>> {
        SharedWords::new(WORDS).map(Arc::new)
    }

    pub(super) fn new(words: Arc<SharedWords>) -> ToldBackings {
        ToldBackings { words, free: Vec::new(), used: 0, not_told: 0 }
    }

    /// Tells of one that the kernel has, before anybody is told of the open that it is for.
    pub(super) fn put(&mut self, told: Told) -> Slot {
        let fresh = || (self.used < TOLD_MAX).then_some(self.used);
        let Some(slot) = self.free.pop().or_else(fresh) else {
            self.note_not_told(self.not_told + 1);
            return None;
        };
        self.used = self.used.max(slot + 1);
        let begin = 1 + 4 * slot;
        self.words.set(begin, told.inode.0);
        self.words.set(begin + 1, told.file.0);
        self.words.set(begin + 2, told.file.1);
        let flag = |is_so: bool, bit: u64| if is_so { bit } else { 0 };
        let flags = flag(told.is_open, IS_OPEN) | flag(told.is_sealed, IS_SEALED);
        // What has this word is whole.
        self.words.set(begin + 3, IS_THERE | flags | u64::from(told.id));
        Some(slot)
    }

    /// Tells whether some open uses one.
    pub(super) fn set_open(&mut self, slot: Slot, is_open: bool) {
        let Some(last) = slot.map(|slot| 1 + 4 * slot + 3) else { return };
        let told = self.words.get(last) & !IS_OPEN;
        self.words.set(last, if is_open { told | IS_OPEN } else { told });
    }

    /// Tells that the kernel will have it no more, before it is closed there.
    pub(super) fn remove(&mut self, slot: Slot) {
        match slot {
            Some(slot) => {
                self.words.set(1 + 4 * slot + 3, 0);
                self.free.push(slot);
            }
            None => self.note_not_told(self.not_told.saturating_sub(1)),
        }
    }

    fn note_not_told(&mut self, count: u64) {
        self.not_told = count;
        self.words.set(0, count);
    }
}

/// What a daemon that died has told.
///
/// # Errors
/// It is no such memory, or did not tell all.
pub(super) fn read(memory: OwnedFd) -> io::Result<Vec<Told>> {
    let words = SharedWords::left(memory, WORDS)?;
    if words.get(0) > 0 {
        return Err(io::Error::other("more backing files were registered than could be told"));
    }
    let one = |slot: usize| {
        let begin = 1 + 4 * slot;
        let last = words.get(begin + 3);
        let has = |bit: u64| last & bit != 0;
        has(IS_THERE).then(|| Told {
            inode: InodeId(words.get(begin)),
            file: (words.get(begin + 1), words.get(begin + 2)),
            id: u32::try_from(last & u64::from(u32::MAX)).unwrap_or_default(),
            is_sealed: has(IS_SEALED),
            is_open: has(IS_OPEN),
        })
    };
    Ok((0..TOLD_MAX).filter_map(one).collect())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn found(words: &SharedWords) -> io::Result<Vec<Told>> {
        read(words.as_fd().try_clone_to_owned().unwrap())
    }

    fn of(inode: u64) -> Told {
        let id = u32::try_from(inode).unwrap() + 1;
        Told {
            inode: InodeId(inode),
            file: (9, inode),
            id,
            is_sealed: inode.is_multiple_of(2),
            is_open: true,
        }
    }

    #[test]
    fn what_the_kernel_has_is_told() {
        let words = ToldBackings::memory().unwrap();
        let mut told = ToldBackings::new(Arc::clone(&words));
        assert_eq!(found(&words).unwrap(), []);
        let slots: Vec<Slot> = (1..=3).map(|inode| told.put(of(inode))).collect();
        assert_eq!(found(&words).unwrap(), [of(1), of(2), of(3)]);
        told.set_open(slots[1], false);
        assert_eq!(found(&words).unwrap()[1], Told { is_open: false, ..of(2) });
        told.set_open(slots[1], true);
        told.remove(slots[0]);
        assert_eq!(found(&words).unwrap(), [of(2), of(3)]);
        assert_eq!(told.put(of(4)), slots[0], "its place is used again");
        assert_eq!(found(&words).unwrap(), [of(4), of(2), of(3)]);
    }

    #[test]
    fn nobody_goes_on_without_those_that_found_no_room() {
        let words = ToldBackings::memory().unwrap();
        let mut told = ToldBackings::new(Arc::clone(&words));
        let last = (0..TOLD_MAX as u64).map(|inode| told.put(of(inode))).last();
        assert_eq!(last, Some(Some(TOLD_MAX - 1)));
        let none = told.put(of(1));
        assert!(none.is_none() && found(&words).is_err());
        told.set_open(none, false);
        told.remove(none);
        assert_eq!(found(&words).unwrap().len(), TOLD_MAX);
    }
}
