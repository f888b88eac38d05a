//! A disk that answers "done" and did nothing: what a store without that step would do. Each must
//! be noticed by the checks, or they would not notice either if the step were missing.

use kvfs::store::disk::{DiskDirectory, DiskPath};

use crate::log::{Name, NameChange, NodeId, Step};

/// Which sync is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// fsync of what becomes an object.
    Objects,
    /// fsync of encoded copies.
    Encoded,
    /// fsync of `meta.redb`.
    Database,
    /// fsync of the directories below `objects/`.
    Shards,
    /// fsync of the store's directory.
    Store,
}

impl Lie {
    pub(crate) fn is_about(self, step: &Step, log: &[Step]) -> bool {
        match (self, step) {
            (Lie::Objects, Step::Sync(node)) => {
                named(log, *node, |path| matches!(path, DiskPath::Staging(_)))
            }
            (Lie::Encoded, Step::Sync(node)) => {
                named(log, *node, |path| matches!(path, DiskPath::Encoding(_)))
            }
            (Lie::Database, Step::Sync(node)) => {
                named(log, *node, |path| *path == DiskPath::MetadataStaging)
            }
            (Lie::Shards, Step::SyncDirectory(DiskDirectory::ObjectShard(_)))
            | (Lie::Store, Step::SyncDirectory(DiskDirectory::Store)) => true,
            _ => false,
        }
    }
}

/// Whether a file was made under such a name.
pub(crate) fn named(log: &[Step], node: NodeId, is_such: impl Fn(&DiskPath) -> bool) -> bool {
    log.iter().any(|step| match step {
        Step::Name(NameChange::Add { name: Name::File(path), node: added }) => {
            *added == node && is_such(path)
        }
        _ => false,
    })
}
