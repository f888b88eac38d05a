//! References to pages: what a slot file may have in the place of their rows.
//!
//! Rows of K, or V, of a whole page begin with a reference, and the rest of them is filler:
//!
//! ```text
//! [u8; 16] magic
//! [u8; 32] prefix hash of the page
//! u32 layer, u32 whether it is V, u32 tokens, u32 0
//! [u8; 32] keyed BLAKE3 of all before it
//! ```
//!
//! The key is the model's own: who knows a prefix hash but may not read the model cannot make an engine
//! that may read it load its pages. Filler is no number in any type that slots have, so that an engine
//! that knows nothing of references computes nothing from them.

use std::ffi::CStr;
use std::fmt;

use crate::page::PrefixHash;

/// A model's key is this attribute of its directory, for those who may read that.
pub(crate) const KEY_ATTRIBUTE: &CStr = c"user.kvfs.slot_key";
/// Bytes of a reference. Rows of a page that have less are not referred to.
pub(crate) const REFERENCE_BYTES: usize = 96;
/// The bytes behind a reference.
pub(crate) const FILLER: u8 = 0xff;

const MAGIC: [u8; 16] = *b"kvfs reference 1";
const HASH_BYTES: usize = 32;
const TAG_START: usize = REFERENCE_BYTES - HASH_BYTES;

/// What makes references of one model, and recognises them.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// The value of [`KEY_ATTRIBUTE`]; nothing, if it is of another length.
    pub(crate) fn new(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// K or V of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) prefix: PrefixHash,
    pub(crate) layer: u32,
    pub(crate) is_v: bool,
    pub(crate) tokens: u32,
}

impl Reference {
    pub(crate) fn to_bytes(self, key: &Key) -> [u8; REFERENCE_BYTES] {
        let mut bytes = [0; REFERENCE_BYTES];
        bytes[..16].copy_from_slice(&MAGIC);
        bytes[16..48].copy_from_slice(&self.prefix.0);
        bytes[48..52].copy_from_slice(&self.layer.to_le_bytes());
        bytes[52..56].copy_from_slice(&u32::from(self.is_v).to_le_bytes());
        bytes[56..60].copy_from_slice(&self.tokens.to_le_bytes());
        let tag = blake3::keyed_hash(&key.0, &bytes[..TAG_START]);
        bytes[TAG_START..].copy_from_slice(tag.as_bytes());
        bytes
    }

    /// The reference with which these rows begin, if it was made with this key.
    ///
    /// # Errors
    /// The end of a line that says why it is none to follow.
    pub(crate) fn parse(bytes: &[u8], key: &Key) -> Result<Self, &'static str> {
        let bytes = bytes.first_chunk::<REFERENCE_BYTES>().ok_or("a reference is cut off")?;
        let tag: [u8; HASH_BYTES] = std::array::from_fn(|index| bytes[TAG_START + index]);
        // A comparison of two hashes takes as long wherever they differ.
        if blake3::keyed_hash(&key.0, &bytes[..TAG_START]) != blake3::Hash::from(tag) {
            return Err("a reference was not made for this model, or was changed");
        }
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        Ok(Self {
            prefix: PrefixHash(std::array::from_fn(|index| bytes[16 + index])),
            layer: number(48),
            is_v: number(52) != 0,
            tokens: number(56),
        })
    }
}

/// Whether rows begin with a reference, or are of a page that begins before them.
pub(crate) fn is_referred(rows: &[u8]) -> bool {
    let count = rows.len().min(REFERENCE_BYTES);
    rows.starts_with(&MAGIC) || count > 0 && rows[..count].iter().all(|byte| *byte == FILLER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Key {
        Key::new(&[byte; 32]).unwrap()
    }

    const REFERENCE: Reference =
        Reference { prefix: PrefixHash([9; 32]), layer: 3, is_v: true, tokens: 256 };

    #[test]
    fn what_was_made_is_recognised() {
        let bytes = REFERENCE.to_bytes(&key(1));
        assert!(is_referred(&bytes));
        assert_eq!(Reference::parse(&bytes, &key(1)), Ok(REFERENCE));
    }

    #[test]
    fn forged_foreign_and_short_ones_are_refused() {
        let bytes = REFERENCE.to_bytes(&key(1));
        assert!(Reference::parse(&bytes, &key(2)).unwrap_err().contains("not made for this model"));
        for at in 0..REFERENCE_BYTES {
            let mut bytes = bytes;
            bytes[at] ^= 1;
            assert!(Reference::parse(&bytes, &key(1)).is_err(), "byte {at}");
            assert!(Reference::parse(&bytes[..at], &key(1)).unwrap_err().contains("cut off"));
        }
        assert!(Key::new(&[1; 31]).is_none());
    }

    #[test]
    fn rows_that_are_no_reference() {
        assert!(!is_referred(&[]));
        assert!(!is_referred(&[0; 200]));
        assert!(is_referred(&[FILLER; 200]));
    }
}
