//! Bytes of manifests and chunks.
//!
//! ```text
//! manifest   "kvfsname", version (u32), Root in postcard, BLAKE3 of all before (32 bytes)
//! chunk      zstd frame of a sequence of rows in postcard; its name is the hash of the latter
//! ```
//!
//! Numbers outside of postcard are little endian. Whatever says how long something is comes from
//! the remote: it is compared with a bound before anything is allocated.

use serde::{Deserialize, Serialize};

use super::Row;
use crate::BlobStore;
use crate::error::{RemoteError, Result};
use crate::name::{BlobName, RemoteName, Sequence, StoreId};
use kvfs_encoding::Encoding;
use kvfs_encoding::content::ContentHash;

const MAGIC: [u8; 8] = *b"kvfsname";
/// Version of manifests and chunks.
const VERSION: u32 = 1;
const HASH_BYTES: usize = 32;

/// Largest chunk before compression: what a reader holds in memory.
pub(super) const CHUNK_BYTES_MAX: usize = 4 << 20;
/// The same after compression, which may make it a little larger.
pub(super) const COMPRESSED_BYTES_MAX: usize = CHUNK_BYTES_MAX + (CHUNK_BYTES_MAX >> 7);
/// Largest manifest: half a million chunks, a billion rows.
pub(super) const ROOT_BYTES_MAX: usize = 64 << 20;
/// Metadata compress 3 to 5 times at zstd's default level, at more than a network's speed.
const LEVEL: i32 = 3;

/// A manifest without its chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// Whose names they are.
    pub store: StoreId,
    /// Number of the manifest.
    pub sequence: Sequence,
    /// Version of the rows.
    pub layout: u32,
    /// When it was made, in seconds since 1970.
    pub published_seconds: u64,
    /// The parts, in order.
    pub chunks: Vec<ChunkEntry>,
    /// What people tell stores apart by. It stands behind the rest, where those who do not know it do
    /// not look.
    #[serde(skip)]
    pub about: About,
    /// Who made it, and how long the chunks are there: behind that, for the same reason.
    #[serde(skip)]
    pub making: Making,
}

/// How a manifest was made. An older kvfs leaves it out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Making {
    /// The mount that made it, a random number; 0 if that is not known.
    pub author: u128,
    /// Bytes of each chunk as it is stored; empty if they are not known.
    pub stored_bytes: Vec<u32>,
}

/// What people tell the stores of a remote apart by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The machine that published; empty if that is not known.
    pub host: String,
    /// Files that the store has.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl About {
    /// A store on this machine.
    pub fn here(files: u64, bytes: u64) -> About {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        About { host: host.trim().to_owned(), files, bytes }
    }
}

/// A part of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkEntry {
    /// Key of its first row.
    pub first_key: Vec<u8>,
    /// Rows in it.
    pub rows: u32,
    /// Bytes before compression.
    pub bytes: u32,
    hash: [u8; HASH_BYTES],
}

/// A row as it is stored.
#[derive(Serialize, Deserialize)]
struct WireRow<'bytes> {
    key: &'bytes [u8],
    value: &'bytes [u8],
    blob: Option<([u8; HASH_BYTES], Encoding)>,
}

/// What is wrong with bytes from the remote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// Not what was written.
    Damaged(&'static str),
    /// Written by another version.
    Version(u32),
}
use Problem::Damaged;

impl Problem {
    pub(super) fn at(self, store: &dyn BlobStore, name: RemoteName) -> RemoteError {
        let place = store.place();
        match self {
            Damaged(what) => RemoteError::Corrupt(format!("remote {place}: {name}: {what}")),
            Problem::Version(version) => RemoteError::Foreign(format!(
                "remote {place}: {name} has version {version}, this kvfs knows {VERSION}"
            )),
        }
    }
}

impl ChunkEntry {
    /// Hash of the chunk before compression, which is its name.
    pub fn hash(&self) -> ContentHash {
        ContentHash(self.hash)
    }
}

impl Root {
    pub(super) fn new(store: StoreId, layout: u32, chunks: Vec<ChunkEntry>) -> Root {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let (sequence, published_seconds) = (Sequence(0), now.as_secs());
        let (about, making) = (About::default(), Making::default());
        Root { store, sequence, layout, published_seconds, chunks, about, making }
    }
}

fn too_large(what: &str, bytes: usize) -> RemoteError {
    RemoteError::Other(format!("{what} of {bytes} bytes cannot be published"))
}

pub(super) fn encode_root(root: &Root) -> Result<Vec<u8>> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    let failed = |_| too_large("a manifest", 0);
    let bytes = postcard::to_extend(root, bytes).map_err(failed)?;
    let bytes = postcard::to_extend(&root.about, bytes).map_err(failed)?;
    let mut bytes = postcard::to_extend(&root.making, bytes).map_err(failed)?;
    let hash = ContentHash::of(&bytes);
    bytes.extend_from_slice(&hash.0);
    if bytes.len() > ROOT_BYTES_MAX {
        return Err(too_large("a manifest", bytes.len()));
    }
    Ok(bytes)
}

pub(super) fn decode_root(bytes: &[u8]) -> std::result::Result<Root, Problem> {
    let rest = bytes.strip_prefix(&MAGIC).ok_or(Damaged("not a manifest of names"))?;
    let (version, _) = rest.split_first_chunk().ok_or(Damaged("cut off"))?;
    let version = u32::from_le_bytes(*version);
    let (body, hash) = bytes.split_last_chunk::<HASH_BYTES>().ok_or(Damaged("cut off"))?;
    if ContentHash::of(body).0 != *hash {
        return Err(Damaged("checksum does not match"));
    }
    if version != VERSION {
        return Err(Problem::Version(version));
    }
    let body = body.get(MAGIC.len() + size_of::<u32>()..).ok_or(Damaged("cut off"))?;
    let not_readable = |_| Damaged("not readable");
    let (mut root, rest): (Root, _) = postcard::take_from_bytes(body).map_err(not_readable)?;
    // Manifests of an older kvfs end here, or behind what they tell about the store.
    let mut rest = rest;
    if !rest.is_empty() {
        (root.about, rest) = postcard::take_from_bytes(rest).map_err(not_readable)?;
    }
    if !rest.is_empty() {
        root.making = postcard::from_bytes(rest).map_err(not_readable)?;
    }
    let lengths = root.making.stored_bytes.len();
    if lengths != 0 && lengths != root.chunks.len() {
        return Err(Damaged("chunks and their lengths do not match"));
    }
    let keys = || root.chunks.iter().map(|entry| &entry.first_key);
    if !keys().is_sorted_by(|first, second| first < second) {
        return Err(Damaged("chunks are not in order"));
    }
    Ok(root)
}

/// The entry of a chunk, and its bytes before compression.
pub(super) fn encode_chunk(rows: &[Row]) -> Result<(ChunkEntry, Vec<u8>)> {
    let wire: Vec<WireRow<'_>> = rows
        .iter()
        .map(|row| WireRow {
            key: &row.key,
            value: &row.value,
            blob: row.blob.map(|blob| (blob.content.0, blob.encoding)),
        })
        .collect();
    let bytes = postcard::to_stdvec(&wire).map_err(|_| too_large("a chunk", 0))?;
    let first_key = rows.first().map(|row| row.key.clone()).unwrap_or_default();
    let rows = u32::try_from(rows.len()).map_err(|_| too_large("a chunk", bytes.len()))?;
    let length = u32::try_from(bytes.len()).map_err(|_| too_large("a chunk", bytes.len()))?;
    let hash = ContentHash::of(&bytes).0;
    Ok((ChunkEntry { first_key, rows, bytes: length, hash }, bytes))
}

pub(super) fn compress(chunk: &[u8]) -> Result<Vec<u8>> {
    zstd::bulk::compress(chunk, LEVEL).map_err(RemoteError::local)
}

pub(super) fn decode_chunk(
    entry: &ChunkEntry, bytes: &[u8],
) -> std::result::Result<Vec<Row>, Problem> {
    let length = entry.bytes as usize;
    if length > CHUNK_BYTES_MAX {
        return Err(Damaged("larger than any chunk"));
    }
    let chunk = zstd::bulk::decompress(bytes, length).map_err(|_| Damaged("not decodable"))?;
    if chunk.len() != length || ContentHash::of(&chunk) != entry.hash() {
        return Err(Damaged("hash does not match"));
    }
    let wire: Vec<WireRow<'_>> =
        postcard::from_bytes(&chunk).map_err(|_| Damaged("not readable"))?;
    let is_sorted = wire.is_sorted_by(|first, second| first.key < second.key);
    let first_key = wire.first().map(|row| row.key);
    if wire.len() != entry.rows as usize || first_key != Some(&entry.first_key) || !is_sorted {
        return Err(Damaged("not the chunk that the manifest describes"));
    }
    let row = |row: WireRow<'_>| Row {
        key: row.key.to_vec(),
        value: row.value.to_vec(),
        blob: row
            .blob
            .map(|(content, encoding)| BlobName { content: ContentHash(content), encoding }),
    };
    Ok(wire.into_iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let blob = BlobName { content: ContentHash::of(b"page"), encoding: Encoding::Zstd };
        let row = |number: u8| Row {
            key: vec![number],
            value: vec![number; 40],
            blob: number.is_multiple_of(2).then_some(blob),
        };
        (0..9).map(row).collect()
    }

    #[test]
    fn every_flipped_byte_and_every_truncation_is_noticed() {
        let (entry, chunk) = encode_chunk(&rows()).unwrap();
        let compressed = compress(&chunk).unwrap();
        assert_eq!(decode_chunk(&entry, &compressed), Ok(rows()));
        let root = encode_root(&Root::new(StoreId(7), 1, vec![entry.clone()])).unwrap();
        assert_eq!(decode_root(&root).unwrap().chunks, std::slice::from_ref(&entry));

        for index in 0..root.len() {
            let mut bytes = root.clone();
            bytes[index] ^= 0x40;
            assert!(decode_root(&bytes).is_err(), "byte {index}");
            assert!(decode_root(&root[..index]).is_err(), "length {index}");
        }
        for index in 0..compressed.len() {
            let mut bytes = compressed.clone();
            bytes[index] ^= 0x40;
            // A flip in what zstd ignores still gives the rows; anything else is an error.
            assert!(
                decode_chunk(&entry, &bytes).is_ok_and(|found| found == rows())
                    || decode_chunk(&entry, &bytes).is_err()
            );
            assert!(decode_chunk(&entry, &compressed[..index]).is_err(), "length {index}");
        }
    }

    #[test]
    fn a_bomb_is_refused_before_it_is_unpacked() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], LEVEL).unwrap();
        let entry = |bytes| ChunkEntry { first_key: Vec::new(), rows: 1, bytes, hash: [0; 32] };
        assert_eq!(decode_chunk(&entry(64 << 20), &bomb), Err(Damaged("larger than any chunk")));
        assert_eq!(decode_chunk(&entry(4096), &bomb), Err(Damaged("not decodable")));
    }

    #[test]
    fn another_version_is_told_from_damage() {
        let root = encode_root(&Root::new(StoreId(7), 1, Vec::new())).unwrap();
        let (body, _) = root.split_last_chunk::<HASH_BYTES>().unwrap();
        let mut bytes = body.to_vec();
        bytes[MAGIC.len()] = 9;
        let hash = ContentHash::of(&bytes);
        bytes.extend_from_slice(&hash.0);
        assert_eq!(decode_root(&bytes), Err(Problem::Version(9)));
    }
}
