//! [`Remote`]: a remote that never makes its callers wait for ever.
//!
//! Every call has a deadline: a transfer may be silent for so long, anything else may take so
//! long. The breaker ([`super::health`]) answers while the remote is down; connecting happens in
//! the background, from the first on, so a mount never waits for its remote.

use std::ffi::OsString;
use std::io;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use prometheus::IntCounter;

use super::counters::{Counters, Direction, Operation};
use super::error::{RemoteError, Result};
use super::health::{Health, State};
use super::marker::{self, RemoteId, attach_sealed};
use super::name::{RemoteName, RemotePrefix, Sequence, StoreId};
use super::numbers::Numbers;
use super::object::SETTLING;
use super::pool::{Abandoned, Bounds, Pool, Watch};
use super::seal::{Seal, Sealed};
use super::spec::{self, RemoteSpec};
use super::throttle::{Bucket, Throttled};
use super::transfer::{Extent, ReadAt, Sink, Source, WriteAt};
use super::{BlobStore, Listing, Put, PutMode, Stat};

/// Pauses between attempts to connect: from a moment, doubled, up to half a minute. A server that
/// restarts is back in the first seconds; one that is off for a day is asked 3000 times.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Makes connections to one place. Called again after every outage.
pub trait Connector: Send + Sync + 'static {
    /// The place, as the user wrote it.
    fn place(&self) -> String;
    /// Opens it, without looking at what is there.
    fn connect(&self, counters: &Counters) -> Result<Arc<dyn BlobStore>>;
}

/// Bounds of the calls on a remote.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest time in which nothing happens. An NFS server that restarts stalls a call for 6 to
    /// 9 s, so the default is 30 s.
    pub quiet_max: Duration,
    /// Calls at a time; others wait, at most as long as silence lasts. Whoever moves objects in
    /// the background uses fewer, so that an open finds one free.
    pub threads_max: usize,
    /// Threads that may hang beside them.
    pub stuck_max: usize,
    /// Longest time for all calls together, from the opening on: for who waits for several in a row.
    pub total_max: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Limits {
        let quiet_max = Duration::from_secs(30);
        Limits { quiet_max, threads_max: 8, stuck_max: 8, total_max: None }
    }
}

/// How a remote is used.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Bounds of calls.
    pub limits: Limits,
    /// Bytes per second in both directions together.
    pub bandwidth: Option<NonZeroU64>,
    /// The remote that the store used before; None makes an empty place a remote.
    pub expected: Option<RemoteId>,
    /// The keys of a remote that is sealed.
    pub seal: Option<Seal>,
    /// What was seen of the manifests there, if it is not sealed.
    pub numbers: Arc<Numbers>,
    /// The store that the remote is for: a directory in a mount of it is refused, whenever it appears there.
    pub store: Option<PathBuf>,
}

/// A remote behind deadlines, a breaker and counters.
#[derive(Debug)]
pub struct Remote {
    inner: Arc<Inner>,
    reconnecting: Option<JoinHandle<()>>,
}

struct Inner {
    place: String,
    connector: Arc<dyn Connector>,
    options: Options,
    /// The end of [`Limits::total_max`].
    until: Option<Instant>,
    bucket: Arc<Bucket>,
    pool: Pool,
    health: Health,
    counters: Counters,
    /// Which remote it was when it first answered: an empty mountpoint is not taken for a new one.
    id: OnceLock<RemoteId>,
}

impl Remote {
    /// Starts to connect to a place, and returns at once.
    pub fn open(spec: &RemoteSpec, options: Options) -> io::Result<Remote> {
        // Variables that are no text are not meant for us.
        let text = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        let environment = std::env::vars_os().filter_map(text);
        let connector = match (spec, &options.store) {
            (RemoteSpec::Directory(path), Some(store)) => spec::directory_for(path, store),
            _ => spec.connector(environment),
        };
        Remote::with_connector(connector, options)
    }

    /// The same, to wherever a connector leads.
    pub fn with_connector(connector: Arc<dyn Connector>, options: Options) -> io::Result<Remote> {
        let Limits { threads_max, stuck_max, total_max, .. } = options.limits;
        let inner = Arc::new(Inner {
            place: connector.place(),
            connector,
            bucket: Arc::new(Bucket::limited_to(options.bandwidth)),
            pool: Pool::new(Bounds { threads_max, stuck_max }),
            health: Health::new(),
            counters: Counters::default(),
            id: options.expected.map(OnceLock::from).unwrap_or_default(),
            until: total_max.map(|longest| Instant::now() + longest),
            options,
        });
        let shared = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("kvfs-connect".to_owned());
        let reconnecting = Some(thread.spawn(move || shared.keep_connected())?);
        Ok(Remote { inner, reconnecting })
    }

    /// Whether it answers.
    pub fn state(&self) -> State {
        self.inner.health.state()
    }

    /// Whether the time for all calls ([`Limits::total_max`]) is over.
    pub fn is_late(&self) -> bool {
        self.inner.until.is_some_and(|until| until <= Instant::now())
    }

    /// Why the last transfer was given up as too slow, if it was. The remote may be up all the same.
    pub fn slow(&self) -> Option<RemoteError> {
        self.inner.health.slow()
    }

    /// Waits for the first answer or failure, for a start-up check; a timeout leaves it
    /// [`State::Connecting`].
    pub fn wait_for_answer(&self, patience: Duration) -> State {
        self.inner.health.wait_for_answer(patience)
    }

    /// Looks whether the place still is this remote. One that was emptied, or has something else in its place, is down
    /// from then on, until it is what it was.
    pub fn check_place(&self) -> Result<()> {
        let there = match self.head(RemoteName::Marker) {
            Ok(Some(_)) => {
                let seal = self.inner.options.seal.as_ref();
                Some(marker::check_id(self, seal.map(|seal| seal.keys.as_ref()))?)
            }
            Ok(None) => None,
            Err(error @ RemoteError::Foreign(_)) => {
                let error = RemoteError::Unreachable(error.text().into_owned());
                self.inner.health.lose(error.clone());
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        if there.is_some() && there == self.inner.id.get().copied() {
            return Ok(());
        }
        let what = if there.is_none() { "is gone" } else { "is that of another remote" };
        let error = RemoteError::Unreachable(format!(
            "remote {}: KVFS-REMOTE {what}: was the place emptied, or is something else mounted there?",
            self.inner.place
        ));
        self.inner.health.lose(error.clone());
        Err(error)
    }

    /// Whether what goes there is sealed.
    pub fn is_sealed(&self) -> bool {
        self.inner.options.seal.is_some()
    }

    /// What was seen of manifests there since the last time that somebody asked.
    pub fn take_numbers(&self) -> Vec<(StoreId, Sequence)> {
        self.inner.numbers().take_fresh()
    }

    /// A store is gone for good: nothing of it is expected there any more.
    pub fn forget_store(&self, store: StoreId) {
        self.inner.numbers().forget(store);
    }

    /// The limit on what goes there and comes from there, which may change.
    pub fn bandwidth(&self) -> &Bucket {
        &self.inner.bucket
    }

    /// What was asked of it.
    pub fn counters(&self) -> &Counters {
        &self.inner.counters
    }

    /// Threads in calls that were left behind.
    pub fn stuck_threads(&self) -> usize {
        self.inner.pool.stuck()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.inner.health.close();
        self.inner.pool.close();
        if let Some(thread) = self.reconnecting.take() {
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Inner").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Inner {
    fn keep_connected(&self) {
        let mut pause = PAUSE_MIN;
        while self.health.wait_until_down() {
            let outcome = self.connect();
            let is_up = outcome.is_ok();
            self.health.connected(outcome);
            if is_up {
                pause = PAUSE_MIN;
            } else {
                self.health.pause(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }

    fn connect(&self) -> Result<(Arc<dyn BlobStore>, RemoteId)> {
        let (connector, expected) = (Arc::clone(&self.connector), self.id.get().copied());
        let (counters, seal) = (self.counters.clone(), self.options.seal.clone());
        let answer = self.pool.call(&self.watch(), move || {
            let store = connector.connect(&counters)?;
            let keys = seal.as_ref().map(|seal| seal.keys.as_ref());
            let id = attach_sealed(store.as_ref(), expected, keys)?;
            Ok((store, id))
        });
        let (store, id) = answer.unwrap_or_else(|abandoned| Err(self.explain(abandoned)))?;
        let id = *self.id.get_or_init(|| id);
        let store: Arc<dyn BlobStore> = Arc::new(Throttled::new(store, Arc::clone(&self.bucket)));
        let store = match &self.options.seal {
            Some(seal) => Arc::new(Sealed::new(store, id, seal)),
            None => store,
        };
        Ok((store, id))
    }

    fn numbers(&self) -> &Numbers {
        self.options.seal.as_ref().map_or(&self.options.numbers, |seal| &seal.numbers)
    }

    fn watch(&self) -> Arc<Watch> {
        Watch::new(self.options.limits.quiet_max, self.until)
    }

    fn explain(&self, abandoned: Abandoned) -> RemoteError {
        let place = &self.place;
        match abandoned {
            Abandoned::Silent => RemoteError::Timeout(format!(
                "remote {place}: nothing happened for {} s",
                self.options.limits.quiet_max.as_secs_f32()
            )),
            Abandoned::Late => RemoteError::Timeout(format!(
                "remote {place}: not done within {} s",
                self.options.limits.total_max.unwrap_or_default().as_secs_f32()
            )),
            Abandoned::NoThread => RemoteError::Unreachable(format!(
                "remote {place}: no thread was free for the call: {} others were under way, {} more hang",
                self.pool.busy(),
                self.pool.stuck()
            )),
            Abandoned::Ended => RemoteError::Unreachable(format!("remote {place}: call ended")),
        }
    }

    /// One counted call on the connection.
    fn run<T: Send + 'static>(
        &self, operation: Operation, watch: &Arc<Watch>,
        work: impl FnOnce(&dyn BlobStore) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let start = Instant::now();
        let outcome = self.health.connection(&self.place).and_then(|connection| {
            let store = Arc::clone(&connection.store);
            let answer = self.pool.call(watch, move || work(store.as_ref()));
            // Only what the remote was asked tells something about it.
            let was_asked =
                !matches!(answer, Err(Abandoned::NoThread | Abandoned::Ended | Abandoned::Late));
            let outcome = answer.unwrap_or_else(|abandoned| Err(self.explain(abandoned)));
            if was_asked {
                self.health.record(&connection, &outcome);
            }
            outcome
        });
        self.counters.request(operation, &outcome, start.elapsed());
        outcome
    }
}

/// A source or sink that shows progress and counts what moves.
struct Watched<T> {
    inner: T,
    watch: Arc<Watch>,
    moved: IntCounter,
}

impl ReadAt for Watched<Arc<dyn ReadAt>> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let count = self.inner.read_at(buffer, offset)?;
        self.watch.tick();
        self.moved.inc_by(count as u64);
        Ok(count)
    }
}

impl WriteAt for Watched<Sink> {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.inner.write_all_at(bytes, offset)?;
        self.watch.tick();
        self.moved.inc_by(bytes.len() as u64);
        Ok(())
    }
}

impl BlobStore for Remote {
    fn place(&self) -> &str {
        &self.inner.place
    }

    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put> {
        let watch = self.inner.watch();
        let moved = self.inner.counters.moved(Direction::Out);
        let shown = Arc::clone(&watch);
        let source = source.through(|inner| Arc::new(Watched { inner, watch: shown, moved }));
        self.inner.run(Operation::Put, &watch, move |store| store.put(name, source, mode))
    }

    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64> {
        let watch = self.inner.watch();
        let moved = self.inner.counters.moved(Direction::In);
        let sink = Watched { inner: sink, watch: Arc::clone(&watch), moved };
        let sink = Arc::new(sink);
        let outcome =
            self.inner.run(Operation::Get, &watch, move |store| store.get(name, extent, sink));
        self.inner.health.record_transfer(&outcome);
        // A place that was emptied has nothing, which says nothing about what the remote has.
        if matches!(outcome, Err(RemoteError::Missing(_))) && name != RemoteName::Marker {
            self.check_place()?;
        }
        outcome
    }

    fn head(&self, name: RemoteName) -> Result<Option<Stat>> {
        let watch = self.inner.watch();
        self.inner.run(Operation::Head, &watch, move |store| store.head(name))
    }

    fn refresh(&self, name: RemoteName) -> Result<()> {
        let watch = self.inner.watch();
        self.inner.run(Operation::Refresh, &watch, move |store| store.refresh(name))
    }

    fn delete(&self, name: RemoteName) -> Result<()> {
        let watch = self.inner.watch();
        self.inner.run(Operation::Delete, &watch, move |store| store.delete(name))
    }

    fn delete_if_older(&self, name: RemoteName, than: SystemTime) -> Result<bool> {
        let watch = self.inner.watch();
        let work = move |store: &dyn BlobStore| store.delete_if_older(name, than);
        self.inner.run(Operation::Delete, &watch, work)
    }

    /// The longest there is while there is no connection to ask.
    fn settling(&self) -> Duration {
        let connection = self.inner.health.connection(&self.inner.place);
        connection.map_or(SETTLING, |connection| connection.store.settling())
    }

    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        let watch = self.inner.watch();
        self.inner.run(Operation::List, &watch, move |store| store.list(prefix, after))
    }

    fn listed_names(&self, name: RemoteName) -> Result<Vec<RemoteName>> {
        self.inner.health.connection(&self.inner.place)?.store.listed_names(name)
    }

    fn newest_seen(&self, store: StoreId) -> Option<Sequence> {
        // Where nothing is sealed, anybody can have made up a manifest of any number.
        self.is_sealed().then(|| self.inner.numbers().highest(store))?
    }

    fn manifests_seen(&self) -> Vec<(StoreId, Sequence)> {
        self.inner.numbers().all()
    }

    fn note_manifest(&self, store: StoreId, sequence: Sequence) {
        self.inner.numbers().note(store, sequence);
    }

    fn sweep(&self, older_than: SystemTime) -> Result<u64> {
        let watch = self.inner.watch();
        self.inner.run(Operation::Sweep, &watch, move |store| store.sweep(older_than))
    }

    fn is_vacant(&self) -> Result<bool> {
        let watch = self.inner.watch();
        self.inner.run(Operation::List, &watch, BlobStore::is_vacant)
    }
}
