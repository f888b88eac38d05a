//! How a cold copy of an object is stored.

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
