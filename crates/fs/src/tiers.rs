//! The tiers below the raw files of a mount: what they share, and what is told of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::collection::Publication;
use super::demotion::Demotion;
use super::flights::Flights;
use super::movement::Wishes;
use super::residency::{Landed, ssd_used_bytes};
use super::{FileSystem, FsError, held_back};
use crate::core::Core;
use kvfs_page::names;
use kvfs_storage::store::database::Snapshot;
use kvfs_storage::store::record::{
    EncodedCopy, FileRecord, Inode, InodeId, ObjectId, ObjectKind, RemoteCopy, RemoteState,
};
use kvfs_storage::tier::copies::Copies;
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::encoded::EncodedCopies;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::ram::LetGo;
use kvfs_storage::tier::rate::Rate;
use kvfs_storage::tier::remote::{Remote, RemoteError, State as RemoteHealth};
use kvfs_storage::tier::ssd::SsdTier;
use kvfs_storage::tier::writes::WriteBudget;

/// What the remote does not have yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lacking {
    /// Files.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Since when the first of them waits.
    pub seconds: u64,
}

/// What a mount has beside its store that encodes cold objects or has a remote.
#[derive(Debug)]
pub struct Tiers {
    /// `None` without a remote.
    pub(super) exchange: Option<Exchange>,
    pub(super) copies: Copies,
    /// What may still be written to the disk.
    pub writes: WriteBudget,
    pub(super) counters: Counters,
    flights: Flights<ObjectId, Result<Landed, RemoteError>>,
    pub(super) wishes: Wishes,
    pub(super) publication: Publication,
    /// Somebody read the status, so what it says of the remote must be of now.
    pub(super) look_asked: AtomicBool,
    /// How often the place was looked at, was the remote, and had what it should have.
    pub(super) looks: AtomicU64,
    /// Why objects do not reach the remote, as of the last round of moving.
    trouble: Mutex<Option<String>>,
    /// Stored bytes that come from the remote.
    pub(super) fetching: Rate,
    /// Bytes decoded from what the disk has encoded.
    pub(super) decoding: Rate,
    /// The mount ends: nothing more moves.
    pub(super) closing: AtomicBool,
    /// A round of moving is going on.
    pub(super) moving: AtomicBool,
    /// All records were looked at since the mount began.
    pub(super) is_surveyed: AtomicBool,
    /// [`names_changed`](kvfs_storage::store::metadata::Metadata::names_changed) as last published.
    pub(super) names_published: AtomicU64,
}

impl Tiers {
    /// An SSD tier, and the remote behind it.
    pub fn new(
        exchange: Option<Exchange>, ssd: SsdTier, encoded: EncodedCopies, counters: Counters,
    ) -> Tiers {
        Tiers {
            exchange,
            writes: WriteBudget::new(None),
            copies: Copies::new(ssd, encoded),
            counters,
            flights: Flights::default(),
            wishes: Wishes::default(),
            publication: Publication::default(),
            look_asked: AtomicBool::new(false),
            looks: AtomicU64::new(0),
            trouble: Mutex::default(),
            fetching: Rate::default(),
            decoding: Rate::default(),
            closing: AtomicBool::new(false),
            moving: AtomicBool::new(false),
            is_surveyed: AtomicBool::new(false),
            names_published: AtomicU64::new(0),
        }
    }

    /// Does something about an object's bytes, or waits for whoever does so already.
    pub(super) fn share(
        &self, object: ObjectId, work: impl FnOnce() -> Result<Landed, RemoteError>,
    ) -> Result<Landed, RemoteError> {
        self.flights.share(object, work).unwrap_or_else(|| {
            Err(RemoteError::Other("the transfer ended without a result".to_owned()))
        })
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Why objects do not reach the remote, if they do not.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }
}

impl FileSystem {
    /// Attaches the tiers below. Only before the mount answers.
    pub fn attach(&mut self, tiers: Tiers) {
        let mut state = self.core.state();
        state.metadata.has_tiers = true;
        held_back::resume(&tiers, &state);
        drop(state);
        self.tiers = Some(tiers);
    }

    /// How the kernel is made to forget a backing file.
    pub fn on_leaving(&self, let_go: LetGo) {
        let _ = self.core.let_go.set(let_go);
    }

    /// The tiers below.
    pub fn tiers(&self) -> Option<&Tiers> {
        self.tiers.as_ref()
    }

    /// Reads all records, beside the mount: which files the remote does not have, and which the
    /// disk does not.
    pub fn survey(&self) -> Result<(), FsError> {
        let Some(tiers) = &self.tiers else {
            return Ok(());
        };
        let snapshot = self.core.state().metadata.snapshot()?;
        let mut copies = std::collections::HashSet::new();
        snapshot.for_each::<RemoteCopy>(b'R', |object, _| {
            copies.insert(ObjectId(object));
        })?;
        let mut encoded_copies = std::collections::HashSet::new();
        snapshot.for_each::<EncodedCopy>(b'Z', |object, _| {
            encoded_copies.insert(ObjectId(object));
        })?;
        let (mut arrivals, mut known, mut encoded) = (Vec::new(), Vec::new(), Vec::new());
        snapshot.for_each::<Inode>(b'I', |id, inode| {
            let file = inode.file().filter(|file| FileRecord::is_settled(file));
            let object = file.and_then(|file| file.object);
            encoded.extend(
                object
                    .filter(|object| encoded_copies.contains(object))
                    .map(|object| (InodeId(id), object)),
            );
            match object {
                Some(object) if copies.contains(&object) => {
                    known.push((inode.atime.max(inode.mtime), InodeId(id), object));
                }
                Some(_) => {
                    let bytes = file.map_or(0, |file| file.size);
                    arrivals.push((InodeId(id), bytes, inode.ctime));
                }
                None => {}
            }
        })?;
        self.survey_positions(&snapshot)?;
        drop(snapshot);
        for (id, object) in encoded {
            self.demotion(tiers).survey_encoded((id, object))?;
            encoded_copies.remove(&object);
        }
        for object in encoded_copies {
            self.demotion(tiers).forget_lone_copy(object)?;
        }
        let mut state = self.core.state();
        for (id, bytes, since) in arrivals {
            state.metadata.arrivals.insert_since(id, bytes, since.into());
        }
        drop(state);
        // The policy takes what it is told of last for what was used last.
        known.sort_unstable();
        for (_, id, object) in known {
            self.demotion(tiers).note_copy((id, object))?;
        }
        tiers.is_surveyed.store(true, Ordering::Release);
        Ok(())
    }

    /// Which files say where the rows of sequences stand: those stay on the disk, or come back.
    fn survey_positions(&self, snapshot: &Snapshot) -> Result<(), FsError> {
        let mut sequences = Vec::new();
        snapshot.for_each_named(b'E', |parent, offset_and_name| {
            if offset_and_name.get(8..) == Some(names::POSITIONS.as_bytes()) {
                sequences.push(InodeId(parent));
            }
        })?;
        for sequence in sequences {
            let name = names::POSITIONS.as_bytes();
            let is_one = {
                let mut state = self.core.state();
                let entry = state.entry(sequence, name)?;
                entry
                    .is_some_and(|entry| state.metadata.note_positions(sequence, name, entry.inode))
            };
            if is_one {
                self.note_away(sequence)?;
            }
        }
        Ok(())
    }

    /// Lines of `.kvfs/status` about the tiers below.
    pub(super) fn tier_status(&self, text: &mut String) {
        let Some(tiers) = &self.tiers else {
            return;
        };
        let waiting = lacking_in_remote(&self.core, Some(tiers));
        let names_changed = self.core.state().metadata.names_changed;
        let encoded = tiers.copies.encoded().usage();
        let usage = tiers.copies.disk().remote_use();
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            crate::views::add_line(text, key, value);
        };
        if let Some(budget) = tiers.copies.disk().budget_bytes() {
            line("ssd_budget_bytes", &budget);
        }
        line("ssd_used_bytes", &ssd_used_bytes(&self.core, Some(tiers)));
        if let Some(day_bytes) = tiers.writes.day_bytes() {
            let (files, bytes) = held_back::held(self);
            line("ssd_writes_day_bytes", &day_bytes);
            line("ssd_writes_left_bytes", &tiers.writes.left_bytes());
            line("ssd_written_bytes", &tiers.writes.written_bytes());
            line("ssd_spared_files", &files);
            line("ssd_spared_bytes", &bytes);
        }
        line("ssd_encoded_objects", &encoded.objects);
        line("ssd_encoded_bytes", &encoded.stored_bytes);
        line("ssd_only_encoded_objects", &encoded.only_objects);
        line("ssd_only_encoded_bytes", &encoded.only_bytes);
        line("lossy_demotions", &tiers.counters.rounded_pages());
        // 0 as long as hardly anything was decoded.
        line("decoding_bytes_per_second", &tiers.decoding.bytes_per_second().unwrap_or(0));
        let Some(remote) = tiers.exchange.as_ref().map(Exchange::remote) else {
            return self.remote_memory().tell_offline(text);
        };
        line("remote", &kvfs_storage::tier::remote::BlobStore::place(remote.as_ref()));
        line("remote_sealed", &if remote.is_sealed() { "yes" } else { "no" });
        tell_health(remote, &mut line);
        tiers.look_asked.store(true, Ordering::Release);
        line("remote_looks", &tiers.looks.load(Ordering::Acquire));
        line("remote_objects", &usage.objects);
        line("remote_stored_bytes", &usage.stored_bytes);
        line("remote_only_objects", &usage.only_objects);
        line("remote_only_bytes", &usage.only_bytes);
        line("remote_waiting_files", &waiting.files);
        line("remote_waiting_bytes", &waiting.bytes);
        line("remote_waiting_seconds", &waiting.seconds);
        {
            let state = self.core.state();
            let given_up = state.metadata.arrivals.given_up();
            line("remote_given_up_files", &given_up.len());
            line("remote_given_up_bytes", &given_up.bytes());
            if let Some(why) = given_up.why() {
                line("remote_given_up_reason", &why);
            }
        }
        line("remote_asked_files", &tiers.wishes.count());
        let names_published = tiers.names_published.load(Ordering::Acquire);
        let is_published = names_published == names_changed;
        line("remote_names", &if is_published { "published" } else { "changed" });
        line("remote_names_changes", &names_changed);
        line("remote_names_published", &names_published);
        let (prefixes, stores) = self.foreign.count();
        line("remote_stores", &stores);
        line("remote_prefixes", &prefixes);
        // 0 as long as hardly anything was fetched.
        let rate = tiers.fetching.bytes_per_second();
        line("remote_bytes_per_second", &rate.unwrap_or(0));
    }
}

impl Demotion<'_> {
    /// Notes what is known of an object's copy now; the records above may be out of date.
    fn note_copy(&self, (id, object): (InodeId, ObjectId)) -> Result<(), FsError> {
        let mut state = self.core.state();
        let copy = state.metadata.remote_copy(object)?;
        let record = state.metadata.object(object)?;
        let (Some(copy), Some(record)) = (copy, record) else {
            return Ok(());
        };
        match copy.state {
            RemoteState::Held => {
                // Nobody knows whether a manifest names it: it is uploaded again.
                state.metadata.forget_remote_copy(object)?;
                state.metadata.note_arrival(id)?;
            }
            RemoteState::Named => {
                self.tiers.copies.note_remote_copy(object, &copy);
                if record.kind != ObjectKind::Manifest {
                    self.tiers.copies.allow_leaving(object, id, record.length);
                }
            }
            RemoteState::Only => {
                self.tiers.copies.note_remote_copy(object, &copy);
                drop(state);
                // A crash may have left its file.
                self.remove_left((id, object), record.length)?;
            }
        }
        Ok(())
    }
}

/// What is at rest and not yet in the remote, verified and named; nothing without a remote.
pub(super) fn lacking_in_remote(core: &Core, tiers: Option<&Tiers>) -> Lacking {
    if tiers.is_none_or(|tiers| tiers.exchange.is_none()) {
        return Lacking::default();
    }
    let state = core.state();
    let arrivals = &state.metadata.arrivals;
    let seconds = arrivals.oldest().and_then(|since| since.elapsed().ok());
    Lacking {
        files: arrivals.len(),
        bytes: arrivals.bytes(),
        seconds: seconds.map_or(0, |age| age.as_secs()),
    }
}

/// Whether the remote answers, and gives bytes at a rate.
fn tell_health(remote: &Remote, line: &mut dyn FnMut(&str, &dyn std::fmt::Display)) {
    match remote.state() {
        RemoteHealth::Connecting => line("remote_state", &"connecting"),
        RemoteHealth::Up { .. } => line("remote_state", &"up"),
        RemoteHealth::Down { error, .. } => line("remote_state", &format!("down: {error}")),
    }
    if let Some(slow) = remote.slow() {
        line("remote_slow", &slow);
    }
}
