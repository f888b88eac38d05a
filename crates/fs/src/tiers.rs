//! The tiers below the raw files of a mount: what they share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::collection::Publication;
use super::flights::Flights;
use super::movement::Wishes;
use super::residency::Landed;
use super::{FileSystem, held_back};
use crate::core::Core;
use kvfs_storage::store::record::ObjectId;
use kvfs_storage::tier::copies::Copies;
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::encoded::EncodedCopies;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::ram::LetGo;
use kvfs_storage::tier::rate::Rate;
use kvfs_storage::tier::remote::RemoteError;
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
