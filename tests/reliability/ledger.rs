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

#[derive(Debug, Default)]
struct History {
    acknowledged: Option<Version>,
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
    /// A program that is told of an error between its two writes and closes the file leaves the first
    /// of them.
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
            history.acknowledged = Some(version);
            history.begun.clear();
        }
        self.acknowledged += 1;
    }

    pub(crate) fn absorb(&mut self, other: Ledger) {
        for (name, (new, content)) in other.names {
            let (history, known) = self.names.entry(name).or_default();
            *known = content;
            if new.acknowledged.is_some() {
                history.begun.clear();
                history.acknowledged = new.acknowledged;
            }
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
            let version = found.ok().and_then(|bytes| {
                let possible = history.acknowledged.iter().chain(&history.begun);
                let version = recognise(model, content.unwrap(), &bytes, possible);
                let is_half = has_halves && is_first_half(model, content.unwrap(), &bytes, history);
                assert!(
                    version.is_some() || is_half,
                    "{when}: torn: {} has {} bytes: {history:?}",
                    name.display(),
                    bytes.len()
                );
                version
            });
            if has_halves && path.exists() && version.is_none() {
                *history = History::default();
                continue;
            }
            let is_lost = version.is_none() && history.acknowledged.is_some();
            assert!(!is_lost, "{when}: lost: {}: {history:?}", name.display());
            *history = History { acknowledged: version, begun: Vec::new() };
        }
        self.names.retain(|_, (history, _)| history.acknowledged.is_some());
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

fn is_first_half(model: &Model, content: Content, bytes: &[u8], history: &History) -> bool {
    let Content::Plain(length) = content else { return false };
    let is_half = |version: &Version| bytes_of(model, content, *version).starts_with(bytes);
    bytes.len() == length / 2 && history.begun.iter().any(is_half)
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
        libc::EINTR,
    ];
    error.raw_os_error().is_some_and(|code| expected.contains(&code))
}
