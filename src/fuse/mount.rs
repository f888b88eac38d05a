//! The life of a mount: open the store, mount, serve, flush.

use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::bounded;
use fuser::INodeNo;

use super::background::{
    join, start, start_indexing, start_moving, start_prefetching, start_threads,
};
use super::connection::Connection;
use super::dispatch::Operations;
use super::shared::Shared;
use super::slow;
use crate::fs::rebuild::{self, RebuildError, RebuildFrom, Rebuilt};
use crate::fs::{AskAnew, FileSystem, FsError, Mover, OnCorrupt, Tiers, Verify};
use crate::observe::Observer;
use crate::store::{Store, StoreError};
use crate::tier::counters::Counters;
use crate::tier::encoded::EncodedCopies;
use crate::tier::encoding::ColdEncoding;
use crate::tier::exchange::Exchange;
use crate::tier::ram::{LetGo, RamTier};
use crate::tier::remote::hold::Grace;
use crate::tier::remote::names::Publisher;
use crate::tier::remote::seal::{KeyRing, Numbers, Seal};
use crate::tier::remote::{
    self, BlobStore, Remote, RemoteError, RemoteId, RemoteSpec, State, StoreId,
};
use crate::tier::ssd::SsdTier;

/// How long an unmount waits for a round of moving to end.
const MOVER_PATIENCE: Duration = Duration::from_secs(2);

/// How long a mount waits to hear that its keys fit. A remote that is down says so later, in the
/// status: the mount does not depend on it.
const KEY_PATIENCE: Duration = Duration::from_secs(3);

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

/// Whether the kernel shall read and write files itself.
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
pub struct MountOptions {
    /// The store's directory; made if it is missing or empty.
    pub store: PathBuf,
    /// Where to mount.
    pub mountpoint: PathBuf,
    /// Let other users in; their permissions are checked either way.
    pub allow_other: bool,
    /// Refuse changes.
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
    /// Bytes of objects that the store's disk should hold at most; `None` for no limit.
    pub ssd_bytes: Option<u64>,
    /// How cold objects are encoded, on the disk and in the remote.
    pub cold: ColdEncoding,
    /// Where objects go that the disk should not hold.
    pub remote: Option<RemoteOptions>,
    /// What becomes of files whose bytes cannot be had.
    pub on_corrupt: OnCorrupt,
    /// How often opens compare bytes with their checksum.
    pub verify: Verify,
    /// Threads that serve requests.
    pub threads: usize,
    /// The configuration as TOML, for `.kvfs/config`.
    pub config_text: String,
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
            ssd_bytes: None,
            cold: ColdEncoding::None,
            remote: None,
            on_corrupt: OnCorrupt::default(),
            verify: Verify::default(),
            threads: default_threads(Passthrough::Auto),
            config_text: String::new(),
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
    fn options(&self, expected: Option<RemoteId>, numbers: &Arc<Numbers>) -> remote::Options {
        let seal = |keys| Seal { keys: Arc::clone(keys), numbers: Arc::clone(numbers) };
        let (bandwidth, seal) = (self.bandwidth, self.keys.as_ref().map(seal));
        remote::Options { bandwidth, expected, seal, ..remote::Options::default() }
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
    /// A thread could not be started.
    Thread(io::Error),
    /// A new store could not take over the names that the remote has for it.
    Rebuild(RebuildError),
    /// The remote is sealed with other keys than are given.
    Key(RemoteError),
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
            MountError::Rebuild(error) => write!(formatter, "{error}"),
            MountError::Key(error) => write!(formatter, "{error}"),
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
    let mut store = Store::open_or_create(&options.store)?;
    let counters = Counters::default();
    if options.ram_bytes > 0 && !options.read_only {
        let ram = RamTier::open(options.ram_bytes, counters.clone()).map_err(MountError::Memory)?;
        store.ram = Some(Arc::new(ram));
    }
    let rebuilt = rebuild_if_new(options, &store)?;
    let observer = Arc::new(Observer::new());
    observer.describe(&options.mountpoint, &options.config_text);
    let (sender, invalidations) = bounded(INVALIDATIONS_MAX);
    let (mut file_system, recovered) = FileSystem::open(store, observer, sender)?;
    log::info!("opened the store {}: {recovered:?}", options.store.display());
    file_system.set_on_corrupt(options.on_corrupt);
    file_system.set_verify(options.verify);
    let mover = attach_tiers(options, &mut file_system, &counters, rebuilt)?;
    show_metrics(&file_system, &counters);
    let file_system = Arc::new(file_system);
    let shared = Arc::new(Shared::new(Arc::clone(&file_system), options.passthrough));
    let let_go = {
        let shared = Arc::downgrade(&shared);
        LetGo(Arc::new(move |inode| {
            shared.upgrade().is_none_or(|shared| shared.backings.let_go(inode))
        }))
    };
    if let Some(ram) = &file_system.store().ram {
        ram.on_eviction(let_go.clone());
    }
    file_system.on_leaving(let_go);
    // The operations hold the senders. They are dropped when the kernel has let the mount go, upon
    // which the slow threads end.
    let (sender, jobs) = bounded(slow::JOBS_MAX);
    let (fetch_sender, fetches) = bounded(slow::JOBS_MAX);
    let operations = Operations::new(Arc::clone(&shared), sender, fetch_sender);
    let connection = Connection::open(options, &shared, operations)?;

    let (stop, stopped) = bounded::<()>(0);
    let notifier = connection.notifier();
    let teller = notifier.clone();
    file_system.on_new_names(AskAnew(Box::new(move |directory| {
        // A directory that the kernel does not hold needs no telling.
        let _ = teller.inval_inode(INodeNo(directory.0), -1, 0);
    })));
    let threads = start_threads(options, &file_system, (notifier, invalidations), &stopped)?;
    let mut slow_threads = Vec::new();
    for number in 0..slow::THREADS {
        let jobs = jobs.clone();
        slow_threads.push(start(&format!("kvfs-slow-{number}"), move || slow::run(&jobs))?);
    }
    if file_system.tiers().is_some() {
        for number in 0..slow::FETCH_THREADS {
            let fetches = fetches.clone();
            start(&format!("kvfs-fetch-{number}"), move || slow::run(&fetches))?;
        }
    }
    start_prefetching(&file_system, counters, &stopped)?;
    start_indexing(options, &file_system, &stopped)?;
    let moving = mover.map(|mover| start_moving(&file_system, mover, &stopped)).transpose()?;
    let rings = connection.begin()?;
    ready();
    join(slow_threads);
    join(rings);
    file_system.stop_moving();
    drop(stop);
    join(threads);
    if let Some(done) = moving {
        // A call that hangs in the remote is left behind; it changes nothing any more.
        let _ = done.recv_timeout(MOVER_PATIENCE);
    }
    file_system.commit_and_close().map_err(MountError::Flush)?;
    log::info!("unmounted {}", options.mountpoint.display());
    Ok(())
}

fn show_metrics(file_system: &FileSystem, counters: &Counters) {
    let registry = file_system.observer().registry();
    if let Err(error) = file_system.retention_counters().register(registry) {
        log::error!("metrics of retention: {error}");
    }
    if let Err(error) = counters.register(registry) {
        log::error!("metrics of the tiers: {error}");
    }
}

/// [`take_over`], and what was seen of manifests, which the store that is made remembers.
fn rebuild_if_new(
    options: &MountOptions, store: &Store,
) -> Result<(Vec<StoreId>, Arc<Numbers>), MountError> {
    let numbers = Arc::new(Numbers::default());
    Ok((take_over(options, store, &numbers)?, numbers))
}

/// A new store takes over the names that the remote has for it. Returns the stores among which
/// nobody has chosen.
fn take_over(
    options: &MountOptions, store: &Store, numbers: &Arc<Numbers>,
) -> Result<Vec<StoreId>, MountError> {
    let wanted = options.remote.as_ref().filter(|_| !options.read_only);
    let Some(wanted) = wanted.filter(|wanted| wanted.rebuild_from != RebuildFrom::Nothing) else {
        return Ok(Vec::new());
    };
    if !rebuild::is_new(store)? {
        return Ok(Vec::new());
    }
    let remote_options = wanted.options(None, numbers);
    let remote = Remote::open(&wanted.place, remote_options).map_err(MountError::Thread)?;
    let outcome = rebuild::rebuild(store, &Arc::new(remote), wanted.rebuild_from);
    match outcome.map_err(MountError::Rebuild)? {
        Rebuilt::NotNeeded => Ok(Vec::new()),
        Rebuilt::From { store, files, left_out } => {
            log::info!("rebuilt from the names of store {store}: {files} files");
            if left_out > 0 {
                log::warn!("{left_out} files were left out: the remote does not have their bytes");
            }
            Ok(Vec::new())
        }
        Rebuilt::Several(stores) => {
            let ids: Vec<String> = stores.iter().map(ToString::to_string).collect();
            log::warn!(
                "the store starts empty: its remote has the names of several stores, choose with \
                 rebuild_from: {}",
                ids.join(" ")
            );
            Ok(stores)
        }
    }
}

/// Attaches the tiers below the raw files, if there are any, and returns what will move objects.
fn attach_tiers(
    options: &MountOptions, file_system: &mut FileSystem, counters: &Counters,
    (rebuild_candidates, numbers): (Vec<StoreId>, Arc<Numbers>),
) -> Result<Option<Mover>, MountError> {
    let has_encoded = file_system.has_encoded_copies().map_err(MountError::Flush)?;
    if options.remote.is_none() && options.cold == ColdEncoding::None && !has_encoded {
        return Ok(None);
    }
    let remote = options.remote.as_ref();
    let remote =
        remote.map(|wanted| connect(wanted, options.cold, file_system, &numbers)).transpose()?;
    let (exchange, publisher) = remote.unzip();
    let ssd = SsdTier::new(options.ssd_bytes);
    let encoded = EncodedCopies::new(options.cold, options.ssd_bytes);
    let mut tiers = Tiers::new(exchange, ssd, encoded, counters.clone());
    tiers.rebuild_candidates = rebuild_candidates;
    file_system.attach(tiers);
    Ok((!options.read_only).then(|| Mover::new(publisher)))
}

/// Connects to the remote, in the background.
fn connect(
    wanted: &RemoteOptions, cold: ColdEncoding, file_system: &FileSystem, numbers: &Arc<Numbers>,
) -> Result<(Exchange, Publisher), MountError> {
    let (id, expected) = file_system.remote_identity().map_err(MountError::Flush)?;
    let seen = file_system.manifests_seen().map_err(MountError::Flush)?;
    if wanted.keys.is_none() && !seen.is_empty() {
        // Whatever its marker says by now: nothing goes there in clear.
        return Err(MountError::Key(RemoteError::Key(format!(
            "remote {}: this store seals what it keeps there: give the file with the key \
             (--remote-key FILE)",
            wanted.place
        ))));
    }
    numbers.know(seen);
    let remote_options = wanted.options(expected, numbers);
    let remote = Remote::open(&wanted.place, remote_options).map_err(MountError::Thread)?;
    let remote = Arc::new(remote);
    if (expected.is_none() || wanted.keys.is_some())
        && let State::Down { error: error @ RemoteError::Key(_), .. } =
            remote.wait_for_answer(KEY_PATIENCE)
    {
        return Err(MountError::Key(error));
    }
    if let Err(error) = remote.counters().register(file_system.observer().registry()) {
        log::error!("metrics of the remote: {error}");
    }
    let store = Arc::clone(&remote) as Arc<dyn BlobStore>;
    let grace = Grace::default();
    Ok((Exchange::new(remote, grace, cold), Publisher::new(store, id, grace)))
}
