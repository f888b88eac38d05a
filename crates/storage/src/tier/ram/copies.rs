//! The copies that memory has, and how many bytes of them are of which kind.
//!
//! Sums are kept while copies change: whoever watches a mount asks for them each second, and with a hundred thousand
//! copies adding them up takes milliseconds in which requests wait.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use super::{RamUse, Stay};
use crate::store::record::{InodeId, ObjectId};

/// One copy. Its bytes count from before its file is made until after it is gone.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) bytes: u64,
    pub(super) state: CopyState,
    /// Counts the times that it became dirty, and came to rest after that.
    pub(super) version: u64,
    /// The file that it belongs to, once it has a name.
    pub(super) inode: Option<InodeId>,
    pub(super) pinned: bool,
    pub(super) stay: Stay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyState {
    /// Its bytes are still coming from another tier: nobody may see it.
    Arriving,
    /// The only copy of its bytes.
    Dirty,
    /// The disk has them too.
    Clean,
    /// They are unreferenced, but somebody still had the file when that came to be.
    Doomed,
}

impl Copy {
    /// Whether it may be opened.
    pub(super) fn is_visible(&self) -> bool {
        matches!(self.state, CopyState::Dirty | CopyState::Clean)
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Copies {
    by_object: BTreeMap<ObjectId, Copy>,
    usage: RamUse,
}

/// A copy that may change, which is counted again afterwards.
#[derive(Debug)]
pub(super) struct Changing<'a> {
    copy: &'a mut Copy,
    usage: &'a mut RamUse,
}

impl RamUse {
    fn add(&mut self, copy: &Copy) {
        self.objects += 1;
        self.used_bytes += copy.bytes;
        self.dirty_bytes += if copy.state == CopyState::Dirty { copy.bytes } else { 0 };
        self.pinned_bytes += if copy.pinned { copy.bytes } else { 0 };
    }

    fn take_off(&mut self, copy: &Copy) {
        self.objects -= 1;
        self.used_bytes -= copy.bytes;
        self.dirty_bytes -= if copy.state == CopyState::Dirty { copy.bytes } else { 0 };
        self.pinned_bytes -= if copy.pinned { copy.bytes } else { 0 };
    }
}

impl Copies {
    /// Of all of them.
    pub(super) fn usage(&self) -> RamUse {
        self.usage
    }

    /// Adds the copy of an object that has none.
    pub(super) fn insert(&mut self, object: ObjectId, copy: Copy) {
        self.usage.add(&copy);
        if let Some(before) = self.by_object.insert(object, copy) {
            self.usage.take_off(&before);
        }
    }

    pub(super) fn remove(&mut self, object: ObjectId) {
        if let Some(copy) = self.by_object.remove(&object) {
            self.usage.take_off(&copy);
        }
    }

    /// A copy, to change it.
    pub(super) fn change(&mut self, object: ObjectId) -> Option<Changing<'_>> {
        let Copies { by_object, usage } = self;
        let copy = by_object.get_mut(&object)?;
        usage.take_off(copy);
        Some(Changing { copy, usage })
    }
}

impl Deref for Copies {
    type Target = BTreeMap<ObjectId, Copy>;

    fn deref(&self) -> &Self::Target {
        &self.by_object
    }
}

impl Deref for Changing<'_> {
    type Target = Copy;

    fn deref(&self) -> &Copy {
        self.copy
    }
}

impl DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut Copy {
        self.copy
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.usage.add(self.copy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_follow_every_change() {
        let copy = |bytes, state| Copy {
            bytes,
            state,
            version: 0,
            inode: None,
            pinned: false,
            stay: Stay::begin(),
        };
        let [one, two] = [ObjectId(1), ObjectId(2)];
        let mut copies = Copies::default();
        copies.insert(one, copy(10, CopyState::Dirty));
        copies.insert(two, copy(5, CopyState::Arriving));
        let usage = |objects, used_bytes, dirty_bytes, pinned_bytes| RamUse {
            used_bytes,
            dirty_bytes,
            pinned_bytes,
            objects,
        };
        assert_eq!(copies.usage(), usage(2, 15, 10, 0));
        copies.change(two).unwrap().pinned = true;
        copies.change(two).unwrap().state = CopyState::Dirty;
        assert_eq!(copies.usage(), usage(2, 15, 15, 5));
        assert!(copies.change(one).is_none_or(|copy| copy.state != CopyState::Clean));
        assert!(copies.change(ObjectId(3)).is_none());
        copies.change(one).unwrap().state = CopyState::Doomed;
        assert_eq!(copies.usage(), usage(2, 15, 5, 5));
        copies.insert(two, copy(7, CopyState::Clean));
        assert_eq!(copies.usage(), usage(2, 17, 0, 0));
        copies.remove(two);
        copies.remove(two);
        copies.remove(one);
        assert_eq!(copies.usage(), RamUse::default());
    }
}
