//! What a mount knows of names, inodes, objects and handles, behind one lock; what *settled*, *changing* and
//! *at rest* mean.
//!
//! It calls the store and nothing above: no tier, no limit, no prefix. What those must hear of is returned.

pub(crate) mod describe;
pub(crate) mod failures;
pub(crate) mod guard;
pub(crate) mod handle;
pub(crate) mod happened;
pub(crate) mod idle;
pub(crate) mod latest;
pub(crate) mod models;
pub(crate) mod node;
pub(crate) mod orphan;
pub(crate) mod pack;
pub(crate) mod persist;
pub mod recalled;
pub(crate) mod refuse;
pub(crate) mod releases;
pub(crate) mod rights;
pub(crate) mod rows;
pub(crate) mod settle;
pub(crate) mod share;
pub(crate) mod spare;
pub(crate) mod stale;
pub(crate) mod state;
pub(crate) mod turns;
pub(crate) mod unsettled;
pub(crate) mod uses;
pub(crate) mod waits;

use std::sync::{Arc, Mutex, OnceLock};

use parking_lot::Condvar;

use self::failures::Failures;
use self::guard::{StateGuard, StateLock};
use self::recalled::Before;
use self::releases::Releases;
use self::spare::Spares;
use self::state::State;
use self::turns::SealingTurns;
use self::uses::Uses;
use super::attributes::Place;
use super::health::Refusal;
use super::hits::Hits;
use super::{AskAnew, FsError, Invalidation, IoMode};
use kvfs_observe::Observer;
use kvfs_storage::ingest::seal;
use kvfs_storage::store::Store;
use kvfs_storage::store::record::ObjectId;
use kvfs_storage::tier::ram::LetGo;
use kvfs_storage::tier::what_if::Sample;

/// The parts of [`super::FileSystem`] stand on this one.
#[derive(Debug)]
pub struct Core {
    pub(crate) store: Store,
    state: StateLock,
    /// Signalled whenever a writer's handle is released.
    pub(crate) released: Condvar,
    /// Releases that were taken from the kernel and are not done.
    pub releases: Releases,
    pub(crate) sealing_turns: SealingTurns,
    pub(crate) spares: Spares,
    /// What was used, for questions about other budgets.
    pub(crate) sample: Sample,
    /// What was asked for and was there.
    pub(crate) hits: Hits,
    /// When files were used, as far as that is not on record.
    pub(crate) uses: Arc<Mutex<Uses>>,
    pub(crate) failures: Failures,
    pub(crate) observer: Arc<Observer>,
    pub(crate) io_mode: OnceLock<IoMode>,
    pub(crate) invalidations: crossbeam_channel::Sender<Invalidation>,
    pub(crate) ask_anew: OnceLock<AskAnew>,
    /// What is known of the daemons before this one.
    pub before: Before,
    /// Makes the kernel forget a backing file that it keeps for the next open.
    pub(crate) let_go: OnceLock<LetGo>,
}

impl Core {
    pub(crate) fn new(
        store: Store, mut state: State, observer: Arc<Observer>,
        invalidations: crossbeam_channel::Sender<Invalidation>,
    ) -> Core {
        state.refusal = store.is_read_only().then_some(Refusal::ReadOnlyMedia);
        Core {
            store,
            state: StateLock::new(state),
            released: Condvar::new(),
            releases: Releases::default(),
            sealing_turns: SealingTurns::new(),
            spares: Spares::default(),
            sample: Sample::default(),
            hits: Hits::default(),
            uses: Arc::default(),
            failures: Failures::default(),
            observer,
            io_mode: OnceLock::new(),
            invalidations,
            ask_anew: OnceLock::new(),
            before: Before::default(),
            let_go: OnceLock::new(),
        }
    }

    pub(crate) fn is_passthrough(&self) -> bool {
        matches!(self.io_mode.get(), Some(IoMode::Passthrough))
    }

    pub(crate) fn state(&self) -> StateGuard<'_> {
        self.state.lock()
    }

    /// The state, for an operation that changes something.
    pub(crate) fn state_to_change(&self) -> Result<StateGuard<'_>, FsError> {
        let state = self.state();
        if state.refusal.is_some() { Err(FsError::ReadOnly) } else { Ok(state) }
    }

    /// How the kernel is told of new names before the operation that made them has answered.
    pub fn on_new_names(&self, ask_anew: AskAnew) {
        let _ = self.ask_anew.set(ask_anew);
    }

    /// The kernel is to forget something; it is told after the running operation has answered.
    pub(crate) fn invalidate(&self, what: Invalidation) {
        // A full queue only delays what short-lived caching in those directories bounds anyway.
        let _ = self.invalidations.try_send(what);
    }

    /// Copies an object's bytes to a new object on the disk.
    pub(crate) fn copy_object(&self, object: ObjectId) -> Result<ObjectId, FsError> {
        let copy = self.state().metadata.new_object();
        seal::copy(&self.store, object, copy).inspect_err(|_| {
            self.state().metadata.remove_object(copy);
        })?;
        Ok(copy)
    }

    /// A name appeared that the kernel did not make itself, as it does when it renames. Where pages,
    /// manifests and sequences are, it looks every absent name up again, so it need not be told of the name;
    /// that would wait for the lock of the directory, which somebody may hold who waits for the
    /// daemon. A daemon that is killed meanwhile would never end.
    pub(crate) fn announce(&self, place: &Place) {
        // Whoever wrote the row or byte that made the name may list the directory next.
        if let Some(crate::AskAnew(ask_anew)) = self.ask_anew.get() {
            ask_anew(place.parent);
        }
    }
}
