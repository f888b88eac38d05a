//! How many names below a limited directory a file has: its bytes count there once, and go with the last of them,
//! whatever names it has elsewhere.

use std::cell::RefCell;
use std::collections::HashMap;

use kvfs_storage::store::record::InodeId;

/// Files with several names, by what a walk has seen of those below the directory.
#[derive(Debug, Default)]
pub(super) struct NamesBelow(RefCell<HashMap<InodeId, u32>>);

impl NamesBelow {
    /// A name of a file that has several was seen. Whether it is the first of them.
    pub(super) fn see(&self, id: InodeId) -> bool {
        let mut names = self.0.borrow_mut();
        let count = names.entry(id).or_default();
        *count += 1;
        *count == 1
    }

    /// Whether the file has no more names there if one goes. One that was not seen here has one name.
    pub(super) fn is_last(&self, id: InodeId) -> bool {
        self.0.borrow().get(&id).is_none_or(|count| *count <= 1)
    }

    /// A name went. Whether it was the last.
    pub(super) fn remove(&self, id: InodeId) -> bool {
        let mut names = self.0.borrow_mut();
        let Some(count) = names.get_mut(&id) else { return true };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            names.remove(&id);
        }
        is_last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_several_names_counts() {
        let (names, id) = (NamesBelow::default(), InodeId(7));
        assert!(names.is_last(id) && names.remove(id), "it has one name");
        assert!(names.see(id) && !names.see(id));
        assert!(!names.is_last(id) && !names.remove(id));
        assert!(names.is_last(id) && names.remove(id));
    }
}
