//! What an object's file says about itself, in an extended attribute beside its bytes: where it
//! stands in the mount, and its records. While there is a `meta.redb` nobody reads it;
//! [`super::fsck::rebuild`] makes the records again from it.
//!
//! A commit writes what it changes after the bytes and before the records. Nobody waits until it is
//! durable: the journal of the disk's filesystem takes some seconds. So after a crash of the daemon the
//! notes are as new as the records, after a power cut they may be a little older. They are notes
//! all the same: renaming a directory does not touch what is below it, and where an attribute
//! cannot be kept there is none.

use std::io;

use serde::{Deserialize, Serialize};

use super::Store;
use super::disk::{Access, DiskPath, is_of_file};
use super::record::{Inode, Kind, ObjectId, ObjectRecord, Time};

/// Names that are noted of one file, the newest: an attribute has 4 KiB on ext4.
const PATHS_MAX: usize = 16;

/// What is noted of an object. Encoded with postcard; another layout needs another
/// [`super::format::VERSION`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Where it stands, from the mount's root; the newest name last.
    pub paths: Vec<Vec<u8>>,
    /// Its file.
    pub(crate) inode: Inode,
    /// Its bytes.
    pub(crate) object: ObjectRecord,
}

impl Description {
    /// A note of a file with these names. What the object's file knows better, and what changes
    /// without the file changing, is left out, so that the note stays the same.
    pub fn new(mut paths: Vec<Vec<u8>>, mut inode: Inode, object: ObjectRecord) -> Self {
        let links = usize::try_from(inode.links).unwrap_or(PATHS_MAX).clamp(1, PATHS_MAX);
        paths.drain(..paths.len().saturating_sub(links));
        inode.atime = Time::default();
        let mut object = ObjectRecord { references: 1, ..object };
        if let Kind::File(file) = &mut inode.kind
            && file.unsettled
        {
            (file.size, file.blocks, object.length) = (0, 0, 0);
            (inode.mtime, inode.ctime) = (Time::default(), Time::default());
        }
        Description { paths, inode, object }
    }
}

impl Store {
    /// Notes what an object is, if anything has changed. An object without a file is fine.
    pub fn describe(&self, object: ObjectId, description: &Description) -> io::Result<()> {
        let text = super::database::encode(description);
        for path in [DiskPath::Object(object), DiskPath::Encoded(object)] {
            match self.disk.note(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if !is_of_file(&error) => return Err(error),
                Ok(Some(old)) if old == text => {}
                old => {
                    self.disk.set_note(&path, &text)?;
                    if description.object.checksum.is_none() && had_checksum(old.ok().flatten()) {
                        // The bytes may change from now on: what they were must not outlive that.
                        if self.packs.holds(object) {
                            self.packs.sync()?;
                        } else {
                            self.disk.open(&path, Access::Read)?.sync()?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Notes what an object is of which no commit has noted anything: nothing has to be looked at before.
    pub fn describe_new(&self, object: ObjectId, description: &Description) -> io::Result<()> {
        let text = super::database::encode(description);
        match self.disk.set_note(&DiskPath::Object(object), &text) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        }
    }

    /// The same of new objects that are in packs.
    pub fn describe_packed(&self, descriptions: &[(ObjectId, Description)]) -> io::Result<()> {
        let encoded = descriptions
            .iter()
            .map(|(object, description)| (*object, super::database::encode(description)));
        self.packs.set_notes(&encoded.collect::<Vec<_>>())
    }

    /// Notes of another copy of an object what is noted of one, as far as it can be noted there.
    pub fn carry_note(&self, from: &DiskPath, to: &DiskPath) {
        let carry = || -> io::Result<()> {
            // Until nobody has noted something else meanwhile.
            while let Some(note) = self.disk.note(from)? {
                if self.disk.note(to)?.as_ref() == Some(&note) {
                    break;
                }
                self.disk.set_note(to, &note)?;
            }
            Ok(())
        };
        match carry() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                log::debug!("{}: where it belongs is not noted: {error}", to.relative().display());
            }
            _ => {}
        }
    }

    /// What is noted of an object.
    pub fn description(&self, object: ObjectId) -> Option<Description> {
        let paths = [DiskPath::Object(object), DiskPath::Encoded(object)];
        let mut notes = paths.iter().filter_map(|path| self.disk.note(path).ok().flatten());
        notes.find_map(|note| super::database::decode(&note).ok())
    }
}

fn had_checksum(note: Option<Vec<u8>>) -> bool {
    let note = note.and_then(|note| super::database::decode::<Description>(&note).ok());
    note.is_some_and(|note| note.object.checksum.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_carried_to_a_copy_and_what_has_none_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        let (raw, copy) = (DiskPath::Object(ObjectId(1)), DiskPath::Encoded(ObjectId(1)));
        // Neither is there.
        store.carry_note(&raw, &copy);
        for path in [&raw, &copy] {
            store.disk.create(path).unwrap();
        }
        store.disk.set_note(&copy, b"before").unwrap();
        store.carry_note(&raw, &copy);
        assert_eq!(store.disk.note(&copy).unwrap().unwrap(), b"before");
        store.disk.set_note(&raw, b"after").unwrap();
        store.carry_note(&raw, &copy);
        assert_eq!(store.disk.note(&copy).unwrap().unwrap(), b"after");
    }
}
