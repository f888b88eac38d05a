//! Moving objects towards the remote, in the background.
//!
//! Each step is durable before the next one relies on it, so a crash anywhere leaves at least one
//! verified copy:
//!
//! ```text
//! upload     the remote holds the bytes                        (tier::exchange)
//! verify     they were read back and compared                  record: Held
//! publish    a manifest of names says that somebody needs them record: Named
//! leave      the record says that the disk's copy does not     record: Only
//!            count any more; only then is its file removed
//! ```
//!
//! Everything that comes to rest is uploaded; only what does not fit leaves.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::growing::Growing;
use super::residency::item;
use super::state::State;
use super::tiers::Tiers;
use super::{FileSystem, FsError};
use crate::store::disk::{Access, DiskPath};
use crate::store::format;
use crate::store::record::{FileRecord, InodeId, ObjectId, RemoteCopy, RemoteState, Role};
use crate::tier::counters::Tier;
use crate::tier::exchange::{Item, Uploaded};
use crate::tier::remote::hold::Stamp;
use crate::tier::remote::names::Publisher;
use crate::tier::remote::{RemoteError, State as RemoteHealth};

/// Files uploaded between two looks at everything else: with pages of 4 MiB 256 MiB.
const BATCH: usize = 64;
/// Files that a commit will make durable in a moment, looked at while holding the state.
const PASSED_OVER_MAX: usize = 1024;
/// Uploads at a time; of the remote's eight calls, opens find at least half free.
const UPLOADS: usize = 3;
/// Larger files never move: a fetch of gigabytes at open would look like a hang.
pub(super) const MOVING_BYTES_MAX: u64 = 4 << 30;
/// A manifest of names costs a pass over all records: while more is coming, one is published so
/// often.
const PUBLISH_EVERY: Duration = Duration::from_secs(10);
/// Passes over all records take at most one of so many parts of the time.
const PASSES_APART: u32 = 20;
/// Objects that leave between two commits.
const LEAVING_BATCH: usize = 256;
/// Searches for objects that may leave, each of which passes over what is in use.
const SEARCHES_MAX: usize = 8;

/// What the thread that moves objects remembers between two rounds.
#[derive(Debug)]
pub struct Mover {
    publisher: Publisher,
    /// Uploaded, to be read back when they are due.
    uploaded: VecDeque<(InodeId, Uploaded)>,
    /// Verified, and not yet in a reliable manifest.
    unnamed: BTreeSet<(InodeId, ObjectId)>,
    /// From before the oldest of those was put.
    oldest: Option<Stamp>,
    /// When it was last published, and how long that took.
    published: Instant,
    took: Duration,
    growing: Growing,
    reported: Option<&'static str>,
}

impl Mover {
    /// One that has nothing to do yet.
    pub fn new(publisher: Publisher) -> Mover {
        Mover {
            publisher,
            uploaded: VecDeque::new(),
            unnamed: BTreeSet::new(),
            oldest: None,
            published: Instant::now(),
            took: Duration::ZERO,
            growing: Growing::default(),
            reported: None,
        }
    }
}

impl FileSystem {
    /// One round of moving; says how long to wait before the next.
    pub fn move_objects(&self, mover: &mut Mover) -> Duration {
        let Some(tiers) = &self.tiers else {
            return Duration::MAX;
        };
        let outcome = self.round(tiers, mover);
        let under_way = mover.uploaded.len() + mover.unnamed.len();
        tiers.under_way.store(under_way, Ordering::Release);
        if tiers.is_closing() {
            return Duration::MAX;
        }
        if let Err(error) = &outcome {
            self.report_outage(mover, error);
        } else if mover.reported.take().is_some() {
            log::info!("moving objects to the remote goes on");
        }
        match outcome {
            Err(_) => Duration::from_secs(5),
            Ok(true) => Duration::ZERO,
            Ok(false) => Duration::from_millis(500),
        }
    }

    /// Whether there is more to do at once.
    fn round(&self, tiers: &Tiers, mover: &mut Mover) -> Result<bool, FsError> {
        match tiers.exchange.remote().state() {
            RemoteHealth::Up { id, .. } => self.remember_remote(id)?,
            RemoteHealth::Connecting => return Ok(false),
            RemoteHealth::Down { error, .. } => return Err(FsError::Remote(error)),
        }
        let uploaded = self.upload_batch(tiers, mover)?;
        self.verify_due(tiers, mover)?;
        let is_idle = uploaded == 0 && mover.uploaded.is_empty();
        let is_asked = tiers.publication.take_request();
        if is_asked || self.is_publication_due(tiers, mover, is_idle) {
            let outcome = self.publish_names(tiers, mover);
            if is_asked {
                tiers.publication.answer(outcome.is_ok());
            }
            outcome?;
        }
        let left = self.make_room_on_disk(tiers)? + self.grant_wishes(tiers)?;
        Ok(uploaded > 0 || left > 0)
    }

    fn upload_batch(&self, tiers: &Tiers, mover: &mut Mover) -> Result<usize, FsError> {
        let batch = self.take_arrivals(tiers)?;
        if batch.is_empty() {
            return Ok(0);
        }
        let (todo, done) = (Mutex::new(batch.iter()), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..UPLOADS.min(batch.len()) {
                scope.spawn(|| {
                    crate::sys::be_idle();
                    while let Some((id, item)) = next(&todo) {
                        let outcome = if tiers.is_closing() {
                            Err(RemoteError::Unreachable("the mount ends".to_owned()))
                        } else {
                            tiers.exchange.upload(&self.store, item)
                        };
                        let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                        done.push((*id, *item, outcome));
                    }
                });
            }
        });
        let mut failure = None;
        let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        let count = done.len();
        for (id, item, outcome) in done {
            match outcome {
                Ok(uploaded) => mover.uploaded.push_back((id, uploaded)),
                Err(error) => {
                    tiers.counters.failed(Tier::Ssd, Tier::Remote, error.label());
                    failure = self.not_uploaded(id, &item, error).or(failure);
                }
            }
        }
        failure.map_or(Ok(count), |error| Err(FsError::Remote(error)))
    }

    /// Files that came to rest, whose bytes are durable, and which the remote does not have.
    fn take_arrivals(&self, tiers: &Tiers) -> Result<Vec<(InodeId, Item)>, FsError> {
        let mut state = self.state();
        let mut batch = Vec::new();
        let mut later = Vec::new();
        while batch.len() < BATCH
            && later.len() < PASSED_OVER_MAX
            && let Some(id) = state.metadata.arrivals.pop_first()
        {
            match candidate(&state, id)? {
                Candidate::Ready(item) => batch.push((id, item)),
                Candidate::NotYet => later.push(id),
                Candidate::Never => {}
            }
        }
        state.metadata.arrivals.extend(later);
        tiers.under_way.fetch_add(batch.len(), Ordering::AcqRel);
        Ok(batch)
    }

    /// An object could not be uploaded: it is tried again, unless that cannot help. Returns the
    /// error if it concerns the remote.
    fn not_uploaded(&self, id: InodeId, item: &Item, error: RemoteError) -> Option<RemoteError> {
        match &error {
            // Somebody changed or removed the file meanwhile; it will arrive again.
            RemoteError::Local(cause) if cause.kind() == io::ErrorKind::NotFound => None,
            RemoteError::Local(cause) if cause.kind() == io::ErrorKind::InvalidData => {
                log::warn!("object {} was not uploaded: {error}", item.object);
                None
            }
            RemoteError::Corrupt(_) | RemoteError::Other(_) => {
                self.observer.failed(&format!("object {} was not uploaded: {error}", item.object));
                None
            }
            _ => {
                self.state().metadata.arrivals.insert(id);
                Some(error)
            }
        }
    }

    /// Reads back what was uploaded long enough ago, and notes what is right.
    fn verify_due(&self, tiers: &Tiers, mover: &mut Mover) -> Result<(), FsError> {
        while let Some((id, uploaded)) = mover.uploaded.front().copied() {
            if !uploaded.due_in().is_zero() || tiers.is_closing() {
                return Ok(());
            }
            mover.uploaded.pop_front();
            match tiers.exchange.verify(&self.store, &uploaded) {
                Ok(()) => self.note_verified(tiers, mover, id, &uploaded)?,
                Err(error) => {
                    tiers.counters.failed(Tier::Ssd, Tier::Remote, error.label());
                    if let Some(error) = self.not_uploaded(id, &uploaded.item, error) {
                        return Err(FsError::Remote(error));
                    }
                }
            }
        }
        Ok(())
    }

    fn note_verified(
        &self, tiers: &Tiers, mover: &mut Mover, id: InodeId, uploaded: &Uploaded,
    ) -> Result<(), FsError> {
        let object = uploaded.item.object;
        let mut state = self.state_to_change()?;
        let record = state.metadata.object(object)?;
        // What somebody changed or deleted meanwhile is garbage in the remote.
        let is_same = record.and_then(|record| record.checksum) == Some(uploaded.item.checksum.0);
        if tiers.is_closing() || !is_same {
            return Ok(());
        }
        let copy = RemoteCopy {
            content: uploaded.blob.content.0,
            encoding: uploaded.blob.encoding,
            stored_bytes: uploaded.stored_bytes,
            state: RemoteState::Held,
        };
        state.metadata.put_remote_copy(object, &copy);
        drop(state);
        tiers.ssd.has_remote_copy(object, &copy);
        tiers.counters.moved(Tier::Ssd, Tier::Remote, uploaded.item.length);
        mover.unnamed.insert((id, object));
        let since = uploaded.held.since;
        mover.oldest = Some(mover.oldest.map_or(since, |oldest| oldest.or_earlier(since)));
        Ok(())
    }

    /// What waits to leave is named at once if nothing more is coming. A change of names alone can
    /// wait: a publication is a pass over all records.
    fn is_publication_due(&self, tiers: &Tiers, mover: &Mover, is_idle: bool) -> bool {
        let is_time = mover.published.elapsed() >= PUBLISH_EVERY.max(mover.took * PASSES_APART);
        if !mover.unnamed.is_empty() {
            return is_idle || is_time;
        }
        let named = tiers.names_published.load(Ordering::Acquire);
        is_time && (self.state().metadata.names_changed != named || self.has_grown(&mover.growing))
    }

    /// Publishes all names, upon which the remote keeps what they name.
    fn publish_names(&self, tiers: &Tiers, mover: &mut Mover) -> Result<(), FsError> {
        let begin = Instant::now();
        let names_changed = self.state().metadata.names_changed;
        self.commit()?;
        let snapshot = self.state().metadata.snapshot()?;
        let growing = self.copy_growing(tiers, &mut mover.growing, &snapshot)?;
        let oldest = growing.values().filter_map(|made| made.since).chain(mover.oldest);
        let oldest = oldest.reduce(Stamp::or_earlier);
        let rows = super::manifest_of_names::rows(&snapshot, &growing)?;
        let published =
            mover.publisher.publish(format::VERSION, rows, oldest).map_err(FsError::Remote)?;
        tiers.names_published.store(names_changed, Ordering::Release);
        mover.growing.was_published(published.is_reliable);
        (mover.published, mover.took) = (Instant::now(), begin.elapsed());
        mover.oldest = None;
        let unnamed = std::mem::take(&mut mover.unnamed);
        let mut state = self.state_to_change()?;
        if tiers.is_closing() {
            return Ok(());
        }
        for (id, object) in unnamed {
            let Some(copy) = state.metadata.remote_copy(object)? else {
                continue;
            };
            if !published.is_reliable {
                // It took too long: the objects may have been collected meanwhile.
                state.metadata.forget_remote_copy(object)?;
                tiers.ssd.forget(object);
                state.metadata.arrivals.insert(id);
                continue;
            }
            if copy.state != RemoteState::Held {
                continue;
            }
            let named = RemoteCopy { state: RemoteState::Named, ..copy };
            state.metadata.put_remote_copy(object, &named);
            let kind = state.metadata.object(object)?.map(|record| (record.kind, record.length));
            if let Some((kind, length)) = kind
                && kind != crate::store::record::ObjectKind::Manifest
            {
                tiers.ssd.may_leave(object, id, length);
            }
        }
        log::info!(
            "published {} names to the remote, {} of {} parts were new",
            published.rows,
            published.chunks_sent,
            published.chunks
        );
        Ok(())
    }

    /// Lets objects leave the disk while it holds more than it should; how many left.
    fn make_room_on_disk(&self, tiers: &Tiers) -> Result<usize, FsError> {
        let mut passed_over = HashSet::new();
        let mut left = 0;
        for _ in 0..SEARCHES_MAX {
            let excess = tiers.ssd.excess_bytes(self.ssd_used_bytes());
            if excess == 0 || tiers.is_closing() {
                break;
            }
            let mut next = tiers.ssd.next_to_leave(excess, &passed_over);
            if next.is_empty() {
                break;
            }
            next.truncate(LEAVING_BATCH);
            let gone = self.leave_disk(tiers, &next)?;
            left += gone.len();
            for _ in &gone {
                tiers.counters.evicted(Tier::Ssd, "room");
            }
            passed_over.extend(next.iter().map(|(object, _)| *object));
            for object in gone {
                passed_over.remove(&object);
            }
        }
        Ok(left)
    }

    /// Removes the disk's copies of those of these objects that may go; which went.
    pub(super) fn leave_disk(
        &self, tiers: &Tiers, objects: &[(ObjectId, InodeId)],
    ) -> Result<Vec<ObjectId>, FsError> {
        let mut marked = Vec::new();
        for &(object, id) in objects {
            if let Some(bytes) = self.mark_leaving(tiers, id, object)? {
                marked.push((id, object, bytes));
            }
        }
        if marked.is_empty() {
            return Ok(Vec::new());
        }
        if let Err(error) = self.commit() {
            let mut state = self.state();
            for (_, object, _) in marked {
                let copy = state.metadata.remote_copy(object)?;
                if let Some(copy) = copy.filter(|copy| copy.state == RemoteState::Only) {
                    let named = RemoteCopy { state: RemoteState::Named, ..copy };
                    state.metadata.put_remote_copy(object, &named);
                }
            }
            return Err(error);
        }
        let mut gone = Vec::new();
        for (id, object, bytes) in marked {
            if self.remove_left(tiers, (id, object), bytes)? {
                gone.push(object);
            }
        }
        Ok(gone)
    }

    /// Removes the disk's copy of an object, which by now is known not to count, unless somebody
    /// came to use it meanwhile: then it counts again. Whether it went.
    pub(super) fn remove_left(
        &self, tiers: &Tiers, (id, object): (InodeId, ObjectId), bytes: u64,
    ) -> Result<bool, FsError> {
        let mut state = self.state();
        // Somebody may be changing the file by now: then its bytes are the only ones.
        let copy = state.metadata.remote_copy(object)?;
        let Some(copy) = copy.filter(|copy| copy.state == RemoteState::Only) else {
            return Ok(false);
        };
        if !self.is_idle(&state, id, object) {
            let named = RemoteCopy { state: RemoteState::Named, ..copy };
            state.metadata.put_remote_copy(object, &named);
            tiers.ssd.may_leave(object, id, bytes);
            tiers.counters.skipped("in_use");
            return Ok(false);
        }
        match self.store.disk.remove(&DiskPath::Object(object)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        tiers.ssd.has_left(object, bytes);
        drop(state);
        self.invalidate(super::Invalidation::Inode(id));
        Ok(true)
    }

    /// Whether nobody uses the disk's copy of a file's object, nor relies on it.
    fn is_idle(&self, state: &State, id: InodeId, object: ObjectId) -> bool {
        let is_idle = state.nodes.get(&id).is_none_or(|node| !node.is_in_use())
            && !state.unsettled.contains_key(&id)
            && !state.sealing.contains(&id);
        let is_unused = || match self.store.disk.open(&DiskPath::Object(object), Access::Read) {
            Ok(file) => file.is_unused().unwrap_or(false),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        is_idle && is_unused()
    }

    /// Records that the disk's copy does not count, if nobody uses it. Returns its length.
    fn mark_leaving(
        &self, tiers: &Tiers, id: InodeId, object: ObjectId,
    ) -> Result<Option<u64>, FsError> {
        // Whatever the kernel keeps open for the next reader would keep the space.
        let let_go = self.let_go.get().is_none_or(|let_go| let_go.0(id));
        let mut state = self.state_to_change()?;
        let Some(copy) = state.metadata.remote_copy(object)? else {
            return Ok(None);
        };
        let Some(inode) = state.metadata.inode(id)? else {
            return Ok(None);
        };
        if state.is_pinned(id)? {
            tiers.ssd.stays(object);
            return Ok(None);
        }
        let file = inode.file().filter(|file| {
            file.object == Some(object) && file.is_settled() && file.role != Role::Manifest
        });
        let Some(length) = file.map(|file| file.size) else {
            return Ok(None);
        };
        if copy.state != RemoteState::Named {
            return Ok(None);
        }
        if !let_go || !self.is_idle(&state, id, object) {
            tiers.counters.skipped("in_use");
            return Ok(None);
        }
        let only = RemoteCopy { state: RemoteState::Only, ..copy };
        state.metadata.put_remote_copy(object, &only);
        Ok(Some(length))
    }

    fn report_outage(&self, mover: &mut Mover, error: &FsError) {
        let label = match error {
            FsError::Remote(error) => error.label(),
            _ => "local",
        };
        // The same cause, told every few seconds, would push everything else out of the errors.
        if mover.reported.replace(label) != Some(label) {
            self.observer.failed(&format!("objects do not reach the remote: {error}"));
        }
    }

    /// The mount ends: what is under way in the background changes nothing any more.
    pub fn stop_moving(&self) {
        if let Some(tiers) = &self.tiers {
            let _state = self.state();
            tiers.closing.store(true, Ordering::Release);
        }
    }
}

/// Whether a file is to be uploaded.
enum Candidate {
    Ready(Item),
    /// Its bytes are not durable yet.
    NotYet,
    /// Not as it is now; if it changes, it arrives again.
    Never,
}

fn candidate(state: &State, id: InodeId) -> Result<Candidate, FsError> {
    let inode = state.metadata.inode(id)?;
    let file = inode.as_ref().filter(|inode| inode.links > 0).and_then(|inode| inode.file());
    let Some(file) = file.filter(|file| FileRecord::is_settled(file)) else {
        return Ok(Candidate::Never);
    };
    let Some(object) = file.object.filter(|_| !state.unsettled.contains_key(&id)) else {
        return Ok(Candidate::Never);
    };
    if state.metadata.publishes(object) || state.metadata.is_committing(object) {
        return Ok(Candidate::NotYet);
    }
    if state.metadata.remote_copy(object)?.is_some() || file.size > MOVING_BYTES_MAX {
        return Ok(Candidate::Never);
    }
    Ok(item(state, file.role, object)?.map_or(Candidate::Never, Candidate::Ready))
}

fn next<'a, T>(todo: &Mutex<std::slice::Iter<'a, T>>) -> Option<&'a T> {
    todo.lock().unwrap_or_else(PoisonError::into_inner).next()
}
