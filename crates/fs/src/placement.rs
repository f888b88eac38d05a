//! Where the pages of a layer are: many of them in one answer.
//!
//! Whoever draws a map of a sequence would ask five attributes of each page, half a million requests for
//! 100,000 pages. `user.kvfs.pages` of a layer's directory has them all, in parts, and opens nothing: it
//! comes from records and from looks at the files, as each single attribute does.

use std::fmt::Write;

use super::attributes::Caller;
use super::extended::{LOSSY, PIN};
use super::whereabouts::Whereabouts;
use super::{FileSystem, FsError};
use crate::core::rights::User;
use crate::core::state::State;
use kvfs_page::names::{LayerEntry, layer_entry};
use kvfs_storage::store::keys::FIRST_NAME_OFFSET;
use kvfs_storage::store::record::{DirectoryClass, InodeId};

/// The attribute, and behind it, if not from the beginning, a point and where to go on.
const PAGES: &[u8] = b"user.kvfs.pages";
/// Names that are looked at for one answer: with the longest lines they fit into an attribute (64 KiB), and
/// the request takes some milliseconds.
const NAMES_MAX: usize = 256;

/// Whether an attribute is one of these.
pub(super) fn is_asked(attribute: &[u8]) -> bool {
    let rest = attribute.strip_prefix(PAGES);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

/// A name and its inode.
type Named = (Vec<u8>, InodeId);

/// A part of the answer: `next OFFSET` or `end`, then one line for each page, tail and state.
pub(super) fn tell(
    fs: &FileSystem, layer: InodeId, attribute: &[u8], caller: Caller,
) -> Result<Vec<u8>, FsError> {
    let from = offset(attribute).ok_or(FsError::NoAttribute)?;
    let user = User::from(caller);
    let (names, next) = names(fs, layer, from, user)?;
    let mut text = next.map_or_else(|| "end\n".to_owned(), |next| format!("next {next}\n"));
    for (name, id) in names {
        // The lock is taken anew for each, as if each were asked for alone.
        let line = describe(fs, &fs.core.state(), id, user)?;
        if let Some(line) = line {
            let _ = writeln!(text, "{} {line}", String::from_utf8_lossy(&name));
        }
    }
    Ok(text.into_bytes())
}

fn offset(attribute: &[u8]) -> Option<u64> {
    let rest = attribute.strip_prefix(PAGES)?;
    match rest.strip_prefix(b".") {
        None => Some(FIRST_NAME_OFFSET),
        Some(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
    }
}

/// Names of pages, tails and states from an offset on, and where to go on.
fn names(
    fs: &FileSystem, layer: InodeId, from: u64, user: User,
) -> Result<(Vec<Named>, Option<u64>), FsError> {
    let state = fs.core.state();
    let (inode, class) = match state.directory(layer) {
        Err(FsError::NotDirectory) => return Err(FsError::NoAttribute),
        outcome => outcome?,
    };
    if !matches!(class, DirectoryClass::Layer(_)) {
        return Err(FsError::NoAttribute);
    }
    // The kernel has asked whether it may be read; sizes and times take entering it.
    if !user.may_enter(&inode) {
        return Err(FsError::NotPermitted);
    }
    let (mut found, mut looked_at, mut next) = (Vec::new(), 0, None);
    state.metadata.entries(layer, from.max(FIRST_NAME_OFFSET), |at, name, entry| {
        if looked_at == NAMES_MAX {
            next = Some(at);
            return false;
        }
        looked_at += 1;
        let counts = !matches!(layer_entry(name), LayerEntry::Staging | LayerEntry::Other);
        // What is being written under its own name is absent.
        if counts && !state.is_pending(layer, name) {
            found.push((name.to_vec(), entry.inode));
        }
        true
    })?;
    Ok((found, next))
}

/// `TIER ENCODING BYTES USED_SECONDS LINKS FLAGS`; nothing of what went meanwhile.
fn describe(
    fs: &FileSystem, state: &State, id: InodeId, user: User,
) -> Result<Option<String>, FsError> {
    let inode = match state.inode(id) {
        Err(FsError::NotFound | FsError::Stale) => return Ok(None),
        outcome => outcome?,
    };
    let Some(file) = inode.file() else { return Ok(None) };
    let shown = state.attributes_of(&fs.core.store, id, &inode)?;
    if shown.size == 0 {
        // A tail that waits for its first row.
        return Ok(None);
    }
    let object = state.current_object(id, file);
    let (tier, encoding, flags) = if user.may_read(&inode) {
        let found = object.map(|object| fs.whereabouts(state, object)).transpose()?;
        let encoding = found.and_then(Whereabouts::stored).map_or("raw", |(name, _)| name);
        (found.map_or("none", |found| found.word()), encoding, flags(state, id)?)
    } else {
        // As for the attributes of the file itself.
        ("hidden", "hidden", "-".to_owned())
    };
    let (bytes, last_use, links) = (shown.size, shown.atime.seconds, shown.links);
    Ok(Some(format!("{tier} {encoding} {bytes} {last_use} {links} {flags}")))
}

/// `pinned,lossy,damaged`, or `-`.
fn flags(state: &State, id: InodeId) -> Result<String, FsError> {
    let mut flags = Vec::new();
    if state.metadata.attribute(id, PIN)?.is_some_and(|value| value == b"1") {
        flags.push("pinned");
    }
    if state.metadata.attribute(id, LOSSY)?.is_some() {
        flags.push("lossy");
    }
    if state.is_known_damaged(id) {
        flags.push("damaged");
    }
    Ok(if flags.is_empty() { "-".to_owned() } else { flags.join(",") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_to_go_on() {
        assert!(is_asked(b"user.kvfs.pages") && is_asked(b"user.kvfs.pages.7"));
        assert!(!is_asked(b"user.kvfs.pagesx") && !is_asked(b"user.kvfs.page"));
        assert_eq!(offset(b"user.kvfs.pages"), Some(FIRST_NAME_OFFSET));
        assert_eq!(offset(b"user.kvfs.pages.77"), Some(77));
        for wrong in ["user.kvfs.pages.", "user.kvfs.pages.-1", "user.kvfs.pages.x"] {
            assert_eq!(offset(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
