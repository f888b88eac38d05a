//! Encoded copies, as a remote may give them: forged headers, forged frames, bombs.

use kvfs::page::{
    Dtype, Layer, Manifest, ManifestFields, PageIdentity, PagePlace, TokenStart, pack_page,
};
use kvfs::tier::content::ContentHash;
use kvfs::tier::encoding::{
    Encoding, EncodingError, Lossless, Stored, Subject, ZstdLevel, decode, decode_local, encode,
};

use super::engine::{Outcome, Target};
use crate::common::fill;

/// An input is: encoding, what else is to be set right, the length on record (4), a blob.
const PREAMBLE: usize = 6;
const HEADER_BYTES: usize = 48;
/// Where the header's checksum begins.
const CHECKSUM_AT: usize = 40;
/// The header's field of the logical length.
const LENGTH: std::ops::Range<usize> = 16..24;

fn identity() -> (Vec<u8>, PageIdentity) {
    let fields = ManifestFields::new("test/fuzz", Dtype::F16, 1, 2, 64);
    let place = PagePlace::new(&Manifest::new(fields).unwrap(), Layer(0), TokenStart(0)).unwrap();
    let mut rows = fill(3, usize::try_from(place.geometry().row_bytes()).unwrap() * 16);
    rows.iter_mut().skip(1).step_by(2).for_each(|high| *high = 0x3c);
    (pack_page(&place, &rows, 16).unwrap(), place.identity(16))
}

fn seeds() -> Vec<Vec<u8>> {
    let (page, identity) = identity();
    let (page_subject, file) = (Subject::Page(identity), Subject::File);
    let mut text = b"the same again and again; ".repeat(60);
    text.extend(fill(9, 300));
    let zstd = Lossless::Zstd(ZstdLevel::DEFAULT);
    let mut seeds = Vec::new();
    for (bytes, subject, how) in [
        (&page, page_subject, zstd),
        (&page, file, zstd),
        (&text, file, zstd),
        (&text, file, Lossless::Raw),
        (&vec![0; 3 << 20], file, zstd),
        (&Vec::new(), file, zstd),
    ] {
        let mut blob = Vec::new();
        let length = bytes.len() as u64;
        let encoded = encode(&mut bytes.as_slice(), length, how, &subject, &mut blob).unwrap();
        let number = Encoding::ALL.iter().position(|one| *one == encoded.encoding).unwrap();
        let number = u8::try_from(number).unwrap();
        let length = u32::try_from(length).unwrap().to_le_bytes();
        seeds.push([&[number, 1], length.as_slice(), &blob].concat());
    }
    seeds
}

pub(crate) fn target() -> Target {
    let (_, identity) = identity();
    Target {
        name: "blob",
        length_max: 8192,
        seeds: seeds(),
        words: &[
            b"kvfs",
            b"\x5b\x2a\x4d\x18\x28\0\0\0",
            b"\x5c\x2a\x4d\x18\x04\0\0\0",
            b"\x28\xb5\x2f\xfd",
            b"\x28\xb5\x2f\xfd\xa4\0\0\x40\0",
            b"\0\x10\0\0",
            b"\0\0\x40\0",
        ],
        // Two chunks and what zstd keeps for one; a vector that grows asks for twice as much.
        allocation_max: 16 << 20,
        run: Box::new(move |input| run(input, &identity)),
    }
}

/// Puts the header's checksum and length right, so that what lies behind them is reached.
fn mend(blob: &mut [u8], repair: u8, length: u64) {
    if blob.len() < HEADER_BYTES {
        return;
    }
    if repair & 2 != 0 {
        blob[LENGTH].copy_from_slice(&length.to_le_bytes());
    }
    if repair & 1 != 0 {
        let checksum = kvfs::page::content_checksum(&blob[..CHECKSUM_AT]).0;
        blob[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&checksum[..HEADER_BYTES - CHECKSUM_AT]);
    }
}

fn run(input: &[u8], identity: &PageIdentity) -> Outcome {
    let Some((preamble, rest)) = input.split_at_checked(PREAMBLE) else {
        return Outcome::refused(&"too short");
    };
    let encoding = Encoding::ALL[usize::from(preamble[0]) % Encoding::ALL.len()];
    let length = u64::from(u32::from_le_bytes(*preamble.last_chunk().unwrap()));
    // What is on record is true in a forged remote as well: objects of up to 4 MiB.
    let length = length % (4 << 20);
    let mut blob = rest.to_vec();
    if encoding != Encoding::Raw {
        mend(&mut blob, preamble[1], length);
    }
    let subject = if preamble[1] & 4 == 0 { Subject::File } else { Subject::Page(*identity) };
    let stored = Stored { encoding, stored_bytes: blob.len() as u64, length };
    let mut written = Bounded { bytes: Vec::new(), length_max: length };
    let outcome = decode(&mut blob.as_slice(), &stored, &subject, &mut written);
    let checksum = decode_local(&mut blob.as_slice(), &stored, &subject, &mut std::io::sink());
    match outcome {
        Err(error) => {
            assert!(matches!(error, EncodingError::Corrupt { .. } | EncodingError::Unsupported(_)));
            assert!(checksum.is_err());
            Outcome::refused(&error)
        }
        Ok(digest) => {
            assert_eq!(written.bytes.len() as u64, length);
            assert_eq!(digest.content, ContentHash::of(&written.bytes));
            assert_eq!(checksum.unwrap(), digest.checksum);
            Outcome::accepted((encoding.extension(), length.checked_ilog2()))
        }
    }
}

/// Takes as many bytes as are on record, and not one more.
struct Bounded {
    bytes: Vec<u8>,
    length_max: u64,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let length = self.bytes.len() + bytes.len();
        assert!(length as u64 <= self.length_max, "more bytes than are on record");
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
