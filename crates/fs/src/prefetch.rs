//! Bringing pages nearer before they are opened, in the order of the scan that is going on.
//!
//! Whoever opens a page tells which ones come next ([`kvfs_storage::tier::scan`]). Those that are not in
//! memory are queued, and a few threads see to them; what nobody expects any more when its turn
//! comes is left out.
//!
//! Pages that only the remote has, or that the disk has only encoded, are fetched or decoded as an
//! open would; an open that comes meanwhile waits
//! for the same transfer. Pages that the disk has are read into the page cache
//! ([`DiskFile::populate`](kvfs_storage::store::disk::DiskFile::populate)). They are not copied into the RAM tier: read in order from a cold disk,
//! pages of 4 MiB came at 0.9 GB/s without help, at 1.3 with that advice, and at 1.0 copied ahead
//! into a tmpfs by two threads, since copying takes the processor from the reader (two cores). The
//! page cache is scan resistant by itself, and takes nothing of the tier's budget.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::residency::Residency;
use super::tiers::Tiers;
use super::whereabouts::Whereabouts;
use super::{FileSystem, FsError};
use crate::core::state::State;
use crossbeam_channel::Sender;
use kvfs_page::names::{format_layer, format_page};
use kvfs_page::{Layer, TokenStart};
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::record::{DirectoryClass, InodeId, Kind, ObjectId, Role};
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::scan::{AHEAD_PAGES_MAX, Position, Scans};

/// Threads that bring pages nearer: with three uploads, two of the remote's eight calls stay free for
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
    means: Means,
}

/// How a page comes nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Means {
    /// It is in memory.
    None,
    /// The disk has it.
    ReadAhead,
    /// The remote has it, or the disk has it encoded.
    Fetch,
}

/// What is known of the scans, and of the pages that were brought nearer for them.
#[derive(Debug, Default)]
pub struct Prefetch {
    known: Mutex<Known>,
    way: OnceLock<Way>,
}

/// Where pages go that are to come nearer, and what counts them.
#[derive(Debug)]
struct Way {
    queue: Sender<Ahead>,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Known {
    scans: Scans,
    /// Pages asked for and not opened since.
    pages: HashMap<ObjectId, (Means, Fate)>,
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
    /// Where pages go that are to be nearer when they are opened; [`Prefetcher::fetch`] takes them out.
    pub fn through(&self, queue: Sender<Ahead>, counters: Counters) {
        let _ = self.way.set(Way { queue, counters });
    }

    /// Counts pages that nobody opened, from time to time.
    pub fn forget_unused(&self) {
        let Some(Way { counters, .. }) = self.way.get() else {
            return;
        };
        self.known().pages.retain(|_, (means, fate)| {
            let is_unused = matches!(fate, Fate::Here(since) if since.elapsed() > UNUSED_AFTER);
            if is_unused {
                means.count(counters, "unused");
            }
            !is_unused
        });
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What makes pages ready that are most likely opened next.
#[derive(Clone, Copy, Debug)]
pub struct Prefetcher<'a> {
    prefetch: &'a Prefetch,
    residency: Residency<'a>,
}

impl FileSystem {
    /// What makes pages ready that are most likely opened next.
    pub fn prefetcher(&self) -> Prefetcher<'_> {
        Prefetcher { prefetch: &self.prefetch, residency: self.residency() }
    }
}

impl Prefetcher<'_> {
    /// A file is about to be opened: if it is a page, the ones that follow it are made ready.
    /// `is_held` says that it was opened a moment ago, so it is most likely in memory.
    pub fn expect_more(&self, id: InodeId, is_held: bool) {
        let Some(way) = self.prefetch.way.get() else {
            return;
        };
        // As long as everything is here, opening a page again costs nothing more: the page was read
        // a moment ago, and so were most likely those after it.
        let all_here = self.residency.tiers.is_none_or(|tiers| {
            tiers.copies.disk().remote_use().only_objects == 0
                && tiers.copies.encoded().usage().only_objects == 0
        });
        if is_held && all_here {
            return;
        }
        if let Err(error) = self.queue_next(way, id, is_held) {
            log::warn!("looking for the pages after inode {}: {error}", id.0);
        }
    }

    fn queue_next(&self, way: &Way, id: InodeId, is_held: bool) -> Result<(), FsError> {
        let state = self.residency.core.state();
        let Some((sequence, object, page)) = page_of(&state, id)? else {
            return Ok(());
        };
        let (at, tokens, bytes) = page;
        let mut known = self.prefetch.known();
        known.note_open(&way.counters, object);
        let Known { scans, pages } = &mut *known;
        let mut failure = None;
        let mut found = scans.opened(sequence, (at, tokens), bytes, |at| {
            self.find_page(&state, sequence, at).unwrap_or_else(|error| {
                failure = Some(error);
                None
            })
        });
        drop(state);
        let helps = |means| match means {
            Means::None => false,
            Means::ReadAhead => !is_held,
            Means::Fetch => true,
        };
        found.retain(|ahead| helps(ahead.means) && !pages.contains_key(&ahead.object));
        for ahead in found {
            match way.queue.try_send(ahead) {
                Ok(()) => drop(pages.insert(ahead.object, (ahead.means, Fate::Queued))),
                Err(_) => ahead.means.count(&way.counters, "dropped"),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Brings a page nearer, if somebody still expects it.
    pub fn fetch(&self, ahead: Ahead) {
        let Some(Way { counters, .. }) = self.prefetch.way.get() else {
            return;
        };
        let Ahead { object, means, .. } = ahead;
        {
            let mut known = self.prefetch.known();
            // An open may have overtaken it.
            if known.pages.get(&object) != Some(&(means, Fate::Queued)) {
                return;
            }
            let is_closing = self.residency.tiers.is_some_and(Tiers::is_closing);
            if is_closing || !known.scans.expects(ahead.sequence, ahead.at) {
                known.pages.remove(&object);
                means.count(counters, "dropped");
                return;
            }
            known.pages.insert(object, (means, Fate::Fetching));
        }
        let outcome = match means {
            Means::Fetch => self
                .residency
                .fetch((ahead.id, ahead.role), object)
                .map(|fetched| fetched.has_other()),
            Means::ReadAhead | Means::None => self.read_ahead(object),
        };
        let mut known = self.prefetch.known();
        let fate = known.pages.remove(&object).map(|(_, fate)| fate);
        match (outcome, fate) {
            (Ok(true), Some(Fate::Fetching)) => {
                known.pages.insert(object, (means, Fate::Here(Instant::now())));
            }
            // Whoever opens it is told why.
            (Ok(false) | Err(_), Some(Fate::Fetching)) => means.count(counters, "failed"),
            _ => {}
        }
    }

    /// Reads an object into the kernel's cache. False if the disk does not have it any more.
    fn read_ahead(&self, object: ObjectId) -> Result<bool, FsError> {
        match self.residency.core.store.open_object(object, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            file => Ok(file?.populate(0, u64::MAX).map(|()| true)?),
        }
    }

    /// The page at a position of a sequence.
    fn find_page(
        &self, state: &State, sequence: InodeId, at: Position,
    ) -> Result<Option<Ahead>, FsError> {
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
        let Some((role, object)) = file.and_then(|file| Some((file.role, file.object?))) else {
            return Ok(None);
        };
        let means = match self.residency.whereabouts(state, object)? {
            Whereabouts::Memory | Whereabouts::Nowhere => Means::None,
            Whereabouts::Disk => Means::ReadAhead,
            Whereabouts::Encoded(_) | Whereabouts::Remote(_) => Means::Fetch,
        };
        Ok(Some(Ahead { id: entry.inode, role, object, sequence, at, means }))
    }
}

impl Means {
    fn count(self, counters: &Counters, outcome: &str) {
        match self {
            Means::Fetch => counters.prefetched(outcome),
            Means::ReadAhead => counters.read_ahead(outcome),
            Means::None => {}
        }
    }
}

impl Known {
    fn note_open(&mut self, counters: &Counters, object: ObjectId) {
        match self.pages.remove(&object) {
            Some((means, Fate::Here(_))) => means.count(counters, "used"),
            Some((means, Fate::Queued)) => means.count(counters, "dropped"),
            Some((means, Fate::Fetching)) => {
                self.pages.insert(object, (means, Fate::Late));
                means.count(counters, "late");
            }
            Some((means, Fate::Late)) => drop(self.pages.insert(object, (means, Fate::Late))),
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
    // Nobody scans states: one is enough.
    if page.is_state() {
        return Ok(None);
    }
    let Some(Kind::Directory { parent, class: DirectoryClass::Layer(layer), .. }) =
        state.metadata.inode(directory)?.map(|inode| inode.kind)
    else {
        return Ok(None);
    };
    let at = Position { layer, start: page.start };
    Ok(Some((parent, object, (at, u64::from(page.tokens), file.size))))
}
