//! What a tier calls bytes: by a hash of them, so that machines that share a remote tier agree on
//! names without asking each other.
//!
//! BLAKE3 and not the page checksum: a remote directory may be shared with people one does not
//! trust, and XXH3 can be collided on purpose.

use std::fmt;
use std::str::FromStr;

/// BLAKE3 of the logical (decoded) bytes of an object; 64 hexadecimal digits as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash(pub [u8; 32]);

impl ContentHash {
    /// The hash of bytes at hand.
    pub fn of(bytes: &[u8]) -> ContentHash {
        ContentHash(*blake3::hash(bytes).as_bytes())
    }

    /// What the same bytes are called within a scope, and nowhere else.
    #[must_use]
    pub fn within(&self, scope: &[u8]) -> ContentHash {
        let mut hasher = blake3::Hasher::new_derive_key("kvfs 2026-11-23 bytes within a scope");
        hasher.update(&self.0).update(scope);
        ContentHash(*hasher.finalize().as_bytes())
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// The text is not 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAHash;

impl FromStr for ContentHash {
    type Err = NotAHash;

    fn from_str(text: &str) -> Result<ContentHash, NotAHash> {
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(NotAHash);
        }
        let hash = blake3::Hash::from_hex(text).map_err(|_| NotAHash)?;
        Ok(ContentHash(*hash.as_bytes()))
    }
}

/// Hashes bytes as they pass.
#[derive(Debug, Default)]
pub struct ContentHasher(blake3::Hasher);

impl ContentHasher {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of all bytes taken so far.
    pub fn finish(&self) -> ContentHash {
        ContentHash(*self.0.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_hash_agree() {
        fn check(text: &str, valid: bool) {
            match text.parse::<ContentHash>() {
                Ok(hash) => assert_eq!((hash.to_string().as_str(), valid), (text, true)),
                Err(NotAHash) => assert!(!valid, "{text}"),
            }
        }
        // The empty input, from the BLAKE3 test vectors.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(ContentHash::of(b"").to_string(), empty);
        check(empty, true);
        check(&empty.to_uppercase(), false);
        check(&empty[1..], false);
        check("", false);
    }

    #[test]
    fn hashing_in_parts_is_hashing_the_whole() {
        let mut hasher = ContentHasher::default();
        hasher.update(b"key ");
        hasher.update(b"value");
        assert_eq!(hasher.finish(), ContentHash::of(b"key value"));
    }
}
