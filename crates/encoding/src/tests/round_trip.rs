//! What goes in comes out, and stock zstd agrees.

use std::io::Cursor;
use std::process::{Command, Stdio};

use crate::content::ContentHash;
use crate::limits::{CHUNK_BYTES, COPY_BYTES};
use crate::{
    Encoded, Encoding, EncodingError, Lossless, Stored, Subject, ZstdLevel, decode, decode_local,
    encode,
};
use kvfs_page::{
    Dtype, Layer, Manifest, ManifestFields, PageHasher, PageIdentity, PagePlace, TokenStart,
    content_checksum, pack_page,
};

#[path = "../../../../tests/common/skips.rs"]
mod skips;

/// Repeatable bytes that zstd can do something with.
pub(super) fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let words = std::iter::repeat_with(|| {
        let [a, b, ..] = next();
        [a, b & 3]
    });
    words.flatten().take(length).collect()
}

/// The identity of some page with elements of this type.
pub(super) fn identity(dtype: Dtype) -> PageIdentity {
    let manifest = Manifest::new(ManifestFields::new("tiny", dtype, 1, 2, 64)).unwrap();
    PagePlace::new(&manifest, Layer(0), TokenStart(0)).unwrap().identity(4)
}

pub(super) fn zstd() -> Lossless {
    Lossless::Zstd(ZstdLevel::DEFAULT)
}

pub(super) fn encoded(logical: &[u8], lossless: Lossless, subject: &Subject) -> (Vec<u8>, Encoded) {
    let mut blob = Vec::new();
    let encoded =
        encode(&mut &*logical, logical.len() as u64, lossless, subject, &mut blob).unwrap();
    assert_eq!(encoded.stored_bytes, blob.len() as u64);
    (blob, encoded)
}

pub(super) fn decoded(
    blob: &[u8], encoding: Encoding, length: u64, subject: &Subject,
) -> Result<(Vec<u8>, ContentHash), EncodingError> {
    let stored = Stored { encoding, stored_bytes: blob.len() as u64, length };
    let mut logical = Vec::new();
    let digest = decode(&mut &*blob, &stored, subject, &mut logical)?;
    let mut again = Vec::new();
    let checksum = decode_local(&mut &*blob, &stored, subject, &mut again).unwrap();
    assert!(again == logical && checksum == digest.checksum);
    Ok((logical, digest.content))
}

const LENGTHS: [usize; 17] = [
    0,
    1,
    2,
    31,
    4095,
    4096,
    4097,
    4099,
    65_537,
    COPY_BYTES,
    COPY_BYTES + 1,
    CHUNK_BYTES as usize - 1,
    CHUNK_BYTES as usize,
    CHUNK_BYTES as usize + 1,
    CHUNK_BYTES as usize + 4096,
    2 * CHUNK_BYTES as usize,
    3 * CHUNK_BYTES as usize + 4097,
];

#[test]
fn every_length() {
    fn check(lossless: Lossless, subject: &Subject, logical: &[u8], expected: Encoding) {
        let (blob, encoded) = encoded(logical, lossless, subject);
        assert_eq!(encoded.encoding, expected, "{} bytes", logical.len());
        assert_eq!(encoded.digest.content, ContentHash::of(logical));
        let checksum = match subject {
            Subject::File => content_checksum(logical),
            Subject::Page(identity) => {
                let mut hasher = PageHasher::new();
                hasher.update(logical);
                hasher.finish(identity).object
            }
        };
        assert_eq!(encoded.digest.checksum, checksum);
        let stored = Stored {
            encoding: encoded.encoding,
            stored_bytes: encoded.stored_bytes,
            length: logical.len() as u64,
        };
        let mut back = Vec::new();
        let digest = decode(&mut &*blob, &stored, subject, &mut back).unwrap();
        assert_eq!((back.as_slice(), digest), (logical, encoded.digest));
    }
    for length in LENGTHS {
        let logical = bytes(length, 7);
        check(Lossless::Raw, &Subject::File, &logical, Encoding::Raw);
        check(zstd(), &Subject::File, &logical, Encoding::Zstd);
        check(zstd(), &Subject::Page(identity(Dtype::Q8_0)), &logical, Encoding::Zstd);
        if length > 8192 {
            for dtype in [Dtype::F16, Dtype::Bf16] {
                let page = Subject::Page(identity(dtype));
                check(zstd(), &page, &logical, Encoding::ZstdShuffled);
            }
        }
        let words: Vec<u8> = logical.iter().flat_map(|byte| [*byte, 0, 7, 63]).collect();
        let logical = &words[..length.min(words.len())];
        check(zstd(), &Subject::File, logical, Encoding::Zstd);
    }
    // Random bytes: shuffling does not pay, and nothing grows by more than the frames' heads.
    let random: Vec<u8> =
        (0..65_536u64).flat_map(|i| *blake3::hash(&i.to_le_bytes()).as_bytes()).collect();
    check(zstd(), &Subject::Page(identity(Dtype::F16)), &random, Encoding::Zstd);
    let (blob, _) = encoded(&random, zstd(), &Subject::File);
    assert!(blob.len() < random.len() + 256, "{}", blob.len());
}

#[test]
fn four_byte_floats_are_shuffled_where_it_pays() {
    let floats: Vec<u8> = (0..300_000u32)
        .flat_map(|i| (f64::from(i.wrapping_mul(2_654_435_761)) / 4e9).to_string().parse::<f32>())
        .flat_map(f32::to_le_bytes)
        .collect();
    let page = Subject::Page(identity(Dtype::F32));
    let (blob, encoded) = encoded(&floats, zstd(), &page);
    assert_eq!(encoded.encoding, Encoding::ZstdShuffled);
    let (back, _) = decoded(&blob, Encoding::ZstdShuffled, floats.len() as u64, &page).unwrap();
    assert!(back == floats);
}

#[test]
fn equal_bytes_give_equal_blobs() {
    let logical = bytes(3 * CHUNK_BYTES as usize / 2, 3);
    let page = Subject::Page(identity(Dtype::F16));
    assert!(encoded(&logical, zstd(), &page) == encoded(&logical, zstd(), &page));
}

#[test]
fn sources_in_small_pieces() {
    /// Gives a prime number of bytes at a time, and is interrupted now and then.
    struct Slow<'a>(&'a [u8], bool);
    impl std::io::Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            let most = buffer.len().min(4093);
            self.0.read(&mut buffer[..most])
        }
    }
    let logical = bytes(CHUNK_BYTES as usize + 5000, 5);
    let length = logical.len() as u64;
    for lossless in [Lossless::Raw, zstd()] {
        let mut blob = Vec::new();
        let mut source = Slow(&logical, false);
        let found = encode(&mut source, length, lossless, &Subject::File, &mut blob).unwrap();
        let (expected, same) = encoded(&logical, lossless, &Subject::File);
        assert!(blob == expected && found == same);
        let stored = Stored { encoding: found.encoding, stored_bytes: found.stored_bytes, length };
        let mut back = Vec::new();
        decode(&mut Slow(&blob, false), &stored, &Subject::File, &mut back).unwrap();
        assert!(back == logical);
    }
}

#[test]
fn sources_of_another_length() {
    fn check(lossless: Lossless, length: u64, expected: &str) {
        let logical = bytes(10_000, 9);
        let found = encode(
            &mut Cursor::new(&logical),
            length,
            lossless,
            &Subject::File,
            &mut std::io::sink(),
        );
        let error = found.unwrap_err();
        assert!(matches!(error, EncodingError::Length { .. }));
        assert_eq!(error.to_string(), expected);
    }
    for lossless in [Lossless::Raw, zstd()] {
        check(lossless, 10_001, "object ends after 10000 of the 10001 bytes on record");
        check(lossless, 9_999, "object is longer than the 9999 bytes on record");
        check(lossless, 0, "object is longer than the 0 bytes on record");
        check(
            lossless,
            u64::MAX,
            &format!("object ends after 10000 of the {} bytes on record", u64::MAX),
        );
    }
}

#[test]
fn io_errors_say_which_side() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::from_raw_os_error(libc::EIO))
        }
    }
    impl std::io::Write for Broken {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::Error::from_raw_os_error(libc::ENOSPC))
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let logical = bytes(5000, 1);
    for lossless in [Lossless::Raw, zstd()] {
        let file = &Subject::File;
        let source = encode(&mut Broken, 5000, lossless, file, &mut std::io::sink());
        assert!(matches!(source, Err(EncodingError::Source(_))));
        let sink = encode(&mut &*logical, 5000, lossless, file, &mut Broken);
        assert!(matches!(sink, Err(EncodingError::Sink(_))));

        let (blob, encoded) = encoded(&logical, lossless, file);
        let stored =
            Stored { encoding: encoded.encoding, stored_bytes: blob.len() as u64, length: 5000 };
        let source = decode(&mut Broken, &stored, file, &mut std::io::sink());
        assert!(matches!(source, Err(EncodingError::Source(_))));
        let sink = decode(&mut &*blob, &stored, file, &mut Broken);
        assert!(matches!(sink, Err(EncodingError::Sink(_))));
    }
}

#[test]
fn stock_zstd_decodes_a_zstd_blob() {
    let missing = Command::new("zstd").arg("--version").output().err();
    if !skips::is_there("zstd", missing.map(|error| format!("no program zstd: {error}"))) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for length in LENGTHS {
        let logical = bytes(length, 11);
        let (blob, _) = encoded(&logical, zstd(), &Subject::File);
        let path = directory.path().join("blob.zst");
        std::fs::write(&path, blob).unwrap();
        let output = Command::new("zstd")
            .args(["-d", "-c", "-q"])
            .arg(&path)
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(output.status.success() && output.stdout == logical, "{length} bytes");
    }
}

#[test]
fn a_page_with_its_header() {
    let manifest = Manifest::new(ManifestFields::new("tiny", Dtype::F16, 1, 2, 64)).unwrap();
    let place = PagePlace::new(&manifest, Layer(0), TokenStart(0)).unwrap();
    let rows = bytes(100 * 512, 13);
    let page = pack_page(&place, &rows, 100).unwrap();
    let subject = Subject::Page(place.identity(100));
    let (blob, encoded) = encoded(&page, zstd(), &subject);
    let (back, content) = decoded(&blob, encoded.encoding, page.len() as u64, &subject).unwrap();
    assert_eq!((back, content), (page, encoded.digest.content));
}
