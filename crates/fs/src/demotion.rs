//! Moving objects towards the remote, in the background.
//!
//! Each step is durable before the next one relies on it, so a crash anywhere leaves at least one
//! verified copy:
//!
//! ```text
//! upload     the remote holds the bytes                        (upload)
//! verify     they were read back and compared                  record: Held
//! publish    a manifest of names says that somebody needs them record: Named
//! leave      the record says that the disk's copy does not     record: Only (leave)
//!            count any more; only then is its file removed
//! ```
//!
//! Everything that comes to rest is uploaded; only what does not fit leaves, and only what does not
//! fit encoded either ([`super::encoded`]).

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::growing::Growing;
use super::lossy::LossyModels;
use super::prefixes::fetch_positions;
use super::remote_memory::RemoteMemory;
use super::sight::{self, Sight, note_publications};
use super::tiers::{Tiers, lacking_in_remote};
use super::{FileSystem, FsError, held_back};
use crate::core::Core;
use crate::core::failures::note_failure_of_all;
use crate::core::state::State;
use kvfs_storage::store::format;
use kvfs_storage::store::record::{InodeId, ObjectId, ObjectKind, RemoteState};
use kvfs_storage::tier::exchange::{Exchange, Uploaded};
use kvfs_storage::tier::remote::hold::Stamp;
use kvfs_storage::tier::remote::names::Publisher;
use kvfs_storage::tier::remote::names::format::About;
use kvfs_storage::tier::remote::{BlobStore, State as RemoteHealth};

/// A manifest of names costs a pass over all records: while more is coming, one is published so
/// often.
const PUBLISH_EVERY: Duration = Duration::from_secs(10);
/// Passes over all records take at most one of so many parts of the time.
const PASSES_APART: u32 = 20;

/// What makes changes durable.
pub(super) trait Commits: std::fmt::Debug {
    /// Makes every change so far durable.
    fn commit(&self) -> Result<(), FsError>;
}

impl Commits for FileSystem {
    fn commit(&self) -> Result<(), FsError> {
        FileSystem::commit(self)
    }
}

/// What moves objects down the tiers: it encodes, uploads and lets leave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demotion<'a> {
    pub(super) core: &'a Core,
    pub(super) tiers: &'a Tiers,
    pub(super) commits: &'a dyn Commits,
}

/// What the thread that moves objects remembers between two rounds.
#[derive(Debug)]
pub struct Mover {
    /// `None` without a remote.
    pub(super) publisher: Option<Publisher>,
    /// Uploaded, to be read back when they are due.
    pub(super) uploaded: VecDeque<(InodeId, Uploaded)>,
    /// Verified, and not yet in a reliable manifest.
    pub(super) unnamed: BTreeSet<(InodeId, ObjectId)>,
    /// From before the oldest of those was put.
    pub(super) oldest: Option<Stamp>,
    /// The connection through which all of that was.
    connection: u64,
    /// What was seen of the remote.
    pub(super) sight: Sight,
    /// When it was last published, and how long that took.
    published: Instant,
    took: Duration,
    growing: Growing,
    lossy_models: LossyModels,
    reported: Option<&'static str>,
}

impl Mover {
    /// One that has nothing to do yet.
    pub fn new(publisher: Option<Publisher>) -> Mover {
        Mover {
            publisher,
            uploaded: VecDeque::new(),
            unnamed: BTreeSet::new(),
            oldest: None,
            connection: 0,
            sight: Sight::default(),
            published: Instant::now(),
            took: Duration::ZERO,
            growing: Growing::default(),
            lossy_models: LossyModels::default(),
            reported: None,
        }
    }

    /// Files that were uploaded, and are not yet known to be named.
    fn under_way(&self) -> HashSet<InodeId> {
        let uploaded = self.uploaded.iter().map(|(id, _)| *id);
        uploaded.chain(self.unnamed.iter().map(|(id, _)| *id)).collect()
    }

    /// What waits to leave is named at once if nothing more is coming. A change of names alone can
    /// wait: a publication is a pass over all records.
    fn is_publication_due(&self, core: &Core, tiers: &Tiers, is_idle: bool) -> bool {
        let is_time = self.published.elapsed() >= PUBLISH_EVERY.max(self.took * PASSES_APART);
        if !self.unnamed.is_empty() || self.sight.is_name_lost() {
            return is_idle || is_time;
        }
        let named = tiers.names_published.load(Ordering::Acquire);
        is_time && (core.state().metadata.names_changed != named || self.growing.has_grown(core))
    }

    fn report_outage(&mut self, (core, tiers): (&Core, &Tiers), error: &FsError) {
        let label = match error {
            FsError::Remote(error) => error.label(),
            _ => "local",
        };
        // The same cause, told every few seconds, would push everything else out of the errors.
        if self.reported.replace(label) != Some(label) {
            core.observer.failed(&format!("objects do not reach the remote: {error}"));
        }
        let waiting = lacking_in_remote(core, Some(tiers));
        let why = format!("objects do not reach the remote: {error}");
        let all = (waiting.files as u64, Some(waiting.bytes));
        note_failure_of_all(core, ("move", label), all, why);
    }

    /// What is not under way any more is in the remote, or waits to go there again.
    fn note_arrived(&self, core: &Core) {
        let under_way = self.under_way();
        core.state().metadata.arrivals.keep_taken(|id| under_way.contains(&id));
    }
}

impl Mover {
    /// The connection is another one: what was uploaded and not yet named may have gone to a place that only looked
    /// like the remote, and is uploaded, or found, again.
    pub(super) fn distrust(&mut self, core: &Core, tiers: &Tiers) -> Result<(), FsError> {
        let mut state = core.state_to_change()?;
        for (id, _) in self.uploaded.drain(..) {
            state.metadata.note_arrival(id)?;
        }
        for file in std::mem::take(&mut self.unnamed) {
            tiers.forget_upload(&mut state, file)?;
        }
        self.oldest = None;
        self.growing = Growing::default();
        Ok(())
    }
}

impl Tiers {
    /// Whether objects are moving down the tiers, which takes the processor.
    pub fn is_moving(&self) -> bool {
        self.moving.load(Ordering::Relaxed)
    }

    /// The mount ends: what is under way in the background changes nothing any more.
    pub fn stop_moving(&self, core: &Core) {
        let _state = core.state();
        self.closing.store(true, Ordering::Release);
    }

    /// A file counts as one that the remote does not have.
    pub(super) fn forget_upload(
        &self, state: &mut State, (id, object): (InodeId, ObjectId),
    ) -> Result<(), FsError> {
        if state.metadata.is_only_remote(object)? {
            // It was held back, and memory has it still: the disk gets it.
            state.metadata.publish(object);
        }
        state.metadata.forget_remote_copy(object)?;
        self.copies.forget_remote_copy(object);
        state.metadata.note_arrival(id)?;
        Ok(())
    }
}

impl FileSystem {
    pub(super) fn demotion<'a>(&'a self, tiers: &'a Tiers) -> Demotion<'a> {
        Demotion { core: &self.core, tiers, commits: self }
    }
}

/// One round of moving; says how long to wait before the next.
pub fn move_objects(fs: &FileSystem, mover: &mut Mover) -> Duration {
    let Some(tiers) = &fs.tiers else {
        return Duration::MAX;
    };
    tiers.moving.store(true, Ordering::Relaxed);
    let outcome = round(fs, tiers, mover);
    tiers.moving.store(false, Ordering::Relaxed);
    mover.note_arrived(&fs.core);
    if tiers.is_closing() {
        return Duration::MAX;
    }
    tiers.publication.note_round(outcome.as_ref().err());
    let trouble = outcome.as_ref().err().map(ToString::to_string);
    let trouble = trouble.or_else(|| mover.sight.trouble().map(str::to_owned));
    tiers.note_trouble(trouble);
    if let Err(error) = &outcome {
        mover.report_outage((&fs.core, tiers), error);
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
fn round(fs: &FileSystem, tiers: &Tiers, mover: &mut Mover) -> Result<bool, FsError> {
    let demotion = fs.demotion(tiers);
    // Before anything that waits for the remote.
    let encoded = demotion.encode_cold(&mut mover.lossy_models)?;
    let Some(exchange) = &tiers.exchange else {
        return Ok(demotion.note_raw()? || encoded > 0);
    };
    match exchange.remote().state() {
        RemoteHealth::Up { id, connection, .. } => {
            RemoteMemory::of(&fs.core)
                .remember(id, BlobStore::place(exchange.remote().as_ref()))?;
            if std::mem::replace(&mut mover.connection, connection) != connection {
                mover.distrust(&fs.core, tiers)?;
                mover.sight = Sight::default();
            }
        }
        RemoteHealth::Connecting => return Ok(false),
        RemoteHealth::Down { error, .. } => return Err(FsError::Remote(error)),
    }
    sight::look(fs, tiers, exchange, mover)?;
    fetch_positions(fs)?;
    RemoteMemory::of(&fs.core).note_manifests_seen(exchange.remote())?;
    let uploaded = demotion.upload_batch(exchange, mover)?;
    demotion.verify_due(exchange, mover)?;
    if tiers.is_closing() {
        return Ok(false);
    }
    let is_idle = uploaded == 0 && mover.uploaded.is_empty();
    let is_asked = tiers.publication.take_request();
    if is_asked || mover.is_publication_due(&fs.core, tiers, is_idle) {
        let outcome = publish_names(fs, tiers, exchange, mover);
        if is_asked {
            tiers.publication.answer(outcome.is_ok());
        }
        outcome?;
        // Making room may take seconds, in which nobody is to be told that the remote lacks what it has.
        mover.note_arrived(&fs.core);
    }
    let granted = fs.movement().grant_wishes(tiers)?;
    let mut made_room = demotion.encode_cold(&mut mover.lossy_models)?;
    if made_room == 0 {
        made_room = demotion.make_room_on_disk()?;
    }
    let is_asking = mover.sight.is_asking();
    Ok(uploaded > 0 || granted > 0 || encoded > 0 || made_room > 0 || is_asking)
}

/// Publishes all names, upon which the remote keeps what they name.
fn publish_names(
    fs: &FileSystem, tiers: &Tiers, exchange: &Exchange, mover: &mut Mover,
) -> Result<(), FsError> {
    let Some(names) = &mut mover.publisher else {
        return Ok(());
    };
    let begin = Instant::now();
    exchange.remote().check_place().map_err(FsError::Remote)?;
    let names_changed = fs.core.state().metadata.names_changed;
    fs.indexer().update()?;
    note_publications(&fs.core, names)?;
    fs.commit()?;
    let (snapshot, totals) = {
        let metadata = &fs.core.state().metadata;
        (metadata.snapshot()?, metadata.totals)
    };
    names.describe(About::here(totals.objects, totals.bytes));
    let growing = mover.growing.send(&fs.core, exchange, &snapshot)?;
    let oldest = growing.values().filter_map(|made| made.since).chain(mover.oldest);
    let oldest = oldest.reduce(Stamp::or_earlier);
    let rows = super::manifest_of_names::rows(&snapshot, &growing)?;
    let published = names.publish(format::VERSION, rows, oldest).map_err(FsError::Remote)?;
    RemoteMemory::of(&fs.core).note_manifests_seen(exchange.remote())?;
    note_publications(&fs.core, names)?;
    mover.sight.note_published();
    tiers.note_trouble(None);
    tiers.names_published.store(names_changed, Ordering::Release);
    mover.growing.note_published(published.is_reliable);
    (mover.published, mover.took) = (Instant::now(), begin.elapsed());
    mover.oldest = None;
    let unnamed = std::mem::take(&mut mover.unnamed);
    let mut state = fs.core.state_to_change()?;
    if tiers.is_closing() {
        return Ok(());
    }
    for (id, object) in unnamed {
        let Some(copy) = state.metadata.remote_copy(object)? else {
            continue;
        };
        if !published.is_reliable {
            // It took too long: the objects may have been collected meanwhile.
            tiers.forget_upload(&mut state, (id, object))?;
            continue;
        }
        if copy.state != RemoteState::Held {
            held_back::note_named(&fs.core, object);
            continue;
        }
        state.metadata.set_remote_state(object, copy, RemoteState::Named);
        let kind = state.metadata.object(object)?.map(|record| (record.kind, record.length));
        if let Some((kind, length)) = kind
            && kind != ObjectKind::Manifest
        {
            tiers.copies.allow_leaving(object, id, length);
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
