//! `kvfs log`: what a mount did to files without their users asking, from `.kvfs/events`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kvfs_os::mountinfo;
use serde::Deserialize;

use super::output::{Failure, Outcome, Report, bytes};
use super::status;
use super::subject::Subject;

/// How often `--follow` looks for what is new.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

const LOG_HELP: &str = "\
Shown are files that a limit deleted, that were damaged, refused or quarantined, and files whose bytes
moved between memory, disk and remote; not what programs remove or rename themselves. The store
remembers some 100,000 events. Times are UTC. Only root and whoever mounted it may read them.

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
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Event {
    pub(super) time: String,
    pub(super) what: String,
    pub(super) path: Option<String>,
    pub(super) inode: Option<u64>,
    pub(super) reason: String,
    pub(super) files: u64,
    pub(super) bytes: Option<u64>,
    pub(super) used: Option<String>,
    pub(super) from_token: Option<u64>,
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
            let name = if self.what == "events lost" { "events" } else { "files" };
            details.push(format!("{} {name}", self.files));
        }
        details.extend(self.bytes.map(bytes));
        details.extend(self.used.as_deref().map(|used| format!("last used {}", seconds_of(used))));
        if details.is_empty() {
            return self.reason.clone();
        }
        format!("{} ({})", self.reason, details.join(", "))
    }

    /// A row of a table.
    pub(super) fn row(&self) -> String {
        let path = match (&self.path, self.inode) {
            (Some(path), _) => path.clone(),
            (None, Some(inode)) => format!("inode {inode}"),
            (None, None) => "-".to_owned(),
        };
        format!("{}  {:<11}  {path}  {}", self.time(), self.what, self.why())
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
            Ok(()) if arguments.follow => std::thread::sleep(LOOK_INTERVAL),
            Ok(()) => break,
        }
    }
    Ok(Report::default())
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
    lines: BufReader<File>,
    mountpoint: PathBuf,
}

impl Events {
    pub(super) fn open(mountpoint: &Path) -> Result<Events, Failure> {
        // Says so where the daemon is gone or stuck.
        status::read(mountpoint)?;
        let file = File::open(mountpoint.join(".kvfs/events"));
        let file = file.map_err(|error| explain(mountpoint, &error))?;
        Ok(Events { lines: BufReader::new(file), mountpoint: mountpoint.to_owned() })
    }

    /// The next event and its line. `None` if there is none yet.
    pub(super) fn next(&mut self) -> Result<Option<(Event, String)>, Failure> {
        let mut line = String::new();
        self.lines.read_line(&mut line).map_err(|error| explain(&self.mountpoint, &error))?;
        if line.is_empty() {
            return Ok(None);
        }
        line.truncate(line.trim_end().len());
        let event = serde_json::from_str(&line).map_err(|error| {
            Failure::Failed(format!("{}: {line:?} is no event: {error}", self.mountpoint.display()))
        })?;
        Ok(Some((event, line)))
    }
}

fn explain(mountpoint: &Path, error: &io::Error) -> Failure {
    let place = mountpoint.display();
    Failure::Failed(match error.raw_os_error() {
        Some(libc::EACCES) => {
            format!("{place}: only root and whoever mounted it may read what happened")
        }
        Some(libc::ENOENT) => {
            format!("{place}: its daemon is of a version without events: mount the store again")
        }
        Some(errno) if crate::sys::is_daemon_gone(errno) => {
            format!("the daemon of {place} is gone: mount the store again, which clears it")
        }
        _ => format!("{place}: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_in_words() {
        let line = r#"{"number":7,"time":"2026-11-25T02:41:09.123Z","what":"deleted","path":"models/m/sequences/a",
            "inode":4294967300,"reason":"models/m may hold 100 bytes","files":64,"bytes":4096,
            "used":"2026-11-24T00:00:00.000Z","from_token":2048,"later":1}"#;
        let event: Event = serde_json::from_str(line).unwrap();
        let expected = "2026-11-25 02:41:09  deleted      models/m/sequences/a  models/m may hold 100 bytes (from \
                        token 2048 on, 64 files, 4.0 KiB, last used 2026-11-24 00:00:00)";
        assert_eq!(event.row(), expected);
        let lost = Event { what: "events lost".to_owned(), files: 5, ..Event::default() };
        assert!(lost.row().ends_with("events lost  -   (5 events)"), "{}", lost.row());
        let moved = Event { inode: Some(9), reason: "room".to_owned(), ..Event::default() };
        assert!(moved.row().ends_with("inode 9  room"), "{}", moved.row());
    }
}
