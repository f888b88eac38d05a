//! How a cold copy of an object is stored.
//!
//! A *blob* is the stored form of an object's *logical* bytes. `raw` is the logical bytes
//! themselves. Every other encoding is a file of zstd frames (`blob` has its layout once): the
//! logical bytes are cut into chunks, a `filter` prepares each of them, zstd compresses it. So
//! memory is bounded whatever the length, and stock `zstd -d` reads a `zstd` blob.
//!
//! [`encode`] and [`decode`] stream and lose nothing. [`quantise_page`] makes a *new version* of a
//! page whose values fit `q8_0` or `q4_0` blocks; its blob decodes to that version exactly.
//!
//! `encode` and `decode` do not know which bytes are the right ones: they return a [`Digest`] of the
//! logical bytes that passed, and the caller compares it with what it has on record.

#![forbid(unsafe_code)]

mod blob;
mod cold;
pub mod content;
mod decode;
mod digest;
mod encode;
mod error;
mod filter;
mod limits;
mod page_version;
mod quantise;
mod rounding;
mod shuffle;

pub use cold::{ColdEncoding, NotAColdEncoding, Quantisation, ZstdLevel};
pub use decode::{Stored, decode, decode_local};
pub use digest::{Digest, Subject};
pub use encode::{Encoded, Lossless, encode};
pub use error::EncodingError;
pub use page_version::{Quantised, Unsuitable, Version, quantise_page};
pub use rounding::round_rows;

use serde::{Deserialize, Serialize};

/// What the bytes of a stored copy are. The order is the wire format: variants are only appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Encoding {
    /// The logical bytes themselves.
    Raw,
    /// zstd frames.
    Zstd,
    /// zstd frames over bytes that were shuffled by significance.
    ZstdShuffled,
    /// A page whose values are stored as `q8_0` blocks.
    Q8_0,
    /// A page whose values are stored as `q4_0` blocks.
    Q4_0,
}

impl Encoding {
    /// Every encoding.
    pub const ALL: [Encoding; 5] =
        [Encoding::Raw, Encoding::Zstd, Encoding::ZstdShuffled, Encoding::Q8_0, Encoding::Q4_0];

    /// How the name of a stored copy ends.
    pub fn extension(self) -> &'static str {
        match self {
            Encoding::Raw => "raw",
            Encoding::Zstd => "zst",
            Encoding::ZstdShuffled => "shuf.zst",
            Encoding::Q8_0 => "q8_0",
            Encoding::Q4_0 => "q4_0",
        }
    }
}

#[cfg(test)]
mod tests;
