//! chmod, chown, utimensat and truncate.

use super::attributes::Attributes;
use super::open::Opening;
use super::{FileSystem, FsError};
use crate::core::rows::append_turn;
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::metadata::TokensChange;
use kvfs_storage::store::record::{Inode, InodeId, Time};

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewTime {
    /// The time of the call.
    Now,
    /// This time.
    At(Time),
}

/// What to change; `None` leaves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// Permission bits.
    pub mode: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Logical size.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<NewTime>,
    /// Last change of content.
    pub mtime: Option<NewTime>,
}

impl NewTime {
    fn resolve(self) -> Time {
        match self {
            NewTime::Now => Time::now(),
            NewTime::At(time) => time,
        }
    }
}

impl FileSystem {
    /// Changes attributes. The kernel has checked that the caller may.
    pub fn set_attributes(&self, id: InodeId, set: &SetAttributes) -> Result<Attributes, FsError> {
        if super::is_virtual(id) {
            return Err(FsError::NotPermitted);
        }
        match set.size {
            // It may be how somebody makes room.
            Some(_) => self.pacing().throttle_removal(),
            None => self.pacing().throttle()?,
        }
        self.core.state().check_current(id)?;
        if let Some(size) = set.size {
            let opening = self.opening();
            opening.with_resident(id, || opening.truncate(id, size))?;
        }
        let mut state = self.core.state_to_change()?;
        let mut inode = state.inode(id)?;
        let dates = (set.atime.is_some() || set.mtime.is_some()) && inode.file().is_some();
        let until_now = || self.retention.use_until_now((&state, &self.core.store), id, &inode);
        let used = dates.then(until_now).transpose()?;
        inode.mode = set.mode.map_or(inode.mode, |mode| mode & 0o7777);
        if let Some(owner) = set.uid {
            self.retention.end_limits(&mut state, (id, &inode), owner)?;
            inode.uid = owner;
        }
        inode.gid = set.gid.unwrap_or(inode.gid);
        inode.atime = set.atime.map_or(inode.atime, NewTime::resolve);
        inode.ctime = Time::now();
        if let Some(mtime) = set.mtime.map(NewTime::resolve) {
            inode.mtime = mtime;
            if let Some(node) = state.nodes.get_mut(&id) {
                node.wanted.is_dated = true;
            }
            let changing = state.unsettled.get(id).copied();
            let object = inode.file().filter(|file| file.unsettled).and_then(|file| file.object);
            if let Some(object) = changing.or(object) {
                // As long as a file changes in place, its file on the disk tells the time: the one that was asked
                // for, although a file that was made ahead may have had it before.
                state.unsettled.forget_made(object);
                // That of a file without a name is read there as well; what is in a pack has a date of its own once it
                // was taken out.
                if self.core.store.packs.unpack(object)? {
                    state.metadata.staged.insert(object);
                }
                self.core.store.open_object(object, Access::ReadWrite)?.set_modified(mtime)?;
            }
        }
        state.put_inode(id, &inode);
        if let Some(used) = used {
            self.retention.keep_use(&mut state, (id, &inode), used);
        }
        state.attributes_of(&self.core.store, id, &inode)
    }
}

impl Opening<'_> {
    fn truncate(&self, id: InodeId, size: u64) -> Result<(), FsError> {
        let mut state = self.core.state_to_change()?;
        let inode: Inode = state.inode(id)?;
        let file = match inode.file() {
            Some(file) => file.clone(),
            None if inode.is_directory() => return Err(FsError::IsDirectory),
            None => return Err(FsError::Invalid),
        };
        if file.role.is_sealed() {
            return Err(FsError::NotPermitted);
        }
        if file.role.is_append_only() {
            let object = file.object.ok_or(FsError::Stale)?;
            let turn = append_turn(&mut state, id);
            drop(state);
            let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if size > 0 {
                // rsync --inplace cuts a file to the length that it has just written.
                let length = self.core.store.stat_object(object)?.length;
                return if size == length { Ok(()) } else { Err(FsError::NotPermitted) };
            }
            let opened = self.core.store.open_object(object, Access::ReadWrite)?;
            self.core.cut_rows(file.role, opened.as_ref(), size)?;
            self.core.note_tokens(id, TokensChange::Truncated);
            return Ok(());
        }
        drop(state);
        if size > 0 {
            self.check_bytes(id)?;
        }
        let mut state = self.set_length_in_place(self.core.state_to_change()?, id, size)?;
        self.core.settle_if_at_rest(&mut state, id)?;
        state.drop_node_if_idle(id)
    }
}
