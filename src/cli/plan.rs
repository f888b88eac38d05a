//! `kvfs status --plan`: where the files below a path would come from if they were read now, how
//! long that would take, and what is left without the remote.
//!
//! It is a sum, not a simulation: what lies in a tier divided by the rate of the link that leads
//! from there. The rates of the remote and of decoding are those that the mount measured; the
//! others, and these before anything was moved, are assumed, and said to be.

use std::ffi::CStr;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use kvfs_os::mountinfo;
use serde_json::{Value, json};

use super::history::shown;
use super::output::{Failure, Outcome, Report, bytes};
use super::probe::status_value;
use super::status;
use super::subject::if_there;
use crate::sys;
use crate::tier::counters::Tier;

/// A mapped page of 2 MiB pages is copied at 22 GB/s, one of 4 KiB pages at 2.7 GB/s.
const RAM_BYTES_PER_SECOND: u64 = 5_000_000_000;
/// What a disk behind one queue of a small machine gives.
const SSD_BYTES_PER_SECOND: u64 = 1_000_000_000;
/// Pages of zstd:3, on one core.
const DECODING_BYTES_PER_SECOND: u64 = 500_000_000;
/// A network of 1 Gbit/s.
const REMOTE_BYTES_PER_SECOND: u64 = 100_000_000;

/// What a file's bytes come through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// They are in a tier as they are read, or come from the remote.
    Tier(Tier),
    /// The disk has them encoded.
    Decoding,
    /// Nowhere: no copy is left, or none that is what was written.
    Lost,
}

impl Source {
    pub(super) const ALL: [Source; 5] = [
        Source::Tier(Tier::Ram),
        Source::Tier(Tier::Ssd),
        Source::Decoding,
        Source::Tier(Tier::Remote),
        Source::Lost,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Source::Tier(tier) => tier.name(),
            Source::Decoding => "ssd_encoded",
            Source::Lost => "none",
        }
    }

    /// The word for its tier.
    fn tier(self) -> &'static str {
        match self {
            Source::Decoding => Tier::Ssd.name(),
            source => source.name(),
        }
    }

    /// The same for people.
    fn in_words(self) -> &'static str {
        match self {
            Source::Tier(Tier::Ram) => "in memory",
            Source::Tier(Tier::Ssd) => "on the disk",
            Source::Decoding => "on the disk, encoded",
            Source::Tier(Tier::Remote) => "only in the remote",
            Source::Lost => "nowhere: no good copy is left",
        }
    }

    /// Why a mount with this status cannot read what comes from there, if so.
    pub(super) fn hindrance(self, status: &str) -> Option<&'static str> {
        match self {
            Source::Tier(Tier::Remote) if status_value(status, "remote").is_none() => {
                Some("only a remote has it, and the mount has none")
            }
            Source::Tier(Tier::Remote) => {
                let state = status_value(status, "remote_state").unwrap_or_default();
                state.starts_with("down").then_some("only the remote has it, which is down")
            }
            Source::Lost => Some("no good copy is left"),
            Source::Tier(_) | Source::Decoding => None,
        }
    }

    /// Whether there is such a reason.
    fn is_out_of_reach(self, status: &str) -> bool {
        self.hindrance(status).is_some()
    }
}

/// One file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) path: PathBuf,
    pub(super) source: Source,
    pub(super) bytes: u64,
    /// What crosses the link.
    pub(super) stored_bytes: u64,
}

/// What comes from one source.
#[derive(Debug)]
pub(super) struct Link {
    source: Source,
    pub(super) files: u64,
    bytes: u64,
    stored_bytes: u64,
    /// What takes the time.
    timed_bytes: u64,
    rate: Rate,
}

/// How fast a link is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    bytes_per_second: u64,
    is_measured: bool,
}

impl Rate {
    /// Of the way from a source to whoever reads.
    fn of(source: Source, status: &str) -> Rate {
        let (key, assumed) = match source {
            Source::Tier(Tier::Ram) => (None, RAM_BYTES_PER_SECOND),
            Source::Tier(Tier::Ssd) | Source::Lost => (None, SSD_BYTES_PER_SECOND),
            Source::Decoding => (Some("decoding_bytes_per_second"), DECODING_BYTES_PER_SECOND),
            Source::Tier(Tier::Remote) => {
                (Some("remote_bytes_per_second"), REMOTE_BYTES_PER_SECOND)
            }
        };
        let measured = key.and_then(|key| status_value(status, key)?.parse().ok());
        let measured = measured.filter(|rate| *rate > 0);
        Rate { bytes_per_second: measured.unwrap_or(assumed), is_measured: measured.is_some() }
    }

    /// Of the way into a tier, which nobody measures.
    pub(super) fn written_to(tier: Tier) -> Rate {
        Rate::of(Source::Tier(tier), "")
    }
}

impl Link {
    /// What the files of a source need of a link of this rate, of each so many bytes.
    pub(super) fn new(
        source: Source, files: &[Planned], rate: Rate, timed: impl Fn(&Planned) -> u64,
    ) -> Link {
        let of_source = || files.iter().filter(|file| file.source == source);
        Link {
            source,
            files: of_source().count() as u64,
            bytes: of_source().map(|file| file.bytes).sum(),
            stored_bytes: of_source().map(|file| file.stored_bytes).sum(),
            timed_bytes: of_source().map(timed).sum(),
            rate,
        }
    }

    pub(super) fn seconds(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "an estimate of two digits")]
        let seconds = self.timed_bytes as f64 / self.rate.bytes_per_second as f64;
        seconds
    }

    /// A line for people.
    pub(super) fn line(&self) -> String {
        let kind = if self.rate.is_measured { "measured" } else { "assumed" };
        format!(
            "{}: {} files, {}, {} to move at {}/s ({kind}): {:.3} s\n",
            self.source.name(),
            self.files,
            bytes(self.bytes),
            bytes(self.stored_bytes),
            bytes(self.rate.bytes_per_second),
            self.seconds()
        )
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "from": self.source.name(),
            "files": self.files,
            "bytes": self.bytes,
            "moved_bytes": self.stored_bytes,
            "bytes_per_second": self.rate.bytes_per_second,
            "measured": self.rate.is_measured,
            "seconds": self.seconds(),
        })
    }
}

/// Prints the plan.
pub(crate) fn run(path: &Path, as_json: bool) -> Outcome {
    let (mount, path) = mountinfo::kvfs_above(path).map_err(Failure::Failed)?;
    let explain = |error: io::Error| Failure::Failed(format!("{}: {error}", shown(&path)));
    let status = status::read(&mount.mountpoint)?;
    let mut files = Vec::new();
    find(&path, &mut files).map_err(explain)?;
    let links = links(&files, &status);
    Ok(if as_json {
        Report::json(&to_json(&path, &files, &links, &status))
    } else {
        Report::text(to_text(&path, &files, &links, &status))
    })
}

/// Where the files at or below a path are and what reading them takes, for people and programs.
pub(super) fn places(path: &Path, status: &str) -> io::Result<(Vec<String>, Value)> {
    let mut files = Vec::new();
    find(path, &mut files)?;
    let links = links(&files, status);
    let in_words = |link: &Link| {
        let count =
            if link.files == 1 { "1 file".to_owned() } else { format!("{} files", link.files) };
        let place = format!("{}: {count}, {}", link.source.in_words(), bytes(link.bytes));
        if let Some(why) = link.source.hindrance(status) {
            return format!("{place}; it cannot be read now: {why}");
        }
        let kind = if link.rate.is_measured { "measured" } else { "assumed" };
        let moved = bytes(link.stored_bytes);
        format!(
            "{place}; reading moves {moved} in {:.3} s at a rate that is {kind}",
            link.seconds()
        )
    };
    let used = links.iter().filter(|link| link.files > 0);
    let text = used.map(in_words).collect();
    Ok((text, to_json(path, &files, &links, status)))
}

/// Adds the files at or below a path, in the order of their names.
fn find(path: &Path, files: &mut Vec<Planned>) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    if metadata.is_dir() {
        // What goes meanwhile is not there.
        let mut entries = Vec::new();
        for entry in if_there(path.read_dir())?.into_iter().flatten() {
            entries.extend(if_there(entry)?);
        }
        entries.sort_by_key(std::fs::DirEntry::file_name);
        return entries.iter().try_for_each(|entry| {
            if_there(find(&entry.path(), files)).map(Option::unwrap_or_default)
        });
    }
    if metadata.is_file() {
        files.push(Planned::of(path, metadata.len())?);
    }
    Ok(())
}

impl Planned {
    /// A regular file of so many bytes.
    pub(super) fn of(path: &Path, bytes: u64) -> io::Result<Planned> {
        let read = |name: &CStr| sys::extended_attribute(path, name);
        let source = match read(c"user.kvfs.tier")?.as_deref() {
            Some(b"ram") => Source::Tier(Tier::Ram),
            Some(b"remote") => Source::Tier(Tier::Remote),
            Some(b"none") => Source::Lost,
            _ => match read(c"user.kvfs.encoding")?.as_deref() {
                None | Some(b"raw") => Source::Tier(Tier::Ssd),
                Some(_) => Source::Decoding,
            },
        };
        let is_damaged = read(c"user.kvfs.damaged")?.is_some();
        let source = if is_damaged { Source::Lost } else { source };
        let stored = read(c"user.kvfs.stored_bytes")?.and_then(|text| String::from_utf8(text).ok());
        let stored_bytes = stored.and_then(|text| text.parse().ok()).unwrap_or(bytes);
        Ok(Planned { path: path.to_owned(), source, bytes, stored_bytes })
    }
}

/// What reading the files needs of each link.
pub(super) fn links(files: &[Planned], status: &str) -> Vec<Link> {
    let link = |source| {
        Link::new(source, files, Rate::of(source, status), |file| match source {
            // What takes the time is what comes out.
            Source::Decoding => file.bytes,
            Source::Tier(_) => file.stored_bytes,
            Source::Lost => 0,
        })
    };
    Source::ALL.map(link).into()
}

/// Files that a mount with this status cannot read. Files of a sequence are read in the order of their
/// paths: layer by layer.
fn unreadable<'a>(files: &'a [Planned], status: &'a str) -> impl Iterator<Item = &'a Planned> {
    files.iter().filter(|file| file.source.is_out_of_reach(status))
}

/// Files that it could not read without its remote, if it has one, beside those.
fn remote_only<'a>(files: &'a [Planned], status: &'a str) -> impl Iterator<Item = &'a Planned> {
    let is_remote = |file: &&Planned| file.source == Source::Tier(Tier::Remote);
    files.iter().filter(is_remote).filter(|file| !file.source.is_out_of_reach(status))
}

fn to_text(path: &Path, files: &[Planned], links: &[Link], status: &str) -> String {
    let mut text = format!("path: {}\nfiles: {}\n", shown(path), files.len());
    // Writing to a String cannot fail.
    let can_be_read = |link: &&Link| link.files > 0 && !link.source.is_out_of_reach(status);
    for link in links.iter().filter(can_be_read) {
        text.push_str(&link.line());
    }
    let seconds = expected_seconds(links, status);
    let _ = writeln!(text, "expected: {seconds:.3} s");
    let state = status_value(status, "remote_state").unwrap_or("none");
    let _ = writeln!(text, "remote: {state}");
    let relative = |file: &Planned| {
        let below = file.path.strip_prefix(path).unwrap_or(&file.path);
        if below.as_os_str().is_empty() { path.to_owned() } else { below.to_owned() }
    };
    if let Some(first) = unreadable(files, status).next() {
        let count = unreadable(files, status).count();
        let why = first.source.hindrance(status).unwrap_or_default();
        let _ = writeln!(
            text,
            "now: {count} files cannot be read (EIO), the first is {}: {why}",
            shown(&relative(first))
        );
    }
    match remote_only(files, status).next() {
        None if unreadable(files, status).next().is_some() => {}
        None => text.push_str("without the remote: everything can be read\n"),
        Some(first) => {
            let _ = writeln!(
                text,
                "without the remote: {} files cannot be opened (EIO, ETIMEDOUT), the first is {}",
                remote_only(files, status).count(),
                shown(&relative(first))
            );
        }
    }
    text
}

/// How long reading what can be read takes.
fn expected_seconds(links: &[Link], status: &str) -> f64 {
    let links = links.iter().filter(|link| !link.source.is_out_of_reach(status));
    links.map(Link::seconds).sum()
}

fn to_json(path: &Path, files: &[Planned], links: &[Link], status: &str) -> Value {
    let named = |path: &Path| path.display().to_string();
    let file = |file: &Planned| {
        json!({
            "path": named(&file.path),
            "tier": file.source.tier(),
            "bytes": file.bytes,
            "stored_bytes": file.stored_bytes,
        })
    };
    // Whatever the mount has now, these come from a remote.
    let without_remote = || files.iter().filter(|file| file.source == Source::Tier(Tier::Remote));
    json!({
        "path": named(path),
        "links": links.iter().map(Link::to_json).collect::<Vec<_>>(),
        "seconds": expected_seconds(links, status),
        "remote_state": status_value(status, "remote_state"),
        "unreadable": {
            "files": unreadable(files, status).count(),
            "first": unreadable(files, status).next().map(|file| named(&file.path)),
        },
        "without_remote": {
            "unreadable_files": without_remote().count(),
            "first": without_remote().next().map(|file| named(&file.path)),
        },
        "files": files.iter().map(file).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(path: &str, source: Source, bytes: u64, stored_bytes: u64) -> Planned {
        Planned { path: PathBuf::from(path), source, bytes, stored_bytes }
    }

    #[test]
    fn what_cannot_be_read_now_is_not_promised() {
        let remote = Source::Tier(Tier::Remote);
        let of = |status| remote.hindrance(status);
        assert_eq!(of("remote: /r\nremote_state: up\n"), None);
        assert_eq!(of("remote: /r\nremote_state: connecting\n"), None);
        let down = of("remote: /r\nremote_state: down: it hangs\n");
        assert_eq!(down, Some("only the remote has it, which is down"));
        assert_eq!(of(""), Some("only a remote has it, and the mount has none"));
        assert_eq!(Source::Lost.hindrance("remote: /r\n"), Some("no good copy is left"));
        assert_eq!(Source::Decoding.hindrance(""), None);
    }

    #[test]
    fn what_crosses_a_link_takes_its_time() {
        let files = [
            planned("/m/s/000/a", Source::Tier(Tier::Ssd), 1_000_000_000, 1_000_000_000),
            planned("/m/s/000/b", Source::Tier(Tier::Remote), 4_000_000, 2_000_000),
            planned("/m/s/001/a", Source::Tier(Tier::Remote), 4_000_000, 2_000_000),
        ];
        let status = "remote: /nas\nremote_state: up\nremote_bytes_per_second: 8000000\n";
        let plan = to_json(Path::new("/m/s"), &files, &links(&files, status), status);
        assert_eq!(plan["seconds"], json!(1.5));
        assert_eq!(plan["links"][3]["moved_bytes"], json!(4_000_000));
        assert_eq!(plan["links"][3]["measured"], json!(true));
        assert_eq!(plan["without_remote"], json!({ "unreadable_files": 2, "first": "/m/s/000/b" }));
        let status = "remote: /nas\n";
        let text = to_text(Path::new("/m/s"), &files, &links(&files, status), status);
        assert!(text.contains("(assumed): 0.040 s\nexpected: 1.040 s\n"), "{text}");
        assert!(text.ends_with("2 files cannot be opened (EIO, ETIMEDOUT), the first is 000/b\n"));
        let text = to_text(Path::new("/m/s"), &files, &links(&files, ""), "");
        let lines = "now: 2 files cannot be read (EIO), the first is 000/b: only a remote has it, \
                     and the mount has none\n";
        assert!(text.ends_with(lines) && text.contains("expected: 1.000 s"), "{text}");
        let text = to_text(Path::new("/m/s"), &files[..1], &links(&files[..1], ""), "");
        assert!(text.ends_with("without the remote: everything can be read\n"), "{text}");
    }

    #[test]
    fn decoding_takes_its_time_for_what_comes_out() {
        let file = planned("/m/s/000/a", Source::Decoding, 1_000_000, 100);
        let status = "decoding_bytes_per_second: 2000000\n";
        let plan = to_json(
            Path::new("/m/s"),
            std::slice::from_ref(&file),
            &links(std::slice::from_ref(&file), status),
            status,
        );
        assert_eq!((&plan["seconds"], &plan["files"][0]["tier"]), (&json!(0.5), &json!("ssd")));
        let link = &plan["links"][2];
        assert_eq!((&link["from"], &link["moved_bytes"]), (&json!("ssd_encoded"), &json!(100)));
        assert_eq!(plan["without_remote"], json!({ "unreadable_files": 0, "first": null }));
    }
}
