//! What was done to a simulated disk, in order.

use std::sync::Arc;

use kvfs::store::disk::{DiskDirectory, DiskPath};

use crate::remote::Blobs;

/// A file, whatever its names are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(pub(crate) u64);

/// Whatever has a name on the disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Name {
    File(DiskPath),
    Directory(DiskDirectory),
}

impl Name {
    /// The directory that must be synced for the name to be durable.
    pub(crate) fn parent(&self) -> DiskDirectory {
        match self {
            Name::Directory(DiskDirectory::ObjectShard(_)) => DiskDirectory::Objects,
            Name::Directory(_) => DiskDirectory::Store,
            Name::File(path) => match path {
                DiskPath::Object(object) | DiskPath::Encoded(object) => {
                    DiskDirectory::ObjectShard(kvfs::store::disk::shard(*object))
                }
                DiskPath::Staging(_)
                | DiskPath::Scratch(_)
                | DiskPath::Incoming(_)
                | DiskPath::Encoding(_) => DiskDirectory::Staging,
                DiskPath::Quarantine(_) => DiskDirectory::Quarantine,
                DiskPath::Pack(_) => DiskDirectory::Packs,
                DiskPath::Format
                | DiskPath::FormatStaging
                | DiskPath::Metadata
                | DiskPath::MetadataStaging
                | DiskPath::Reserve
                | DiskPath::Ram(_) => DiskDirectory::Store,
            },
        }
    }
}

/// A change of a file's bytes, volatile until the file is synced.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { offset: u64, bytes: Arc<[u8]> },
    SetLength(u64),
}

/// A change of names, volatile until the directory is synced.
#[derive(Clone, Debug)]
pub(crate) enum NameChange {
    Add {
        name: Name,
        node: NodeId,
    },
    Remove {
        name: Name,
        node: NodeId,
    },
    /// Both names change at once or not at all.
    Rename {
        from: Name,
        to: Name,
        node: NodeId,
    },
}

/// One step.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Change {
        node: NodeId,
        change: Change,
    },
    Name(NameChange),
    /// The bytes are durable.
    Sync(NodeId),
    /// A sync failed, of a file or of a directory: what was not durable of the file by then will not
    /// be made durable by a later sync.
    FailedSync(Option<NodeId>),
    /// The names are durable.
    SyncDirectory(DiskDirectory),
    /// What the remote holds from now on.
    Remote(Arc<Blobs>),
    /// The program began what leads to this version of the model.
    Begin(usize),
    /// The program was told that this version is durable.
    Acknowledge(usize),
}

impl Step {
    /// Whether the disk, and not only what is known of it, changes.
    pub(crate) fn is_of_disk(&self) -> bool {
        !matches!(self, Step::Begin(_) | Step::Acknowledge(_))
    }
}
