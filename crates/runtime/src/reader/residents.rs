//! The pages that stay in memory from one scan to the next.
//!
//! Two things are scarce. A process has at most `vm.max_map_count` mappings (65,530 unless somebody
//! changed it), and a million tokens x 80 layers are 78,125 pages of 1024 tokens. And the memory
//! for pages that are not in the mount's own RAM tier is ours. So there is one set for all
//! sequences of a process, bounded in both.
//!
//! A decode step reads a sequence from one end to the other and then begins again. Replacing the
//! page that was used longest ago would, where not everything fits, throw away every page shortly
//! before it is wanted. So whoever came first stays, whoever does not fit is loaded for the moment,
//! and only pages that no scan has used for a long time make room.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::memory::available_bytes;
use super::page::LoadedPage;
use crate::page::{Layer, TokenStart};

/// Scans that a page may go unused before it makes room: as many sequences can be decoded in turns
/// without pushing each other's pages out. At 20 tokens per second it is 50 s.
const IDLE_SCANS: u64 = 1024;

/// Pages looked at for one that needs room: the search must not take longer than mapping a page
/// for the moment (40 us).
const SEARCH_MAX: usize = 64;

/// Where `/proc` cannot be read: the kernel's default.
const MAP_COUNT_DEFAULT: usize = 65_530;

/// Which page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// Number of the open sequence.
    pub(super) sequence: u64,
    pub(super) layer: Layer,
    pub(super) start: TokenStart,
}

/// Bounds of [`Residents`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Pages, of which each is a mapping.
    pub pages: usize,
    /// Bytes of pages that are kept in memory of this process, because the mount does not hold
    /// them in its own or cannot share it.
    pub kept_bytes: u64,
}

impl Default for Limits {
    /// Three quarters of the mappings that a process may have (the rest is for what pages are
    /// loaded for the moment, for allocators, libraries and threads), and a quarter of the memory
    /// that is available (the rest is for the mount's RAM tier and for the model).
    fn default() -> Self {
        let count = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let count = count.and_then(|text| text.trim().parse().ok()).unwrap_or(MAP_COUNT_DEFAULT);
        Self { pages: count / 4 * 3, kept_bytes: available_bytes() / 4 }
    }
}

/// Pages in memory, shared by sequences.
#[derive(Debug)]
pub struct Residents {
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pages: HashMap<Key, Entry>,
    /// Every page of the map once, in the order in which they are looked at.
    order: VecDeque<Key>,
    kept_bytes: u64,
    scans: u64,
}

#[derive(Debug)]
struct Entry {
    page: Arc<LoadedPage>,
    /// The last scan that used it.
    used: u64,
}

impl Residents {
    /// None yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, state: Mutex::default() }
    }

    /// Those of the process, within the default [`Limits`].
    pub fn of_process() -> Arc<Self> {
        static OF_PROCESS: LazyLock<Arc<Residents>> =
            LazyLock::new(|| Arc::new(Residents::new(Limits::default())));
        Arc::clone(&OF_PROCESS)
    }

    /// The bounds.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Pages in memory.
    pub fn pages(&self) -> usize {
        self.state().pages.len()
    }

    /// Bytes of them in memory of this process.
    pub fn kept_bytes(&self) -> u64 {
        self.state().kept_bytes
    }

    /// A scan begins.
    pub(super) fn begin_scan(&self) {
        self.state().scans += 1;
    }

    pub(super) fn get(&self, key: &Key) -> Option<Arc<LoadedPage>> {
        let mut state = self.state();
        let scans = state.scans;
        let entry = state.pages.get_mut(key)?;
        entry.used = scans;
        Some(Arc::clone(&entry.page))
    }

    /// Keeps a page if there is room, or room can be made.
    pub(super) fn offer(&self, key: Key, page: LoadedPage) -> Arc<LoadedPage> {
        let page = Arc::new(page);
        let mut state = self.state();
        if state.make_room(&self.limits, kept(&page)) {
            state.insert(key, &page);
        }
        page
    }

    /// Lets go of a page that is another file now.
    pub(super) fn remove(&self, key: &Key) {
        let mut state = self.state();
        if state.take(key) {
            state.order.retain(|other| other != key);
        }
    }

    /// Lets go of the pages of a sequence that is closed.
    pub(super) fn forget(&self, sequence: u64) {
        let mut state = self.state();
        let keys: Vec<Key> =
            state.pages.keys().copied().filter(|key| key.sequence == sequence).collect();
        for key in keys {
            state.take(&key);
        }
        state.order.retain(|key| key.sequence != sequence);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn insert(&mut self, key: Key, page: &Arc<LoadedPage>) {
        let entry = Entry { page: Arc::clone(page), used: self.scans };
        self.kept_bytes += kept(page);
        match self.pages.insert(key, entry) {
            // Two streams have loaded it.
            Some(other) => self.kept_bytes -= kept(&other.page),
            None => self.order.push_back(key),
        }
    }

    fn take(&mut self, key: &Key) -> bool {
        let Some(entry) = self.pages.remove(key) else { return false };
        self.kept_bytes -= kept(&entry.page);
        true
    }

    fn make_room(&mut self, limits: &Limits, bytes: u64) -> bool {
        let fits = |state: &Self| {
            state.pages.len() < limits.pages
                && state.kept_bytes.saturating_add(bytes) <= limits.kept_bytes.max(state.kept_bytes)
        };
        for _ in 0..SEARCH_MAX {
            if fits(self) {
                return true;
            }
            let Some(key) = self.order.pop_front() else { return false };
            let idle =
                self.pages.get(&key).is_some_and(|entry| entry.used + IDLE_SCANS < self.scans);
            if idle {
                self.take(&key);
            } else {
                self.order.push_back(key);
            }
        }
        fits(self)
    }
}

/// What a page takes of our memory.
fn kept(page: &LoadedPage) -> u64 {
    if page.is_mapped() { 0 } else { page.bytes() }
}

#[cfg(test)]
mod tests;
