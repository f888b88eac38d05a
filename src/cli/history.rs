//! `kvfs log`: what a mount did to files without their users asking, from `.kvfs/events`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kvfs_os::mountinfo;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use super::output::{self, Failure, Outcome, Report, bytes};
use super::status;
use super::subject::{LOST, Subject};
use crate::page::{escaped_bytes, printable};

/// How often `--follow` looks for what is new.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Below the mountpoint.
pub(super) const EVENTS: &str = ".kvfs/events";
/// Reading from this place on gives all events, from behind it those with higher numbers.
pub(super) const AFTER: u64 = 1 << 62;

const LOG_HELP: &str = "\
Shown are files that a limit deleted, that were damaged, refused or quarantined, files whose bytes
moved between memory, disk and remote, and what failed: moves, uploads, fetches and commits; not what
programs remove or rename themselves. The store remembers some 100,000 events. Times are UTC. Only root and whoever mounted it may read them.

Example: kvfs log /mnt/kv/models/llama --follow";

/// `kvfs log`.
#[derive(Debug, Args)]
#[command(after_help = LOG_HELP)]
pub(crate) struct LogArguments {
    /// Wait for what happens next, until Ctrl-C
    #[arg(long, short = 'f')]
    pub follow: bool,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Only what happened to this file or below this directory, which may be gone by now [default:
    /// everything in the mount that the current directory is in, or in the only one]
    pub path: Option<PathBuf>,
}

/// One event, as the mount tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Event {
    pub(super) number: u64,
    pub(super) time: String,
    pub(super) what: String,
    pub(super) path: Option<String>,
    pub(super) inode: Option<u64>,
    pub(super) directory: Option<u64>,
    pub(super) reason: String,
    pub(super) files: u64,
    pub(super) bytes: Option<u64>,
    pub(super) used: Option<String>,
    pub(super) from_token: Option<u64>,
    pub(super) uses: Option<u64>,
}

impl Event {
    /// When, for people.
    pub(super) fn time(&self) -> String {
        seconds_of(&self.time)
    }

    /// Why, and how much.
    pub(super) fn why(&self) -> String {
        let mut details = Vec::new();
        details.extend(self.from_token.map(|token| format!("from token {token} on")));
        if self.files > 1 {
            let name = if self.what == LOST { "events" } else { "files" };
            details.push(format!("{} {name}", self.files));
        }
        details.extend(self.bytes.map(bytes));
        details.extend(self.uses.map(|uses| match uses {
            1 => "1 use".to_owned(),
            _ => format!("{uses} uses"),
        }));
        details.extend(self.used.as_deref().map(|used| format!("last used {}", seconds_of(used))));
        let reason = printable(self.reason.chars());
        if details.is_empty() {
            return reason;
        }
        format!("{reason} ({})", details.join(", "))
    }

    /// To what.
    pub(super) fn place(&self) -> String {
        match (&self.path, self.inode) {
            (Some(path), _) => printable(path.chars()),
            (None, Some(inode)) => format!("inode {inode}"),
            (None, None) => "-".to_owned(),
        }
    }

    /// A row of a table.
    pub(super) fn row(&self) -> String {
        format!("{}  {:<11}  {}  {}", self.time(), self.what, self.place(), self.why())
    }
}

/// A time without its fractions of a second.
fn seconds_of(time: &str) -> String {
    time.split('.').next().unwrap_or_default().replace('T', " ")
}

/// Prints what happened.
pub(crate) fn run(arguments: &LogArguments) -> Outcome {
    let subject = match &arguments.path {
        Some(path) => Subject::find(path)?,
        None => Subject::whole(&only_mount()?),
    };
    let mut events = Events::open(&subject.mountpoint)?;
    if arguments.follow {
        // Nobody can unmount what is somebody's current directory.
        std::env::set_current_dir("/").map_err(Failure::failed)?;
    }
    let mut out = BufWriter::new(io::stdout().lock());
    loop {
        let outcome = print_new(&mut events, &subject, arguments.json, &mut out);
        match outcome {
            // Whoever reads has seen enough.
            Err(Stop::Output(error)) if error.kind() == ErrorKind::BrokenPipe => break,
            Err(Stop::Output(error)) => {
                return Err(Failure::Failed(format!("standard output cannot be written: {error}")));
            }
            Err(Stop::Mount(failure)) => return Err(failure),
            Ok(()) => {}
        }
        if !arguments.follow {
            break;
        }
        events.close();
        if is_closed_within(&io::stdout(), LOOK_INTERVAL)? {
            break;
        }
        if events.go_on()?.is_none() {
            output::note(&format!("kvfs: {} was unmounted", shown(&subject.mountpoint)));
            break;
        }
    }
    Ok(Report::default())
}

/// Waits for so long, or until nobody can read any more what is written.
fn is_closed_within(output: &impl AsFd, time: Duration) -> Result<bool, Failure> {
    // Errors and the end are told whatever is asked for.
    let mut descriptors = [PollFd::new(output.as_fd(), PollFlags::empty())];
    let milliseconds = u16::try_from(time.as_millis()).unwrap_or(u16::MAX);
    match poll(&mut descriptors, milliseconds) {
        Ok(found) => Ok(found > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => Err(Failure::failed(errno)),
    }
}

/// Why nothing more is printed.
enum Stop {
    Output(io::Error),
    Mount(Failure),
}

fn print_new(
    events: &mut Events, subject: &Subject, json: bool, out: &mut impl Write,
) -> Result<(), Stop> {
    while let Some((event, line)) = events.next().map_err(Stop::Mount)? {
        if !subject.concerns(&event) {
            continue;
        }
        let line = if json { line } else { event.row() };
        writeln!(out, "{line}").map_err(Stop::Output)?;
    }
    out.flush().map_err(Stop::Output)
}

/// The mount that somebody means who names none.
fn only_mount() -> Result<PathBuf, Failure> {
    if let Ok((mount, _)) = mountinfo::kvfs_above(Path::new(".")) {
        return Ok(mount.mountpoint);
    }
    let mounts = mountinfo::read().map_err(Failure::failed)?;
    let mut kvfs = mounts.into_iter().filter(mountinfo::Mount::is_kvfs);
    match (kvfs.next(), kvfs.next()) {
        (Some(mount), None) => Ok(mount.mountpoint),
        (None, _) => Err(Failure::Failed("nothing is mounted: name a path in a mount".to_owned())),
        _ => Err(Failure::Usage("several stores are mounted: name a path in one".to_owned())),
    }
}

/// What a mount remembers, from the oldest on.
#[derive(Debug)]
pub(super) struct Events {
    mountpoint: PathBuf,
    /// Of the mount.
    device: u64,
    /// Of the event that was read last.
    number: u64,
    lines: Option<BufReader<File>>,
}

impl Events {
    pub(super) fn open(mountpoint: &Path) -> Result<Events, Failure> {
        // Says so where the daemon is gone or stuck.
        status::read(mountpoint)?;
        let open = || {
            let file = File::open(mountpoint.join(EVENTS))?;
            Ok((file.metadata()?.dev(), file))
        };
        let (device, file) = open().map_err(|error| explain(mountpoint, &error))?;
        let lines = Some(BufReader::new(file));
        Ok(Events { mountpoint: mountpoint.to_owned(), device, number: 0, lines })
    }

    /// Lets go of the mount, which could not be unmounted while something in it is open.
    fn close(&mut self) {
        self.lines = None;
    }

    /// Goes on after the event that was read last. `None` if that mount is there no more.
    fn go_on(&mut self) -> Result<Option<()>, Failure> {
        let open = || {
            let mut file = File::open(self.mountpoint.join(EVENTS))?;
            file.seek(SeekFrom::Start(AFTER + self.number))?;
            Ok((file.metadata()?.dev(), file))
        };
        match open() {
            Ok((device, file)) if device == self.device => self.lines = Some(BufReader::new(file)),
            Ok(_) => return Ok(None),
            Err(_) if !status::is_mounted(&self.mountpoint) => return Ok(None),
            Err(error) => return Err(explain(&self.mountpoint, &error)),
        }
        Ok(Some(()))
    }

    /// The next event and its line. `None` if there is none yet.
    pub(super) fn next(&mut self) -> Result<Option<(Event, String)>, Failure> {
        let mut line = String::new();
        let Some(lines) = &mut self.lines else { return Ok(None) };
        lines.read_line(&mut line).map_err(|error| explain(&self.mountpoint, &error))?;
        if line.is_empty() {
            return Ok(None);
        }
        line.truncate(line.trim_end().len());
        let event: Event = serde_json::from_str(&line).map_err(|error| {
            Failure::Failed(format!("{}: {line:?} is no event: {error}", shown(&self.mountpoint)))
        })?;
        self.number = event.number;
        Ok(Some((event, line)))
    }
}

fn explain(mountpoint: &Path, error: &io::Error) -> Failure {
    let place = shown(mountpoint);
    Failure::Failed(match error.raw_os_error() {
        Some(libc::EACCES) => {
            format!("{place}: only root and whoever mounted it may ask")
        }
        Some(libc::ENOENT | libc::EINVAL) => {
            format!("{place}: its daemon is of another version: mount the store again")
        }
        Some(errno) if crate::sys::is_daemon_gone(errno) => {
            format!("the daemon of {place} is gone: mount the store again, which clears it")
        }
        _ => format!("{place}: {error}"),
    })
}

/// A path for people.
pub(super) fn shown(path: &Path) -> String {
    escaped_bytes(path.as_os_str().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_in_words() {
        let line = r#"{"number":7,"time":"2026-11-25T02:41:09.123Z","what":"deleted","path":"models/m/sequences/a",
            "inode":4294967300,"reason":"models/m may hold 100 bytes","files":64,"bytes":4096,
            "used":"2026-11-24T00:00:00.000Z","from_token":2048,"uses":3,"later":1}"#;
        let event: Event = serde_json::from_str(line).unwrap();
        let expected = "2026-11-25 02:41:09  deleted      models/m/sequences/a  models/m may hold 100 bytes (from \
                        token 2048 on, 64 files, 4.0 KiB, 3 uses, last used 2026-11-24 00:00:00)";
        assert_eq!(event.row(), expected);
        let lost = Event { what: "events lost".to_owned(), files: 5, ..Event::default() };
        assert!(lost.row().ends_with("events lost  -   (5 events)"), "{}", lost.row());
        let moved = Event { inode: Some(9), reason: "room".to_owned(), ..Event::default() };
        assert!(moved.row().ends_with("inode 9  room"), "{}", moved.row());
    }

    #[test]
    fn a_row_is_one_line_that_controls_nothing() {
        let hostile = "files/\u{1b}[31m\u{202e}\\n\n".to_owned();
        let event = Event { path: Some(hostile.clone()), reason: hostile, ..Event::default() };
        let shown = "files/\\u{1b}[31m\\u{202e}\\n\\n";
        assert!(event.row().ends_with(&format!("{shown}  {shown}")), "{}", event.row());
    }

    #[test]
    fn whoever_reads_no_more_is_noticed_at_once() {
        let (reader, writer) = io::pipe().unwrap();
        assert!(!is_closed_within(&writer, Duration::from_millis(1)).unwrap());
        drop(reader);
        assert!(is_closed_within(&writer, Duration::from_secs(60)).unwrap());
        // A file on the disk can always be written.
        let file = tempfile::tempfile().unwrap();
        assert!(!is_closed_within(&file, Duration::from_millis(1)).unwrap());
    }
}
