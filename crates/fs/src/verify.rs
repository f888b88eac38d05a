//! How often the bytes of a file are compared with their checksum when it is opened. What comes back
//! from an encoded copy or from the remote is compared in any case, and so is what a change in place
//! makes the only copy.

use super::FsError;
use super::open::Opening;
use super::residency::{Residency, tier_here};
use crate::core::Core;
use std::io;
use std::sync::Arc;

use kvfs_storage::ingest::seal;
use kvfs_storage::store::disk::{DiskFile, FileStat, is_damage, is_unreadable};
use kvfs_storage::store::record::{Inode, InodeId, ObjectId, Role};
use kvfs_storage::tier::counters::Tier;

/// When an open reads the whole file and compares it with its checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// The first time after the mount, and again whenever the store's file is another one.
    #[default]
    First,
    /// Each time.
    Always,
    /// Not at all: only the length is compared.
    Never,
}

impl std::str::FromStr for Verify {
    type Err = String;

    fn from_str(text: &str) -> Result<Verify, String> {
        match text {
            "first" => Ok(Verify::First),
            "always" => Ok(Verify::Always),
            "never" => Ok(Verify::Never),
            _ => Err(format!("{text:?} is neither first, always nor never")),
        }
    }
}

impl std::fmt::Display for Verify {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Verify::First => "first",
            Verify::Always => "always",
            Verify::Never => "never",
        })
    }
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// Length and checksum.
    Bytes,
    /// The length alone.
    Length,
}

impl Opening<'_> {
    /// What an open compares.
    pub(super) fn depth_at_open(&self) -> Depth {
        if self.choices.verify() == Verify::Never { Depth::Length } else { Depth::Bytes }
    }

    /// Compares a file's bytes with their checksum before somebody changes them, unless that was done since the
    /// mount: nobody could afterwards.
    pub(super) fn check_bytes(&self, id: InodeId) -> Result<(), FsError> {
        let state = self.core.state();
        let inode = state.inode(id)?;
        let Some(file) = inode.file() else { return Ok(()) };
        let is_changing = file.unsettled || state.unsettled.contains_key(id);
        let is_known = state.nodes.get(&id).is_some_and(|node| node.verified.is_some());
        if is_changing || is_known || file.size == 0 || self.depth_at_open() != Depth::Bytes {
            return Ok(());
        }
        let opened = self.open_reader(state, id, &inode, file)?;
        self.publishing.release(opened.handle)
    }
}

impl Residency<'_> {
    /// Opens an object and, the first time, checks that its bytes are those that were sealed. Which tier had it.
    pub(super) fn open_verified(
        &self, (id, inode): (InodeId, &Inode), (object, settled): (ObjectId, bool),
        verified: Option<(ObjectId, FileStat)>, depth: Depth,
    ) -> Result<(Arc<dyn DiskFile>, FileStat, Tier), FsError> {
        let role = inode.file().ok_or(FsError::Invalid)?.role;
        let (opened, tier) = match self.open_resident((id, role), object) {
            Err(FsError::Io(error)) if settled && is_bad(&error) => {
                self.open_in_its_place((id, inode), object, error)?
            }
            found => found?,
        };
        let stat = opened.stat()?;
        let known = verified.is_some_and(|(_, known)| known.is_same_content(&stat));
        if !settled || known {
            return Ok((opened, stat, tier));
        }
        let Err(damage) = self.verify_file((id, inode), object, opened.as_ref(), depth) else {
            return Ok((opened, stat, tier));
        };
        drop(opened);
        let is_damaged = matches!(damage, FsError::Corrupt | FsError::Unreadable(_));
        if !is_damaged || !self.replace_damaged((id, role), object, &stat)? {
            if is_damaged {
                self.note_damage(id, object, true);
            }
            return Err(damage);
        }
        let (opened, tier) = self.open_resident((id, role), object)?;
        self.verify_file((id, inode), object, opened.as_ref(), depth)?;
        let stat = opened.stat()?;
        Ok((opened, stat, tier))
    }

    /// Opens another copy of a settled file whose own cannot be opened, for this reason.
    fn open_in_its_place(
        &self, (id, inode): (InodeId, &Inode), object: ObjectId, error: io::Error,
    ) -> Result<(Arc<dyn DiskFile>, Tier), FsError> {
        let role = inode.file().ok_or(FsError::Invalid)?.role;
        let expected =
            self.core.state().metadata.object(object)?.and_then(|record| record.checksum);
        // Of what cannot be opened, and not of what somebody has put in its place by now.
        let stat = self.core.store.stat_object(object).ok();
        match self.open_if_here(object) {
            Err(again) if is_bad(&again) => {}
            Ok(Some(_)) => return self.open_resident((id, role), object),
            // It passed, or is no damage of this file.
            _ => return Err(error.into()),
        }
        if changed_since(self.core, (id, inode), expected) {
            return self.open_resident((id, role), object);
        }
        let why = format!("its file cannot be opened: {error}");
        let damage = self.unreadable(id, object, &why, error);
        match self.replace((id, role), object, stat.as_ref()) {
            Ok(true) => return self.open_resident((id, role), object),
            // It may have a good one.
            Err(FsError::Remote(error)) if error.is_outage() => {
                return Err(FsError::Remote(error));
            }
            _ if changed_since(self.core, (id, inode), expected) => {}
            _ => self.note_damage(id, object, true),
        }
        Err(damage)
    }

    /// Tells that a file's own copy is not to be had. Where that says nothing of its bytes, the error stays what it is.
    fn unreadable(&self, id: InodeId, object: ObjectId, why: &str, error: io::Error) -> FsError {
        let damage = self.corrupt(id, object, tier_here(self.core, object), why);
        if is_damage(&error) { damage } else { FsError::Unreadable(error) }
    }

    /// Compares what was opened with what is on record of a file.
    fn verify_file(
        &self, (id, inode): (InodeId, &Inode), object: ObjectId, opened: &dyn DiskFile,
        depth: Depth,
    ) -> Result<(), FsError> {
        let file = inode.file().ok_or(FsError::Invalid)?;
        let length = opened.stat()?.length;
        let expected =
            self.core.state().metadata.object(object)?.and_then(|record| record.checksum);
        if length != file.size {
            if changed_since(self.core, (id, inode), expected) {
                return Ok(());
            }
            let size = file.size;
            let why = format!("its file has {length} bytes instead of {size}");
            return Err(self.corrupt(id, object, tier_here(self.core, object), &why));
        }
        let Some(expected) = expected.filter(|_| depth == Depth::Bytes) else {
            return Ok(());
        };
        let actual = match file.role {
            Role::Page(page) => seal::page_checksum(opened, &page),
            _ => seal::content_checksum(opened),
        };
        let actual = match actual {
            Err(error) if is_bad(&error) => {
                let why = format!("its file cannot be read: {error}");
                return Err(self.unreadable(id, object, &why, error));
            }
            actual => actual?,
        };
        if actual == expected || changed_since(self.core, (id, inode), Some(expected)) {
            return Ok(());
        }
        let why = "the stored bytes are not those that were written (checksum mismatch)";
        Err(self.corrupt(id, object, tier_here(self.core, object), why))
    }
}

/// Whether a file's own copy cannot be used, by the error of opening or reading it.
pub(super) fn is_bad(error: &io::Error) -> bool {
    is_damage(error) || is_unreadable(error)
}

/// Whether somebody began to write to a file while it was being compared with its checksum: what was known of its
/// bytes does not hold any more, and nothing is wrong with that. Names, rights and dates say nothing of them.
pub(super) fn changed_since(
    core: &Core, (id, inode): (InodeId, &Inode), checksum: Option<[u8; 16]>,
) -> bool {
    let state = core.state();
    let bytes = |inode: &Inode| inode.file().map(|file| (file.role, file.object, file.size));
    let Ok(Some(now)) = state.metadata.inode(id) else { return true };
    // A commit gives other bytes another checksum.
    let object = now.file().and_then(|file| file.object);
    let record = object.and_then(|object| state.metadata.object(object).ok().flatten());
    let is_written_to = state.unsettled.contains_key(id)
        || now.links == 0 && state.nodes.get(&id).is_some_and(|node| node.writers > 0);
    is_written_to
        || bytes(&now) != bytes(inode)
        // A file without a name is on no record any more.
        || record.is_some_and(|record| record.checksum != checksum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lossy::LossyModels;
    use crate::tiers::Tiers;
    use crate::unmounted::{FILES, Unmounted, place};
    use crate::{OnCorrupt, SetAttributes};
    use kvfs_storage::store::disk::{Access, shard};
    use kvfs_storage::tier::counters::Counters;
    use kvfs_storage::tier::encoded::EncodedCopies;
    use kvfs_storage::tier::encoding::{ColdEncoding, ZstdLevel};
    use kvfs_storage::tier::ssd::SsdTier;

    #[test]
    fn three_words() {
        fn check(text: &str, expected: Option<Verify>) {
            assert_eq!(text.parse().ok(), expected, "{text}");
            assert!(expected.is_none_or(|verify| verify.to_string() == text));
        }
        check("first", Some(Verify::First));
        check("always", Some(Verify::Always));
        check("never", Some(Verify::Never));
        check("sometimes", None);
        check("", None);
    }

    /// A file of an earlier mount, its record and its object.
    fn written(unmounted: &Unmounted) -> (InodeId, Inode, ObjectId) {
        let id = unmounted.id_of(FILES, "file").unwrap();
        let inode = unmounted.fs.core.state().inode(id).unwrap();
        let object = inode.file().unwrap().object.unwrap();
        (id, inode, object)
    }

    fn with_file() -> Unmounted {
        let unmounted = Unmounted::new();
        unmounted.write(FILES, "file", b"some bytes");
        unmounted.again()
    }

    #[test]
    fn bytes_that_are_not_what_was_written_are_found_unless_only_lengths_are_looked_at() {
        let unmounted = with_file();
        let (fs, (id, inode, object)) = (&unmounted.fs, written(&unmounted));
        let file = fs.core.store.open_object(object, Access::ReadWrite).unwrap();
        let verify =
            |depth| match fs.residency().verify_file((id, &inode), object, file.as_ref(), depth) {
                Ok(()) => true,
                Err(FsError::Corrupt) => false,
                Err(error) => panic!("{error}"),
            };
        assert!(verify(Depth::Bytes) && verify(Depth::Length));
        file.write_all_at(b"other", 0).unwrap();
        assert!(!verify(Depth::Bytes) && verify(Depth::Length));
        file.write_all_at(b"some bytes", 0).unwrap();
        assert!(verify(Depth::Bytes));
        file.write_all_at(b"!", 10).unwrap();
        assert!(!verify(Depth::Bytes) && !verify(Depth::Length));
    }

    #[test]
    fn what_somebody_writes_meanwhile_is_no_damage() {
        let unmounted = with_file();
        let (fs, (id, inode, object)) = (&unmounted.fs, written(&unmounted));
        let checksum = fs.core.state().metadata.object(object).unwrap().unwrap().checksum;
        let changed = |checksum| changed_since(&fs.core, (id, &inode), checksum);
        assert!(!changed(checksum));
        assert!(changed(Some([1; 16])) && changed(None), "a commit gave it another");
        let set = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        fs.set_attributes(id, &set).unwrap();
        assert!(!changed(checksum), "rights say nothing of bytes");
        let opened = fs.open_file(id, libc::O_WRONLY).unwrap();
        fs.write(opened.handle, 0, b"new", false).unwrap();
        assert!(changed(checksum));
        fs.unlink(&place(FILES, "file")).unwrap();
        assert!(changed(checksum), "a file without a name that somebody writes to");
        fs.release(opened.handle).unwrap();
        assert!(changed(checksum), "it is gone");
    }

    #[test]
    fn a_file_without_a_name_can_be_damaged_as_well() {
        let unmounted = with_file();
        let (fs, (id, inode, object)) = (&unmounted.fs, written(&unmounted));
        let checksum = fs.core.state().metadata.object(object).unwrap().unwrap().checksum;
        let opened = fs.open_file(id, libc::O_RDONLY).unwrap();
        fs.unlink(&place(FILES, "file")).unwrap();
        assert!(!changed_since(&fs.core, (id, &inode), checksum));
        fs.release(opened.handle).unwrap();
    }

    #[test]
    fn bytes_that_were_compared_since_the_mount_are_not_again() {
        let unmounted = with_file();
        let (fs, (id, _, object)) = (&unmounted.fs, written(&unmounted));
        let opened = fs.open_file(id, libc::O_RDONLY).unwrap();
        let file = fs.core.store.open_object(object, Access::ReadWrite).unwrap();
        file.write_all_at(b"other", 0).unwrap();
        fs.opening().check_bytes(id).unwrap();
        fs.release(opened.handle).unwrap();
    }

    #[test]
    fn before_a_change_in_place_bytes_are_compared_once() {
        let unmounted = with_file();
        let (fs, (id, _, object)) = (&unmounted.fs, written(&unmounted));
        let file = fs.core.store.open_object(object, Access::ReadWrite).unwrap();
        file.write_all_at(b"other", 0).unwrap();
        assert!(matches!(fs.opening().check_bytes(id), Err(FsError::Corrupt)));
        assert_eq!(fs.opening().depth_at_open(), Depth::Bytes);
        fs.choices.set(Verify::Never, OnCorrupt::Eio);
        assert_eq!(fs.opening().depth_at_open(), Depth::Length);
        fs.opening().check_bytes(id).unwrap();
        fs.choices.set(Verify::First, OnCorrupt::Eio);
        // What is empty, or is being written, has no bytes to compare.
        let new = unmounted.write(FILES, "new", b"");
        fs.opening().check_bytes(new).unwrap();
        let opened = fs.open_file(id, libc::O_WRONLY | libc::O_TRUNC);
        opened.map(|opened| fs.release(opened.handle).unwrap()).unwrap();
    }

    /// The disk has it encoded as well.
    #[test]
    fn another_copy_takes_the_place_of_what_cannot_be_opened() {
        let mut unmounted = Unmounted::new();
        let bytes = vec![7; 200_000];
        unmounted.write(FILES, "file", &bytes);
        unmounted = unmounted.again();
        let encoded = EncodedCopies::new(ColdEncoding::Zstd(ZstdLevel::DEFAULT), Some(1));
        let tiers = Tiers::new(None, SsdTier::new(Some(1)), encoded, Counters::default());
        unmounted.fs.attach(tiers);
        let (fs, (id, _, object)) = (&unmounted.fs, written(&unmounted));
        let tiers = fs.tiers.as_ref().unwrap();
        tiers.copies.note_raw(object, id, bytes.len() as u64);
        let demotion = fs.demotion(tiers);
        assert_eq!(demotion.encode_cold(&mut LossyModels::default()).unwrap(), 1);
        // Comes back, and may now be lost.
        let read = || {
            let opened = fs.open_file(id, libc::O_RDONLY).unwrap();
            let mut found = vec![0; bytes.len()];
            assert_eq!(fs.read(opened.handle, 0, &mut found).unwrap(), bytes.len());
            assert!(found == bytes);
            fs.release(opened.handle).unwrap();
        };
        read();
        let path = fs.store().path().join(format!("objects/{:02x}/{object}", shard(object)));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        read();
    }
}
