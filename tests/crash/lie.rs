//! A disk that answers "done" and did nothing: what a store without that step would do. Each must
//! be noticed by the checks, or they would not notice either if the step were missing.

use kvfs::store::disk::{DiskDirectory, DiskPath};

use crate::log::{Name, NameChange, NodeId, Step};

/// Which step is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// fsync of what becomes an object.
    SyncOfObjects,
    /// fsync of encoded copies.
    SyncOfEncoded,
    /// fsync of `meta.redb`.
    SyncOfDatabase,
    /// fsync of the directories below `objects/`.
    SyncOfShards,
    /// fsync of the store's directory.
    SyncOfStore,
}

impl Lie {
    pub(crate) fn is_about(&self, step: &Step, log: &[Step]) -> bool {
        match (self, step) {
            (Lie::SyncOfObjects, Step::Sync(node)) => {
                named(log, *node, |path| matches!(path, DiskPath::Staging(_)))
            }
            (Lie::SyncOfEncoded, Step::Sync(node)) => {
                named(log, *node, |path| matches!(path, DiskPath::Encoding(_)))
            }
            (Lie::SyncOfDatabase, Step::Sync(node)) => {
                named(log, *node, |path| *path == DiskPath::MetadataStaging)
            }
            (Lie::SyncOfShards, Step::SyncDirectory(DiskDirectory::ObjectShard(_)))
            | (Lie::SyncOfStore, Step::SyncDirectory(DiskDirectory::Store)) => true,
            _ => false,
        }
    }
}

/// Whether a file was made under such a name.
fn named(log: &[Step], node: NodeId, is_such: impl Fn(&DiskPath) -> bool) -> bool {
    log.iter().any(|step| match step {
        Step::Name(NameChange::Add { name: Name::File(path), node: added }) => {
            *added == node && is_such(path)
        }
        _ => false,
    })
}
