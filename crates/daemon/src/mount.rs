//! The life of a mount: open the store, mount, serve, flush.

use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};

use super::background::{join, start_indexing, start_moving, start_prefetching, start_threads};
use super::connection::Connection;
use super::dispatch::Operations;
use super::exchange::{self, Ending, Left};
use super::keeper::{Arming, Kept};
use super::metrics_address::{Listener, MetricsAddress};
use super::metrics_endpoint::MetricsEndpoint;
use super::pace::Paced;
use super::page::Page;
use super::remote::{self, NeedError};
use super::shared::Shared;
use super::slow;
use kvfs_fs::rebuild::{RebuildError, RebuildFrom};
use kvfs_fs::takeover::{Handover, Launch};
use kvfs_fs::{
    AskAnew, FileSystem, FsError, Invalidation, Mover, OnCorrupt, Steering, Verify, record_uses,
};
use kvfs_observe::Observer;
use kvfs_storage::store::packs::DEFAULT_PACKED_BYTES_MAX;
use kvfs_storage::store::{Store, StoreError};
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::encoding::ColdEncoding;
use kvfs_storage::tier::ram::{LetGo, RamTier};
use kvfs_storage::tier::remote::seal::{KeyRing, Seal};
use kvfs_storage::tier::remote::{self as far, Numbers, RemoteError, RemoteId, RemoteSpec};

/// How long an unmount waits for a round of moving to end.
const MOVER_PATIENCE: Duration = Duration::from_secs(2);

/// Names and inodes that wait to be invalidated. They come one or two per sealed page.
const INVALIDATIONS_MAX: usize = 4096;

/// Threads that serve requests. With passthrough one per two cores: the others are for clients, and
/// the kernel wakes threads in turn, each from a cold start (opening a page on two cores: 36 us with
/// one thread, 37-63 us with two). Without it they copy every byte.
pub fn default_threads(passthrough: Passthrough) -> usize {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    if passthrough == Passthrough::Auto && nix::unistd::geteuid().is_root() {
        (cores / 2).clamp(1, 4)
    } else {
        cores.clamp(2, 4)
    }
}

/// Whether the kernel is to read and write files itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Passthrough {
    /// If it can.
    #[default]
    Auto,
    /// No: the daemon serves every byte.
    Off,
}

/// What a mount needs.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the user")]
pub struct MountOptions {
    /// The store's directory; made if it is missing or empty.
    pub store: PathBuf,
    /// Where to mount.
    pub mountpoint: PathBuf,
    /// Let other users in; their permissions are checked either way.
    pub allow_other: bool,
    /// Refuse changes that clients ask for.
    pub read_only: bool,
    /// Whether the kernel reads and writes files itself.
    pub passthrough: Passthrough,
    /// Whether requests may come through `io_uring`, if the kernel can.
    pub io_uring: bool,
    /// Further options for the kernel: `noexec`, `noatime` and the like.
    pub kernel_options: Vec<String>,
    /// Longest time that a change which nobody syncs stays in memory.
    pub commit_interval: Duration,
    /// Budget of the RAM tier; 0 for none.
    pub ram_bytes: u64,
    /// Files of up to so many bytes are put into packs; 0 for none.
    pub packed_bytes_max: u64,
    /// Bytes of objects that the store's disk should hold at most; `None` for no limit.
    pub ssd_bytes: Option<u64>,
    /// Bytes that may be written to the disk in a day.
    pub ssd_writes_day_bytes: Option<u64>,
    /// How cold objects are encoded, on the disk and in the remote.
    pub cold: ColdEncoding,
    /// Where objects go that the disk should not hold.
    pub remote: Option<RemoteOptions>,
    /// Mount also without a remote that has what the store has not.
    pub offline: bool,
    /// What becomes of files whose bytes cannot be had.
    pub on_corrupt: OnCorrupt,
    /// How often opens compare bytes with their checksum.
    pub verify: Verify,
    /// Threads that serve requests.
    pub threads: usize,
    /// Where metrics are served over HTTP, beside `.kvfs/metrics`.
    pub metrics_address: Option<MetricsAddress>,
    /// Names by which that address may be asked, beside numbers and `localhost`.
    pub metrics_hosts: Vec<String>,
    /// What a browser is shown there.
    pub page: Option<Arc<dyn Page>>,
    /// Who knows these settings by name, and changes them while the mount is used.
    pub steering: Option<Arc<dyn Steering>>,
    /// How the program was called that makes the mount; without it, no other takes the mount over.
    pub launch: Option<Arc<Launch>>,
    /// Whether somebody has asked the mount to end.
    pub ending: Arc<Ending>,
    /// The keeper, which has another daemon go on if this one dies.
    pub keeper: Option<Arc<Kept>>,
}

impl MountOptions {
    /// The defaults.
    pub fn new(store: &Path, mountpoint: &Path) -> MountOptions {
        MountOptions {
            store: store.to_owned(),
            mountpoint: mountpoint.to_owned(),
            allow_other: false,
            read_only: false,
            passthrough: Passthrough::Auto,
            io_uring: true,
            kernel_options: Vec::new(),
            commit_interval: Duration::from_secs(1),
            ram_bytes: 0,
            packed_bytes_max: DEFAULT_PACKED_BYTES_MAX,
            ssd_bytes: None,
            ssd_writes_day_bytes: None,
            cold: ColdEncoding::None,
            remote: None,
            offline: false,
            on_corrupt: OnCorrupt::default(),
            verify: Verify::default(),
            threads: default_threads(Passthrough::Auto),
            metrics_address: None,
            metrics_hosts: Vec::new(),
            page: None,
            steering: None,
            launch: None,
            ending: Arc::default(),
            keeper: None,
        }
    }
}

/// The remote of a mount.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Where it is.
    pub place: RemoteSpec,
    /// The keys that seal what goes there.
    pub keys: Option<Arc<KeyRing>>,
    /// Bytes per second in both directions together.
    pub bandwidth: Option<NonZeroU64>,
    /// Whose names the store takes over if it is new.
    pub rebuild_from: RebuildFrom,
    /// How often the prefixes of the other stores are read; `None` for never.
    pub index_interval: Option<Duration>,
}

impl RemoteOptions {
    pub(super) fn options(
        &self, store: &Path, expected: Option<RemoteId>, numbers: &Arc<Numbers>,
    ) -> far::Options {
        let seal = |keys| Seal { keys: Arc::clone(keys), numbers: Arc::clone(numbers) };
        let (bandwidth, seal) = (self.bandwidth, self.keys.as_ref().map(seal));
        let store = Some(store.to_owned());
        let numbers = Arc::clone(numbers);
        far::Options { bandwidth, expected, seal, numbers, store, ..far::Options::default() }
    }
}

/// Why a mount could not be made or did not end well.
#[derive(Debug)]
pub enum MountError {
    /// The store cannot be used.
    Store(StoreError),
    /// The kernel did not mount.
    Mount(io::Error),
    /// There is no memory filesystem for the RAM tier.
    Memory(io::Error),
    /// The kernel did not take the rings that it was promised.
    Rings(io::Error),
    /// The address for metrics cannot be listened to; the line tells which.
    Metrics(String),
    /// A thread could not be started.
    Thread(io::Error),
    /// The remote that the store needs is not the one that was given, or none was.
    Need(NeedError),
    /// A new store could not take over the names that the remote has for it.
    Rebuild(RebuildError),
    /// The remote is sealed with other keys than are given.
    Key(RemoteError),
    /// What another daemon has left cannot be gone on with.
    Left(&'static str),
    /// The last changes could not be made durable.
    Flush(FsError),
}

impl std::fmt::Display for MountError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MountError::Store(error) => write!(formatter, "{error}"),
            MountError::Mount(error) => write!(formatter, "the kernel refused the mount: {error}"),
            MountError::Memory(error) => {
                write!(formatter, "the RAM tier could not be made: {error} (mount without --ram)")
            }
            MountError::Rings(error) => {
                write!(formatter, "FUSE over io_uring: {error} (mount with --no-io-uring)")
            }
            MountError::Thread(error) => write!(formatter, "no thread could be started: {error}"),
            MountError::Metrics(line) => formatter.write_str(line),
            MountError::Need(error) => write!(formatter, "{error}"),
            MountError::Rebuild(error) => write!(formatter, "{error}"),
            MountError::Key(error) => write!(formatter, "{error}"),
            MountError::Left(what) => write!(formatter, "the daemon before left no {what}"),
            MountError::Flush(error) => {
                write!(formatter, "the last changes could not be written: {error}")
            }
        }
    }
}

impl std::error::Error for MountError {}

impl From<StoreError> for MountError {
    fn from(error: StoreError) -> MountError {
        MountError::Store(error)
    }
}

/// Opens the store, mounts it, calls `ready`, serves until it is unmounted, and flushes.
pub fn serve(options: &MountOptions, ready: impl FnOnce()) -> Result<(), MountError> {
    serve_or_go_on(options, None, ready)
}

/// The same for a mount that another daemon has left: opens the store and goes on.
pub fn go_on(
    options: &MountOptions, left: Handover, ready: impl FnOnce(),
) -> Result<(), MountError> {
    serve_or_go_on(options, Some(left), ready)
}

fn serve_or_go_on(
    options: &MountOptions, left: Option<Handover>, ready: impl FnOnce(),
) -> Result<(), MountError> {
    kvfs_os::refuse_large_files();
    let listener = listen(options, left.is_some())?;
    let mut left = left.map(Left::new).transpose()?;
    let keeper = left.as_ref().map_or_else(|| Ok(options.keeper.clone()), Left::keeper)?;
    let counters = Counters::default();
    let (sender, invalidations) = bounded(INVALIDATIONS_MAX);
    let (file_system, mover) = open_file_system(options, &mut left, &counters, sender)?;
    let shared = Arc::new(Shared::new(Arc::clone(&file_system), options));
    let let_go = let_go(&shared);
    if let Some(ram) = &file_system.store().ram {
        ram.on_eviction(let_go.clone());
    }
    file_system.on_leaving(let_go);
    let room_in = Arc::clone(&file_system);
    let (paced, paced_threads) = Paced::start(Box::new(move || room_in.pacing().has_room()))?;
    paced.tell(file_system.observer());
    let (pools, queues) = slow::queues(paced);
    let operations = Operations::new(Arc::clone(&shared), pools);
    let connection = match &left {
        Some(left) => left.connect(options, &shared, operations)?,
        None => Connection::open(options, &shared, operations)?,
    };

    let (stop, stopped) = bounded::<()>(0);
    let notifier = connection.notifier();
    let (teller, silenced) = (notifier.clone(), notifier.clone());
    file_system.core.on_new_names(AskAnew(Box::new(move |directory| {
        // A directory that the kernel does not hold needs no telling.
        let _ = teller.forget_attributes(directory);
    })));
    let threads = start_threads(options, &file_system, (notifier, invalidations), &stopped)?;
    let slow_threads = queues.start(file_system.tiers().is_some(), file_system.observer())?;
    start_prefetching(&file_system, counters, &stopped)?;
    start_indexing(options, &file_system, &stopped)?;
    let moving = mover.map(|mover| start_moving(&file_system, mover, &stopped)).transpose()?;
    let endpoint =
        listener.map(|socket| MetricsEndpoint::start(socket, &file_system, options)).transpose()?;
    let exchanges = left.as_ref().map_or(0, Left::exchanges);
    let source = connection.source();
    let (begun, begins) = bounded::<()>(0);
    let goes_on = left.is_some().then_some(&stopped);
    let arming = Arming::prepare(options, keeper.as_ref(), (&shared, &source), exchanges, goes_on)?;
    let kept = (source, silenced);
    exchange::start(options, &shared, kept, keeper.as_ref(), exchanges, (begins, &stopped))?;
    let requests = connection.begin()?;
    drop(begun);
    exchange::note_served();
    left.iter().for_each(Left::tell);
    arming.map(|arming| arming.start(&stopped)).transpose()?;
    if let Some(keeper) = &keeper {
        keeper.ready();
    }
    ready();
    join(slow_threads);
    join(paced_threads);
    join(requests);
    if let Some(tiers) = file_system.tiers() {
        tiers.stop_moving(&file_system.core);
    }
    drop((stop, endpoint));
    join(threads);
    if let Some(done) = moving {
        // A call that hangs in the remote is left behind; it changes nothing any more.
        let _ = done.recv_timeout(MOVER_PATIENCE);
    }
    end(options, &file_system, keeper.as_deref())
}

/// Makes durable what is not, and lets go of the store.
fn end(
    options: &MountOptions, file_system: &FileSystem, keeper: Option<&Kept>,
) -> Result<(), MountError> {
    if !options.read_only {
        record_uses(file_system).map_err(MountError::Flush)?;
    }
    file_system.commit_and_close().map_err(MountError::Flush)?;
    if let Some(keeper) = keeper {
        keeper.end();
    }
    tell_end(options, file_system);
    Ok(())
}

/// Has the kernel let go of a backing file.
fn let_go(shared: &Arc<Shared>) -> LetGo {
    let shared = Arc::downgrade(shared);
    LetGo(Arc::new(move |inode| {
        shared.upgrade().is_none_or(|shared| shared.backings.let_go(inode))
    }))
}

/// The store of a mount, with what moves objects, if anything does.
fn open_file_system(
    options: &MountOptions, left: &mut Option<Left>, counters: &Counters,
    sender: Sender<Invalidation>,
) -> Result<(Arc<FileSystem>, Option<Mover>), MountError> {
    let mut store = match left.as_mut() {
        Some(left) => left.open_store(&options.store)?,
        None => Store::open_or_create(&options.store)?,
    };
    // What a rebuild sees of manifests is remembered by the store that it makes.
    let numbers = Arc::new(Numbers::default());
    if !options.read_only {
        store.check_writable()?;
    }
    let observer = Arc::new(Observer::new());
    if left.is_none() {
        remote::prepare(options, &store, &numbers, &observer)?;
    }
    store.ram = memory_tier(options, &store, counters, left.as_mut())?;
    store.packs.set_packed_bytes_max(options.packed_bytes_max);
    observer.describe(&options.mountpoint);
    let mut file_system = if let Some(left) = left.as_mut() {
        left.open(store, observer, sender)?
    } else {
        let (file_system, recovered) = FileSystem::open(store, observer, sender)?;
        log::info!("opened the store {}: {recovered}", options.store.display());
        file_system
    };
    file_system.choices.set(options.verify, options.on_corrupt);
    file_system.steer_by(options.steering.as_ref());
    let mover =
        remote::attach_tiers(options, &mut file_system, counters, &numbers, left.is_some())?;
    if let Some(left) = left {
        left.go_on_moving(&file_system)?;
    }
    show_metrics(&file_system, counters);
    Ok((Arc::new(file_system), mover))
}

/// Where metrics are asked for. A mount that goes on does so without them as well.
fn listen(options: &MountOptions, goes_on: bool) -> Result<Option<Listener>, MountError> {
    match options.metrics_address.as_ref().map(Listener::bind).transpose() {
        Err(error) if goes_on => {
            log::error!("no metrics are served from now on: {error}");
            Ok(None)
        }
        outcome => outcome,
    }
}

fn memory_tier(
    options: &MountOptions, store: &Store, counters: &Counters, left: Option<&mut Left>,
) -> Result<Option<Arc<RamTier>>, MountError> {
    // A budget of 0 leaves what cannot leave yet.
    if let Some(ram) = left.and_then(|left| left.open_ram(options.ram_bytes, counters)) {
        return Ok(Some(Arc::new(ram?)));
    }
    if options.ram_bytes == 0 {
        return Ok(None);
    }
    // What is encoded, or elsewhere, can be nowhere else on read-only media.
    if options.read_only && !store.is_read_only() {
        log::warn!(
            "ram is ignored: what is mounted read-only has no memory tier, since no page is written"
        );
        return Ok(None);
    }
    let ram = RamTier::open(options.ram_bytes, counters.clone()).map_err(MountError::Memory)?;
    Ok(Some(Arc::new(ram)))
}

fn tell_end(options: &MountOptions, file_system: &FileSystem) {
    log::info!("unmounted {}", options.mountpoint.display());
    if let Some((operation, held)) = file_system.observer().longest_held() {
        let name = operation.name();
        log::info!("the request that others waited for longest was {name}: {held:.1?}");
    }
}

fn show_metrics(file_system: &FileSystem, counters: &Counters) {
    let registry = file_system.observer().registry();
    if let Err(error) = file_system.retention.counters().register(registry) {
        log::error!("metrics of retention: {error}");
    }
    if let Err(error) = counters.register(registry) {
        log::error!("metrics of the tiers: {error}");
    }
}
