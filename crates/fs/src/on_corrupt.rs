//! What an open answers whose bytes cannot be had: the failure, or that there is no such file.
//!
//! To an engine that keeps a cache, a file that fails is worse than one that is not there: it
//! computes what it misses. So a mount may be told to treat such files as misses. One whose bytes
//! are damaged everywhere goes for good, its bytes into quarantine. The kernel is answered ESTALE,
//! upon which it looks the name up again, and then finds none. One that the disk cannot read, whose remote does not answer, or
//! that has another copy on record which nobody could look at, stays, since it may come back.

use super::attributes::Place;
use super::opened::Opened;
use super::residency::Residency;
use super::{FileSystem, FsError, Invalidation, open};
use crate::core::happened;
use crate::core::state::State;
use kvfs_page::names;
use kvfs_storage::store::quarantine::Take;
use kvfs_storage::store::record::{InodeId, ObjectId};
use kvfs_storage::tier::remote::RemoteError;

/// What becomes of a file whose bytes cannot be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCorrupt {
    /// Opening it fails: EIO, ETIMEDOUT.
    #[default]
    Eio,
    /// Opening it finds nothing: ENOENT.
    Miss,
}

impl std::str::FromStr for OnCorrupt {
    type Err = String;

    fn from_str(text: &str) -> Result<OnCorrupt, String> {
        match text {
            "eio" => Ok(OnCorrupt::Eio),
            "miss" => Ok(OnCorrupt::Miss),
            _ => Err(format!("{text:?} is neither miss nor eio")),
        }
    }
}

impl std::fmt::Display for OnCorrupt {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            OnCorrupt::Eio => "eio",
            OnCorrupt::Miss => "miss",
        })
    }
}

impl FileSystem {
    /// Opens a file; `flags` are those of open(2).
    pub fn open_file(&self, id: InodeId, flags: i32) -> Result<Opened, FsError> {
        if self.choices.on_corrupt() == OnCorrupt::Eio {
            // What another store was said to have is a cache's hit, or none.
            return open::open_present(self, id, flags).or_else(|error| {
                let residency = self.residency();
                if residency.is_foreign(id) { residency.as_miss(id, error) } else { Err(error) }
            });
        }
        if self.core.state().damaged.contains_key(&id) {
            return Err(FsError::Stale);
        }
        open::open_present(self, id, flags).or_else(|error| self.residency().as_miss(id, error))
    }
}

impl Residency<'_> {
    /// What an open answers whose bytes cannot be had for this reason.
    fn as_miss(&self, id: InodeId, error: FsError) -> Result<Opened, FsError> {
        // Without its `positions.json`, tokens that were removed from a sequence would count again, and rows that mean
        // nothing.
        if self.core.state().metadata.positions.contains(&id) {
            return Err(error);
        }
        match &error {
            FsError::Corrupt if self.has_untried_copy(id)? => Err(FsError::NotFound),
            // Its name cannot go.
            FsError::Corrupt if self.core.store.is_read_only() => Err(FsError::NotFound),
            FsError::Corrupt
            | FsError::Remote(RemoteError::Corrupt(_) | RemoteError::Missing(_)) => {
                self.give_up(id)?;
                Err(FsError::Stale)
            }
            // Its bytes may be what was written, so its name stays.
            FsError::Unreadable(failure) => {
                log::warn!("inode {} counts as a miss: {failure}", id.0);
                Err(FsError::NotFound)
            }
            // The disk failed, not the remote.
            FsError::Remote(RemoteError::Local(_)) => Err(error),
            FsError::Remote(remote) => {
                log::warn!("inode {} counts as a miss: {remote}", id.0);
                Err(FsError::NotFound)
            }
            _ => Err(error),
        }
    }

    /// Whether a copy is on record that only a remote or another mount could give. Where the remote
    /// was asked, its answer says what is wrong with its copy.
    fn has_untried_copy(&self, id: InodeId) -> Result<bool, FsError> {
        let object = self.core.state().inode(id)?.file().and_then(|file| file.object);
        object.map_or(Ok(false), |object| self.has_other_copy(object))
    }

    /// A file has no good copy left: its names go as they are looked up.
    fn give_up(&self, id: InodeId) -> Result<(), FsError> {
        let object = {
            let state = self.core.state_to_change()?;
            let inode = state.inode(id)?;
            inode.file().and_then(|file| file.object)
        };
        let Some(object) = object else {
            return Ok(());
        };
        let why = format!("object {object}: no copy is what was written");
        happened::keep_damaged(self.core, id, object, Take::Copy, &why);
        let mut state = self.core.state_to_change()?;
        // Somebody may have given the file other bytes.
        let inode = state.inode(id)?;
        if inode.file().and_then(|file| file.object) == Some(object) {
            state.damaged.insert(id, object);
        }
        drop(state);
        self.core.invalidate(Invalidation::Inode(id));
        Ok(())
    }
}

impl State {
    /// Takes a name away from a file that has no good copy left. Whether it did.
    pub(super) fn drop_damaged(&mut self, place: &Place, id: InodeId) -> Result<bool, FsError> {
        let Some(&object) = self.damaged.get(&id) else {
            return Ok(false);
        };
        let mut inode = self.inode(id)?;
        if inode.file().and_then(|file| file.object) != Some(object) {
            self.damaged.remove(&id);
            return Ok(false);
        }
        let name = place.name.as_slice();
        if name == names::POSITIONS.as_bytes()
            && self.metadata.note_positions(place.parent, name, id)
        {
            self.damaged.remove(&id);
            return Ok(false);
        }
        log::warn!("{} is gone: its bytes were damaged", self.path(place.parent, &place.name));
        self.remove_name(place, id);
        self.touch_directory(place.parent, 0)?;
        self.drop_link(id, &mut inode)?;
        // Whoever still knows the file without a name gets no damaged bytes either.
        if inode.links == 0 && !self.nodes.contains_key(&id) {
            self.damaged.remove(&id);
        }
        Ok(true)
    }
}

/// Files that have no good copy left, and the object that they had then.
pub(super) type Damaged = std::collections::HashMap<InodeId, ObjectId>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted, place};
    use kvfs_storage::store::record::EncodedCopy;
    use kvfs_storage::tier::encoding::Encoding;

    #[test]
    fn two_words() {
        fn check(text: &str, expected: Option<OnCorrupt>) {
            assert_eq!(text.parse().ok(), expected, "{text}");
        }
        check("eio", Some(OnCorrupt::Eio));
        check("miss", Some(OnCorrupt::Miss));
        check("MISS", None);
        check("", None);
        assert_eq!([OnCorrupt::Eio, OnCorrupt::Miss].map(|word| word.to_string()), ["eio", "miss"]);
    }

    fn miss(unmounted: &Unmounted, id: InodeId, error: FsError) -> FsError {
        unmounted.fs.residency().as_miss(id, error).unwrap_err()
    }

    #[test]
    fn what_may_come_back_counts_as_absent_for_now() {
        let unmounted = Unmounted::new();
        let id = unmounted.write(FILES, "file", b"bytes");
        let remote = |error| miss(&unmounted, id, FsError::Remote(error));
        assert!(matches!(remote(RemoteError::Unreachable("away".into())), FsError::NotFound));
        assert!(matches!(remote(RemoteError::Timeout("slow".into())), FsError::NotFound));
        // The disk failed, not the remote.
        let full = || std::io::Error::from_raw_os_error(libc::ENOSPC);
        assert_eq!(remote(RemoteError::Local(full().into())).errno(), libc::ENOSPC);
        assert!(matches!(miss(&unmounted, id, FsError::Busy), FsError::Busy));
        assert!(unmounted.fs.core.state().damaged.is_empty());
        // There is a copy that nobody could look at.
        let object = unmounted.fs.core.state().inode(id).unwrap().file().unwrap().object.unwrap();
        let copy = EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 5 };
        unmounted.fs.core.state().metadata.has_tiers = true;
        unmounted.fs.core.state().metadata.put_encoded_copy(object, &copy);
        assert!(matches!(miss(&unmounted, id, FsError::Corrupt), FsError::NotFound));
        assert!(unmounted.fs.core.state().damaged.is_empty());
    }

    #[test]
    fn what_has_no_good_copy_left_goes_with_its_names() {
        let unmounted = Unmounted::new();
        let (fs, core) = (&unmounted.fs, &unmounted.fs.core);
        let id = unmounted.write(FILES, "file", b"bytes");
        let other = unmounted.write(FILES, "other", b"bytes");
        fs.link(id, &place(FILES, "again")).unwrap();
        fs.choices.set(crate::Verify::First, OnCorrupt::Miss);
        for lost in [FsError::Corrupt, FsError::Remote(RemoteError::Missing("it".into()))] {
            assert!(matches!(miss(&unmounted, id, lost), FsError::Stale));
        }
        assert!(unmounted.told.try_iter().any(|what| what == Invalidation::Inode(id)));
        assert!(matches!(fs.open_file(id, libc::O_RDONLY), Err(FsError::Stale)));
        fs.release(fs.open_file(other, libc::O_RDONLY).unwrap().handle).unwrap();
        let drop_name = |name, id| core.state().drop_damaged(&place(FILES, name), id).unwrap();
        assert!(!drop_name("other", other));
        assert!(drop_name("file", id));
        assert_eq!(unmounted.names(FILES), ["again", "other"]);
        assert_eq!(core.state().inode(id).unwrap().links, 1);
        assert!(core.state().damaged.contains_key(&id), "it has another name");
        assert!(drop_name("again", id));
        assert!(core.state().damaged.contains_key(&id), "the kernel knows it still");
        assert_eq!(unmounted.names(FILES), ["other"]);
    }

    #[test]
    fn where_rows_stand_is_never_a_miss() {
        let unmounted = Unmounted::new();
        let sequence = unmounted.make_model(1).make_sequence("s", &[0], 1);
        let id = unmounted.write(sequence, names::POSITIONS, b"{}");
        unmounted.fs.choices.set(crate::Verify::First, OnCorrupt::Miss);
        let stays = || {
            assert!(matches!(miss(&unmounted, id, FsError::Corrupt), FsError::Corrupt));
            let gone = FsError::Remote(RemoteError::Missing("it".into()));
            assert!(matches!(miss(&unmounted, id, gone), FsError::Remote(_)));
            assert!(unmounted.fs.core.state().damaged.is_empty());
        };
        stays();
        // A mount that has not seen its name yet learns what it is when the name is looked up again.
        unmounted.fs.core.state().metadata.positions.clear();
        assert!(matches!(miss(&unmounted, id, FsError::Corrupt), FsError::Stale));
        let name = place(sequence, names::POSITIONS);
        assert!(!unmounted.fs.core.state().drop_damaged(&name, id).unwrap());
        stays();
        assert_eq!(unmounted.id_of(sequence, names::POSITIONS), Some(id));
    }

    #[test]
    fn whoever_knows_a_damaged_file_no_more_is_told_nothing_of_it() {
        let unmounted = Unmounted::new();
        let (fs, core) = (&unmounted.fs, &unmounted.fs.core);
        let id = unmounted.write(FILES, "file", b"bytes");
        miss(&unmounted, id, FsError::Corrupt);
        fs.link(id, &place(FILES, "again")).unwrap();
        fs.forget(id, 2);
        assert!(core.state().drop_damaged(&place(FILES, "again"), id).unwrap());
        assert!(core.state().damaged.contains_key(&id), "it has another name");
        assert!(core.state().drop_damaged(&place(FILES, "file"), id).unwrap());
        assert!(core.state().damaged.is_empty());
        // One that was given other bytes since is not damaged any more.
        let id = unmounted.write(FILES, "new", b"bytes");
        core.state().damaged.insert(id, ObjectId(1_000_000));
        assert!(!core.state().drop_damaged(&place(FILES, "new"), id).unwrap());
        assert!(core.state().damaged.is_empty());
        assert_eq!(unmounted.names(FILES), ["new"]);
    }
}
