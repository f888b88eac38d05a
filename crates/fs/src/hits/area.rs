//! The model, or the directory right below `files/`, that a directory lies in.
//!
//! A lookup takes some ten microseconds, and a walk up to the root one for each step: what was found is kept.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::core::state::State;
use kvfs_storage::store::record::{DirectoryClass, InodeId, Kind};

/// Directories that are kept: 64 KiB. Beyond them all are found anew.
const KEPT_MAX: usize = 1 << 12;
/// Steps to the root. What lies deeper is in no area.
const STEPS_MAX: usize = 64;

/// What something counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Area {
    /// The directory of a model.
    Model(InodeId),
    /// A directory right below `files/`, or `files/` itself for what lies right in it.
    Directory(InodeId),
    /// Neither, or it is not known.
    Elsewhere,
}

/// Areas of directories that were asked for.
#[derive(Debug, Default)]
pub(crate) struct Areas(Mutex<HashMap<InodeId, Area>>);

impl Areas {
    /// That of what lies in a directory.
    pub(crate) fn of(&self, state: &State, directory: Option<InodeId>) -> Area {
        let Some(directory) = directory else { return Area::Elsewhere };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(area) = known.get(&directory) {
            return *area;
        }
        let area = find(state, directory);
        if known.len() >= KEPT_MAX {
            known.clear();
        }
        known.insert(directory, area);
        area
    }

    /// A directory was moved, with all that are in it.
    pub(crate) fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn find(state: &State, directory: InodeId) -> Area {
    let (mut at, mut below) = (directory, directory);
    for _ in 0..STEPS_MAX {
        let Ok(Kind::Directory { parent, class, .. }) = state.inode(at).map(|inode| inode.kind)
        else {
            break;
        };
        match class {
            DirectoryClass::Model => return Area::Model(at),
            DirectoryClass::Plain if parent == InodeId::ROOT => return Area::Directory(below),
            _ if parent == InodeId::ROOT => break,
            _ => (below, at) = (at, parent),
        }
    }
    Area::Elsewhere
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted, place};

    #[test]
    fn a_directory_counts_for_its_model_or_for_the_one_below_files() {
        let unmounted = Unmounted::new();
        let top = unmounted.make_directory(FILES, "top", (0o755, 0));
        let deep = unmounted.make_directory(top, "deep", (0o755, 0));
        let model = unmounted.make_model(2).directory;
        let areas = Areas::default();
        let of = |directory| areas.of(&unmounted.fs.core.state(), Some(directory));
        let expected = [FILES, top, top].map(Area::Directory);
        assert_eq!([FILES, top, deep].map(of), expected);
        assert_eq!(of(model), Area::Model(model));
        assert_eq!(of(InodeId::ROOT), Area::Elsewhere);
    }

    #[test]
    fn what_was_moved_is_found_anew() {
        let unmounted = Unmounted::new();
        let [one, two] =
            ["one", "two"].map(|name| unmounted.make_directory(FILES, name, (0o755, 0)));
        let moved = unmounted.make_directory(one, "moved", (0o755, 0));
        let of = |directory| {
            unmounted.fs.core.hits.areas.of(&unmounted.fs.core.state(), Some(directory))
        };
        assert_eq!(of(moved), Area::Directory(one));
        unmounted.fs.rename(&place(one, "moved"), &place(two, "moved"), 0).unwrap();
        assert_eq!(of(moved), Area::Directory(two));
    }
}
