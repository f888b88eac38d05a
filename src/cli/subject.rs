//! A file or directory that somebody asks about, which may be gone by now.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};

use kvfs_os::mountinfo;

use super::history::Event;
use super::output::Failure;
use crate::page::{escaped, names};

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
        let explain = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
        let absolute = std::path::absolute(path).map_err(explain)?;
        let is_there = |path: &&Path| path.symlink_metadata().is_ok();
        let there = absolute.ancestors().find(is_there).unwrap_or(Path::new("/"));
        let (mount, resolved) = mountinfo::kvfs_above(there).map_err(|error| {
            Failure::Failed(if there == absolute {
                error
            } else {
                format!("{} is not in a mount of kvfs", path.display())
            })
        })?;
        let gone = absolute.strip_prefix(there).unwrap_or(Path::new(""));
        let path = if gone.as_os_str().is_empty() { resolved } else { resolved.join(gone) };
        let mut subject = Subject::whole(&mount.mountpoint);
        let below = path.strip_prefix(&mount.mountpoint).unwrap_or(Path::new(""));
        let parts = below.iter().map(|part| escaped(part.to_string_lossy().chars()));
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

    /// Whether something happened to it, or to something below it.
    pub(super) fn concerns(&self, event: &Event) -> bool {
        if self.shown.is_empty() || event.inode.is_some_and(|inode| self.inodes.contains(&inode)) {
            return true;
        }
        let Some(path) = &event.path else { return false };
        if is_at_or_below(path, &self.shown) {
            return true;
        }
        event.what == "deleted" && is_at_or_below(&self.shown, path) && self.went_with(event)
    }

    /// Whether it is, or was, among what went with the end of a sequence.
    fn went_with(&self, event: &Event) -> bool {
        let Some(first) = event.from_token else { return true };
        let name = self.path.file_name().map_or(&b""[..], OsStrExt::as_bytes);
        let start = names::parse_page(name).or_else(|| names::parse_tail(name));
        let row = names::parse_state(name);
        start.is_some_and(|start| start.0 >= first) || row.is_some_and(|row| row.0 > first)
    }
}

fn is_at_or_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn collect(path: &Path, inodes: &mut BTreeSet<u64>) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    inodes.insert(metadata.ino());
    let mut directories = Vec::new();
    directories.extend(metadata.is_dir().then(|| path.to_owned()));
    while let Some(directory) = directories.pop() {
        for entry in directory.read_dir()? {
            let entry = entry?;
            inodes.insert(entry.ino());
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(what: &str, path: Option<&str>, from_token: Option<u64>) -> Event {
        let path = path.map(str::to_owned);
        Event { what: what.to_owned(), path, from_token, ..Event::default() }
    }

    fn subject(shown: &str) -> Subject {
        let path = Path::new("/mnt").join(shown);
        Subject { shown: shown.to_owned(), path, ..Subject::whole(Path::new("/mnt")) }
    }

    #[test]
    fn what_happened_above_concerns_what_went_with_it() {
        let sequence = Some("models/m/sequences/a");
        let page = subject("models/m/sequences/a/000/0002048.safetensors");
        assert!(page.concerns(&event("deleted", sequence, Some(2048))));
        assert!(page.concerns(&event("deleted", sequence, None)));
        assert!(!page.concerns(&event("deleted", sequence, Some(4096))));
        assert!(!page.concerns(&event("damaged", sequence, None)));
        assert!(!page.concerns(&event("deleted", Some("models/m/sequences/ab"), None)));
        let tail = subject("models/m/sequences/a/000/0004096.tail");
        assert!(tail.concerns(&event("deleted", sequence, Some(4096))));
        let state = subject("models/m/sequences/a/000/state-0002048.safetensors");
        assert!(state.concerns(&event("deleted", sequence, Some(2047))));
        assert!(
            !state.concerns(&event("deleted", sequence, Some(2048))),
            "it comes before that row"
        );
        let tokens = subject("models/m/sequences/a/tokens");
        assert!(!tokens.concerns(&event("deleted", sequence, Some(0))));
    }

    #[test]
    fn a_directory_concerns_what_is_below_it_and_no_namesake() {
        let directory = subject("files/pool");
        assert!(directory.concerns(&event("deleted", Some("files/pool/a/b"), None)));
        assert!(directory.concerns(&event("refused", Some("files/pool"), None)));
        assert!(!directory.concerns(&event("deleted", Some("files/pool2/a"), None)));
        assert!(!directory.concerns(&event("evicted", None, None)));
        let held = Subject { inodes: [7].into(), ..subject("files/pool") };
        assert!(held.concerns(&Event { inode: Some(7), ..event("evicted", None, None) }));
        assert!(!held.concerns(&Event { inode: Some(8), ..event("evicted", None, None) }));
        assert!(subject("").concerns(&event("evicted", None, None)));
    }
}
