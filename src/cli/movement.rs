//! `kvfs promote` and `kvfs evict`: move files between the tiers of the mount that they are in.
//!
//! Each file is asked for by setting its `user.kvfs.tier`. The daemon answers when the file is
//! nearer; a file that is to leave for the remote is only noted, so it is watched until it has
//! gone. Interrupting the command leaves what was asked for under way. With `--dry-run` nothing is asked for (`forecast`).

mod forecast;

use std::collections::{HashSet, VecDeque};
use std::ffi::CStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvfs_os::mountinfo;
use serde_json::{Value, json};

use super::arguments::{EvictArguments, EvictTo, PromoteArguments};
use super::output::{EXIT_FAILED, EXIT_OK, Failure, Outcome, Report, complain};
use super::probe::status_value;
use super::progress::{self, Scale};
use super::{status, sync};
use crate::page::names::MANIFEST;
use crate::sys;
use crate::tier::counters::Tier;
use forecast::Request;

const TIER: &CStr = c"user.kvfs.tier";
const ENCODING: &CStr = c"user.kvfs.encoding";
const PIN: &CStr = c"user.kvfs.pin";
const MOVING: &CStr = c"user.kvfs.moving";

/// Files asked for at a time: half of what the remote is asked at a time, the rest is for others.
const THREADS: usize = 4;
/// How long a file may stay in use, or the remote away, before it is given up: the release of a
/// file that was just closed takes milliseconds, a server that restarts some seconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often files that are to leave are looked at, and how many of them: a look is a system call.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
const LOOKS_MAX: usize = 512;

/// Brings files nearer: into memory where the mount has a RAM tier, else to the disk.
pub(crate) fn promote(arguments: &PromoteArguments) -> Outcome {
    let movement = &arguments.movement;
    let todo = Todo::find(&movement.paths)?;
    let to = if todo.has("ram_tier") { Tier::Ram } else { Tier::Ssd };
    if movement.dry_run {
        return forecast::tell(&todo, Request::Promote(to), movement.json);
    }
    let word = to.name().as_bytes();
    let bar = progress::bar("promoting", Scale::Bytes(todo.bytes()));
    // Before the first is opened: those behind it are fetched ahead then, and would count as there already.
    let before: Vec<io::Result<Spot>> =
        todo.files.iter().map(|file| Spot::of(&file.path)).collect();
    let done = ask_each(&todo, &bar, |index, file| {
        let was_in = |to: &[u8]| before[index].as_ref().is_ok_and(|spot| spot.is_raw_in(to));
        fetch(file)?;
        let to: &[u8] = match set_patiently(file, word) {
            // Memory is full of what is in use or pinned: the disk is next.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && to == Tier::Ram => {
                set_patiently(file, b"ssd")?;
                b"ssd"
            }
            outcome => outcome.map(|()| word)?,
        };
        // It may have left again by now, which is no reason to say that it never came.
        Ok(!was_in(to))
    });
    bar.finish_and_clear();
    if done.moved == 0 && done.failed.is_empty() {
        todo.check_can_promote()?;
    }
    Ok(report("promoted", &done, to, movement.json))
}

/// Moves files away: to the remote, or only out of memory.
pub(crate) fn evict(arguments: &EvictArguments) -> Outcome {
    let movement = &arguments.movement;
    let todo = Todo::find(&movement.paths)?;
    let to =
        arguments.to.unwrap_or(if todo.has("remote") { EvictTo::Remote } else { EvictTo::Ssd });
    let tier = todo.check_can_evict(to)?;
    if movement.dry_run {
        return forecast::tell(&todo, Request::Evict(tier), movement.json);
    }
    let bar = progress::bar("evicting", Scale::Bytes(todo.bytes()));
    let done = match to {
        EvictTo::Ssd => ask_each(&todo, &bar, |_, file| {
            let is_in_memory = Spot::of(file)?.tier == b"ram";
            if is_in_memory {
                set_patiently(file, b"ssd")?;
            }
            Ok(is_in_memory)
        }),
        EvictTo::Remote => evict_to_remote(&todo, &bar),
    };
    bar.finish_and_clear();
    Ok(report("evicted", &done, tier, movement.json))
}

fn evict_to_remote(todo: &Todo, bar: &ProgressBar) -> Done {
    let waiting = Mutex::new(Vec::new());
    let mut done = ask_each(todo, &ProgressBar::hidden(), |index, file| {
        let was_there = Spot::of(file)?.tier == b"remote";
        set_patiently(file, b"remote")?;
        if !was_there && let Ok(mut waiting) = waiting.lock() {
            waiting.push(Waiting { file: &todo.files[index], stuck: None });
        }
        Ok(!was_there)
    });
    for (file, why) in wait_until_gone(waiting.into_inner().unwrap_or_default(), bar) {
        done.moved -= 1;
        done.moved_bytes -= file.bytes;
        done.failed.push((file.path.clone(), why));
    }
    done
}

/// Where a file is, as the mount tells it.
#[derive(Debug)]
struct Spot {
    tier: Vec<u8>,
    encoding: Vec<u8>,
}

impl Spot {
    fn of(file: &Path) -> io::Result<Spot> {
        let read =
            |name| Ok::<_, io::Error>(sys::extended_attribute(file, name)?.unwrap_or_default());
        Ok(Spot { tier: read(TIER)?, encoding: read(ENCODING)? })
    }

    fn is_raw_in(&self, tier: &[u8]) -> bool {
        self.tier == tier && self.encoding == b"raw"
    }
}

/// What came of asking for files.
#[derive(Debug, Default)]
struct Done {
    moved: usize,
    moved_bytes: u64,
    /// Where they were wanted already.
    there: usize,
    failed: Vec<(PathBuf, String)>,
}

impl Done {
    fn add(&mut self, file: &Candidate, outcome: Result<bool, String>) {
        match outcome {
            Ok(true) => {
                self.moved += 1;
                self.moved_bytes += file.bytes;
            }
            Ok(false) => self.there += 1,
            Err(why) => self.failed.push((file.path.clone(), why)),
        }
    }
}

/// What to move, and what the mount says about itself.
struct Todo {
    files: Vec<Candidate>,
    status: String,
}

/// A file that somebody names.
struct Candidate {
    path: PathBuf,
    bytes: u64,
    /// In its mount.
    inode: u64,
}

impl Candidate {
    fn new(path: PathBuf, metadata: &Metadata) -> Candidate {
        Candidate { path, bytes: metadata.len(), inode: metadata.ino() }
    }
}

impl Todo {
    /// The files below paths of one mount.
    fn find(paths: &[PathBuf]) -> Result<Todo, Failure> {
        let (mut files, mut mountpoint) = (Vec::new(), None);
        for path in paths {
            let (mount, path) = mountinfo::kvfs_above(path).map_err(Failure::Failed)?;
            if mountpoint.get_or_insert_with(|| mount.mountpoint.clone()) != &mount.mountpoint {
                return Err(Failure::Usage("the paths are in different mounts".to_owned()));
            }
            let explain = |error| Failure::Failed(format!("{}: {error}", path.display()));
            collect(&path, &mut files).map_err(explain)?;
        }
        // A path may be named twice, and a file have two names: its bytes move once.
        let mut seen = HashSet::new();
        files.retain(|file| seen.insert(file.inode));
        let mountpoint = mountpoint.unwrap_or_default();
        if sync::is_read_only(&mountpoint) {
            let place = mountpoint.display();
            return Err(Failure::Failed(format!("{place} is mounted read-only: nothing moves")));
        }
        Ok(Todo { files, status: status::read(&mountpoint)? })
    }

    fn has(&self, key: &str) -> bool {
        status_value(&self.status, key).is_some()
    }

    fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Refuses where there is nowhere but the disk, where files are as they are read.
    fn check_can_promote(&self) -> Result<(), Failure> {
        if self.has("ram_tier") || self.has("ssd_used_bytes") {
            return Ok(());
        }
        Err(Failure::Failed(
            "the mount has one tier, its disk: nothing can be promoted (mount it with --ram)"
                .to_owned(),
        ))
    }

    /// The tier that files are to leave for, if the mount has what it takes.
    fn check_can_evict(&self, to: EvictTo) -> Result<Tier, Failure> {
        let line = match to {
            EvictTo::Ssd if self.has("ram_tier") => return Ok(Tier::Ssd),
            EvictTo::Remote if self.has("remote") => return Ok(Tier::Remote),
            EvictTo::Ssd if self.has("remote") => {
                "the mount has no RAM tier: mount it with --ram, or evict --to remote"
            }
            EvictTo::Ssd => {
                "the mount has neither a remote nor a RAM tier: nothing can be evicted (mount it with \
                 --remote or --ram)"
            }
            EvictTo::Remote => "the mount has no remote: mount it with --remote, or evict --to ssd",
        };
        Err(Failure::Failed(line.to_owned()))
    }
}

/// Adds a file, or the files below a directory that can move: links are not followed, and tails, token files, positions
/// and manifests stay on the disk.
fn collect(path: &Path, files: &mut Vec<Candidate>) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    if metadata.is_symlink() {
        return Err(io::Error::other("it is a symbolic link: name the file that it leads to"));
    }
    if !metadata.is_dir() {
        files.push(Candidate::new(path.to_owned(), &metadata));
        return Ok(());
    }
    let mut directories = vec![path.to_owned()];
    while let Some(directory) = directories.pop() {
        let mut entries: Vec<_> = directory.read_dir()?.collect::<io::Result<_>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let kind = entry.file_type()?;
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file() && entry.file_name() != MANIFEST && can_move(&entry.path()) {
                // What goes meanwhile does not move.
                files.extend(
                    entry.metadata().map(|metadata| Candidate::new(entry.path(), &metadata)),
                );
            }
        }
    }
    Ok(())
}

/// Rows are appended where they are. An attribute that cannot be read shows itself when it is set.
fn can_move(path: &Path) -> bool {
    use crate::page::names::{LayerEntry, POSITIONS, TOKENS, layer_entry, parse_layer};
    use std::os::unix::ffi::OsStrExt;
    let name = path.file_name().map_or(&b""[..], OsStrExt::as_bytes);
    let parent = path.parent().and_then(Path::file_name).map_or(&b""[..], OsStrExt::as_bytes);
    let is_tail = matches!(layer_entry(name), LayerEntry::Tail(_)) && parse_layer(parent).is_some();
    !is_tail && ![TOKENS, POSITIONS].map(str::as_bytes).contains(&name)
}

/// Calls `ask`, which says whether a file moved, with the number of each file and the file, on some threads.
fn ask_each(
    todo: &Todo, bar: &ProgressBar, ask: impl Fn(usize, &Path) -> io::Result<bool> + Sync,
) -> Done {
    let files = &todo.files;
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Done::default()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(files.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = files.get(index) else { break };
                    let outcome = ask(index, &file.path);
                    let outcome = outcome.map_err(|error| explain(todo, &file.path, &error));
                    if let Ok(mut done) = done.lock() {
                        done.add(file, outcome);
                    }
                    bar.inc(file.bytes);
                }
            });
        }
    });
    done.into_inner().unwrap_or_default()
}

/// Has the remote's copy brought here by opening the file. Setting the attribute does that as well, but with the file locked
/// in the kernel, and whoever then removes the file waits with its directory locked
/// (Documentation/filesystems/directory-locking.rst).
fn fetch(file: &Path) -> io::Result<()> {
    if sys::extended_attribute(file, TIER)?.as_deref() == Some(b"remote") {
        // Why it did not come, or may not be read, the attribute tells.
        drop(std::fs::File::open(file));
    }
    Ok(())
}

/// Asks for a tier. A file that is in use may have been closed a moment ago, and a daemon with too
/// many wishes grants some.
fn set_patiently(file: &Path, word: &[u8]) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match sys::set_extended_attribute(file, TIER, word) {
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN))
                    && start.elapsed() < PATIENCE =>
            {
                std::thread::sleep(LOOK_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

fn explain(todo: &Todo, file: &Path, error: &io::Error) -> String {
    let tier = || sys::extended_attribute(file, TIER).ok().flatten().unwrap_or_default();
    let is_pinned =
        || matches!(sys::extended_attribute(file, PIN), Ok(Some(value)) if value == b"1");
    match error.raw_os_error() {
        Some(libc::EBUSY) => "somebody has it open or mapped".to_owned(),
        Some(libc::EPERM) if is_pinned() => "it is pinned (user.kvfs.pin)".to_owned(),
        Some(libc::EOPNOTSUPP) => "files of this kind do not move, or not there".to_owned(),
        Some(libc::ENOSPC) => "there is no room".to_owned(),
        Some(libc::EIO) if !todo.has("remote") && tier() == b"remote" => {
            "only a remote has it, and the mount has none".to_owned()
        }
        Some(libc::EIO) if tier() == b"none" => "no copy of it is left".to_owned(),
        Some(libc::EFBIG) => "it is too large to move".to_owned(),
        Some(libc::EAGAIN) => "too many files wait already".to_owned(),
        _ => error.to_string(),
    }
}

/// A file that is to leave.
struct Waiting<'a> {
    file: &'a Candidate,
    /// Since when nothing but a user or the remote keeps it here.
    stuck: Option<Instant>,
}

/// Watches files until they have left.
fn wait_until_gone<'a>(files: Vec<Waiting<'a>>, bar: &ProgressBar) -> Vec<(&'a Candidate, String)> {
    bar.set_length(files.iter().map(|waiting| waiting.file.bytes).sum());
    let mut waiting = VecDeque::from(files);
    let mut failed = Vec::new();
    while !waiting.is_empty() {
        let mut changed = false;
        for _ in 0..waiting.len().min(LOOKS_MAX) {
            let Some(mut next) = waiting.pop_front() else { break };
            match look(&mut next) {
                Ok(false) => {
                    waiting.push_back(next);
                    continue;
                }
                Ok(true) => {}
                Err(why) => failed.push((next.file, why)),
            }
            changed = true;
            bar.inc(next.file.bytes);
        }
        if !changed {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
    failed
}

/// Whether a file has left, or why it does not.
fn look(waiting: &mut Waiting<'_>) -> Result<bool, String> {
    let file = &waiting.file.path;
    let read = |name| sys::extended_attribute(file, name).map_err(|error| error.to_string());
    // Looked at in this order, a file that leaves in between has left.
    let moving = read(MOVING)?;
    if read(TIER)?.as_deref() == Some(b"remote") {
        return Ok(true);
    }
    let why = match moving.as_deref() {
        None => return Err("it was changed meanwhile".to_owned()),
        Some(b"in_use") => "somebody has it open or mapped",
        Some(b"remote_down") => "the remote is down (kvfs status tells why)",
        Some(b"not_uploaded") => "it cannot be brought into the remote (kvfs status tells why)",
        Some(_) => {
            waiting.stuck = None;
            return Ok(false);
        }
    };
    if waiting.stuck.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
        return Ok(false);
    }
    // What is reported as not moved stays.
    let _ = sys::remove_extended_attribute(file, TIER);
    Err(why.to_owned())
}

fn report(word: &str, done: &Done, to: Tier, is_json: bool) -> Report {
    for (file, why) in &done.failed {
        complain("kvfs", &format!("{}: {why}", file.display()));
    }
    let files = if done.moved == 1 { "file" } else { "files" };
    let counted = |count: usize, what: &str| match count {
        0 => String::new(),
        count => format!(", {count} {what}"),
    };
    let there = counted(done.there, "were there already");
    let stay = counted(done.failed.len(), "did not move");
    let text = format!("{word} {} {files}{there}{stay}\n", done.moved);
    let failed = done.failed.iter().map(|(path, why)| unmoved(path, why));
    let value = json!({
        "dry_run": false,
        "to": to.name(),
        "moved_files": done.moved,
        "moved_bytes": done.moved_bytes,
        "there_files": done.there,
        "failed": failed.collect::<Vec<_>>(),
    });
    let exit = if done.failed.is_empty() { EXIT_OK } else { EXIT_FAILED };
    Report { exit, ..Report::answer(is_json, &value, text) }
}

/// A file that stays, for programs.
fn unmoved(path: &Path, why: &str) -> Value {
    json!({ "path": path.display().to_string(), "why": why })
}
