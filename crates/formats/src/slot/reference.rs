//! References to pages: what a slot file may have in the place of their rows.
//!
//! Rows of K, or V, of a whole page begin with a reference. Filler is behind it, up to the end of the first
//! row of which it is all, and zeros in the place of the other rows:
//!
//! ```text
//! [u8; 16] magic
//! [u8; 32] prefix hash of the page
//! u32 layer, u32 whether it is V, u32 tokens, u32 0
//! [u8; 32] keyed BLAKE3 of all before it
//! ```
//!
//! The key is the model's own: who knows a prefix hash but may not read the model cannot make an engine
//! that may read it load its pages. Filler is no number in any type that slots have. An engine that knows
//! nothing of references attends to one such row in each head, so all that it computes is no number
//! either. The zeros are holes where a slot is a file, and are read as fast as memory is cleared.

use std::ffi::CStr;
use std::fmt;

use kvfs_page::PrefixHash;

/// A model's key is this attribute of its directory, for those who may read that.
pub const KEY_ATTRIBUTE: &CStr = c"user.kvfs.slot_key";
/// Bytes of a reference. Rows of a page that have less are not referred to.
pub const REFERENCE_BYTES: usize = 96;
/// The bytes behind a reference.
const FILLER: u8 = 0xff;

const MAGIC: [u8; 16] = *b"kvfs reference 1";
const HASH_BYTES: usize = 32;
const TAG_START: usize = REFERENCE_BYTES - HASH_BYTES;

/// What makes references of one model, and recognises them.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl Key {
    /// The value of [`KEY_ATTRIBUTE`]; nothing, if it is of another length.
    pub fn new(bytes: &[u8]) -> Option<Self> {
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
pub struct Reference {
    /// Of the page.
    pub prefix: PrefixHash,
    /// Whose page it is.
    pub layer: u32,
    /// Or K.
    pub is_v: bool,
    /// Of a page.
    pub tokens: u32,
}

impl Reference {
    /// Bytes of the reference and the filler, where a row has so many.
    pub fn filled_bytes(row_bytes: u64) -> u64 {
        (REFERENCE_BYTES as u64).div_ceil(row_bytes) * row_bytes + row_bytes
    }

    /// Fills `to` with what stands in the place of a page's rows, from byte `at` on.
    pub fn write(self, key: &Key, row_bytes: u64, at: u64, to: &mut [u8]) {
        let rest = |end: u64| {
            let rest = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
            rest.min(to.len())
        };
        let (referred, filled) =
            (rest(REFERENCE_BYTES as u64), rest(Self::filled_bytes(row_bytes)));
        to[filled..].fill(0);
        to[referred..filled].fill(FILLER);
        let from = REFERENCE_BYTES.saturating_sub(usize::try_from(at).unwrap_or(usize::MAX));
        if referred > 0 {
            let bytes = self.to_bytes(key);
            to[..referred].copy_from_slice(&bytes[REFERENCE_BYTES - from..][..referred]);
        }
    }

    fn to_bytes(self, key: &Key) -> [u8; REFERENCE_BYTES] {
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
    pub fn parse(bytes: &[u8], key: &Key) -> Result<Self, &'static str> {
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
pub fn is_referred(rows: &[u8]) -> bool {
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
    fn what_stands_for_rows() {
        fn check(row_bytes: usize, filled: usize) {
            let mut whole = vec![1; 4 * filled];
            REFERENCE.write(&key(1), row_bytes as u64, 0, &mut whole);
            assert_eq!(Reference::parse(&whole, &key(1)), Ok(REFERENCE));
            assert!(whole[REFERENCE_BYTES..filled].iter().all(|byte| *byte == FILLER));
            assert!(whole[filled..].iter().all(|byte| *byte == 0));
            // One row at least is filler alone.
            let mut rows = whole.chunks_exact(row_bytes);
            assert!(rows.any(|row| row.iter().all(|byte| *byte == FILLER)), "{row_bytes}");
            for piece in [1, 40, 100, 1000] {
                let mut pieces = vec![1; whole.len()];
                for (index, to) in pieces.chunks_mut(piece).enumerate() {
                    REFERENCE.write(&key(1), row_bytes as u64, (index * piece) as u64, to);
                }
                assert!(pieces == whole, "rows of {row_bytes} bytes, in pieces of {piece}");
            }
        }
        check(32, 128);
        check(64, 192);
        check(96, 192);
        check(512, 1024);
    }

    #[test]
    fn rows_that_are_no_reference() {
        assert!(!is_referred(&[]));
        assert!(!is_referred(&[0; 200]));
        assert!(is_referred(&[FILLER; 200]));
    }
}
