//! The records that `meta.redb` keeps: what a name, an inode and an object are.
//!
//! Values are encoded with postcard (its wire format is stable and documented); a change of any
//! type here is a new store version, see [`super::format`]. `serde_bytes` changes nothing there: bytes are
//! copied as a whole, and not one by one.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use crate::page::classify::DirectoryClass;
use crate::page::{
    Checksum, Dtype, Layer, ModelIdentity, PageIdentity, PagePlace, PrefixHash, StatePlace,
    TokenStart,
};
use crate::tier::encoding::Encoding;

/// Number of an inode: `epoch << 32 | counter`, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InodeId(pub u64);

/// Number of an object (one file below `objects/` or `staging/`), never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectId(pub u64);

/// Directories above a name that are followed. Only forged or damaged records have more: they may
/// form a ring, and whoever follows it would never come back.
pub const DEPTH_MAX: usize = 4096;

impl InodeId {
    /// The mount's root directory; the kernel fixes this number.
    pub const ROOT: InodeId = InodeId(1);
}

impl std::fmt::Display for ObjectId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

/// A point in time, to the nanosecond, before or after 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time {
    /// Whole seconds since 1970, rounded down.
    pub seconds: i64,
    /// Below one billion.
    pub nanoseconds: u32,
}

impl Time {
    /// The time now.
    pub fn now() -> Time {
        std::time::SystemTime::now().into()
    }
}

impl From<std::time::SystemTime> for Time {
    fn from(time: std::time::SystemTime) -> Time {
        match time.duration_since(std::time::UNIX_EPOCH) {
            Ok(after) => Time {
                seconds: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
                nanoseconds: after.subsec_nanos(),
            },
            Err(error) => {
                let before = error.duration();
                let seconds = -i64::try_from(before.as_secs()).unwrap_or(i64::MAX);
                match before.subsec_nanos() {
                    0 => Time { seconds, nanoseconds: 0 },
                    nanoseconds => {
                        Time { seconds: seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds }
                    }
                }
            }
        }
    }
}

impl From<Time> for std::time::SystemTime {
    fn from(time: Time) -> std::time::SystemTime {
        let nanoseconds = std::time::Duration::from_nanos(u64::from(time.nanoseconds));
        let seconds = std::time::Duration::from_secs(time.seconds.unsigned_abs());
        if time.seconds >= 0 {
            std::time::UNIX_EPOCH + seconds + nanoseconds
        } else {
            std::time::UNIX_EPOCH - seconds + nanoseconds
        }
    }
}

/// One inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inode {
    /// What it is, with what only that kind has.
    pub kind: Kind,
    /// Permission bits, `0..=0o7777`.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Hard links; for a directory 2 + subdirectories.
    pub links: u32,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
}

/// The kinds of inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A directory. Parent and name are kept to find the model above a page and to name paths.
    Directory {
        /// What the directory is for.
        class: DirectoryClass,
        /// The directory above; the root is its own.
        parent: InodeId,
        /// Its name there.
        #[serde(with = "serde_bytes")]
        name: Vec<u8>,
    },
    /// A regular file.
    File(FileRecord),
    /// A symbolic link.
    Symlink {
        /// What it points to.
        #[serde(with = "serde_bytes")]
        target: Vec<u8>,
    },
    /// A FIFO, socket or device node.
    Special {
        /// `S_IFMT` bits of the mode.
        file_type: u32,
        /// Device number, 0 for FIFO and socket.
        device: u32,
    },
}

/// A regular file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// The rules that hold for it.
    pub role: Role,
    /// The bytes; `None` once another inode has taken them over.
    pub object: Option<ObjectId>,
    /// Logical size; while [`FileRecord::unsettled`], the object's file knows better.
    pub size: u64,
    /// Blocks of 512 bytes.
    pub blocks: u64,
    /// Somebody may be writing to the object: size, blocks and mtime are read from its file,
    /// and it has no checksum. Recovery settles what a crash left so.
    pub unsettled: bool,
}

impl FileRecord {
    /// Its bytes are those of its object, and nobody may be writing to them.
    pub fn is_settled(&self) -> bool {
        self.object.is_some() && !self.unsettled && !self.role.is_append_only()
    }
}

/// What rules hold for a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Full POSIX.
    Plain,
    /// A sealed page, or state of a recurrent layer: immutable.
    Page(PageRecord),
    /// A sealed manifest: immutable.
    Manifest,
    /// Rows of the open page: append-only.
    Tail {
        /// First token of the page that it becomes.
        start: u64,
        /// The layer's directory.
        directory: InodeId,
    },
    /// Token ids of a sequence: append-only.
    Tokens,
}

impl Role {
    /// Nobody can write to it any more.
    pub fn is_sealed(self) -> bool {
        matches!(self, Role::Page(_) | Role::Manifest)
    }

    /// The daemon serves it and lets it only grow.
    pub fn is_append_only(self) -> bool {
        matches!(self, Role::Tail { .. } | Role::Tokens)
    }
}

/// What a sealed page, or the state of a recurrent layer, was verified to be. Stores of any age hold it,
/// so a state is told by a number that no page has: it is one of 0 tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRecord {
    /// Identity of the model's cache (see the manifest).
    pub model: [u8; 16],
    /// Layer.
    pub layer: u32,
    /// First token; of a state, the row after which it is.
    pub start: u64,
    /// Tokens held; 0 of a state.
    pub tokens: u32,
    /// How elements are stored.
    pub dtype: Dtype,
    /// The public checksum over identity and payload; of a state, the first half of the hash of the tokens
    /// that it has seen, so that it can be told from others without its bytes.
    pub checksum: [u8; 16],
}

impl PageRecord {
    /// That of a page.
    pub fn of_page(place: &PagePlace, tokens: u32, checksum: Checksum) -> PageRecord {
        let PageIdentity { model, layer, start, tokens, dtype } = place.identity(tokens);
        let checksum = checksum.0;
        PageRecord { model: model.0, layer: layer.0, start: start.0, tokens, dtype, checksum }
    }

    /// That of a state.
    pub fn of_state(place: &StatePlace, prefix: PrefixHash) -> PageRecord {
        let PageIdentity { model, layer, start, tokens, dtype } = place.identity();
        let checksum = half(prefix);
        PageRecord { model: model.0, layer: layer.0, start: start.0, tokens, dtype, checksum }
    }

    /// Whether it is that of a state.
    pub fn is_state(&self) -> bool {
        self.tokens == 0
    }

    /// Whether it is that of a state which has seen these tokens.
    pub fn is_state_of(&self, prefix: PrefixHash) -> bool {
        self.is_state() && self.checksum == half(prefix)
    }
}

/// 128 bits tell more prefixes apart than anybody can make.
fn half(prefix: PrefixHash) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&prefix.0[..16]);
    half
}

impl From<&PageRecord> for PageIdentity {
    fn from(page: &PageRecord) -> PageIdentity {
        PageIdentity {
            model: ModelIdentity(page.model),
            layer: Layer(page.layer),
            start: TokenStart(page.start),
            tokens: page.tokens,
            dtype: page.dtype,
        }
    }
}

/// What an object's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectKind {
    /// A file's; they may change in place.
    File,
    /// A sealed page's.
    Page,
    /// Rows or token ids; they grow, so they never get a checksum.
    Rows,
    /// A sealed manifest's: the model's pages cannot be checked without it, so it never leaves.
    Manifest,
}

/// What a store holds, kept up to date with every commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Objects of every kind.
    pub objects: u64,
    /// Sealed pages among them.
    pub pages: u64,
    /// Their bytes, as of when each came to rest.
    pub bytes: u64,
}

impl Totals {
    /// Counts one more object.
    pub fn add(&mut self, record: &ObjectRecord) {
        self.objects += 1;
        self.pages += u64::from(record.kind == ObjectKind::Page);
        self.bytes = self.bytes.saturating_add(record.length);
    }
}

/// One object: the bytes behind one file version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectRecord {
    /// What the bytes are.
    pub kind: ObjectKind,
    /// Length in bytes.
    pub length: u64,
    /// Checksum of the stored bytes, absent while somebody may be writing.
    pub checksum: Option<[u8; 16]>,
    /// Inodes that refer to it.
    pub references: u32,
}

/// A copy of an object in the remote tier that was read back and compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteCopy {
    /// BLAKE3 of the logical bytes, which the remote calls the object by.
    pub content: [u8; 32],
    /// How it is encoded there.
    pub encoding: Encoding,
    /// Its length there.
    pub stored_bytes: u64,
    /// How far the disk may rely on it.
    pub state: RemoteState,
}

/// How far a remote copy is relied upon. The order is that of an object that leaves the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoteState {
    /// No manifest of names is known to name it: a collector may still take it away. After a crash
    /// it is uploaded again.
    Held,
    /// A reliable manifest names it: the disk's copy may go.
    Named,
    /// The disk's copy is gone, or is garbage that a crash left.
    Only,
}

/// A copy of an object on the disk in fewer bytes, which decoded to the object when it was made.
/// Where the raw file is missing, it takes its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedCopy {
    /// How it is encoded; never raw.
    pub encoding: Encoding,
    /// Its length.
    pub stored_bytes: u64,
}

/// A record of which a store has one at most.
pub trait Single: Serialize + DeserializeOwned {
    /// Its key.
    const TAG: u8;
}

impl Single for RemoteIdentity {
    const TAG: u8 = b'N';
}

impl Single for RemotePlace {
    const TAG: u8 = b'P';
}

impl Single for Publications {
    const TAG: u8 = b'A';
}

/// The names by which a store and its remote know each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteIdentity {
    /// What the store publishes its names as.
    pub store: u128,
    /// Which remote it uses, once it has answered.
    pub remote: Option<u128>,
}

/// The manifests of names that the store has published itself, so that it notices those of a copy of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publications {
    /// Number of the newest that is known to have been published.
    pub highest: u64,
    /// The mounts that may have published a newer one.
    pub authors: Vec<u128>,
}

/// Where the remote of a store was when it last answered. It tells a mount that was given none, or
/// another one, what is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePlace {
    /// The directory or URL, as it was written.
    pub place: String,
    /// Since when the store has it there, in seconds since 1970.
    pub since_seconds: u64,
}

/// How much of a [budget for writes](crate::tier::writes) was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WritesLeft {
    /// Bytes; below zero: owed.
    pub left_bytes: i64,
    /// When, in seconds since 1970.
    pub at_seconds: i64,
}

impl Single for WritesLeft {
    const TAG: u8 = b'W';
}

/// How much only the remote has, so that a mount can tell without reading a million records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnlyRemote {
    /// The epoch of the mount that counted. A kvfs that does not count begins an epoch all the same:
    /// then the number is out of date, and is counted anew.
    pub epoch: u32,
    /// Objects.
    pub objects: u64,
    /// Their bytes there.
    pub stored_bytes: u64,
}

impl OnlyRemote {
    /// One more, if only the remote has it.
    pub fn add(&mut self, copy: &RemoteCopy) {
        if copy.state == RemoteState::Only {
            self.objects += 1;
            self.stored_bytes = self.stored_bytes.saturating_add(copy.stored_bytes);
        }
    }

    /// One less, if only the remote had it.
    pub fn subtract(&mut self, copy: &RemoteCopy) {
        if copy.state == RemoteState::Only {
            self.objects = self.objects.saturating_sub(1);
            self.stored_bytes = self.stored_bytes.saturating_sub(copy.stored_bytes);
        }
    }
}

/// How far the prefix index knows a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexedTokens {
    /// The directory of the model, under which its pages are indexed.
    pub model: InodeId,
    /// The token file that was indexed.
    pub tokens: InodeId,
    /// How much of it, in bytes.
    pub length: u64,
}

/// What the prefix index keeps of one page of a sequence, full or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexedPage {
    /// Hash of everything before it; zeros at the beginning of an unseeded chain.
    pub parent: [u8; 32],
    /// Its own, once it is full.
    pub hash: Option<[u8; 32]>,
    /// Its tokens, four bytes each, as far as they are part of a key.
    #[serde(with = "serde_bytes")]
    pub lead: Vec<u8>,
}

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The inode.
    pub inode: InodeId,
    /// `S_IFMT` bits, for `readdir`.
    pub file_type: u32,
}

impl Inode {
    /// `S_IFMT` bits.
    pub fn file_type(&self) -> u32 {
        match &self.kind {
            Kind::Directory { .. } => libc::S_IFDIR,
            Kind::File(_) => libc::S_IFREG,
            Kind::Symlink { .. } => libc::S_IFLNK,
            Kind::Special { file_type, .. } => *file_type,
        }
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        matches!(self.kind, Kind::Directory { .. })
    }

    /// The file part, if it is a regular file.
    pub fn file(&self) -> Option<&FileRecord> {
        match &self.kind {
            Kind::File(file) => Some(file),
            _ => None,
        }
    }

    /// The file part, if it is a regular file.
    pub fn file_mut(&mut self) -> Option<&mut FileRecord> {
        match &mut self.kind {
            Kind::File(file) => Some(file),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
