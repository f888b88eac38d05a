//! What enforces limits: it walks what is below them, and removes.

use std::time::Duration;

use super::{Retainer, Retention};
use crate::attributes::Place;
use crate::core::Core;
use crate::{FileSystem, FsError};
use kvfs_storage::store::disk::Space;
use kvfs_storage::store::record::InodeId;

/// What retention asks of the operations on names.
pub(crate) trait Names: std::fmt::Debug {
    /// unlink(2)
    fn unlink(&self, place: &Place) -> Result<(), FsError>;
    /// rmdir(2)
    fn remove_directory(&self, place: &Place) -> Result<(), FsError>;
}

/// What a removal needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Enforcer<'a> {
    pub(super) core: &'a Core,
    pub(super) retention: &'a Retention,
    pub(super) names: &'a dyn Names,
}

impl Names for FileSystem {
    fn unlink(&self, place: &Place) -> Result<(), FsError> {
        FileSystem::unlink(self, place)
    }

    fn remove_directory(&self, place: &Place) -> Result<(), FsError> {
        FileSystem::remove_directory(self, place)
    }
}

impl FileSystem {
    pub(crate) fn enforcer(&self) -> Enforcer<'_> {
        Enforcer { core: &self.core, retention: &self.retention, names: self }
    }

    /// What `statfs` tells in a directory: not more than what the limits above it leave. Files that are off the record and
    /// about to be removed are free: whoever removes and syncs until there is room would remove too much.
    pub fn space_at(&self, id: InodeId) -> Result<Space, FsError> {
        let space = self.core.store.disk.space()?;
        self.retention.limit_space(&self.core, id, self.postponed.waiting().added_to(space))
    }
}

/// One step of retention; says how long to wait before the next.
pub fn retain(fs: &FileSystem, retainer: &mut Retainer) -> Duration {
    fs.enforcer().retain(retainer)
}

/// Puts all uses on record, when a mount that may change something ends.
pub fn record_uses(fs: &FileSystem) -> Result<(), FsError> {
    fs.retention.record_uses(&fs.core, || fs.commit())
}
