//! Pages with the same bytes are stored once, whatever sequences they belong to: the second name
//! becomes a hard link of the first.
//!
//! Sequences that begin alike have the same K and V, so engines that do not look for prefixes write
//! the same pages again. They are found by their checksum and compared byte by byte: a checksum
//! that somebody made to collide must not put one user's bytes into another's sequence. Caches of
//! different tenants or salts have different identities, hence different checksums.

use std::io;

use crate::FsError;
use crate::core::Core;
use crate::core::state::State;
use crate::insert::{Origin, Verified};
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
        match self.are_equal(object, other) {
            Ok(equal) => Ok(equal.then_some(id)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn are_equal(&self, one: ObjectId, other: ObjectId) -> io::Result<bool> {
        let map = |object| -> io::Result<_> {
            Ok(self.store.open_object(object, Access::Read)?.map_at_rest())
        };
        Ok(match (map(one)?, map(other)?) {
            (Some(one), Some(other)) => *one == *other,
            _ => false,
        })
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
            && wanted.attributes.is_empty()
            && self.metadata.attribute_names(id)?.is_empty();
        if is_alike {
            inode.links += 1;
            inode.ctime = Time::now();
            // Who evicts what nobody used lately must see that it was used.
            inode.atime = inode.ctime;
            self.put_inode(id, &inode);
        }
        Ok(is_alike)
    }

    /// A page goes: nobody shall find it any more.
    pub(crate) fn forget_page(&mut self, id: InodeId, inode: &Inode) -> Result<(), FsError> {
        let page = inode.file().filter(|file| matches!(file.role, Role::Page(_)));
        let Some(object) = page.and_then(|file| file.object) else { return Ok(()) };
        if let Some(checksum) = self.metadata.object(object)?.and_then(|record| record.checksum) {
            self.metadata.forget_page(&checksum, id)?;
        }
        Ok(())
    }
}
