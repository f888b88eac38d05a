//! Who reads the files of a directory by their names for as long as something is open, and must not take another file
//! for the one that it began with.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::super::record::InodeId;

use crate::page::TokenStart;
use crate::page::names::{self, LayerEntry};

/// Tells whether a page or tail in one of some directories, of those that begin before some token, is another file
/// than when this was made, or gone, or has lost rows. New names count only where they hide an older one.
#[derive(Clone, Debug)]
pub struct Watch {
    has_changed: Arc<AtomicBool>,
    /// Of changes of content, those with higher numbers came later.
    since: u64,
}

impl Watch {
    /// Whether it is, or was meanwhile.
    pub fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::Acquire)
    }
}

/// Files whose content changed under watches; beyond, all of these end.
const CHANGED_MAX: usize = 1 << 16;

/// One directory of a watch.
#[derive(Debug)]
struct Watching {
    has_changed: Weak<AtomicBool>,
    /// What begins here or later is nothing to it.
    end: u64,
}

/// The watches that are alive.
#[derive(Debug, Default)]
pub struct Watches {
    by_directory: HashMap<InodeId, Vec<Watching>>,
    /// Files that got other bytes in their place, and the number of that change.
    changed: HashMap<InodeId, u64>,
    changes: u64,
}

impl Watches {
    /// Watches the first `tokens` of some layers from now on.
    pub fn watch(&mut self, layers: impl IntoIterator<Item = InodeId>, tokens: u64) -> Watch {
        // As many are alive as somebody has files open; each new one takes away what nobody looks at any more.
        self.by_directory.retain(|_, watches| {
            watches.retain(|watch| watch.has_changed.strong_count() > 0);
            !watches.is_empty()
        });
        if self.by_directory.is_empty() {
            self.changed.clear();
        }
        let watch = Watch { has_changed: Arc::default(), since: self.changes };
        for layer in layers {
            let has_changed = Arc::downgrade(&watch.has_changed);
            self.by_directory.entry(layer).or_default().push(Watching { has_changed, end: tokens });
        }
        watch
    }

    /// A file has other bytes from now on, under all of its names.
    pub fn tell_of_content(&mut self, file: InodeId) {
        if self.by_directory.is_empty() {
            return;
        }
        if self.changed.len() >= CHANGED_MAX {
            self.changed.clear();
            for watches in self.by_directory.values() {
                tell(watches, TokenStart(0));
            }
        }
        self.changes += 1;
        self.changed.insert(file, self.changes);
    }

    /// Whether a file has other bytes than when a watch began.
    pub fn has_other_content(&self, file: InodeId, watch: &Watch) -> bool {
        self.changed.get(&file).is_some_and(|change| *change > watch.since)
    }

    /// Whether somebody watches a directory.
    pub fn are_of(&self, directory: InodeId) -> bool {
        self.by_directory.contains_key(&directory)
    }

    /// A name in this directory leads elsewhere.
    pub fn tell_of_name(&self, directory: InodeId, name: &[u8]) {
        if let Some(watches) = self.by_directory.get(&directory)
            && let LayerEntry::Page(start) | LayerEntry::Tail(start) = names::layer_entry(name)
        {
            tell(watches, start);
        }
    }

    /// The tail that begins there has lost rows.
    pub fn tell_of_rows(&self, directory: InodeId, start: TokenStart) {
        tell(self.by_directory.get(&directory).map_or(&[], Vec::as_slice), start);
    }

    /// Takes the watches of a directory away while the same bytes get another name.
    pub fn suspend(&mut self, directory: InodeId) -> Suspended {
        Suspended { directory, watches: self.by_directory.remove(&directory) }
    }

    /// Ends that.
    pub fn resume(&mut self, suspended: Suspended) {
        if let Some(watches) = suspended.watches {
            self.by_directory.insert(suspended.directory, watches);
        }
    }
}

fn tell(watches: &[Watching], start: TokenStart) {
    let concerned = watches.iter().filter(|watch| start.0 < watch.end);
    for has_changed in concerned.filter_map(|watch| watch.has_changed.upgrade()) {
        has_changed.store(true, Ordering::Release);
    }
}

/// Watches that do not look for a moment; the state is locked meanwhile.
#[derive(Debug)]
#[must_use = "it must be resumed"]
pub struct Suspended {
    directory: InodeId,
    watches: Option<Vec<Watching>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_hears_of_its_directories_alone() {
        let page = |start| names::format_page(TokenStart(start)).into_bytes();
        let mut watches = Watches::default();
        let [one, other] = [[InodeId(2), InodeId(3)], [InodeId(3), InodeId(4)]]
            .map(|directories| watches.watch(directories, 64));
        watches.tell_of_name(InodeId(5), &page(0));
        assert!(!one.has_changed() && !other.has_changed());
        watches.tell_of_name(InodeId(4), &page(32));
        assert!(!one.has_changed() && other.has_changed());
        let suspended = watches.suspend(InodeId(2));
        watches.tell_of_name(InodeId(2), &page(0));
        watches.resume(suspended);
        assert!(!one.has_changed());
        watches.tell_of_rows(InodeId(2), TokenStart(0));
        assert!(one.has_changed());
        drop((one, other));
        let last = watches.watch([InodeId(9)], 64);
        assert_eq!(watches.by_directory.len(), 1);
        assert!(watches.are_of(InodeId(9)) && !watches.are_of(InodeId(8)));
        assert!(!last.has_changed());
    }

    #[test]
    fn later_pages_and_temporary_names_are_nothing_to_a_watch() {
        let mut watches = Watches::default();
        let layer = InodeId(2);
        let watch = watches.watch([layer], 64);
        for name in
            [&b"0000064.safetensors"[..], b"0000064.tail", b"0000000.safetensors.tmp", b"notes"]
        {
            watches.tell_of_name(layer, name);
        }
        watches.tell_of_rows(layer, TokenStart(64));
        assert!(!watch.has_changed());
        watches.tell_of_name(layer, b"0000032.tail");
        assert!(watch.has_changed());
    }

    #[test]
    fn content_that_changes_is_told_to_those_who_watched_before() {
        let mut watches = Watches::default();
        let [file, other] = [InodeId(7), InodeId(8)];
        watches.tell_of_content(file);
        assert!(watches.changed.is_empty(), "nobody watches");
        let before = watches.watch([InodeId(2)], 64);
        watches.tell_of_content(file);
        let later = watches.watch([InodeId(2)], 64);
        let other_for = |file, watch| watches.has_other_content(file, watch);
        assert!(other_for(file, &before) && !other_for(file, &later) && !other_for(other, &before));
        assert!(!before.has_changed() && !later.has_changed(), "no name of theirs");
        for number in 0..=CHANGED_MAX as u64 {
            watches.tell_of_content(InodeId(100 + number));
        }
        assert!(before.has_changed() && later.has_changed(), "there were too many");
        drop((before, later));
        drop(watches.watch([InodeId(3)], 64));
        assert!(watches.changed.is_empty());
    }
}
