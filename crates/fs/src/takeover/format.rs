//! The bytes that one daemon leaves to the next one: a header with the version of this format and a checksum, and what
//! is meant.
//!
//! ```text
//! 0   8   "KVFSLIVE"
//! 8   4   version of the format
//! 12  4   0
//! 16  8   length of what follows
//! 24  8   its checksum (XXH3)
//! 32      the rest, as postcard has it
//! ```
//!
//! Whatever changes in [`Handover`], or in anything that is in it, is another version.

use serde::{Deserialize, Serialize};

use super::{Death, Descriptors, Launch, Live, LiveBacking};
use kvfs_storage::store::database::{decode, encode};
use kvfs_storage::store::record::{InodeId, ObjectId};
use kvfs_storage::tier::ram::LiveRam;

/// The version that this program writes and reads.
pub const FORMAT: u32 = 4;

const MAGIC: &[u8; 8] = b"KVFSLIVE";
const HEADER_BYTES: usize = 32;

/// What one daemon leaves to the next one.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Handover {
    /// How the mount was made.
    pub launch: Launch,
    /// Absent if somebody only asks whether this can be read.
    pub descriptors: Option<Descriptors>,
    /// The same.
    pub live: Option<Live>,
    /// Backing files that the kernel has.
    pub backings: Vec<LiveBacking>,
    /// Files that are to leave the disk, and the objects that they had when somebody asked.
    pub wishes: Vec<(InodeId, ObjectId)>,
    /// The memory tier, if there is one.
    pub ram: Option<LiveRam>,
    /// The keys of a sealed remote, as a file of them has them: asking for them anew may take a minute, or somebody.
    pub keys: Option<Secret>,
    /// Daemons that the mount had before.
    pub exchanges: u64,
    /// When requests began to wait, in nanoseconds since 1970.
    pub since: u64,
    /// The daemon has died: what is live is what the store has, and what is told there.
    pub death: Option<Death>,
}

/// What is told to nobody but the next daemon.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret")
    }
}

/// Why bytes cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FormatError {
    /// They are none of these.
    Unknown,
    /// They have another version.
    Version(u32),
    /// They are not as they were written.
    Damaged,
}

impl std::fmt::Display for FormatError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FormatError::Unknown => formatter.write_str("it is nothing that a daemon leaves"),
            FormatError::Version(version) => {
                write!(formatter, "it has format {version}, this kvfs reads format {FORMAT}")
            }
            FormatError::Damaged => formatter.write_str("it is damaged"),
        }
    }
}

impl std::error::Error for FormatError {}

impl Handover {
    /// Whether the mount has a keeper.
    pub fn is_kept(&self) -> bool {
        self.descriptors.as_ref().is_some_and(|descriptors| descriptors.keeper.is_some())
    }

    /// The bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.to_bytes_of(self.live.as_ref(), self.ram.as_ref())
    }

    /// The bytes, with what is in memory only.
    pub fn to_bytes_with(&self, live: &Live, ram: Option<&LiveRam>) -> Vec<u8> {
        self.to_bytes_of(Some(live), ram)
    }

    fn to_bytes_of(&self, live: Option<&Live>, ram: Option<&LiveRam>) -> Vec<u8> {
        // As the fields stand in the structure, which holds what it is made of.
        let Handover {
            launch, descriptors, backings, wishes, keys, exchanges, since, death, ..
        } = self;
        with_header(&encode(&(
            launch,
            descriptors,
            live,
            backings,
            wishes,
            ram,
            keys,
            exchanges,
            since,
            death,
        )))
    }

    /// What bytes mean.
    ///
    /// # Errors
    /// They are of another version, or not whole.
    pub fn from_bytes(bytes: &[u8]) -> Result<Handover, FormatError> {
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(FormatError::Unknown)?;
        let number = |at: usize, length: usize| {
            let mut number = [0; 8];
            number[..length].copy_from_slice(&header[at..at + length]);
            u64::from_le_bytes(number)
        };
        if !header.starts_with(MAGIC) {
            return Err(FormatError::Unknown);
        }
        let version = number(8, 4);
        if version != u64::from(FORMAT) {
            return Err(FormatError::Version(u32::try_from(version).unwrap_or(u32::MAX)));
        }
        let is_whole = number(12, 4) == 0
            && number(16, 8) == rest.len() as u64
            && number(24, 8) == twox_hash::XxHash3_64::oneshot(rest);
        if !is_whole {
            return Err(FormatError::Damaged);
        }
        decode(rest).map_err(|_| FormatError::Damaged)
    }
}

fn with_header(rest: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(FORMAT.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend((rest.len() as u64).to_le_bytes());
    bytes.extend(twox_hash::XxHash3_64::oneshot(rest).to_le_bytes());
    bytes.extend(rest);
    bytes
}

#[cfg(test)]
mod tests;
