//! Prefix hashes: the name of a page's tokens and of all tokens before them.
//!
//! The K and V of a page depend on its tokens and on every token before, so that is what a page
//! can be looked up by. Each full page's hash covers the hash of the page before it:
//!
//! ```text
//! h(i) = SHA-256(h(i-1) || tokens of page i, u32 little endian each)
//! ```
//!
//! The first page has no hash before it (this is the chain that `SGLang` computes), unless the
//! manifest names a tenant, a salt or an adapter: then it follows the SHA-256 of
//! `kvfs-prefix-v1` and of these three, encoded as in [`ModelIdentity`](super::ModelIdentity).

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

/// Hash of a page's tokens and of all tokens before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixHash(pub [u8; 32]);

impl PrefixHash {
    /// What seeds the first page: nothing if nothing keeps this cache from sharing.
    pub(super) fn root(isolation: &[u8]) -> Option<Self> {
        let seed = || Sha256::new().chain_update(b"kvfs-prefix-v1").chain_update(isolation);
        (!isolation.is_empty()).then(|| Self(seed().finalize().into()))
    }

    /// The hash of the page that follows `parent` and holds these tokens, four bytes each, little
    /// endian.
    #[must_use]
    pub fn next(parent: Option<Self>, tokens: &[u8]) -> Self {
        let mut hasher = Sha256::new();
        if let Some(parent) = parent {
            hasher.update(parent.0);
        }
        Self(hasher.chain_update(tokens).finalize().into())
    }
}

impl fmt::Display for PrefixHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The text is not 64 hexadecimal digits in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParsePrefixHashError;

impl fmt::Display for ParsePrefixHashError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prefix hash has 64 hexadecimal digits, a to f in lower case")
    }
}

impl std::error::Error for ParsePrefixHashError {}

impl FromStr for PrefixHash {
    type Err = ParsePrefixHashError;

    /// One hash has one spelling, as every name in the mount.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(ParsePrefixHashError),
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let mut hash = [0; 32];
        if pairs.len() != hash.len() || !rest.is_empty() {
            return Err(ParsePrefixHashError);
        }
        for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Ok(Self(hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Manifest, ManifestFields};

    fn tokens(range: std::ops::Range<u32>) -> Vec<u8> {
        range.flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn the_chain_is_that_of_other_engines() {
        // Computed with Python's hashlib from the published formula.
        fn check(parent: Option<PrefixHash>, range: std::ops::Range<u32>, expected: &str) {
            assert_eq!(PrefixHash::next(parent, &tokens(range)).to_string(), expected);
        }
        let first = "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea";
        check(None, 0..16, first);
        let parent = first.parse().ok();
        assert!(parent.is_some());
        check(parent, 16..32, "4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a");
    }

    #[test]
    fn one_hash_has_one_spelling() {
        fn check(text: &str, is_hash: bool) {
            assert_eq!(text.parse::<PrefixHash>().is_ok(), is_hash, "{text}");
        }
        check(&"0a".repeat(32), true);
        check(&"0A".repeat(32), false);
        check(&"0a".repeat(31), false);
        check(&"0a".repeat(33), false);
        check(&format!("{}a", "0a".repeat(31)), false);
        check(&"0g".repeat(32), false);
        check("", false);
    }

    #[test]
    fn tenants_salts_and_adapters_have_hashes_of_their_own() {
        let root = |change: fn(&mut ManifestFields)| {
            let mut fields = ManifestFields::new("model", Dtype::F16, 1, 1, 64);
            change(&mut fields);
            Manifest::new(fields).unwrap().prefix_root()
        };
        let plain = root(|_| {});
        assert_eq!(plain, None);
        let others = [
            root(|fields| fields.tenant = Some("a".into())),
            root(|fields| fields.salt = Some("a".into())),
            root(|fields| fields.lora = Some("a".into())),
            root(|fields| fields.salt = Some("b".into())),
        ];
        for (index, one) in others.iter().enumerate() {
            assert!(one.is_some());
            assert!(!others[..index].contains(one));
        }
    }
}
