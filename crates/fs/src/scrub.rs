//! Scrubbing: everything that the disk holds is read and compared with its checksum before somebody
//! needs it, and what is damaged is mended from another copy while there is one.
//!
//! Whoever sets `user.kvfs.scrub` of a file or directory to `start` (or `start BYTES_PER_SECOND`) has
//! what is below it read; that of the root is the whole store. `stop` ends it. The attribute of the
//! root and `.kvfs/status` tell how far it is.
//!
//! | file | |
//! |---|---|
//! | `files` | which files are below a path |
//! | `last` | when all was read last, across mounts |
//! | `read` | a file past the page cache, and its checksum |
//! | `aside` | a thread for that, with what others leave of the processor |
//! | `mend` | one file: what is compared, and where good bytes come from |
//!
//! Files are read in the order in which they were made, several at a time; what reads and hashes
//! them runs at idle priority, what takes locks does not. Reading goes past the page cache: the cache may hold good bytes of a file that the disk has lost. Copies in
//! the remote are not read: it compares what it sends.

mod aside;
mod files;
mod last;
mod mend;
mod read;

use std::fmt::Write as _;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::Instant;

use crossbeam_channel::Sender;

use super::{FileSystem, FsError};
use crate::core::Core;
use aside::Aside;
use files::files_below;
use kvfs_observe::Gauges;
use kvfs_storage::store::record::{InodeId, ObjectId, Time};
use kvfs_storage::tier::remote::throttle::Bucket;
use last::LastScrub;
pub(crate) use last::SCRUBBED;
use mend::Mender;
use read::Reader;

/// Files that are read at a time. One after the other leaves the disk idle while its bytes are hashed.
const THREADS: usize = 4;

/// What to read.
#[derive(Clone, Copy, Debug)]
pub struct ScrubRequest {
    /// A file, or a directory with everything below it.
    below: InodeId,
    /// Bytes that are read per second at most.
    rate: Option<NonZeroU64>,
}

/// The scrub that is running, or what the last one found.
#[derive(Debug, Default)]
pub struct Scrub {
    progress: Mutex<Progress>,
    is_stopped: AtomicBool,
    way: OnceLock<Sender<ScrubRequest>>,
}

#[derive(Clone, Debug, Default)]
struct Progress {
    phase: Phase,
    started: Option<Instant>,
    seconds: u64,
    /// Files below the path.
    files: u64,
    /// Of them, those that were looked at.
    done: u64,
    bytes_read: u64,
    /// Without a checksum yet, or only in the remote and not known to be damaged.
    skipped: u64,
    damaged: u64,
    repaired: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Never,
    Running,
    Done,
    Stopped,
    Failed(String),
}

/// What became of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Sound,
    Skipped,
    Repaired,
    Damaged,
}

impl Scrub {
    pub(super) fn is_running(&self) -> bool {
        self.progress().phase == Phase::Running
    }

    /// Where requests go; [`FileSystem::scrub`] takes them.
    pub fn through(&self, way: Sender<ScrubRequest>) {
        let _ = self.way.set(way);
    }

    /// Starts or ends a scrub, as the value of the attribute says.
    pub(super) fn ask(&self, below: InodeId, value: &[u8]) -> Result<(), FsError> {
        if value == b"stop" {
            self.is_stopped.store(true, Ordering::Release);
            return Ok(());
        }
        let request = parse(below, value).ok_or(FsError::Invalid)?;
        let way = self.way.get().ok_or(FsError::Unsupported)?;
        {
            let mut progress = self.progress();
            if progress.phase == Phase::Running {
                return Err(FsError::InUse);
            }
            let started = Some(Instant::now());
            *progress = Progress { phase: Phase::Running, started, ..Progress::default() };
        }
        self.is_stopped.store(false, Ordering::Release);
        way.try_send(request).map_err(|_| FsError::InUse)
    }

    /// How far it is, as lines `key: value`.
    pub(super) fn report(&self) -> String {
        self.progress().report()
    }

    /// Lines of `.kvfs/status`; none as long as nobody has asked for a scrub, in this mount or one before.
    pub(super) fn tell(&self, core: &Core, text: &mut String) {
        let progress = self.progress().clone();
        if progress.phase != Phase::Never {
            text.push_str(&progress.report());
        }
        if let Some(last) = LastScrub::of(core) {
            text.push_str(&last.line());
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress {
    fn count(&mut self, found: Found, bytes: u64) {
        self.done += 1;
        self.bytes_read += bytes;
        self.skipped += u64::from(found == Found::Skipped);
        self.damaged += u64::from(matches!(found, Found::Repaired | Found::Damaged));
        self.repaired += u64::from(found == Found::Repaired);
    }

    fn report(&self) -> String {
        let phase = match &self.phase {
            Phase::Never => "never",
            Phase::Running => "running",
            Phase::Done => "done",
            Phase::Stopped => "stopped",
            Phase::Failed(why) => why,
        };
        let seconds = match self.started {
            Some(started) if self.phase == Phase::Running => started.elapsed().as_secs(),
            _ => self.seconds,
        };
        let mut text = format!("scrub: {phase}\n");
        for (key, value) in [
            ("scrub_seconds", seconds),
            ("scrub_files", self.files),
            ("scrub_files_done", self.done),
            ("scrub_files_skipped", self.skipped),
            ("scrub_bytes_read", self.bytes_read),
            ("scrub_damaged_files", self.damaged),
            ("scrub_repaired_files", self.repaired),
        ] {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{key}: {value}");
        }
        text
    }
}

/// Values of the scrub that is running, or of the last one of this mount; none as long as nobody has asked for one. And
/// how long ago all was read last.
pub(super) fn add_scrub(fs: &FileSystem, gauges: &mut Gauges) {
    if let Some(last) = LastScrub::of(&fs.core) {
        let age = last.age_seconds(Time::now());
        gauges.add("kvfs_scrub_age_seconds", "Time since a scrub of the whole store ended", age);
    }
    let progress = fs.scrubs.progress().clone();
    if progress.started.is_none() {
        return;
    }
    let is_running = progress.phase == Phase::Running;
    let mut add = |name, help, value| gauges.add(name, help, value);
    add("kvfs_scrub_running", "A scrub is running", u64::from(is_running));
    add("kvfs_scrub_files", "Files that it reads", progress.files);
    add("kvfs_scrub_files_done", "Files that it has looked at", progress.done);
    add("kvfs_scrub_damaged_files", "Files of them that were damaged", progress.damaged);
    add("kvfs_scrub_repaired_files", "Files of those that were mended", progress.repaired);
}

/// Reads what was asked for, until the end, until somebody stops it, or until the mount is over.
pub fn scrub(fs: &FileSystem, request: &ScrubRequest, is_over: &(dyn Fn() -> bool + Sync)) {
    let looked = fs.core.store.packs.look_for_lost().map_err(FsError::from);
    let found = looked.and_then(|()| files_below(&fs.core, request.below));
    let outcome = found.and_then(|files| {
        fs.scrubs.progress().files = files.len() as u64;
        scrub_files(fs, &files, request.rate, is_over)
    });
    if request.below == InodeId::ROOT && outcome.is_ok() {
        record_scrub(fs);
    }
    let mut progress = fs.scrubs.progress();
    progress.seconds = progress.started.map_or(0, |started| started.elapsed().as_secs());
    progress.phase = match outcome {
        Ok(()) if progress.done == progress.files => Phase::Done,
        Ok(()) => Phase::Stopped,
        Err(error) => {
            fs.core.observer.failed(&format!("the scrub ended: {error}"));
            Phase::Failed(format!("failed: {error}"))
        }
    };
}

fn scrub_files(
    fs: &FileSystem, files: &[(ObjectId, InodeId)], rate: Option<NonZeroU64>,
    is_over: &(dyn Fn() -> bool + Sync),
) -> Result<(), FsError> {
    let todo = &Mutex::new(files.iter());
    let bucket = rate.map(Bucket::new);
    let is_stopped: &(dyn Fn() -> bool + Sync) =
        &|| is_over() || fs.scrubs.is_stopped.load(Ordering::Acquire);
    std::thread::scope(|scope| {
        let start = || {
            let reader = Aside::start(scope, Reader::new(bucket.as_ref(), is_stopped)?)?;
            let work = move || scrub_some(fs, todo, reader, is_stopped);
            Builder::new().spawn_scoped(scope, work)
        };
        // Where there are no more threads or memory, fewer do it.
        let first = start()?;
        let others = (1..THREADS).map_while(|_| start().ok());
        let threads: Vec<_> = std::iter::once(first).chain(others).collect();
        let ended = threads.into_iter().map(|thread| {
            let panicked = |_| Err(std::io::Error::other("a scrub panicked").into());
            thread.join().unwrap_or_else(panicked)
        });
        // All of them are waited for, whatever became of the first.
        ended.fold(Ok(()), Result::and)
    })
}

/// A scrub of everything has ended, unless somebody has stopped it: that goes on record where it may be written to.
fn record_scrub(fs: &FileSystem) {
    let Progress { files, done, skipped, damaged, repaired, .. } = fs.scrubs.progress().clone();
    if done < files {
        return;
    }
    let last = LastScrub { ended: Time::now().seconds, files, skipped, damaged, repaired };
    match last.record(&fs.core) {
        Ok(()) | Err(FsError::ReadOnly) => {}
        Err(error) => fs.core.observer.failed(&format!("a scrub has no record: {error}")),
    }
}

/// Compares again what an earlier mount has found damaged, and may be mended by now.
pub fn look_at_known_damage(fs: &FileSystem, is_over: &(dyn Fn() -> bool + Sync)) {
    let known: Vec<_> = fs.core.state().known_damage.iter().map(|(id, of)| (*of, *id)).collect();
    if known.is_empty() {
        return;
    }
    let looked = std::thread::scope(|scope| {
        let mut reader = Aside::start(scope, Reader::new(None, is_over)?)?;
        for (object, id) in known {
            let found = Mender::of(fs).scrub_file(id, object, &mut reader)?;
            if found != Found::Skipped && !is_over() {
                fs.residency().note_damage(id, object, found == Found::Damaged);
            }
        }
        Ok::<_, FsError>(())
    });
    if let Err(error) = looked {
        log::warn!("files that were damaged are not looked at again: {error}");
    }
}

/// Compares files until there are no more.
fn scrub_some<'a>(
    fs: &'a FileSystem, todo: &Mutex<std::slice::Iter<'_, (ObjectId, InodeId)>>,
    mut reader: Aside<'a>, is_stopped: &(dyn Fn() -> bool + Sync),
) -> Result<(), FsError> {
    while let Some(&(object, id)) = next(todo).filter(|_| !is_stopped()) {
        let found = match Mender::of(fs).scrub_file(id, object, &mut reader)? {
            // Nothing was read, but somebody who opened it found out.
            Found::Skipped if fs.core.state().is_known_damaged(id) => Found::Damaged,
            found => found,
        };
        if found != Found::Skipped {
            fs.residency().note_damage(id, object, found == Found::Damaged);
        }
        if is_stopped() {
            break;
        }
        fs.scrubs.progress().count(found, reader.take_count());
    }
    Ok(())
}

fn next<'a>(
    todo: &Mutex<std::slice::Iter<'a, (ObjectId, InodeId)>>,
) -> Option<&'a (ObjectId, InodeId)> {
    todo.lock().unwrap_or_else(PoisonError::into_inner).next()
}

/// `start`, or `start` and bytes per second.
fn parse(below: InodeId, value: &[u8]) -> Option<ScrubRequest> {
    let mut words = std::str::from_utf8(value).ok()?.split(' ');
    let is_start = words.next() == Some("start");
    let rate = words.next().map(str::parse::<NonZeroU64>).transpose().ok()?;
    (is_start && words.next().is_none()).then_some(ScrubRequest { below, rate })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for() {
        fn check(value: &str, expected: Option<u64>) {
            let request = parse(InodeId::ROOT, value.as_bytes());
            let rate = request.map(|request| request.rate.map_or(u64::MAX, NonZeroU64::get));
            assert_eq!(rate, expected, "{value:?}");
        }
        check("start", Some(u64::MAX));
        check("start 1048576", Some(1 << 20));
        check("start 0", None);
        check("start 1 2", None);
        check("start fast", None);
        check("begin", None);
        check("", None);
    }

    #[test]
    fn what_is_told() {
        let mut progress = Progress { phase: Phase::Done, files: 3, ..Progress::default() };
        progress.count(Found::Sound, 10);
        progress.count(Found::Repaired, 20);
        progress.count(Found::Damaged, 30);
        let text = progress.report();
        for line in [
            "scrub: done",
            "scrub_files: 3",
            "scrub_files_done: 3",
            "scrub_bytes_read: 60",
            "scrub_damaged_files: 2",
            "scrub_repaired_files: 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
        }
    }
}
