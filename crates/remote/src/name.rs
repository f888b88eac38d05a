//! Names of objects in a remote. There is no way to name anything outside of it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use kvfs_encoding::Encoding;
use kvfs_encoding::content::ContentHash;

/// An encoded copy: what its logical bytes are, and how they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlobName {
    /// Hash of the logical (decoded) bytes.
    pub content: ContentHash,
    /// How they are stored.
    pub encoding: Encoding,
}

/// Names a store to all who share a remote; random, made once with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StoreId(pub u128);

/// Number of a manifest of names: each store counts its own, upwards from 1.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Sequence(pub u64);

/// Any object in a remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RemoteName {
    /// `KVFS-REMOTE`
    Marker,
    /// `blobs/ab/<64 hex>.<extension>`
    Blob(BlobName),
    /// `chunks/ab/<64 hex>`
    Chunk(ContentHash),
    /// `names/<32 hex>/<16 hex>`
    Manifest(StoreId, Sequence),
}

/// A part of a remote that can be listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemotePrefix {
    /// `blobs/`
    Blobs,
    /// `chunks/`
    Chunks,
    /// `names/`: the manifests of all stores.
    Manifests,
    /// `names/<32 hex>/`
    ManifestsOf(StoreId),
}

/// The text is not a name of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAName;

impl StoreId {
    /// A new one, of the kernel's random bytes.
    pub fn random() -> std::io::Result<StoreId> {
        random().map(StoreId)
    }
}

/// 128 bits of the kernel's randomness.
pub(super) fn random() -> std::io::Result<u128> {
    let mut bytes = [0; 16];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}

impl fmt::Display for StoreId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

impl FromStr for StoreId {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<StoreId, NotAName> {
        let value = u128::from_str_radix(text, 16).map_err(|_| NotAName)?;
        Some(StoreId(value)).filter(|id| id.to_string() == text).ok_or(NotAName)
    }
}

impl FromStr for Sequence {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<Sequence, NotAName> {
        let value = u64::from_str_radix(text, 16).map_err(|_| NotAName)?;
        Some(Sequence(value)).filter(|number| number.to_string() == text).ok_or(NotAName)
    }
}

impl fmt::Display for BlobName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.content, self.encoding.extension())
    }
}

impl FromStr for BlobName {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<BlobName, NotAName> {
        let (content, extension) = text.split_once('.').ok_or(NotAName)?;
        let encoding = Encoding::ALL.into_iter().find(|one| one.extension() == extension);
        Ok(BlobName {
            content: content.parse().map_err(|_| NotAName)?,
            encoding: encoding.ok_or(NotAName)?,
        })
    }
}

/// The path of the object, with `/`, relative to the root.
impl fmt::Display for RemoteName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoteName::Marker => formatter.write_str("KVFS-REMOTE"),
            RemoteName::Blob(blob) => write!(formatter, "blobs/{:02x}/{blob}", blob.content.0[0]),
            RemoteName::Chunk(hash) => write!(formatter, "chunks/{:02x}/{hash}", hash.0[0]),
            RemoteName::Manifest(store, sequence) => write!(formatter, "names/{store}/{sequence}"),
        }
    }
}

impl FromStr for RemoteName {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<RemoteName, NotAName> {
        let mut parts = text.split('/');
        let leaf = parts.next_back().ok_or(NotAName)?;
        let name = match (parts.next(), parts.next()) {
            (None, None) => RemoteName::Marker,
            (Some("blobs"), Some(_)) => RemoteName::Blob(leaf.parse()?),
            (Some("chunks"), Some(_)) => RemoteName::Chunk(leaf.parse().map_err(|_| NotAName)?),
            (Some("names"), Some(store)) => RemoteName::Manifest(store.parse()?, leaf.parse()?),
            _ => return Err(NotAName),
        };
        // Rules out whatever else: another shard, more parts.
        Some(name).filter(|name| name.to_string() == text).ok_or(NotAName)
    }
}

/// The path of the directory, relative to the root, without a trailing `/`.
impl fmt::Display for RemotePrefix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemotePrefix::Blobs => formatter.write_str("blobs"),
            RemotePrefix::Chunks => formatter.write_str("chunks"),
            RemotePrefix::Manifests => formatter.write_str("names"),
            RemotePrefix::ManifestsOf(store) => write!(formatter, "names/{store}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_agree_and_nothing_else_is_a_name() {
        fn check(text: &str, valid: bool) {
            match text.parse::<RemoteName>() {
                Ok(name) => assert_eq!((name.to_string().as_str(), valid), (text, true)),
                Err(NotAName) => assert!(!valid, "{text}"),
            }
        }
        let hash = ContentHash::of(b"page");
        let shard = &hash.to_string()[..2];
        for encoding in Encoding::ALL {
            check(&format!("blobs/{shard}/{hash}.{}", encoding.extension()), true);
        }
        check(&format!("chunks/{shard}/{hash}"), true);
        check(&format!("names/{}/{}", StoreId(7), Sequence(9)), true);
        check("KVFS-REMOTE", true);
        check(&format!("blobs/zz/{hash}.raw"), false);
        check(&format!("blobs/{shard}/{hash}.exe"), false);
        check(&format!("blobs/{shard}/x/{hash}.raw"), false);
        check(&format!("blobs/{shard}/{hash}.raw/"), false);
        check(&format!("/blobs/{shard}/{hash}.raw"), false);
        check("names/7/9", false);
        check("../etc/passwd", false);
        check("", false);
    }
}
