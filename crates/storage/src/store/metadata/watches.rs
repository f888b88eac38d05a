//! Who reads the files of a directory by their names for as long as something is open, and must not take another file
//! for the one that it began with.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::super::record::InodeId;

/// Tells whether a name in one of some directories leads to another file than when this was made, or to none.
/// New names do not count.
#[derive(Clone, Debug, Default)]
pub struct Watch(Arc<AtomicBool>);

impl Watch {
    /// Whether it does, or did meanwhile.
    pub fn has_changed(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The watches that are alive, by directory.
#[derive(Debug, Default)]
pub struct Watches(HashMap<InodeId, Vec<Weak<AtomicBool>>>);

impl Watches {
    /// Watches some directories from now on.
    pub fn watch(&mut self, directories: impl IntoIterator<Item = InodeId>) -> Watch {
        // As many are alive as somebody has files open; each new one takes away what nobody looks at any more.
        self.0.retain(|_, watches| {
            watches.retain(|watch| watch.strong_count() > 0);
            !watches.is_empty()
        });
        let watch = Watch::default();
        for directory in directories {
            self.0.entry(directory).or_default().push(Arc::downgrade(&watch.0));
        }
        watch
    }

    /// Whether somebody watches a directory.
    pub fn are_of(&self, directory: InodeId) -> bool {
        self.0.contains_key(&directory)
    }

    /// A name in this directory leads elsewhere, or what it leads to has lost its bytes.
    pub fn tell(&self, directory: InodeId) {
        for watch in self.0.get(&directory).into_iter().flatten().filter_map(Weak::upgrade) {
            watch.store(true, Ordering::Release);
        }
    }

    /// Takes the watches of a directory away while the same bytes get another name.
    pub fn suspend(&mut self, directory: InodeId) -> Suspended {
        Suspended { directory, watches: self.0.remove(&directory) }
    }

    /// Ends that.
    pub fn resume(&mut self, suspended: Suspended) {
        if let Some(watches) = suspended.watches {
            self.0.insert(suspended.directory, watches);
        }
    }
}

/// Watches that do not look for a moment; the state is locked meanwhile.
#[derive(Debug)]
#[must_use = "it must be resumed"]
pub struct Suspended {
    directory: InodeId,
    watches: Option<Vec<Weak<AtomicBool>>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_hears_of_its_directories_alone() {
        let mut watches = Watches::default();
        let [one, other] = [[InodeId(2), InodeId(3)], [InodeId(3), InodeId(4)]]
            .map(|directories| watches.watch(directories));
        watches.tell(InodeId(5));
        assert!(!one.has_changed() && !other.has_changed());
        watches.tell(InodeId(4));
        assert!(!one.has_changed() && other.has_changed());
        let suspended = watches.suspend(InodeId(2));
        watches.tell(InodeId(2));
        watches.resume(suspended);
        assert!(!one.has_changed());
        watches.tell(InodeId(2));
        assert!(one.has_changed());
        drop((one, other));
        let last = watches.watch([InodeId(9)]);
        assert_eq!(watches.0.len(), 1);
        assert!(watches.are_of(InodeId(9)) && !last.has_changed());
    }
}
