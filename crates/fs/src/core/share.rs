//! Pages with the same bytes are stored once, whatever sequences they belong to: the second name
//! becomes a hard link of the first.
//!
//! Sequences that begin alike have the same K and V, so engines that do not look for prefixes write
//! the same pages again. They are found by their checksum and compared byte by byte: a checksum
//! that somebody made to collide must not put one user's bytes into another's sequence. Caches of
//! different tenants or salts have different identities, hence different checksums.

use std::io;

use crate::FsError;
use crate::attributes::Place;
use crate::core::Core;
use crate::core::state::State;
use crate::insert::{Origin, Verified};
use crate::retention::USED;
use kvfs_storage::ingest::seal;
use kvfs_storage::store::Store;
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId, Role, Time};

/// As on ext4 and far below the counter's range.
pub(crate) const LINKS_MAX: u32 = 65_000;

impl Core {
    /// A page that has these bytes already. Not one whose bytes would have to be fetched: they
    /// came here just now.
    pub(crate) fn find_twin(
        &self, object: ObjectId, role: Role, checksum: [u8; 16],
    ) -> Result<Option<InodeId>, FsError> {
        let (id, other) = {
            let state = self.state();
            let Some(id) = state.metadata.page_with(&checksum)? else { return Ok(None) };
            match state.metadata.inode(id)? {
                Some(inode) if state.has_content(&inode, role, checksum)? => {
                    (id, inode.file().and_then(|file| file.object))
                }
                _ => return Ok(None),
            }
        };
        let Some(other) = other.filter(|other| *other != object) else { return Ok(None) };
        match have_same_bytes(&self.store, object, other) {
            Ok(equal) => Ok(equal.then_some(id)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The file that has a name already, if it is what these bytes are. One that is damaged is not: these
    /// take its place. What is only encoded or in the remote is believed to be what its record says.
    pub(crate) fn find_same(
        &self, object: ObjectId, place: &Place, (role, checksum): (Role, [u8; 16]),
    ) -> Result<Option<InodeId>, FsError> {
        let (id, other) = {
            let state = self.state();
            let Some(entry) = state.entry(place.parent, &place.name)? else { return Ok(None) };
            let inode = state.inode(entry.inode)?;
            if !state.has_content(&inode, role, checksum)? || state.is_known_damaged(entry.inode) {
                return Ok(None);
            }
            (entry.inode, inode.file().and_then(|file| file.object))
        };
        let Some(other) = other.filter(|other| *other != object) else { return Ok(None) };
        match have_same_bytes(&self.store, object, other) {
            Ok(same) => Ok(same.then_some(id)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let state = self.state();
                let has_copy = state.metadata.encoded_copy(other)?.is_some()
                    || state.metadata.remote_copy(other)?.is_some();
                Ok(has_copy.then_some(id))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether two objects have the same bytes. What cannot be read is not the same.
fn have_same_bytes(store: &Store, one: ObjectId, other: ObjectId) -> io::Result<bool> {
    let one = store.open_object(one, Access::Read)?;
    let other = store.open_object(other, Access::Read)?;
    if let (Some(one), Some(other)) = (one.map_at_rest(), other.map_at_rest()) {
        return Ok(*one == *other);
    }
    if one.stat()?.length != other.stat()?.length {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; seal::READ_BYTES], vec![0; seal::READ_BYTES]);
    let mut offset = 0;
    loop {
        let count = one.read_at(&mut left, offset)?;
        let is_as_long = other.read_at(&mut right, offset).is_ok_and(|other| other == count);
        if !is_as_long || left[..count] != right[..count] {
            return Ok(false);
        }
        if count == 0 {
            return Ok(true);
        }
        offset += count as u64;
    }
}

impl State {
    /// One more name for a page, if nobody could tell it from a file of its own: the same owner
    /// and permissions, no attributes, and no mtime that somebody wants to see again. Returns
    /// whether it is so.
    pub(crate) fn share(
        &mut self, id: InodeId, wanted: &Origin, verified: &Verified,
    ) -> Result<bool, FsError> {
        let Some(mut inode) = self.metadata.inode(id)? else { return Ok(false) };
        let rights = |inode: &Inode| (inode.mode, inode.uid, inode.gid);
        let is_alike = self.has_content(&inode, verified.role, verified.checksum)?
            && rights(&inode) == rights(&wanted.inode)
            && (!wanted.is_dated || inode.mtime == wanted.inode.mtime)
            && (1..LINKS_MAX).contains(&inode.links)
            && wanted.attributes.iter().all(|(name, _)| name == USED)
            && self.metadata.attribute_names(id)?.iter().all(|name| name == USED);
        if is_alike {
            inode.links += 1;
            inode.ctime = Time::now();
            // Who evicts what nobody used lately must see that it was used.
            inode.atime = inode.ctime;
            self.put_inode(id, &inode);
        }
        Ok(is_alike)
    }

    /// A page goes: nobody may find it any more.
    pub(crate) fn forget_page(&mut self, id: InodeId, inode: &Inode) -> Result<(), FsError> {
        let page = inode.file().filter(|file| matches!(file.role, Role::Page(_)));
        let Some(object) = page.and_then(|file| file.object) else { return Ok(()) };
        if let Some(checksum) = self.metadata.object(object)?.and_then(|record| record.checksum) {
            self.metadata.forget_page(&checksum, id)?;
        }
        Ok(())
    }
}
