//! What was promised to programs that wrote, and what may be found afterwards.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::common::sys::errno;
use crate::common::{Model, fill};

/// A version of a file; its bytes follow from it.
pub(crate) type Version = u64;

/// What is written under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// That many bytes.
    Plain(usize),
    /// A page of a layer, from a token on.
    Page(u32, u64),
    /// Rows that are appended one at a time; a version is their number.
    Rows,
}

/// What a program that was told of an error had been told before: so many bytes of a version were written.
#[derive(Clone, Copy, Debug)]
struct Beginning {
    version: Version,
    written: usize,
}

#[derive(Debug, Default)]
struct History {
    acknowledged: Option<Version>,
    /// Of versions whose program was told of an error.
    broken_off: Vec<Beginning>,
    /// Begun since then.
    begun: Vec<Version>,
}

/// Names of a mount, and what may be found under them.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    names: BTreeMap<PathBuf, (History, Option<Content>)>,
    pub(crate) acknowledged: u64,
    /// Cuts that came between the begin of an operation and its acknowledgement.
    pub(crate) interrupted: u64,
    /// A program that is told of an error by one of its writes and closes the file leaves what it wrote before.
    pub(crate) has_halves: bool,
}

impl Ledger {
    pub(crate) fn begin(&mut self, name: &Path, content: Content, version: Version) {
        let (history, known) = self.names.entry(name.to_owned()).or_default();
        *known = Some(content);
        history.begun.push(version);
    }

    /// It was said to be durable.
    pub(crate) fn acknowledge(&mut self, name: &Path, version: Version) {
        if let Some((history, _)) = self.names.get_mut(name) {
            *history = History { acknowledged: Some(version), ..History::default() };
        }
        self.acknowledged += 1;
    }

    /// An error was told when so many bytes of the version had been written in place.
    pub(crate) fn break_off(&mut self, name: &Path, version: Version, written: usize) {
        if let Some((history, _)) = self.names.get_mut(name) {
            history.broken_off.push(Beginning { version, written });
        }
    }

    pub(crate) fn absorb(&mut self, other: Ledger) {
        for (name, (new, content)) in other.names {
            let (history, known) = self.names.entry(name).or_default();
            *known = content;
            if new.acknowledged.is_some() {
                *history = History { acknowledged: new.acknowledged, ..History::default() };
            }
            history.broken_off.extend(new.broken_off);
            history.begun.extend(new.begun);
        }
        self.acknowledged += other.acknowledged;
        self.interrupted += other.interrupted;
    }

    /// Compares with what is found below a mount, takes that for what is there from now on, and
    /// panics if something was lost or is there by halves.
    pub(crate) fn check(&mut self, model: &Model, root: &Path, when: &str) {
        let has_halves = self.has_halves;
        for (name, (history, content)) in &mut self.names {
            let path = root.join(name);
            let mut found = std::fs::read(&path);
            if *content == Some(Content::Rows) && errno(&found) == libc::ENOENT {
                found = rows_of_page(model, &path.with_extension("safetensors"));
            }
            let code = errno(&found);
            assert!([0, libc::ENOENT].contains(&code), "{when}: {}: {found:?}", name.display());
            let version = found.as_ref().ok().and_then(|bytes| {
                let possible = history.acknowledged.iter().chain(&history.begun);
                recognise(model, content.unwrap(), bytes, possible)
            });
            let part = found.as_ref().ok().filter(|_| has_halves && version.is_none());
            let broken_off = part.and_then(|bytes| {
                let is_it = |at: &&Beginning| is_beginning(model, content.unwrap(), **at, bytes);
                history.broken_off.iter().find(is_it).copied()
            });
            let is_known = found.is_err() || version.is_some() || broken_off.is_some();
            let bytes = found.as_ref().map_or(0, Vec::len);
            assert!(is_known, "{when}: torn: {} has {bytes} bytes: {history:?}", name.display());
            let is_lost = found.is_err() && history.acknowledged.is_some();
            assert!(!is_lost, "{when}: lost: {}: {history:?}", name.display());
            let broken_off = broken_off.into_iter().collect();
            *history = History { acknowledged: version, broken_off, begun: Vec::new() };
        }
        let is_there =
            |history: &History| history.acknowledged.is_some() || !history.broken_off.is_empty();
        self.names.retain(|_, (history, _)| is_there(history));
    }
}

impl Ledger {
    /// Removes, durably, the names of files that nobody replaces: their number would only grow.
    pub(crate) fn retire(&mut self, root: &Path, is_retired: impl Fn(&Path) -> bool) {
        let mut directories = std::collections::BTreeSet::new();
        self.names.retain(|name, _| {
            let retired = is_retired(name);
            directories.extend(name.parent().filter(|_| retired).map(Path::to_owned));
            !retired
        });
        for directory in directories {
            for entry in std::fs::read_dir(root.join(directory)).unwrap() {
                std::fs::remove_file(entry.unwrap().path()).unwrap();
            }
        }
        crate::common::sys::sync_directory(root).unwrap();
    }
}

/// The rows of a tail that became a page.
fn rows_of_page(model: &Model, path: &Path) -> io::Result<Vec<u8>> {
    let page = std::fs::read(path)?;
    let name = path.file_name().unwrap().as_encoded_bytes();
    let place = model.place(0, kvfs::page::names::parse_page(name).unwrap().0);
    let mut rows = bytes_of(model, Content::Rows, 32);
    // A row is what it should be if the page is the same with another in its place.
    let row = model.row_bytes();
    for number in (0..32).rev() {
        let whole = kvfs::page::pack_page(&place, &rows, 32).unwrap();
        if whole == page {
            break;
        }
        rows[number * row..(number + 1) * row].fill(0);
    }
    Ok(rows)
}

/// Whether this is what such a program left.
fn is_beginning(model: &Model, content: Content, at: Beginning, bytes: &[u8]) -> bool {
    bytes.len() == at.written && bytes_of(model, content, at.version).starts_with(bytes)
}

/// Which of the possible versions these bytes are.
fn recognise<'a>(
    model: &Model, content: Content, bytes: &[u8], mut possible: impl Iterator<Item = &'a Version>,
) -> Option<Version> {
    if content != Content::Rows {
        return possible.find(|version| bytes_of(model, content, **version) == bytes).copied();
    }
    // The acknowledged rows, and whatever a cut left of those behind them.
    let least = possible.min().copied().unwrap_or(0);
    bytes.starts_with(&bytes_of(model, content, least)).then_some(least)
}

/// The bytes of a version.
pub(crate) fn bytes_of(model: &Model, content: Content, version: Version) -> Vec<u8> {
    match content {
        Content::Plain(length) => fill(version, length),
        Content::Page(layer, start) => model.page(layer, start, version),
        Content::Rows => model.rows(7, u32::try_from(version).unwrap()),
    }
}

/// Whether an operation failed because the disk or the daemon is gone, and not by mistake.
pub(crate) fn is_expected(error: &io::Error) -> bool {
    let expected = [
        libc::EIO,
        libc::EROFS,
        libc::ENOTCONN,
        libc::ECONNABORTED,
        // A request that was on its way through a ring.
        libc::ECANCELED,
        libc::ESTALE,
        libc::ENOSPC,
        libc::EDQUOT,
        libc::EMFILE,
        libc::ENFILE,
        libc::EINTR,
    ];
    error.raw_os_error().is_some_and(|code| expected.contains(&code))
}
