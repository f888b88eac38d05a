//! Threads of a mount that run beside the requests, until the mount ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};

use super::complaint::Complaint;
use super::mount::{MountError, MountOptions};
use super::notify::{Notifier, notify};
use kvfs_fs::{
    Ahead, FileSystem, Invalidation, Mover, PREFETCH_QUEUE_MAX, PREFETCH_THREADS, Retainer,
    ScrubRequest, check_records, look_at_known_damage, move_objects, refresh_foreign,
    remove_unfinished_saves, survey, sweep_after_crash,
};
use kvfs_storage::store::StoreError;
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::ram::{Shrunk, Wanted};

/// How often an idle prefetcher looks for pages that were fetched in vain.
const PREFETCH_TIDY: Duration = Duration::from_secs(5);

/// Between two steps of making the RAM tier smaller, for requests that need its lock.
const SHRINK_STEP_PAUSE: Duration = Duration::from_millis(1);

/// How often copies are asked whether they can leave by now that somebody had open, or that the disk did not have.
const SHRINK_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// How often it is looked whether a pack mostly holds what is not valid any more.
const COMPACT_EVERY: Duration = Duration::from_secs(1);

/// Between two packs, for whoever else uses the disk: copying one takes about as long.
const COMPACT_PAUSE: Duration = Duration::from_millis(100);

/// Between two steps of what was asked of a directory.
const ERRAND_PAUSE: Duration = Duration::from_millis(1);

/// After a failure of the disk.
const COMPACT_RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Moves objects to the remote until `stopped` is closed. The receiver hears of the end.
pub(super) fn start_moving(
    file_system: &Arc<FileSystem>, mut mover: Mover, stopped: &Receiver<()>,
) -> Result<Receiver<()>, MountError> {
    let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
    let (ended, done) = bounded(0);
    start("kvfs-mover", move || {
        let _ended: Sender<()> = ended;
        if let Err(error) = survey(&file_system) {
            log::error!("looking for files to move: {error}");
        }
        let mut pause = Duration::ZERO;
        while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            pause = move_objects(&file_system, &mut mover);
        }
    })?;
    Ok(done)
}

/// Fetches pages ahead until `stopped` is closed. The threads are not waited for: one may hang in
/// the remote.
pub(super) fn start_prefetching(
    file_system: &Arc<FileSystem>, counters: Counters, stopped: &Receiver<()>,
) -> Result<(), MountError> {
    let (queue, pages) = bounded(PREFETCH_QUEUE_MAX);
    file_system.prefetch.through(queue, counters);
    for number in 0..PREFETCH_THREADS {
        let (file_system, stopped, pages) =
            (Arc::clone(file_system), stopped.clone(), pages.clone());
        start(&format!("kvfs-ahead-{number}"), move || prefetch(&file_system, &pages, &stopped))?;
    }
    Ok(())
}

fn prefetch(file_system: &FileSystem, pages: &Receiver<Ahead>, stopped: &Receiver<()>) {
    loop {
        crossbeam_channel::select! {
            recv(stopped) -> _ => return,
            recv(pages) -> page => match page {
                Ok(page) => file_system.prefetcher().fetch(page),
                Err(_) => return,
            },
            default(PREFETCH_TIDY) => file_system.prefetch.forget_unused(),
        }
    }
}

/// Reads what other stores have published until `stopped` is closed. The thread is not waited for:
/// it may hang in the remote.
pub(super) fn start_indexing(
    options: &MountOptions, file_system: &Arc<FileSystem>, stopped: &Receiver<()>,
) -> Result<(), MountError> {
    let remote = options.remote.as_ref().filter(|_| !options.read_only);
    let Some(interval) = remote.and_then(|remote| remote.index_interval) else { return Ok(()) };
    let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
    start("kvfs-index", move || {
        let mut pause = Duration::ZERO;
        while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            pause = interval;
            if let Err(error) = refresh_foreign(&file_system) {
                log::info!("the prefixes of other stores stay as they were: {error}");
            }
        }
    })?;
    Ok(())
}

/// What runs beside the requests, until `stopped` is closed.
pub(super) fn start_threads(
    options: &MountOptions, file_system: &Arc<FileSystem>,
    (notifier, invalidations): (Notifier, Receiver<Invalidation>), stopped: &Receiver<()>,
) -> Result<Vec<JoinHandle<()>>, MountError> {
    let mut threads = vec![start("kvfs-notify", {
        let stopped = stopped.clone();
        move || notify(&notifier, &invalidations, &stopped)
    })?];
    threads.extend(start_shrinking(options, file_system, stopped)?);
    if !file_system.store().is_read_only() {
        threads.extend(start_changing(options, file_system, stopped)?);
    }
    Ok(threads)
}

/// What makes the RAM tier smaller when it is told to, if there is one.
fn start_shrinking(
    options: &MountOptions, file_system: &Arc<FileSystem>, stopped: &Receiver<()>,
) -> Result<Option<JoinHandle<()>>, MountError> {
    let Some(ram) = &file_system.store().ram else { return Ok(None) };
    let (wanted, requests) = bounded(1);
    ram.on_too_large(Wanted(Arc::new(move || {
        // Another request waits already otherwise.
        let _ = wanted.try_send(());
    })));
    let (ram, file_system, stopped) = (Arc::clone(ram), Arc::clone(file_system), stopped.clone());
    let may_commit = !options.read_only;
    let thread = start("kvfs-shrink", move || {
        let mut pause = None;
        loop {
            let timeout = pause.map_or_else(crossbeam_channel::never, crossbeam_channel::after);
            crossbeam_channel::select! {
                recv(stopped) -> _ => return,
                recv(requests) -> _ => {}
                recv(timeout) -> _ => {}
            }
            pause = match ram.shrink() {
                Shrunk::Fits => None,
                Shrunk::Freed => Some(SHRINK_STEP_PAUSE),
                Shrunk::Held => {
                    if may_commit && let Err(error) = kvfs_fs::make_all_durable(&file_system) {
                        log::debug!("the RAM tier stays too large: {error}");
                    }
                    Some(SHRINK_RETRY_PAUSE)
                }
            };
        }
    })?;
    Ok(Some(thread))
}

/// What changes the store, now and then.
fn start_changing(
    options: &MountOptions, file_system: &Arc<FileSystem>, stopped: &Receiver<()>,
) -> Result<Vec<JoinHandle<()>>, MountError> {
    Ok(vec![
        start("kvfs-commit", {
            let (file_system, interval) = (Arc::clone(file_system), options.commit_interval);
            let (wanted, requests) = bounded(1);
            file_system.pacing().ask_through(wanted);
            let stopped = stopped.clone();
            move || commit_regularly(&file_system, interval, (&requests, &stopped))
        })?,
        start("kvfs-spares", {
            let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
            let (wanted, requests) = bounded(1);
            file_system.core.keep_spares(wanted);
            move || while_asked(&requests, &stopped, || file_system.core.make_spares())
        })?,
        start("kvfs-remove", {
            let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
            let (wanted, requests) = bounded(1);
            kvfs_fs::remove_through(&file_system, wanted);
            move || while_asked(&requests, &stopped, || kvfs_fs::remove_discarded(&file_system))
        })?,
        start("kvfs-retain", {
            let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
            let read_only = options.read_only;
            move || retain(&file_system, &stopped, read_only)
        })?,
        start("kvfs-scrub", {
            let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
            // One scrub runs at a time, so there is never more than one request.
            let (wanted, requests) = bounded(1);
            file_system.scrubs.through(wanted);
            move || scrub(&file_system, &requests, &stopped)
        })?,
        start("kvfs-errands", {
            let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
            let (wanted, requests) = bounded(1);
            file_system.errands.wake_through(wanted);
            move || run_errands(&file_system, &requests, &stopped)
        })?,
        start("kvfs-compact", {
            let (file_system, stopped) = (Arc::clone(file_system), stopped.clone());
            move || compact(&file_system, &stopped)
        })?,
        start("kvfs-sweep", {
            let file_system = Arc::clone(file_system);
            let read_only = options.read_only;
            move || sweep(&file_system, read_only)
        })?,
    ])
}

pub(super) fn start(
    name: &str, run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, MountError> {
    let told = name.to_owned();
    let guarded = move || {
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            log::error!("{told} ended by a fault of kvfs; what it does waits for the next mount");
        }
    };
    thread::Builder::new().name(name.to_owned()).spawn(guarded).map_err(MountError::Thread)
}

pub(super) fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        if thread.join().is_err() {
            log::error!("a background thread panicked");
        }
    }
}

/// Commits after each interval, and whenever enough changes wait for it.
fn commit_regularly(
    file_system: &FileSystem, interval: Duration,
    (requests, stopped): (&Receiver<()>, &Receiver<()>),
) {
    let [mut indexing, mut committing] = <[Complaint; 2]>::default();
    loop {
        let is_asked_for = crossbeam_channel::select! {
            recv(stopped) -> _ => return,
            recv(requests) -> _ => true,
            default(interval) => false,
        };
        // Who asks waits for room, which indexing only takes.
        if !is_asked_for && let Some(why) = indexing.of(&file_system.indexer().update()) {
            log::error!("the index of prefixes falls behind: {why}");
        }
        kvfs_fs::take_waiting_events(&file_system.core);
        if let Some(why) = committing.of(&file_system.commit()) {
            log::error!("changes could not be made durable: {why}");
        }
        if let Some(ram) = &file_system.store().ram {
            ram.tidy();
        }
    }
}

/// Runs something whenever it is asked for.
fn while_asked(requests: &Receiver<()>, stopped: &Receiver<()>, run: impl Fn()) {
    loop {
        crossbeam_channel::select! {
            recv(stopped) -> _ => return,
            recv(requests) -> request => match request {
                Ok(()) => run(),
                Err(_) => return,
            },
        }
    }
}

fn scrub(file_system: &FileSystem, requests: &Receiver<ScrubRequest>, stopped: &Receiver<()>) {
    let is_over = || stopped.try_recv() == Err(TryRecvError::Disconnected);
    look_at_known_damage(file_system, &is_over);
    loop {
        crossbeam_channel::select! {
            recv(stopped) -> _ => return,
            recv(requests) -> request => match request {
                Ok(request) => kvfs_fs::scrub(file_system,&request, &is_over),
                Err(_) => return,
            },
        }
    }
}

/// Does what was asked of everything below directories.
fn run_errands(file_system: &FileSystem, requests: &Receiver<()>, stopped: &Receiver<()>) {
    loop {
        crossbeam_channel::select! {
            recv(stopped) -> _ => return,
            recv(requests) -> request => if request.is_err() { return },
        }
        while file_system.errands.step(file_system) {
            // Whoever else needs the state comes between two steps.
            if stopped.recv_timeout(ERRAND_PAUSE) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }
}

/// Takes room back from packs.
fn compact(file_system: &FileSystem, stopped: &Receiver<()>) {
    let mut pause = COMPACT_EVERY;
    while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        pause = match file_system.store().packs.compact() {
            Ok(true) => COMPACT_PAUSE,
            Ok(false) => COMPACT_EVERY,
            // Holes are made meanwhile, as soon as something is removed.
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => COMPACT_EVERY,
            Err(error) => {
                log::debug!("a pack keeps room for nothing: {error}");
                COMPACT_RETRY_PAUSE
            }
        };
    }
}

/// Removes what exceeds the limits of directories.
fn retain(file_system: &FileSystem, stopped: &Receiver<()>, read_only: bool) {
    if read_only {
        return;
    }
    if let Err(error) = file_system.retention.find_limits(&file_system.core) {
        log::error!("looking for limits of directories: {error}");
    }
    let mut retainer = Retainer::default();
    let mut pause = Duration::ZERO;
    while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        pause = kvfs_fs::retain(file_system, &mut retainer);
    }
}

fn sweep(file_system: &FileSystem, read_only: bool) {
    // Before anything is removed for want of a record.
    match check_records(file_system) {
        Ok(()) => {}
        // It was told.
        Err(StoreError::Corrupt(_)) => return,
        Err(error) => return log::error!("comparing the records with their digest: {error}"),
    }
    if let Err(error) = file_system.indexer().note_unindexed() {
        log::error!("looking for sequences without an index of prefixes: {error}");
    }
    if !read_only && let Err(error) = remove_unfinished_saves(file_system) {
        log::error!("removing what a crash left of slots that were being saved: {error}");
    }
    if let Err(error) = file_system.pins().find() {
        log::error!("looking for pinned files: {error}");
    }
    match sweep_after_crash(file_system) {
        Ok(0) => {}
        Ok(removed) => log::info!("removed {removed} object files that a crash had left"),
        Err(error) => log::warn!("looking for what a crash left: {error}"),
    }
}
