//! Where the pages of a layer are: many of them in one answer.
//!
//! Whoever draws a map of a sequence would ask five attributes of each page, half a million requests for
//! 100,000 pages. `user.kvfs.pages` of a layer's directory has them all, in parts, and opens nothing: it
//! comes from records and from looks at the files, as each single attribute does.

use std::fmt::Write;

use super::attributes::Caller;
use super::extended::{LOSSY, PIN};
use super::retention::kept_use;
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
        let found = object.map(|object| fs.residency().whereabouts(state, object)).transpose()?;
        let encoding = found.and_then(Whereabouts::stored).map_or("raw", |(name, _)| name);
        (found.map_or("none", |found| found.word()), encoding, flags(state, id)?)
    } else {
        // As for the attributes of the file itself.
        ("hidden", "hidden", "-".to_owned())
    };
    let last_use = shown.atime.max(kept_use(state, id)?.unwrap_or_default()).seconds;
    let (bytes, links) = (shown.size, shown.links);
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
    use crate::SetAttributes;
    use crate::unmounted::{FILES, Unmounted, at, place};
    use kvfs_storage::store::metadata::Life;

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

    fn told(fs: &FileSystem, layer: InodeId, attribute: &str, uid: u32) -> Vec<String> {
        let text = tell(fs, layer, attribute.as_bytes(), Caller { uid, gid: uid }).unwrap();
        String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn each_page_that_is_there_is_a_line() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let sequence = model.make_sequence("s", &[0], 2);
        let layer = unmounted.id_of(sequence, "000").unwrap();
        let pages = ["0000000.safetensors", "0000016.safetensors"];
        let ids = pages.map(|name| unmounted.id_of(layer, name).unwrap());
        for id in ids {
            unmounted.date(id, at(1000));
        }
        fs.set_extended_attribute(ids[1], b"user.kvfs.pin", b"1", 0).unwrap();
        let object = object_of(fs, ids[1]);
        fs.core.state().known_damage.insert(ids[1], object);
        // None of these is one: an ordinary file, an empty tail, and what is being written.
        unmounted.write(layer, "notes", b"text");
        unmounted.write(layer, "0000032.tail", b"");
        let new = place(layer, "0000048.safetensors");
        let open = fs.create(&new, 0o644, Caller::DAEMON, true).unwrap().opened.handle;
        let bytes = model.page(0, 0).len();
        let expected = [
            "end".to_owned(),
            format!("{} ssd raw {bytes} 1000 1 -", pages[0]),
            format!("{} ssd raw {bytes} 1000 1 pinned,damaged", pages[1]),
        ];
        assert_eq!(told(fs, layer, "user.kvfs.pages", 0), expected);
        fs.release(open).ok();
        // Where the bytes are is for those who may read them.
        let set = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        fs.set_attributes(ids[0], &set).unwrap();
        let line = format!("{} hidden hidden {bytes} 1000 1 -", pages[0]);
        assert_eq!(told(fs, layer, "user.kvfs.pages", 7)[1], line);
        let set = SetAttributes { mode: Some(0o744), ..SetAttributes::default() };
        fs.set_attributes(layer, &set).unwrap();
        let refused = tell(fs, layer, b"user.kvfs.pages", Caller { uid: 7, gid: 7 });
        assert!(matches!(refused, Err(FsError::NotPermitted)));
    }

    fn object_of(fs: &FileSystem, id: InodeId) -> kvfs_storage::store::record::ObjectId {
        fs.core.state().inode(id).unwrap().file().unwrap().object.unwrap()
    }

    #[test]
    fn only_layers_have_pages() {
        let unmounted = Unmounted::new();
        let file = unmounted.write(FILES, "file", b"bytes");
        for id in [FILES, file] {
            let refused = tell(&unmounted.fs, id, b"user.kvfs.pages", Caller::DAEMON);
            assert!(matches!(refused, Err(FsError::NoAttribute)));
        }
    }

    #[test]
    fn many_pages_come_in_parts() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let sequence = model.make_sequence("s", &[0], 1);
        let layer = unmounted.id_of(sequence, "000").unwrap();
        let page = unmounted.id_of(layer, "0000000.safetensors").unwrap();
        let name = |number| format!("{:07}.safetensors", 16 * number);
        let count = NAMES_MAX + 44;
        let entry = fs.core.state().entry(layer, b"0000000.safetensors").unwrap().unwrap();
        for number in 1..count {
            let name = name(number);
            fs.core.state().metadata.put_entry(Life::Durable, layer, name.as_bytes(), entry);
        }
        assert_eq!(entry.inode, page);
        let first = told(fs, layer, "user.kvfs.pages", 0);
        assert_eq!(first.len(), NAMES_MAX + 1);
        let next = first[0].strip_prefix("next ").unwrap();
        let second = told(fs, layer, &format!("user.kvfs.pages.{next}"), 0);
        assert_eq!((second.len(), second[0].as_str()), (45, "end"));
        let lines = first[1..].iter().chain(&second[1..]);
        let mut names: Vec<_> =
            lines.map(|line| line.split(' ').next().unwrap().to_owned()).collect();
        names.sort();
        assert_eq!(names, (0..count).map(name).collect::<Vec<_>>());
    }
}
