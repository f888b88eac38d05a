//! What the daemon shows of a mount itself, without asking the kernel, which would ask the daemon.
//!
//! The texts are those of `.kvfs/`. Directories are looked at for a user, who finds no more here than through the mount:
//! less where it takes a group of which nothing is known.

use std::path::{Component, Path};
use std::sync::Arc;

use super::attributes::Caller;
use super::metrics::exposition;
use super::{FileSystem, FsError, extended_attribute_for, history, hottest, status};
use crate::core::rights::User;
use crate::core::state::State;
use kvfs_page::names;
use kvfs_storage::ingest::model::Model;
use kvfs_storage::ingest::seal::SealError;
use kvfs_storage::store::keys::FIRST_NAME_OFFSET;
use kvfs_storage::store::record::{DirectoryClass, Inode, InodeId};

/// Names of a directory that are looked at with the state held: a few milliseconds.
const NAMES_MAX: usize = 4096;

/// What a mount says of itself at one time: the texts of `.kvfs/`.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// `.kvfs/status`.
    pub status: String,
    /// `.kvfs/metrics`.
    pub metrics: String,
    /// The last lines of `.kvfs/events`, of those that were not told before.
    pub events: String,
    /// `.kvfs/hottest`.
    pub hottest: String,
}

/// Everything, with the events that have higher numbers: the last ones, where there are many.
pub fn told(fs: &FileSystem, after_event: u64) -> Told {
    let last = fs.core.store.events.last_number();
    let after = last.saturating_sub(history::EVENTS_AT_ONCE as u64).max(after_event);
    let events =
        if last > after { history::lines_after(&fs.core, after) } else { Ok(String::new()) };
    let events = events.unwrap_or_else(|error| {
        log::debug!("the last events cannot be shown: {error}");
        String::new()
    });
    Told { status: status::status(fs), metrics: exposition(fs), events, hottest: hottest::text(fs) }
}

/// Somebody who looks at directories.
#[derive(Clone, Copy, Debug)]
pub struct Looker<'a> {
    fs: &'a FileSystem,
    caller: Caller,
}

impl<'a> Looker<'a> {
    /// The user of the daemon.
    pub fn of_daemon(fs: &'a FileSystem) -> Looker<'a> {
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        Looker { fs, caller: Caller { uid, gid } }
    }

    fn user(&self) -> User {
        User::from(self.caller)
    }

    /// The names of directories in a directory, given by its path below the mountpoint, and whether these are all.
    pub fn directories(&self, path: &Path) -> Result<(Vec<Vec<u8>>, bool), FsError> {
        let state = self.fs.core.state();
        let (id, directory) = self.find(&state, path)?;
        if !self.user().may_read(&directory) {
            return Err(FsError::NotPermitted);
        }
        let (mut names, mut looked_at, mut is_all) = (Vec::new(), 0, true);
        state.metadata.entries(id, FIRST_NAME_OFFSET, |_, name, entry| {
            is_all = looked_at < NAMES_MAX;
            looked_at += 1;
            if is_all && entry.file_type == libc::S_IFDIR {
                names.push(name.to_vec());
            }
            is_all
        })?;
        Ok((names, is_all))
    }

    /// The manifest of a model's directory; `None` of another one.
    pub fn model(&self, path: &Path) -> Result<Option<Arc<Model>>, FsError> {
        let mut state = self.fs.core.state();
        let (id, directory) = self.find(&state, path)?;
        let (_, class) = state.directory(id)?;
        let entry = state.entry(id, names::MANIFEST.as_bytes())?;
        let (DirectoryClass::Model, Some(entry)) = (class, entry) else { return Ok(None) };
        let manifest = state.inode(entry.inode)?;
        if !self.user().may_enter(&directory) || !self.user().may_read(&manifest) {
            return Err(FsError::NotPermitted);
        }
        let model = self.fs.core.model_of(&mut state, id);
        model.map(Some).map_err(|error| match error {
            SealError::Io(error) => error.into(),
            SealError::Refused(_) => FsError::Refused,
        })
    }

    /// `user.kvfs.pages`, or a part of it, of a layer's directory.
    pub fn pages(&self, path: &Path, attribute: &[u8]) -> Result<Vec<u8>, FsError> {
        let (id, layer) = self.find(&self.fs.core.state(), path)?;
        // As the kernel asks for attributes of users.
        if !self.user().may_read(&layer) {
            return Err(FsError::NotPermitted);
        }
        extended_attribute_for(self.fs, id, attribute, self.caller)
    }

    /// A directory by its path below the mountpoint, if every one on the way may be entered.
    fn find(&self, state: &State, path: &Path) -> Result<(InodeId, Inode), FsError> {
        let mut id = InodeId::ROOT;
        let mut directory = state.directory(id)?.0;
        for part in path.components() {
            let Component::Normal(name) = part else { return Err(FsError::NotFound) };
            if !self.user().may_enter(&directory) {
                return Err(FsError::NotPermitted);
            }
            let name = name.as_encoded_bytes();
            id = state.entry(id, name)?.ok_or(FsError::NotFound)?.inode;
            directory = state.directory(id)?.0;
        }
        Ok((id, directory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NewNode, Place};
    use kvfs_observe::Observer;
    use kvfs_storage::store::Store;

    const ALICE: Caller = Caller { uid: 7, gid: 7 };
    const BOB: Caller = Caller { uid: 8, gid: 8 };

    fn make(fs: &FileSystem, parent: InodeId, name: &str, mode: u16) -> InodeId {
        let place = Place { parent, name: name.as_bytes().to_vec() };
        fs.make(&place, &NewNode::Directory, mode, ALICE).unwrap().attributes.inode
    }

    #[test]
    fn a_user_finds_what_the_kernel_would_let_him_find() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        let (sender, _invalidations) = crossbeam_channel::bounded(1);
        let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
        let models = fs.core.state().entry(InodeId::ROOT, b"models").unwrap().unwrap().inode;
        for (name, mode) in
            [("open", 0o755), ("entered", 0o711), ("read", 0o744), ("closed", 0o700)]
        {
            let model = make(&fs, models, name, mode);
            make(&fs, make(&fs, model, "sequences", 0o755), "chat", 0o755);
        }
        let names = |caller, path: &str| {
            let found = Looker { fs: &fs, caller }.directories(Path::new(path));
            found.map(|(names, is_all)| (names.len(), is_all)).map_err(|error| error.errno())
        };
        for caller in [ALICE, BOB, Caller::DAEMON] {
            assert_eq!(names(caller, "models"), Ok((4, true)));
            assert_eq!(names(caller, "models/open/sequences"), Ok((1, true)));
            assert_eq!(names(caller, "models/entered/sequences"), Ok((1, true)));
            for absent in
                ["models/x", "models/../models", "/models", ".kvfs", "models/open/prefixes"]
            {
                assert_eq!(names(caller, absent), Err(libc::ENOENT), "{absent}");
            }
        }
        for (path, for_bob) in [
            ("models/entered", Err(libc::EPERM)),
            ("models/read", Ok((1, true))),
            ("models/read/sequences", Err(libc::EPERM)),
            ("models/closed", Err(libc::EPERM)),
            ("models/closed/sequences", Err(libc::EPERM)),
            ("models/closed/x", Err(libc::EPERM)),
        ] {
            assert_eq!(names(BOB, path), for_bob, "{path}");
        }
        assert_eq!(names(ALICE, "models/closed/sequences"), Ok((1, true)));
        assert_eq!(names(Caller::DAEMON, "models/closed/sequences"), Ok((1, true)));
    }

    #[test]
    fn of_very_many_names_some_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        let (sender, _invalidations) = crossbeam_channel::bounded(1);
        let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
        let models = fs.core.state().entry(InodeId::ROOT, b"models").unwrap().unwrap().inode;
        let looker = Looker { fs: &fs, caller: ALICE };
        let count = |looker: &Looker<'_>| {
            let (names, is_all) = looker.directories(Path::new("models")).unwrap();
            (names.len(), is_all)
        };
        (0..NAMES_MAX).for_each(|number| {
            make(&fs, models, &number.to_string(), 0o755);
        });
        assert_eq!(count(&looker), (NAMES_MAX, true));
        make(&fs, models, "more", 0o755);
        assert_eq!(count(&looker), (NAMES_MAX, false));
    }
}
