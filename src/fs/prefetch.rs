//! Fetching or decoding pages before they are opened, in the order of the scan that is going on.
//!
//! Whoever opens a page tells which ones come next ([`crate::tier::scan`]); those that only the
//! remote has, or that the disk has only encoded, are queued, and a few threads fetch them as an open would. An open that comes
//! meanwhile waits for the same transfer. What nobody expects any more when its turn comes is not
//! fetched.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::state::State;
use super::tiers::Tiers;
use super::{FileSystem, FsError};
use crate::page::names::{format_layer, format_page};
use crate::page::{Layer, TokenStart};
use crate::store::record::{DirectoryClass, InodeId, Kind, ObjectId, Role};
use crate::tier::scan::{AHEAD_PAGES_MAX, Position, Scans};

/// Threads that fetch ahead: with three uploads, two of the remote's eight calls stay free for
/// opens.
pub const THREADS: usize = 3;
/// Pages that wait for one of them: two scans that are as far ahead as they may be. More is not
/// fetched.
pub const QUEUE_MAX: usize = 2 * AHEAD_PAGES_MAX;
/// A page that was not opened for so long after it was fetched was fetched in vain.
const UNUSED_AFTER: Duration = Duration::from_secs(30);

/// A page to be fetched.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    id: InodeId,
    role: Role,
    object: ObjectId,
    sequence: InodeId,
    at: Position,
}

/// What is known of the scans, and of the pages that were fetched for them.
#[derive(Debug, Default)]
pub(super) struct Prefetch {
    known: Mutex<Known>,
    queue: OnceLock<Sender<Ahead>>,
}

#[derive(Debug, Default)]
struct Known {
    scans: Scans,
    /// Pages asked for and not opened since.
    pages: HashMap<ObjectId, Fate>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Queued,
    Fetching,
    /// Opened while it was being fetched.
    Late,
    /// Here, and not opened yet.
    Here(Instant),
}

impl Prefetch {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileSystem {
    /// Where pages go that shall be fetched ahead; [`FileSystem::fetch_ahead`] takes them out.
    pub fn prefetch_through(&self, queue: Sender<Ahead>) {
        if let Some(tiers) = &self.tiers {
            let _ = tiers.prefetch.queue.set(queue);
        }
    }

    /// A file is about to be opened: if it is a page, the ones that follow it are fetched.
    pub fn expect_more(&self, id: InodeId) {
        let Some(tiers) = &self.tiers else {
            return;
        };
        // As long as everything is here, opening a page costs nothing more.
        let all_here =
            tiers.ssd.remote_use().only_objects == 0 && tiers.encoded.usage().only_objects == 0;
        if all_here && tiers.prefetch.known().pages.is_empty() {
            return;
        }
        if let Err(error) = self.queue_next(tiers, id) {
            log::warn!("looking for the pages after inode {}: {error}", id.0);
        }
    }

    fn queue_next(&self, tiers: &Tiers, id: InodeId) -> Result<(), FsError> {
        let state = self.state();
        let Some((sequence, object, page)) = page_of(&state, id)? else {
            return Ok(());
        };
        let (at, tokens, bytes) = page;
        let mut known = tiers.prefetch.known();
        known.note_open(tiers, object);
        let Known { scans, pages } = &mut *known;
        let mut failure = None;
        let mut found = scans.opened(sequence, (at, tokens), bytes, |at| {
            find_page(&state, sequence, at).unwrap_or_else(|error| {
                failure = Some(error);
                None
            })
        });
        found.retain(|ahead| {
            let is_away = self.is_away(&state, ahead.object);
            is_away.unwrap_or(false) && !pages.contains_key(&ahead.object)
        });
        drop(state);
        for ahead in found {
            match tiers.prefetch.queue.get().map(|queue| queue.try_send(ahead)) {
                Some(Ok(())) => drop(pages.insert(ahead.object, Fate::Queued)),
                Some(Err(_)) => tiers.counters.prefetched("dropped"),
                None => {}
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Fetches a page, if somebody still expects it.
    pub fn fetch_ahead(&self, ahead: Ahead) {
        let Some(tiers) = &self.tiers else {
            return;
        };
        {
            let mut known = tiers.prefetch.known();
            // An open may have overtaken it.
            if known.pages.get(&ahead.object) != Some(&Fate::Queued) {
                return;
            }
            if tiers.is_closing() || !known.scans.expects(ahead.sequence, ahead.at) {
                known.pages.remove(&ahead.object);
                tiers.counters.prefetched("dropped");
                return;
            }
            known.pages.insert(ahead.object, Fate::Fetching);
        }
        let outcome = self.fetch((ahead.id, ahead.role), ahead.object);
        let mut known = tiers.prefetch.known();
        let fate = known.pages.remove(&ahead.object);
        match (outcome, fate) {
            (Ok(true), Some(Fate::Fetching)) => {
                known.pages.insert(ahead.object, Fate::Here(Instant::now()));
            }
            // Whoever opens it is told why.
            (Ok(false) | Err(_), Some(Fate::Fetching)) => tiers.counters.prefetched("failed"),
            _ => {}
        }
    }

    /// Counts pages that nobody opened, from time to time.
    pub fn forget_unused(&self) {
        let Some(tiers) = &self.tiers else {
            return;
        };
        tiers.prefetch.known().pages.retain(|_, fate| {
            let is_unused = matches!(fate, Fate::Here(since) if since.elapsed() > UNUSED_AFTER);
            if is_unused {
                tiers.counters.prefetched("unused");
            }
            !is_unused
        });
    }
}

impl Known {
    fn note_open(&mut self, tiers: &Tiers, object: ObjectId) {
        match self.pages.remove(&object) {
            Some(Fate::Here(_)) => tiers.counters.prefetched("used"),
            Some(Fate::Queued) => tiers.counters.prefetched("dropped"),
            Some(Fate::Fetching) => {
                self.pages.insert(object, Fate::Late);
                tiers.counters.prefetched("late");
            }
            Some(Fate::Late) => drop(self.pages.insert(object, Fate::Late)),
            None => {}
        }
    }
}

/// A page's place, tokens and bytes.
type Place = (Position, u64, u64);

/// The sequence, object and place of a page that was found by name.
fn page_of(state: &State, id: InodeId) -> Result<Option<(InodeId, ObjectId, Place)>, FsError> {
    let Some(directory) = state.nodes.get(&id).and_then(|node| node.found_in) else {
        return Ok(None);
    };
    let inode = state.inode(id)?;
    let Some(file) = inode.file() else {
        return Ok(None);
    };
    let (Role::Page(page), Some(object)) = (file.role, file.object) else {
        return Ok(None);
    };
    let Some(Kind::Directory { parent, class: DirectoryClass::Layer(layer), .. }) =
        state.metadata.inode(directory)?.map(|inode| inode.kind)
    else {
        return Ok(None);
    };
    let at = Position { layer, start: page.start };
    Ok(Some((parent, object, (at, u64::from(page.tokens), file.size))))
}

/// The page at a position of a sequence.
fn find_page(state: &State, sequence: InodeId, at: Position) -> Result<Option<Ahead>, FsError> {
    let layer = format_layer(Layer(at.layer));
    let Some(directory) = state.entry(sequence, layer.as_bytes())? else {
        return Ok(None);
    };
    let name = format_page(TokenStart(at.start));
    let Some(entry) = state.entry(directory.inode, name.as_bytes())? else {
        return Ok(None);
    };
    let inode = state.inode(entry.inode)?;
    let file = inode.file().filter(|file| matches!(file.role, Role::Page(_)));
    Ok(file.and_then(|file| {
        let (id, role) = (entry.inode, file.role);
        file.object.map(|object| Ahead { id, role, object, sequence, at })
    }))
}
