//! Blobs that are not what they were: refused, or at least never taken for the right bytes.

use std::io::Read;

use super::round_trip::{bytes, decoded, encoded, identity, zstd};
use crate::blob::HEADER_BYTES;
use crate::content::ContentHash;
use crate::{
    Encoding, EncodingError, Lossless, Quantisation, Quantised, Stored, Subject, ZstdLevel, decode,
    quantise_page,
};
use kvfs_page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, content_checksum, pack_page,
};

/// A small blob of each encoding, with its logical bytes.
fn samples() -> Vec<(Encoding, Vec<u8>, Vec<u8>)> {
    let manifest = Manifest::new(ManifestFields::new("tiny", Dtype::F16, 1, 1, 32)).unwrap();
    let place = PagePlace::new(&manifest, Layer(0), TokenStart(0)).unwrap();
    // Exponents of small numbers, so that every value is finite.
    let rows: Vec<u8> = bytes(80 * 128, 17).iter().map(|byte| byte & 0x33).collect();
    let page = pack_page(&place, &rows, 80).unwrap();
    let mut samples = vec![];
    let lossless = [
        (Lossless::Raw, Subject::File),
        (zstd(), Subject::File),
        (zstd(), Subject::Page(identity(Dtype::F16))),
    ];
    for (lossless, subject) in lossless {
        let (blob, encoded) = encoded(&page, lossless, &subject);
        samples.push((encoded.encoding, blob, page.clone()));
    }
    for quantisation in [Quantisation::Q8_0, Quantisation::Q4_0] {
        let Quantised::Version(version) = quantise_page(&page, &place, quantisation).unwrap()
        else {
            panic!("the page is of f16 rows of 32");
        };
        samples.push((quantisation.encoding(), version.blob, version.page));
    }
    let encodings: Vec<Encoding> = samples.iter().map(|sample| sample.0).collect();
    assert_eq!(encodings, Encoding::ALL);
    samples
}

#[test]
fn every_byte_counts() {
    for (encoding, blob, logical) in samples() {
        let content = ContentHash::of(&logical);
        for at in 0..blob.len() {
            for mask in [1, 0x80, 0xff] {
                let mut damaged = blob.clone();
                damaged[at] ^= mask;
                match decoded(&damaged, encoding, logical.len() as u64, &Subject::File) {
                    Err(EncodingError::Corrupt { at: noticed, .. }) => {
                        assert!(
                            noticed <= at as u64 + 12,
                            "{encoding:?}: {at} noticed at {noticed}"
                        );
                    }
                    Err(EncodingError::Unsupported(_)) => assert_eq!(at, 12),
                    Err(error) => panic!("{encoding:?} at {at}: {error}"),
                    // Raw copies say nothing about themselves. A frame may have a bit that
                    // changes nothing; then the bytes are right.
                    Ok((found, hash)) => {
                        assert_eq!(hash, ContentHash::of(&found));
                        let is_right = found == logical;
                        assert_eq!(hash == content, is_right);
                        assert!(is_right || encoding == Encoding::Raw, "{encoding:?} at {at}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_length_counts() {
    for (encoding, blob, logical) in samples() {
        let length = logical.len() as u64;
        for cut in 0..blob.len() {
            let refused = decoded(&blob[..cut], encoding, length, &Subject::File).unwrap_err();
            assert!(matches!(refused, EncodingError::Corrupt { .. }), "{refused}");
            // The same with the right length on record.
            let stored = Stored { encoding, stored_bytes: blob.len() as u64, length };
            let refused = decode(&mut &blob[..cut], &stored, &Subject::File, &mut Vec::new());
            assert!(matches!(refused, Err(EncodingError::Corrupt { .. })));
        }
        for garbage in [&[0][..], &blob] {
            let longer = [&blob, garbage].concat();
            let refused = decoded(&longer, encoding, length, &Subject::File).unwrap_err();
            assert!(matches!(refused, EncodingError::Corrupt { .. }), "{refused}");
            let stored = Stored { encoding, stored_bytes: blob.len() as u64, length };
            let refused = decode(&mut &*longer, &stored, &Subject::File, &mut Vec::new());
            assert!(matches!(refused, Err(EncodingError::Corrupt { .. })));
        }
        for wrong in [0, 1, length - 1, length + 1, length + 4096, 1 << 40, u64::MAX] {
            let refused = decoded(&blob, encoding, wrong, &Subject::File).unwrap_err();
            assert!(matches!(refused, EncodingError::Corrupt { .. }), "{refused}");
        }
    }
}

#[test]
fn another_encoding_is_noticed() {
    for (encoding, blob, logical) in samples() {
        for other in Encoding::ALL.into_iter().filter(|other| *other != encoding) {
            let refused = decoded(&blob, other, logical.len() as u64, &Subject::File).unwrap_err();
            assert!(matches!(refused, EncodingError::Corrupt { .. }), "{refused}");
        }
    }
}

/// A blob that is whole by all its checksums but not one that `encode` makes.
fn forged(length: u64, chunk_bytes: u32, chunks: &[&[u8]]) -> Vec<u8> {
    let (mut blob, _) = encoded(&[], zstd(), &Subject::File);
    blob[16..24].copy_from_slice(&length.to_le_bytes());
    blob[32..36].copy_from_slice(&chunk_bytes.to_le_bytes());
    seal(&mut blob);
    for frame in chunks {
        blob.extend(0x184D_2A5C_u32.to_le_bytes());
        blob.extend(4_u32.to_le_bytes());
        blob.extend(u32::try_from(frame.len()).unwrap().to_le_bytes());
        blob.extend_from_slice(frame);
    }
    blob
}

/// Puts the right checksum into a header.
fn seal(blob: &mut [u8]) {
    let checksum = content_checksum(&blob[..40]);
    blob[40..HEADER_BYTES].copy_from_slice(&checksum.0[..8]);
}

fn check_refused(blob: &[u8], length: u64, expected: &str) {
    let refused = decoded(blob, Encoding::Zstd, length, &Subject::File).unwrap_err();
    assert!(refused.to_string().contains(expected), "{refused}");
}

#[test]
fn headers_that_promise_too_much() {
    let change = |at: usize, value: &[u8]| {
        let (mut blob, _) = encoded(&[7; 9], zstd(), &Subject::File);
        blob[at..at + value.len()].copy_from_slice(value);
        seal(&mut blob);
        blob
    };
    check_refused(&change(12, &[2]), 9, "copy needs a newer kvfs: layout 2, this is 1");
    check_refused(&change(12, &[0]), 9, "the header does not match its checksum");
    for encoding in [0, 5, 255] {
        check_refused(&change(13, &[encoding]), 9, "byte 13: no such encoding");
    }
    check_refused(&change(14, &[1]), 9, "no such encoding");
    for level in [0, 20] {
        check_refused(&change(15, &[level]), 9, "not a zstd level");
    }
    for chunk_bytes in [0, 1, 4095, 4097, (4 << 20) + 4096, u32::MAX] {
        check_refused(&change(32, &chunk_bytes.to_le_bytes()), 9, "a length that is not allowed");
    }
    // Quantised values beyond the file, before the header's end, or in half a block.
    for values_end in [0, 4095, 4096 + 63, 1 << 20, u64::MAX] {
        let mut blob = change(24, &values_end.to_le_bytes());
        blob[13..15].copy_from_slice(&[3, 1]);
        seal(&mut blob);
        let refused = decoded(&blob, Encoding::Q8_0, 9, &Subject::File).unwrap_err();
        assert!(refused.to_string().contains("whole blocks of the file"), "{refused}");
    }
    // No allocation for a file of 16 EiB; it just ends too early.
    check_refused(&forged(u64::MAX, 4096, &[]), u64::MAX, "end too early");
}

#[test]
fn frames_that_promise_too_much() {
    let zeros = |bytes: usize| zstd_frame(&vec![0; bytes]);
    let small = zeros(100);
    check_refused(&forged(100, 4096, &[&zeros(101)]), 100, "not a zstd frame of 100 bytes");
    check_refused(&forged(100, 4096, &[&[&*small, &small].concat()]), 100, "not a zstd frame");
    check_refused(&forged(100, 4096, &[&small, &small]), 100, "bytes behind the last chunk");
    check_refused(&forged(100, 4096, &[&small[..small.len() - 1]]), 100, "not a zstd frame");
    check_refused(&forged(100, 4096, &[&[]]), 100, "not a zstd frame");
    // A frame that names a window of 2 GiB: byte 5 is the window where it is no single segment.
    let mut window = small.clone();
    window[4] &= !0x20;
    window.insert(5, 0xA8);
    check_refused(&forged(100, 4096, &[&window]), 100, "not a zstd frame");
    let mut long = forged(100, 4096, &[&small]);
    long[HEADER_BYTES + 8..HEADER_BYTES + 12].copy_from_slice(&u32::MAX.to_le_bytes());
    check_refused(&long, 100, "frame of 4294967295 bytes");
}

/// A frame as a chunk has it.
fn zstd_frame(content: &[u8]) -> Vec<u8> {
    let (blob, _) = encoded(content, Lossless::Zstd(ZstdLevel::DEFAULT), &Subject::File);
    assert!(content.len() <= 1 << 20, "one chunk");
    blob[HEADER_BYTES + 12..].to_vec()
}

#[test]
fn a_bomb_fails_at_once() {
    /// Counts what arrives.
    struct Count(u64);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len() as u64;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    // 1 GiB of zeros in one frame of some 32 KiB, as any zstd makes it.
    let mut bomb = Vec::new();
    let mut encoder = zstd::stream::write::Encoder::new(&mut bomb, 3).unwrap();
    encoder.set_pledged_src_size(Some(1 << 30)).unwrap();
    encoder.include_contentsize(true).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(1 << 30), &mut encoder).unwrap();
    encoder.finish().unwrap();
    assert!(bomb.len() < 100_000, "{}", bomb.len());

    for (length, expected) in [
        (4096, "holds 1073741824 bytes, 4096 are on record"),
        (1 << 30, "not a zstd frame of 4194304 bytes"),
    ] {
        for blob in [bomb.clone(), forged(1 << 30, 4 << 20, &[&bomb])] {
            let stored =
                Stored { encoding: Encoding::Zstd, stored_bytes: blob.len() as u64, length };
            let mut count = Count(0);
            let refused = decode(&mut &*blob, &stored, &Subject::File, &mut count).unwrap_err();
            let is_expected = refused.to_string().contains(expected);
            assert!(is_expected || blob == bomb, "{refused}");
            assert_eq!(count.0, 0);
        }
    }
}
