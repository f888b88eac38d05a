//! A file or directory that somebody asks about, which may be gone by now.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};

use kvfs_os::mountinfo;

use super::history::Event;
use super::output::Failure;
use super::status;
use crate::page::escaped_bytes;
use crate::page::names::{self, LayerEntry};

/// What a path that was longer begins with.
const SHORTENED: &str = "...";
/// What stands for events that were not kept.
pub(super) const LOST: &str = "events lost";
/// Numbers of inodes that have no record begin here.
const FIRST_VIRTUAL: u64 = 1 << 63;

/// What somebody asks about.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) mountpoint: PathBuf,
    /// Where it is, or was.
    pub(super) path: PathBuf,
    /// The same below the mountpoint, as events tell it; empty for the whole mount.
    shown: String,
    /// Of itself and all below it, if it is there: moves are told without a path.
    inodes: BTreeSet<u64>,
}

/// What an event has to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    /// It happened under its path.
    Itself,
    /// It happened to the sequence that it is in, or was.
    Sequence,
    /// It happened below it, or to one of its files under another name.
    Other,
}

impl Subject {
    /// A whole mount.
    pub(super) fn whole(mountpoint: &Path) -> Subject {
        Subject {
            mountpoint: mountpoint.to_owned(),
            path: mountpoint.to_owned(),
            shown: String::new(),
            inodes: BTreeSet::new(),
        }
    }

    /// What a path leads to, or led to.
    pub(super) fn find(path: &Path) -> Result<Subject, Failure> {
        let named = escaped_bytes(path.as_os_str().as_bytes());
        let explain = |error: io::Error| Failure::Failed(format!("{named}: {error}"));
        let absolute = std::path::absolute(path).map_err(explain)?;
        let there = nearest(&absolute)?;
        let (mount, resolved) = mountinfo::kvfs_above(there).map_err(|error| {
            Failure::Failed(if there == absolute {
                error
            } else {
                format!("{named} is not in a mount of kvfs")
            })
        })?;
        let gone = absolute.strip_prefix(there).unwrap_or(Path::new(""));
        let path = if gone.as_os_str().is_empty() { resolved } else { resolved.join(gone) };
        let mut subject = Subject::whole(&mount.mountpoint);
        let below = path.strip_prefix(&mount.mountpoint).unwrap_or(Path::new(""));
        let parts = below.iter().map(|part| escaped_bytes(part.as_bytes()));
        subject.shown = parts.collect::<Vec<_>>().join("/");
        if !subject.shown.is_empty() && there == absolute {
            collect(&path, &mut subject.inodes).map_err(explain)?;
        }
        subject.path = path;
        Ok(subject)
    }

    /// Whether it is there.
    pub(super) fn is_there(&self) -> bool {
        self.path.symlink_metadata().is_ok()
    }

    /// Whether it is made while it is read.
    pub(super) fn is_virtual(&self) -> bool {
        is_at_or_below(&self.shown, ".kvfs")
            || self.path.symlink_metadata().is_ok_and(|found| found.ino() >= FIRST_VIRTUAL)
    }

    /// What an event has to do with it, if anything. Of a path that was shortened the end decides.
    pub(super) fn relation(&self, event: &Event) -> Option<Relation> {
        if self.shown.is_empty() {
            return Some(Relation::Other);
        }
        let told = event.path.as_deref();
        let (told, is_short) = match told.and_then(|path| path.strip_prefix(SHORTENED)) {
            Some(end) => (Some(end), true),
            None => (told, false),
        };
        let is = |path: &str, told: &str| {
            if is_short { ends_with(path, told) } else { path == told }
        };
        if told.is_some_and(|told| is(&self.shown, told)) {
            return Some(Relation::Itself);
        }
        if let Some(sequence) = self.sequence()
            && event.what == "deleted"
            && told.is_some_and(|told| is(sequence, told))
            && self.went_with(sequence, event.from_token)
        {
            return Some(Relation::Sequence);
        }
        let has = |inode: Option<u64>| inode.is_some_and(|inode| self.inodes.contains(&inode));
        let is_below = match told {
            Some(end) if is_short => has(event.directory) || may_be_below(&self.shown, end),
            Some(path) => is_at_or_below(path, &self.shown),
            None => false,
        };
        (is_below || has(event.inode)).then_some(Relation::Other)
    }

    /// Whether something happened to it, or to something below it; what was lost may have.
    pub(super) fn concerns(&self, event: &Event) -> bool {
        event.what == LOST || self.relation(event).is_some()
    }

    /// The directory of the sequence that it is in.
    fn sequence(&self) -> Option<&str> {
        let (at, _) = self.shown.match_indices('/').nth(3)?;
        let sequence = &self.shown[..at];
        is_sequence(sequence.split('/').map(str::as_bytes)).then_some(sequence)
    }

    /// What limits take for one where a path in this mount is: the sequence that it is in, else the file. `None`
    /// for manifests, which stay.
    pub(super) fn unit_of(&self, path: &Path) -> Option<PathBuf> {
        let below = path.strip_prefix(&self.mountpoint).ok()?;
        let parts: Vec<&[u8]> = below.iter().map(OsStr::as_bytes).collect();
        if matches!(parts[..], [b"models", _, name] if name == names::MANIFEST.as_bytes()) {
            return None;
        }
        let sequence: PathBuf = below.iter().take(4).collect();
        let is_in_sequence = is_sequence(parts.into_iter().take(4));
        Some(if is_in_sequence { self.mountpoint.join(sequence) } else { path.to_owned() })
    }

    /// Whether it is, or was, among what went with its sequence, or with the end of it.
    fn went_with(&self, sequence: &str, from_token: Option<u64>) -> bool {
        let Some(first) = from_token else { return true };
        let below = self.shown.strip_prefix(sequence).and_then(|below| below.strip_prefix('/'));
        let Some((layer, name)) = below.and_then(|below| below.split_once('/')) else {
            return false;
        };
        names::parse_layer(layer.as_bytes()).is_some()
            && match names::layer_entry(name.as_bytes()) {
                LayerEntry::Page(start) | LayerEntry::Tail(start) => start.0 >= first,
                // It goes with the page in which its last row is.
                LayerEntry::State(rows) => rows.0.saturating_sub(1) >= first,
                LayerEntry::Staging | LayerEntry::Other => false,
            }
    }
}

/// Whether a path below the mountpoint is that of the directory of a sequence.
fn is_sequence<'a>(mut parts: impl Iterator<Item = &'a [u8]>) -> bool {
    let is_one = parts.next() == Some(b"models")
        && parts.next().is_some_and(|model| !names::is_staging(model))
        && parts.next() == Some(names::SEQUENCES.as_bytes())
        && parts.next().is_some_and(|name| !names::is_staging(name));
    is_one && parts.next().is_none()
}

/// The path, or what of it is there.
fn nearest(absolute: &Path) -> Result<&Path, Failure> {
    for path in absolute.ancestors() {
        let Err(error) = path.symlink_metadata() else { return Ok(path) };
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::InvalidFilename => {}
            _ => return Err(why_not(path, &error)),
        }
    }
    Ok(Path::new("/"))
}

/// Why a path cannot be looked at: its mount says so where it has one.
fn why_not(path: &Path, error: &io::Error) -> Failure {
    let mounts = mountinfo::read().unwrap_or_default();
    let mount = path.ancestors().find_map(|above| mountinfo::top_at(&mounts, above));
    if let Some(mount) = mount.filter(|mount| mount.is_kvfs())
        && let Err(failure) = status::read(&mount.mountpoint)
    {
        return failure;
    }
    Failure::Failed(format!("{}: {error}", escaped_bytes(path.as_os_str().as_bytes())))
}

fn is_at_or_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether a path is one that was shortened to this end.
fn ends_with(path: &str, end: &str) -> bool {
    path.len() > end.len() && path.ends_with(end)
}

/// Whether a path that was shortened to this end may be below a directory: one of its beginnings is the end of
/// the directory's path.
fn may_be_below(directory: &str, end: &str) -> bool {
    let beginnings = end.match_indices('/').map(|(at, _)| &end[..at]);
    beginnings.filter(|beginning| !beginning.is_empty()).any(|end| ends_with(directory, end))
}

/// The inodes at and below a path. What goes meanwhile is not there.
fn collect(path: &Path, inodes: &mut BTreeSet<u64>) -> io::Result<()> {
    let Some(metadata) = if_there(path.symlink_metadata())? else { return Ok(()) };
    inodes.insert(metadata.ino());
    let directories = metadata.is_dir().then(|| path.to_owned());
    collect_below(directories.into_iter().collect(), inodes)
}

fn collect_below(mut directories: Vec<PathBuf>, inodes: &mut BTreeSet<u64>) -> io::Result<()> {
    while let Some(directory) = directories.pop() {
        let Some(entries) = if_there(directory.read_dir())? else { continue };
        for entry in entries {
            let Some(entry) = if_there(entry)? else { break };
            inodes.insert(entry.ino());
            if if_there(entry.file_type())?.is_some_and(|kind| kind.is_dir()) {
                directories.push(entry.path());
            }
        }
    }
    Ok(())
}

/// What is there; nothing of what went meanwhile, or is a directory no more.
pub(super) fn if_there<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
