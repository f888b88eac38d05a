//! What `stat` shows of an inode, without any type of the FUSE library.

use serde::{Deserialize, Serialize};

use kvfs_storage::store::record::{Inode, InodeId, Kind, Time};

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// The directory.
    pub parent: InodeId,
    /// The name.
    pub name: Vec<u8>,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Caller {
    /// The daemon itself.
    pub const DAEMON: Caller = Caller { uid: 0, gid: 0 };
}

/// What `stat` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The inode.
    pub inode: InodeId,
    /// Logical size in bytes.
    pub size: u64,
    /// Blocks of 512 bytes; never 0 for a non-empty file (`tar -S` would archive a hole).
    pub blocks: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// `S_IFMT` bits.
    pub file_type: u32,
    /// Permission bits.
    pub mode: u16,
    /// Hard links.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node.
    pub device: u32,
    /// Nobody may change the file without the daemon knowing: the kernel may cache this.
    pub is_at_rest: bool,
}

impl Attributes {
    /// What the record alone says.
    pub(crate) fn of_record(id: InodeId, inode: &Inode) -> Attributes {
        let (size, blocks, device) = match &inode.kind {
            Kind::File(file) => (file.size, file.blocks, 0),
            Kind::Symlink { target } => (target.len() as u64, 0, 0),
            Kind::Directory { .. } => (4096, 8, 0),
            Kind::Special { device, .. } => (0, 0, *device),
        };
        Attributes {
            inode: id,
            size,
            blocks: if size > 0 { blocks.max(1) } else { blocks },
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            file_type: inode.file_type(),
            mode: inode.mode,
            links: inode.links,
            uid: inode.uid,
            gid: inode.gid,
            device,
            is_at_rest: true,
        }
    }
}

/// An inode found by name, and how long the kernel may believe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// What `stat` shows.
    pub attributes: Attributes,
    /// The name may be cached until the kernel itself changes it.
    pub name_is_stable: bool,
}
