//! Checksums: XXH3-128, because it keeps up with the page cache.

use std::fmt;
use std::str::FromStr;

use twox_hash::XxHash3_128;

use super::dtype::Dtype;
use super::identity::ModelIdentity;
use super::limits::{PAYLOAD_OFFSET, index};
use super::{Layer, PrefixHash, TokenStart};

/// An XXH3-128 value, big endian; its text is 32 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Checksum(pub [u8; 16]);

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checksum({self})")
    }
}

/// A text was not a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParseChecksumError;

impl fmt::Display for ParseChecksumError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected 32 lower-case hexadecimal digits")
    }
}

impl std::error::Error for ParseChecksumError {}

impl FromStr for Checksum {
    type Err = ParseChecksumError;

    fn from_str(text: &str) -> Result<Self, ParseChecksumError> {
        let canonical = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 32 || !text.bytes().all(canonical) {
            return Err(ParseChecksumError);
        }
        let value = u128::from_str_radix(text, 16).map_err(|_| ParseChecksumError)?;
        Ok(Self(value.to_be_bytes()))
    }
}

/// What a page's checksum binds its bytes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageIdentity {
    /// The cache, from its manifest.
    pub model: ModelIdentity,
    /// The layer.
    pub layer: Layer,
    /// Position of the first token.
    pub start: TokenStart,
    /// Tokens in the page.
    pub tokens: u32,
    /// How elements are stored.
    pub dtype: Dtype,
}

impl PageIdentity {
    fn line(&self, format: &str) -> String {
        let Self { model, layer, start, tokens, dtype } = self;
        format!(
            "{format} model={model} layer={layer} start={start} tokens={tokens} dtype={dtype}\n"
        )
    }
}

/// What the checksum of a state binds its bytes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StateIdentity {
    /// Cache, layer and row; no tokens.
    pub(super) place: PageIdentity,
    /// The tokens that it has seen.
    pub(super) prefix: PrefixHash,
}

impl StateIdentity {
    fn line(&self) -> String {
        let PageIdentity { model, layer, start, .. } = &self.place;
        let prefix = self.prefix;
        format!("kvfs-state-v1 model={model} layer={layer} row={start} prefix={prefix}\n")
    }
}

/// The two checksums of a page.
///
/// A page's checksum binds its bytes to its place, so the right bytes under the wrong name fail:
///
/// ```text
/// line     = "kvfs-page-v1 model=<32 hex> layer=<n> start=<n> tokens=<n> dtype=<name>\n"   ASCII
/// payload  = XXH3-128 of the file from byte 4096 to its end, `_pad` included, big endian
/// checksum = XXH3-128(line ++ payload)
/// ```
///
/// In Python, with the package `xxhash`:
///
/// ```text
/// payload = xxhash.xxh3_128(open(path, "rb").read()[4096:]).digest()
/// xxhash.xxh3_128(line.encode("ascii") + payload).hexdigest()
/// ```
///
/// The header is left out of it, so that the checksum can stand in the header
/// (`kvfs.checksum`). The store records a second one, which notices a changed header too: the
/// same with `kvfs-object-v1`, and the digest of the first 4096 bytes before that of the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageDigest {
    /// Identity and payload: the public one, `kvfs.checksum`.
    pub page: Checksum,
    /// Identity, header and payload: what the store records.
    pub object: Checksum,
}

/// Hashes a page file as its bytes pass by.
#[derive(Clone)]
pub struct PageHasher {
    header: XxHash3_128,
    header_bytes_left: usize,
    payload: XxHash3_128,
}

impl PageHasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self {
            header: XxHash3_128::new(),
            header_bytes_left: index(PAYLOAD_OFFSET),
            payload: XxHash3_128::new(),
        }
    }

    /// The next bytes of the file, in order from byte 0, in pieces of any size.
    pub fn update(&mut self, bytes: &[u8]) {
        let (header, payload) = bytes.split_at(bytes.len().min(self.header_bytes_left));
        self.header_bytes_left -= header.len();
        self.header.write(header);
        self.payload.write(payload);
    }

    /// The checksums of the bytes so far, as the page `identity`.
    pub fn finish(&self, identity: &PageIdentity) -> PageDigest {
        let header = self.header.finish_128().to_be_bytes();
        let payload = self.payload.finish_128().to_be_bytes();
        let page = identity.line("kvfs-page-v1");
        let object = identity.line("kvfs-object-v1");
        PageDigest {
            page: content_checksum(&[page.as_bytes(), &payload].concat()),
            object: content_checksum(&[object.as_bytes(), &header, &payload].concat()),
        }
    }
}

impl PageHasher {
    /// The checksums of the bytes so far, as a state. The public one begins with another line:
    ///
    /// ```text
    /// line = "kvfs-state-v1 model=<32 hex> layer=<n> row=<n> prefix=<64 hex>\n"   ASCII
    /// ```
    pub(super) fn finish_state(&self, identity: &StateIdentity) -> PageDigest {
        let payload = self.payload.finish_128().to_be_bytes();
        let page = content_checksum(&[identity.line().as_bytes(), &payload].concat());
        PageDigest { page, ..self.finish(&identity.place) }
    }
}

impl Default for PageHasher {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for PageHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageHasher")
            .field("header_bytes_left", &self.header_bytes_left)
            .finish_non_exhaustive()
    }
}

/// XXH3-128 of `bytes`, bound to nothing: for plain files.
pub fn content_checksum(bytes: &[u8]) -> Checksum {
    Checksum(XxHash3_128::oneshot(bytes).to_be_bytes())
}

/// [`content_checksum`] of bytes that pass by in pieces.
#[derive(Clone)]
pub struct ContentHasher(XxHash3_128);

impl ContentHasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self(XxHash3_128::new())
    }

    /// The next bytes, in order, in pieces of any size.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of the bytes so far.
    pub fn finish(&self) -> Checksum {
        Checksum(self.0.finish_128().to_be_bytes())
    }
}

impl Default for ContentHasher {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for ContentHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContentHasher").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IDENTITY: PageIdentity = PageIdentity {
        model: ModelIdentity([
            0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd,
            0xee, 0xff,
        ]),
        layer: Layer(7),
        start: TokenStart(1024),
        tokens: 3,
        dtype: Dtype::F16,
    };

    fn digest(file: &[u8], identity: &PageIdentity) -> PageDigest {
        let mut hasher = PageHasher::new();
        hasher.update(file);
        hasher.finish(identity)
    }

    /// The file is `bytes(i % 251 for i in range(12288))`; the values come from Python's xxhash.
    #[test]
    fn same_values_as_python() {
        let file: Vec<u8> = (0..=250).cycle().take(12288).collect();
        let digest = digest(&file, &IDENTITY);
        assert_eq!(digest.page.to_string(), "bf405b0ac74660e978fc150fb16c032a");
        assert_eq!(digest.object.to_string(), "0959856c401c077551e2b5d780861ec1");
        assert_eq!(content_checksum(&file).to_string(), "6f94362169f4fe1398a94fb09d56785b");
        assert_eq!(content_checksum(b"").to_string(), "99aa06d3014798d86001c324468d497f");
    }

    #[test]
    fn every_part_of_the_identity_counts() {
        let file = vec![7; 8192];
        let own = digest(&file, &IDENTITY);
        let others = [
            PageIdentity { model: ModelIdentity([0; 16]), ..IDENTITY },
            PageIdentity { layer: Layer(8), ..IDENTITY },
            PageIdentity { start: TokenStart(2048), ..IDENTITY },
            PageIdentity { tokens: 4, ..IDENTITY },
            PageIdentity { dtype: Dtype::Bf16, ..IDENTITY },
        ];
        for other in others {
            let found = digest(&file, &other);
            assert_ne!(found.page, own.page, "{other:?}");
            assert_ne!(found.object, own.object, "{other:?}");
        }
        let mut changed_header = file;
        changed_header[100] ^= 1;
        let found = digest(&changed_header, &IDENTITY);
        assert_eq!(found.page, own.page);
        assert_ne!(found.object, own.object);
    }

    #[test]
    fn text_form() {
        fn check(text: &str, accepted: bool) {
            let parsed = text.parse::<Checksum>();
            assert_eq!(parsed.is_ok(), accepted, "{text:?}");
            if let Ok(checksum) = parsed {
                assert_eq!(checksum.to_string(), text);
            }
        }
        check("000102030405060708090a0b0c0d0e0f", true);
        check("ffffffffffffffffffffffffffffffff", true);
        check("000102030405060708090A0B0C0D0E0F", false);
        check("000102030405060708090a0b0c0d0e0", false);
        check("000102030405060708090a0b0c0d0e0f0", false);
        check("+00102030405060708090a0b0c0d0e0f", false);
        check("", false);
        check("0001020304050607€90a0b0c0d0e0f", false);
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(file in proptest::collection::vec(any::<u8>(), 0..12_000),
                                cuts in proptest::collection::vec(1..6000usize, 1..20)) {
            let (mut page, mut content) = (PageHasher::new(), ContentHasher::new());
            let mut rest = file.as_slice();
            for cut in cuts.iter().cycle() {
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                page.update(piece);
                content.update(piece);
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(page.finish(&IDENTITY), digest(&file, &IDENTITY));
            prop_assert_eq!(content.finish(), content_checksum(&file));
        }
    }
}
