//! Directories and files that the daemon makes as a client would: of a slot that is saved, and of a sequence of another
//! store.

use std::fmt::Debug;

use crate::attributes::{Caller, Place};
use crate::create::NewNode;
use crate::retention::InUse;
use crate::{FileSystem, FsError};
use kvfs_storage::store::record::{Entry, InodeId};

/// What takes bytes of a file that is made, and where they begin.
pub(crate) type Write<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<(), FsError>;

/// What makes and moves them.
pub(crate) trait Tree: Debug {
    /// Commits first where as many changes wait for that as may.
    fn make_room_for_changes(&self) -> Result<(), FsError>;

    /// Makes a directory.
    fn make_directory(&self, place: &Place, mode: u16, owner: Caller) -> Result<InodeId, FsError>;

    /// Makes a file of the pieces that `fill` writes, and closes it.
    fn make_file(
        &self, place: &Place, mode: u16, owner: Caller,
        fill: &mut dyn FnMut(Write<'_>) -> Result<(), FsError>,
    ) -> Result<(), FsError>;

    /// `renameat2(2)`
    fn move_to(&self, from: &Place, to: &Place, flags: u32) -> Result<(), FsError>;

    /// Removes a directory with all that is in it, whoever has that open.
    fn remove_with_contents(&self, place: &Place, entry: Entry) -> Result<(), FsError>;
}

impl Tree for FileSystem {
    fn make_room_for_changes(&self) -> Result<(), FsError> {
        self.pacing().throttle()
    }

    fn make_directory(&self, place: &Place, mode: u16, owner: Caller) -> Result<InodeId, FsError> {
        let found = self.make(place, &NewNode::Directory, mode, owner)?;
        self.forget(found.attributes.inode, 1);
        Ok(found.attributes.inode)
    }

    fn make_file(
        &self, place: &Place, mode: u16, owner: Caller,
        fill: &mut dyn FnMut(Write<'_>) -> Result<(), FsError>,
    ) -> Result<(), FsError> {
        let created = self.create(place, mode, owner, true)?;
        let (handle, inode) = (created.opened.handle, created.found.attributes.inode);
        // The daemon's own descriptor is no writer that the file waits for.
        drop(created);
        let written = fill(&mut |at, bytes| self.write(handle, at, bytes, true));
        let written = written.and_then(|()| self.flush(handle));
        let released = self.release(handle);
        self.forget(inode, 1);
        written.and(released)
    }

    fn move_to(&self, from: &Place, to: &Place, flags: u32) -> Result<(), FsError> {
        self.rename(from, to, flags).map(drop)
    }

    fn remove_with_contents(&self, place: &Place, entry: Entry) -> Result<(), FsError> {
        self.enforcer().remove_tree(place, entry, InUse::Goes).map(drop)
    }
}
