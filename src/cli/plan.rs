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

use serde_json::{Value, json};

use super::output::{Failure, Outcome, Report, bytes};
use super::probe::status_value;
use super::{mountinfo, status};
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
enum Source {
    /// They are in a tier as they are read, or come from the remote.
    Tier(Tier),
    /// The disk has them encoded.
    Decoding,
}

impl Source {
    const ALL: [Source; 4] = [
        Source::Tier(Tier::Ram),
        Source::Tier(Tier::Ssd),
        Source::Decoding,
        Source::Tier(Tier::Remote),
    ];

    fn name(self) -> &'static str {
        match self {
            Source::Tier(tier) => tier.name(),
            Source::Decoding => "ssd_encoded",
        }
    }

    fn tier(self) -> Tier {
        match self {
            Source::Tier(tier) => tier,
            Source::Decoding => Tier::Ssd,
        }
    }
}

/// One file.
#[derive(Debug, PartialEq, Eq)]
struct Planned {
    path: PathBuf,
    source: Source,
    bytes: u64,
    /// What crosses the link.
    stored_bytes: u64,
}

/// What comes from one source.
#[derive(Debug)]
struct Link {
    source: Source,
    files: u64,
    bytes: u64,
    stored_bytes: u64,
    bytes_per_second: u64,
    is_measured: bool,
}

impl Link {
    fn seconds(&self) -> f64 {
        let bytes = match self.source {
            // What takes the time is what comes out.
            Source::Decoding => self.bytes,
            Source::Tier(_) => self.stored_bytes,
        };
        #[expect(clippy::cast_precision_loss, reason = "an estimate of two digits")]
        let seconds = bytes as f64 / self.bytes_per_second as f64;
        seconds
    }
}

/// Prints the plan.
pub(crate) fn run(path: &Path, as_json: bool) -> Outcome {
    let (mount, path) = mountinfo::kvfs_above(path).map_err(Failure::Failed)?;
    let explain = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
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

/// Adds the files at or below a path, in the order of their names.
fn find(path: &Path, files: &mut Vec<Planned>) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    if metadata.is_dir() {
        let mut entries: Vec<_> = path.read_dir()?.collect::<io::Result<_>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        return entries.iter().try_for_each(|entry| find(&entry.path(), files));
    }
    if !metadata.is_file() {
        return Ok(());
    }
    let read = |name: &CStr| sys::extended_attribute(path, name);
    let source = match read(c"user.kvfs.tier")?.as_deref() {
        Some(b"ram") => Source::Tier(Tier::Ram),
        Some(b"remote") => Source::Tier(Tier::Remote),
        _ => match read(c"user.kvfs.encoding")?.as_deref() {
            None | Some(b"raw") => Source::Tier(Tier::Ssd),
            Some(_) => Source::Decoding,
        },
    };
    let stored = read(c"user.kvfs.stored_bytes")?.and_then(|text| String::from_utf8(text).ok());
    let stored_bytes = stored.and_then(|text| text.parse().ok()).unwrap_or(metadata.len());
    files.push(Planned { path: path.to_owned(), source, bytes: metadata.len(), stored_bytes });
    Ok(())
}

fn links(files: &[Planned], status: &str) -> Vec<Link> {
    let measured = |key| {
        let rate: Option<u64> = status_value(status, key).and_then(|text| text.parse().ok());
        rate.filter(|rate| *rate > 0)
    };
    let link = |source| {
        let (rate, assumed) = match source {
            Source::Tier(Tier::Ram) => (None, RAM_BYTES_PER_SECOND),
            Source::Tier(Tier::Ssd) => (None, SSD_BYTES_PER_SECOND),
            Source::Decoding => (measured("decoding_bytes_per_second"), DECODING_BYTES_PER_SECOND),
            Source::Tier(Tier::Remote) => {
                (measured("remote_bytes_per_second"), REMOTE_BYTES_PER_SECOND)
            }
        };
        let of_source = || files.iter().filter(move |file| file.source == source);
        Link {
            source,
            files: of_source().count() as u64,
            bytes: of_source().map(|file| file.bytes).sum(),
            stored_bytes: of_source().map(|file| file.stored_bytes).sum(),
            bytes_per_second: rate.unwrap_or(assumed),
            is_measured: rate.is_some(),
        }
    };
    Source::ALL.map(link).into()
}

/// Two files of a sequence are read in the order of their paths: layer by layer.
fn first_missing(files: &[Planned]) -> Option<&Path> {
    files.iter().find(|file| file.source.tier() == Tier::Remote).map(|file| file.path.as_path())
}

fn to_text(path: &Path, files: &[Planned], links: &[Link], status: &str) -> String {
    let mut text = format!("path: {}\nfiles: {}\n", path.display(), files.len());
    // Writing to a String cannot fail.
    for link in links.iter().filter(|link| link.files > 0) {
        let kind = if link.is_measured { "measured" } else { "assumed" };
        let _ = writeln!(
            text,
            "{}: {} files, {}, {} to move at {}/s ({kind}): {:.3} s",
            link.source.name(),
            link.files,
            bytes(link.bytes),
            bytes(link.stored_bytes),
            bytes(link.bytes_per_second),
            link.seconds()
        );
    }
    let seconds: f64 = links.iter().map(Link::seconds).sum();
    let _ = writeln!(text, "expected: {seconds:.3} s");
    let state = status_value(status, "remote_state").unwrap_or("none");
    let _ = writeln!(text, "remote: {state}");
    match first_missing(files) {
        None => text.push_str("without the remote: everything can be read\n"),
        Some(missing) => {
            let missing = missing.strip_prefix(path).unwrap_or(missing);
            let missing = if missing.as_os_str().is_empty() { path } else { missing };
            let remote = links.iter().find(|link| link.source.tier() == Tier::Remote);
            let _ = writeln!(
                text,
                "without the remote: {} files cannot be opened (EIO, ETIMEDOUT), the first is {}",
                remote.map_or(0, |link| link.files),
                missing.display()
            );
        }
    }
    text
}

fn to_json(path: &Path, files: &[Planned], links: &[Link], status: &str) -> Value {
    let shown = |path: &Path| path.display().to_string();
    let link = |link: &Link| {
        json!({
            "from": link.source.name(),
            "files": link.files,
            "bytes": link.bytes,
            "moved_bytes": link.stored_bytes,
            "bytes_per_second": link.bytes_per_second,
            "measured": link.is_measured,
            "seconds": link.seconds(),
        })
    };
    let file = |file: &Planned| {
        json!({
            "path": shown(&file.path),
            "tier": file.source.tier().name(),
            "bytes": file.bytes,
            "stored_bytes": file.stored_bytes,
        })
    };
    json!({
        "path": shown(path),
        "links": links.iter().map(link).collect::<Vec<_>>(),
        "seconds": links.iter().map(Link::seconds).sum::<f64>(),
        "remote_state": status_value(status, "remote_state"),
        "without_remote": {
            "unreadable_files": files.iter().filter(|f| f.source.tier() == Tier::Remote).count(),
            "first": first_missing(files).map(shown),
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
    fn what_crosses_a_link_takes_its_time() {
        let files = [
            planned("/m/s/000/a", Source::Tier(Tier::Ssd), 1_000_000_000, 1_000_000_000),
            planned("/m/s/000/b", Source::Tier(Tier::Remote), 4_000_000, 2_000_000),
            planned("/m/s/001/a", Source::Tier(Tier::Remote), 4_000_000, 2_000_000),
        ];
        let status = "remote_state: up\nremote_bytes_per_second: 8000000\n";
        let plan = to_json(Path::new("/m/s"), &files, &links(&files, status), status);
        assert_eq!(plan["seconds"], json!(1.5));
        assert_eq!(plan["links"][3]["moved_bytes"], json!(4_000_000));
        assert_eq!(plan["links"][3]["measured"], json!(true));
        assert_eq!(plan["without_remote"], json!({ "unreadable_files": 2, "first": "/m/s/000/b" }));
        let text = to_text(Path::new("/m/s"), &files, &links(&files, ""), "");
        assert!(text.contains("(assumed): 0.040 s\nexpected: 1.040 s\n"), "{text}");
        assert!(text.ends_with("2 files cannot be opened (EIO, ETIMEDOUT), the first is 000/b\n"));
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
