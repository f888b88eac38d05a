//! Copies of tails and token files in the remote.
//!
//! They grow as long as they live, so no copy of them is ever relied upon by this machine. A
//! manifest of names takes along what they hold when it is made, for whoever rebuilds the store.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use super::FsError;
use crate::core::Core;
use kvfs_storage::store::database::Snapshot;
use kvfs_storage::store::disk::{Access, FileStat, is_of_file, read_all};
use kvfs_storage::store::record::{InodeId, ObjectId, RemoteCopy, RemoteState, Role, Time};
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::hold::Stamp;

/// Larger ones are left out: a token file of 16 million tokens, a tail of 16 pages.
const GROWING_BYTES_MAX: u64 = 64 << 20;

/// A copy that a manifest names.
#[derive(Clone, Copy, Debug)]
pub(super) struct GrowingCopy {
    pub(super) copy: RemoteCopy,
    pub(super) length: u64,
    pub(super) mtime: Time,
    /// Since when the remote holds it; `None` once a reliable manifest has named it.
    pub(super) since: Option<Stamp>,
}

/// What was last sent of each, and what its file was then.
#[derive(Debug, Default)]
pub(super) struct Growing {
    sent: HashMap<ObjectId, (FileStat, GrowingCopy)>,
    /// Objects that could not be read the last time.
    unreadable: HashSet<ObjectId>,
}

impl Growing {
    /// A manifest names what was sent. If that came too late, it may be collected: it is sent again.
    pub(super) fn note_published(&mut self, is_reliable: bool) {
        if is_reliable {
            self.sent.values_mut().for_each(|(_, made)| made.since = None);
        } else {
            self.sent.clear();
        }
    }

    /// Whether a file has grown since it was last sent. New ones are changes of names.
    pub(super) fn has_grown(&self, core: &Core) -> bool {
        self.sent.iter().any(|(object, (known, _))| {
            core.store.stat_object(*object).is_ok_and(|stat| !stat.is_same_content(known))
        })
    }

    /// Sends what has changed since the last time. What was removed meanwhile, or cannot be read, is left out.
    pub(super) fn send(
        &mut self, core: &Core, exchange: &Exchange, snapshot: &Snapshot,
    ) -> Result<BTreeMap<ObjectId, GrowingCopy>, FsError> {
        let mut found = BTreeMap::new();
        let mut sent = HashMap::new();
        let told = std::mem::take(&mut self.unreadable);
        for object in growing_objects(core, snapshot)? {
            let mut leave_out = |why: &io::Error| {
                if !told.contains(&object) {
                    tell_of_unreadable(object, why);
                }
                self.unreadable.insert(object);
            };
            let file = core.store.open_object(object, Access::Read);
            let (file, stat) = match file.and_then(|file| file.stat().map(|stat| (file, stat))) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) if is_of_file(&error) => {
                    leave_out(&error);
                    continue;
                }
                found => found?,
            };
            let made = match self.sent.get(&object) {
                Some((known, made)) if known.is_same_content(&stat) => *made,
                _ if stat.length > GROWING_BYTES_MAX => continue,
                _ => {
                    let bytes = match read_all(file.as_ref(), GROWING_BYTES_MAX) {
                        // It keeps no names of others from the remote.
                        Err(error) if is_of_file(&error) => {
                            leave_out(&error);
                            continue;
                        }
                        outcome => outcome?,
                    };
                    let length = bytes.len() as u64;
                    let (blob, held) = exchange.hold_bytes(bytes).map_err(FsError::Remote)?;
                    let copy = RemoteCopy {
                        content: blob.content.0,
                        encoding: blob.encoding,
                        stored_bytes: length,
                        state: RemoteState::Only,
                    };
                    GrowingCopy { copy, length, mtime: stat.mtime, since: Some(held.since) }
                }
            };
            sent.insert(object, (stat, made));
            found.insert(object, made);
        }
        self.sent = sent;
        Ok(found)
    }
}

/// Token files first: rows are written before the tokens that count them, so what is read later
/// holds at least the rows that were counted.
fn growing_objects(core: &Core, snapshot: &Snapshot) -> Result<Vec<ObjectId>, FsError> {
    let mut ids = Vec::new();
    snapshot.for_each::<()>(b'U', |id, ()| ids.push(InodeId(id)))?;
    let (mut tokens, mut tails) = (Vec::new(), Vec::new());
    let state = core.state();
    for id in ids {
        let inode = state.metadata.inode(id)?;
        match inode.as_ref().and_then(|inode| inode.file()).map(|file| (file.role, file.object)) {
            Some((Role::Tokens, object)) => tokens.extend(object),
            Some((Role::Tail { .. }, object)) => tails.extend(object),
            _ => {}
        }
    }
    tokens.extend(tails);
    Ok(tokens)
}

fn tell_of_unreadable(object: ObjectId, why: &io::Error) {
    log::warn!(
        "rows or tokens are left out of the names that the remote gets: object {object} cannot be read: {why}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;
    use std::time::Duration;

    use crate::unmounted::Unmounted;
    use kvfs_storage::store::disk::DiskPath;
    use kvfs_storage::tier::encoding::{ColdEncoding, Encoding};
    use kvfs_storage::tier::remote::hold::Grace;
    use kvfs_storage::tier::remote::{Options, Remote, RemoteSpec};

    #[test]
    fn what_a_reliable_manifest_names_waits_for_no_other_and_anything_else_is_sent_again() {
        let copy = RemoteCopy {
            content: [7; 32],
            encoding: Encoding::Raw,
            stored_bytes: 4,
            state: RemoteState::Only,
        };
        let made =
            GrowingCopy { copy, length: 4, mtime: Time::default(), since: Some(Stamp::now()) };
        let stat = FileStat { length: 4, blocks: 8, mtime: Time::default(), inode: 1 };
        let sent = HashMap::from([(ObjectId(1), (stat, made))]);
        let mut growing = Growing { sent, ..Growing::default() };
        growing.note_published(true);
        assert!(growing.sent.values().all(|(_, made)| made.since.is_none()));
        growing.note_published(false);
        assert!(growing.sent.is_empty());
    }

    #[test]
    fn a_manifest_leaves_out_what_cannot_be_read_and_takes_it_along_when_it_can() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        for name in ["damaged", "whole"] {
            model.make_sequence(name, &[], 1);
        }
        fs.commit().unwrap();
        let place = tempfile::tempdir().unwrap();
        let spec = RemoteSpec::Directory(place.path().to_owned());
        let remote = Remote::open(&spec, Options::default()).unwrap();
        remote.wait_for_answer(Duration::from_secs(30));
        let exchange = Exchange::new(Arc::new(remote), Grace::default(), ColdEncoding::None);
        let mut growing = Growing::default();
        let mut copies = || {
            let snapshot = fs.core.state().metadata.snapshot().unwrap();
            let found = growing.send(&fs.core, &exchange, &snapshot).unwrap();
            let unreadable: Vec<ObjectId> = growing.unreadable.iter().copied().collect();
            (found.into_keys().collect::<Vec<ObjectId>>(), unreadable)
        };
        let (all, unreadable) = copies();
        assert_eq!((all.len(), unreadable), (2, Vec::new()));
        let (damaged, whole) = (all[0], all[1]);
        let path = fs.core.store.path().join(DiskPath::Object(damaged).relative());
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        symlink(&path, &path).unwrap();
        for _ in 0..2 {
            assert_eq!(copies(), (vec![whole], vec![damaged]));
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(copies(), (vec![whole], Vec::new()), "a removed one");
        std::fs::create_dir(&path).unwrap();
        assert_eq!(copies(), (vec![whole], vec![damaged]), "opened, but not read");
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(copies(), (all, Vec::new()));
    }
}
