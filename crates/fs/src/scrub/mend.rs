//! One file: its raw copy and its encoded copy are compared, and what is damaged is mended from the
//! other, from memory, or from the remote. The damaged bytes are kept in quarantine.

use std::io;

use super::super::residency::{Residency, item};
use super::super::{FileSystem, FsError};
use super::Found;
use super::aside::Aside;
use super::read::Reader;
use crate::core::{Core, happened};
use crate::damage::has_lost_rows;
use crate::demotion::Commits;
use crate::verify::{changed_since, is_bad};
use kvfs_storage::store::disk::{Access, DiskFile, DiskPath, FileStat, is_of_file};
use kvfs_storage::store::quarantine::Take;
use kvfs_storage::store::record::{EncodedCopy, Inode, InodeId, ObjectId, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::encoded::verify;
use kvfs_storage::tier::exchange::Item;

/// A copy on the disk.
enum Copy {
    Absent,
    Sound,
    /// What its file was then, and what is wrong.
    Damaged(Option<FileStat>, String),
}

/// What is compared.
struct Subject {
    id: InodeId,
    object: ObjectId,
    inode: Inode,
    role: Role,
    item: Item,
    encoded: Option<EncodedCopy>,
}

impl Subject {
    /// Whether a file has the bytes that were written.
    fn has_checksum(&self, file: &dyn DiskFile) -> bool {
        let is_never_stopped = || false;
        let checksum = Reader::new(None, &is_never_stopped)
            .and_then(|mut reader| reader.checksum(file, self.role));
        checksum.is_ok_and(|checksum| checksum == self.item.checksum.0)
    }

    fn tell_mended(&self) -> Found {
        log::info!("object {}: mended from another copy", self.object);
        Found::Repaired
    }
}

/// What compares files with their checksums, and mends them.
#[derive(Clone, Copy)]
pub(super) struct Mender<'a> {
    core: &'a Core,
    residency: Residency<'a>,
    commits: &'a dyn Commits,
}

/// What is wrong is not the file, but who may look at it, or where it is.
fn passed_over(subject: &Subject, error: io::Error) -> Result<Copy, FsError> {
    if !is_of_file(&error) {
        return Err(error.into());
    }
    log::warn!("object {} is not compared: {error}", subject.object);
    Ok(Copy::Absent)
}

impl<'a> Mender<'a> {
    pub(super) fn of(fs: &'a FileSystem) -> Mender<'a> {
        Mender { core: &fs.core, residency: fs.residency(), commits: fs }
    }

    /// Compares a file's copies on the disk with its checksum.
    pub(super) fn scrub_file(
        self, id: InodeId, object: ObjectId, reader: &mut Aside<'a>,
    ) -> Result<Found, FsError> {
        let is_lost = {
            // Held, so that nobody takes the file away because its rows are a page by now.
            let state = self.core.state();
            let inode = state.metadata.inode(id)?;
            inode.is_some_and(|inode| has_lost_rows(self.core, &inode))
        };
        if is_lost {
            self.residency.tell_of_lost_rows(id, object);
            return Ok(Found::Damaged);
        }
        let Some(subject) = self.subject(id, object)? else {
            return Ok(Found::Skipped);
        };
        let raw = self.check_raw(&subject, reader)?;
        let encoded = self.check_encoded(&subject, reader)?;
        let expected = Some(subject.item.checksum.0);
        if changed_since(self.core, (id, &subject.inode), expected) {
            return Ok(Found::Skipped);
        }
        match (raw, encoded) {
            (Copy::Absent, Copy::Absent) => Ok(Found::Skipped),
            (Copy::Damaged(stat, why), encoded) => {
                let others =
                    if matches!(encoded, Copy::Damaged(..)) { "; the encoded one too" } else { "" };
                self.mend_raw(&subject, stat.as_ref(), &format!("{why}{others}"))
            }
            (raw, Copy::Damaged(_, why)) => {
                self.mend_encoded(&subject, matches!(raw, Copy::Sound), &why)
            }
            (Copy::Absent | Copy::Sound, _) => Ok(Found::Sound),
        }
    }

    /// A settled file with a checksum, whose bytes are durable.
    fn subject(&self, id: InodeId, object: ObjectId) -> Result<Option<Subject>, FsError> {
        let state = self.core.state();
        let Some(inode) = state.metadata.inode(id)? else {
            return Ok(None);
        };
        let Some(role) =
            inode.file().filter(|file| file.object == Some(object)).map(|file| file.role)
        else {
            return Ok(None);
        };
        let metadata = &state.metadata;
        let is_changing = state.unsettled.contains_key(id)
            || metadata.publishes(object)
            || metadata.is_committing(object);
        match item(&state, role, object)? {
            Some(item) if !is_changing => {
                let encoded = metadata.encoded_copy(object)?;
                Ok(Some(Subject { id, object, inode, role, item, encoded }))
            }
            _ => Ok(None),
        }
    }

    fn check_raw(&self, subject: &Subject, reader: &mut Aside<'_>) -> Result<Copy, FsError> {
        let file = match self.core.store.disk.open(&DiskPath::Object(subject.object), Access::Read)
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if !self.is_nowhere(subject)? {
                    return Ok(Copy::Absent);
                }
                return Ok(Copy::Damaged(None, "its file is missing from the store".to_owned()));
            }
            Err(error) if is_bad(&error) => {
                let stat = self.core.store.stat_object(subject.object).ok();
                return Ok(Copy::Damaged(stat, format!("its file cannot be opened: {error}")));
            }
            Err(error) => return passed_over(subject, error),
            Ok(file) => file,
        };
        let stat = file.stat()?;
        if stat.length != subject.item.length {
            let (found, expected) = (stat.length, subject.item.length);
            let why = format!("its file has {found} bytes instead of {expected}");
            return Ok(Copy::Damaged(Some(stat), why));
        }
        let role = subject.role;
        Ok(match reader.read(move |reader| reader.checksum(file.as_ref(), role)) {
            Ok(checksum) if checksum == subject.item.checksum.0 => Copy::Sound,
            Ok(_) => Copy::Damaged(
                Some(stat),
                "the stored bytes are not those that were written (checksum mismatch)".to_owned(),
            ),
            Err(error) if !is_bad(&error) => return passed_over(subject, error),
            Err(error) => Copy::Damaged(Some(stat), format!("its file cannot be read: {error}")),
        })
    }

    /// Whether no tier has an object that is on record.
    fn is_nowhere(&self, subject: &Subject) -> Result<bool, FsError> {
        let state = self.core.state();
        let is_on_record = state.metadata.object(subject.object)?.is_some()
            && state.metadata.encoded_copy(subject.object)?.is_none()
            && state.metadata.remote_copy(subject.object)?.is_none();
        Ok(is_on_record && self.core.store.stat_object(subject.object).is_err())
    }

    fn check_encoded(self, subject: &Subject, reader: &mut Aside<'a>) -> Result<Copy, FsError> {
        let Some(copy) = subject.encoded else {
            return Ok(Copy::Absent);
        };
        let (store, item) = (&self.core.store, subject.item);
        let outcome = reader.read(move |reader| {
            let outcome = verify(store, &item, &copy);
            reader.pay(copy.stored_bytes);
            outcome.map(|()| item.checksum.0)
        });
        match outcome {
            Ok(_) => Ok(Copy::Sound),
            Err(error) if !is_of_file(&error) => Err(error.into()),
            Err(error) => {
                // It may have been given up meanwhile.
                let current = self.core.state().metadata.encoded_copy(subject.object)?;
                let is_current = current == Some(copy);
                let why = format!("its encoded copy: {error}");
                Ok(if is_current { Copy::Damaged(None, why) } else { Copy::Absent })
            }
        }
    }

    /// The raw file is damaged or missing.
    fn mend_raw(
        &self, subject: &Subject, stat: Option<&FileStat>, why: &str,
    ) -> Result<Found, FsError> {
        let Subject { id, object, role, .. } = *subject;
        if self.core.store.ram.as_ref().is_some_and(|ram| ram.holds(object)) {
            return self.mend_from_memory(subject, why);
        }
        self.residency.corrupt(id, object, Tier::Ssd, why);
        let replaced = self.residency.replace((id, role), object, stat);
        match replaced {
            Ok(true) if self.is_sound_now(subject) => return Ok(subject.tell_mended()),
            Ok(_) | Err(FsError::Corrupt | FsError::Remote(_)) => {}
            Err(error) => return Err(error),
        }
        if stat.is_some() && !matches!(replaced, Ok(true)) {
            let why = format!("object {object}: {why}");
            happened::keep_damaged(self.core, id, object, Take::CopyOfDisk, &why);
        }
        // Whoever opens it next hears of it.
        self.forget_verified(id);
        Ok(Found::Damaged)
    }

    fn is_sound_now(&self, subject: &Subject) -> bool {
        let opened = self.core.store.open_object(subject.object, Access::Read);
        opened.is_ok_and(|file| subject.has_checksum(file.as_ref()))
    }

    /// Memory has the bytes: the next commit writes them to the disk once more.
    fn mend_from_memory(&self, subject: &Subject, why: &str) -> Result<Found, FsError> {
        let Subject { id, object, .. } = *subject;
        self.residency.corrupt(id, object, Tier::Ssd, why);
        let Some(ram) = self.core.store.ram.as_ref().filter(|_| self.is_sound_now(subject)) else {
            return Ok(Found::Damaged);
        };
        let why = format!("object {object}: {why}; the copy in memory takes its place");
        happened::keep_damaged(self.core, id, object, Take::CopyOfDisk, &why);
        {
            let mut state = self.core.state_to_change()?;
            if state.metadata.object(object)?.is_none() {
                return Ok(Found::Skipped);
            }
            ram.make_dirty(object);
            state.metadata.publish(object);
        }
        self.commits.commit()?;
        Ok(subject.tell_mended())
    }

    /// The encoded copy is damaged: it goes, once the disk has the raw file.
    fn mend_encoded(&self, subject: &Subject, has_raw: bool, why: &str) -> Result<Found, FsError> {
        let Subject { id, object, role, .. } = *subject;
        let Some(tiers) = self.residency.tiers else {
            self.residency.corrupt(id, object, Tier::Ssd, why);
            return Ok(Found::Damaged);
        };
        if !has_raw {
            // Memory, or the remote; the copy is given up on the way.
            return match self.residency.open_resident((id, role), object) {
                Ok((file, _)) if subject.has_checksum(file.as_ref()) => {
                    self.residency.write_to_disk(tiers, (id, object), file.as_ref())?;
                    self.mend_encoded(subject, true, why)
                }
                Ok(_) | Err(FsError::Corrupt | FsError::Remote(_)) => {
                    self.forget_verified(id);
                    Ok(Found::Damaged)
                }
                Err(error) => Err(error),
            };
        }
        let mut state = self.core.state_to_change()?;
        if state.metadata.forget_encoded_copy(object)?.is_some() {
            happened::keep_damaged(self.core, id, object, Take::Encoded, why);
            tiers.copies.discard_encoded(object);
            tiers.copies.note_raw(object, id, subject.item.length);
            drop(state);
            self.residency.corrupt(id, object, Tier::Ssd, why);
        }
        Ok(subject.tell_mended())
    }

    fn forget_verified(&self, id: InodeId) {
        if let Some(node) = self.core.state().nodes.get_mut(&id) {
            node.verified = None;
        }
    }
}
