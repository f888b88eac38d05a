//! Lossy versions of pages: against a plain reference, and what must hold for every page.

use half::{bf16, f16};
use proptest::prelude::*;

use super::round_trip::decoded;
use crate::content::ContentHash;
use crate::{
    Quantisation, Quantised, Stored, Subject, Unsuitable, Version, decode, quantise_page,
    round_rows,
};
use kvfs_page::{
    Dtype, Layer, LayerKind, Layout, Manifest, ManifestFields, PageHasher, PagePlace, PageView,
    SideRows, TokenStart, build_header, pack_page, row_f32,
};

const BOTH: [Quantisation; 2] = [Quantisation::Q8_0, Quantisation::Q4_0];
const FLOATS: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];

fn place(dtype: Dtype, layout: Layout, head_dim: u32, v_head_dim: u32) -> PagePlace {
    let mut fields = ManifestFields::new("tiny", dtype, 2, 3, head_dim);
    fields.v_head_dim = Some(v_head_dim);
    fields.layout = layout;
    let manifest = Manifest::new(fields).unwrap();
    let found = manifest.geometry();
    assert_eq!((found.head_dim(), found.v_head_dim()), (head_dim, v_head_dim));
    PagePlace::new(&manifest, Layer(1), TokenStart(1024)).unwrap()
}

fn to_bytes(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

fn to_values(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let elements = bytes.len() / dtype.block_bytes() as usize;
    let mut values = vec![0.0; elements];
    row_f32(dtype, bytes, &mut values);
    values
}

/// A page of `tokens` with these values, row by row.
fn page(place: &PagePlace, tokens: u32, mut next: impl FnMut() -> f32) -> Vec<u8> {
    let geometry = place.geometry();
    let dtype = geometry.dtype();
    let elements = u64::from(tokens) * geometry.row_bytes() / u64::from(dtype.block_bytes());
    let rows: Vec<u8> = (0..elements).flat_map(|_| to_bytes(dtype, next())).collect();
    pack_page(place, &rows, tokens).unwrap()
}

fn version(page: &[u8], place: &PagePlace, quantisation: Quantisation) -> Version {
    match quantise_page(page, place, quantisation).unwrap() {
        Quantised::Version(version) => version,
        Quantised::Unsuitable(why) => panic!("{why:?}"),
    }
}

fn random(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [a, b, c, d, ..] = state.to_le_bytes();
        // Sums are bell-shaped, as keys and values are.
        [a, b, c, d].map(|byte| f32::from(byte) / 128.0 - 1.0).iter().sum()
    }
}

/// The definition, written down plainly: what 32 values become.
fn reference(quantisation: Quantisation, dtype: Dtype, values: &[f32]) -> Vec<f32> {
    let extreme =
        values.iter().copied().reduce(|a, b| if b.abs() > a.abs() { b } else { a }).unwrap();
    let (d, least, most) = match quantisation {
        Quantisation::Q8_0 => (extreme.abs() / 127.0, -127.0, 127.0),
        Quantisation::Q4_0 => (extreme / -8.0, -8.0, 7.0),
    };
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let stored = f16::from_f32(d).to_f32();
    let quants = values.iter().map(|x| (x * inverse).round_ties_even().clamp(least, most));
    quants.flat_map(|q| to_values(dtype, &to_bytes(dtype, q * stored))).collect()
}

#[test]
fn side_rows_are_kept_bit_for_bit() {
    let mut fields = ManifestFields::new("tiny", Dtype::F16, 1, 1, 64);
    let side = SideRows { name: "index_k".to_owned(), row_bytes: 66 };
    (fields.v_head_dim, fields.layers) = (Some(0), Some(vec![LayerKind::WithSide(side)]));
    let place = PagePlace::new(&Manifest::new(fields).unwrap(), Layer(0), TokenStart(0)).unwrap();
    let mut next = random(3);
    // Bytes that would be NaN, were they values.
    let mut row = || {
        let k: Vec<u8> = (0..64).flat_map(|_| to_bytes(Dtype::F16, next())).collect();
        [&k[..], &[0xff; 66]].concat()
    };
    let rows: Vec<u8> = (0..9).flat_map(|_| row()).collect();
    let file = pack_page(&place, &rows, 9).unwrap();
    for quantisation in BOTH {
        let version = version(&file, &place, quantisation);
        let [old, new] =
            [&file, &version.page].map(|file| PageView::parse(file, place.geometry()).unwrap());
        assert!(version.is_changed && old.k() != new.k() && old.side() == new.side());
        assert_eq!(place.verify_bytes(&version.page).unwrap().digest, version.digest);
        let (blob, length) = (&version.blob, version.page.len() as u64);
        let back = decoded(blob, quantisation.encoding(), length, &Subject::File).unwrap();
        assert!(back.0 == version.page);
    }
}

#[test]
fn same_values_as_the_reference() {
    for (quantisation, dtype) in BOTH.into_iter().flat_map(|q| FLOATS.map(|dtype| (q, dtype))) {
        for (layout, head_dim, v_head_dim, tokens) in
            [(Layout::Hnd, 64, 64, 100), (Layout::Nhd, 32, 96, 7), (Layout::Hnd, 576, 0, 33)]
        {
            let place = place(dtype, layout, head_dim, v_head_dim);
            let file = page(&place, tokens, random(u64::from(tokens)));
            let version = version(&file, &place, quantisation);
            let (old, new) = (
                PageView::parse(&file, place.geometry()).unwrap(),
                PageView::parse(&version.page, place.geometry()).unwrap(),
            );
            for head in 0..3 {
                for token in 0..tokens {
                    let pairs = [
                        (old.k_row(head, token), new.k_row(head, token)),
                        (old.v_row(head, token), new.v_row(head, token)),
                    ];
                    for (old, new) in pairs {
                        let (old, new) = (to_values(dtype, old), to_values(dtype, new));
                        let expected: Vec<f32> = old
                            .chunks(32)
                            .flat_map(|block| reference(quantisation, dtype, block))
                            .collect();
                        assert_eq!(new, expected, "{quantisation:?} {dtype} {head} {token}");
                    }
                }
            }
        }
    }
}

/// What must hold for a version, whatever its values.
fn check_version(file: &[u8], place: &PagePlace, quantisation: Quantisation) {
    let version = version(file, place, quantisation);
    assert_eq!(version.page.len(), file.len());
    assert_eq!(version.is_changed, version.page != file);
    // It is a page of its place, by the checksum in its own header.
    let mut read_at = |offset: u64, buffer: &mut [u8]| {
        let rest = &version.page[usize::try_from(offset).unwrap()..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    };
    let verified = place.verify(&mut read_at, file.len() as u64).unwrap();
    assert_eq!(verified.digest, version.digest);
    // Its blob is that page.
    let subject = Subject::Page(place.identity(verified.header.tokens));
    let stored = Stored {
        encoding: quantisation.encoding(),
        stored_bytes: version.blob.len() as u64,
        length: file.len() as u64,
    };
    let mut back = Vec::new();
    let digest = decode(&mut &*version.blob, &stored, &subject, &mut back).unwrap();
    assert!(back == version.page);
    assert_eq!((digest.content, digest.checksum), (version.content, version.digest.object));
    assert_eq!(digest.content, ContentHash::of(&version.page));
    // Quantising it again changes nothing.
    let again = self::version(&version.page, place, quantisation);
    assert!(again.page == version.page, "{quantisation:?} {}", place.geometry().dtype());
    assert!(!again.is_changed);
}

#[test]
fn pages_of_many_chunks() {
    for dtype in FLOATS {
        let place = place(dtype, Layout::Hnd, 128, 64);
        let file = page(&place, 1000, random(3));
        assert!(file.len() > 1 << 20);
        for quantisation in BOTH {
            check_version(&file, &place, quantisation);
        }
    }
}

#[test]
fn idempotent_at_every_magnitude() {
    // Scales at every place between two powers of two, among them f16 subnormals and zero.
    for dtype in FLOATS {
        let place = place(dtype, Layout::Hnd, 64, 64);
        let mut next = random(5);
        let mut magnitude = 1e-9_f32;
        let mut count = 0;
        let file = page(&place, 1024, || {
            count += 1;
            if count % 32 == 0 {
                magnitude *= 1.002;
            }
            next() * magnitude
        });
        assert!(magnitude > 10.0);
        for quantisation in BOTH {
            check_version(&file, &place, quantisation);
        }
    }
}

#[test]
fn header_and_pad_stay() {
    let place = place(Dtype::F16, Layout::Hnd, 64, 64);
    let mut next = random(7);
    let mut file = page(&place, 5, &mut next);
    // Without a declared checksum, the header is the writer's own, to the byte.
    let note = [("note".to_owned(), "é".to_owned())].into();
    let header = build_header(place.geometry(), 5, &note).unwrap();
    file[..4096].copy_from_slice(&header);
    let pad = usize::try_from(place.geometry().pad_bytes(5)).unwrap();
    assert!(pad > 0);
    let length = file.len();
    file[length - pad..].fill(0xa5);
    for quantisation in BOTH {
        let version = version(&file, &place, quantisation);
        assert!(version.is_changed);
        assert!(version.page[..4096] == file[..4096]);
        assert!(version.page[length - pad..] == file[length - pad..]);
        check_version(&file, &place, quantisation);
    }
    // With one, it is that of the new values, and the rest of the metadata stays.
    let mut metadata = note;
    let mut hasher = PageHasher::new();
    hasher.update(&file);
    let declared = hasher.finish(&place.identity(5)).page;
    metadata.insert("kvfs.checksum".to_owned(), declared.to_string());
    metadata.insert("kvfs.later".to_owned(), "x".to_owned());
    file[..4096].copy_from_slice(&build_header(place.geometry(), 5, &metadata).unwrap());
    for quantisation in BOTH {
        let version = version(&file, &place, quantisation);
        let header = place.check_header(&version.page, length as u64).unwrap();
        assert_ne!(header.declared.checksum, Some(declared));
        assert_eq!(header.declared.checksum, Some(version.digest.page));
        let mut expected = metadata.clone();
        expected.insert("kvfs.checksum".to_owned(), version.digest.page.to_string());
        assert_eq!(header.metadata, expected);
        check_version(&file, &place, quantisation);
    }
}

#[test]
fn unsuitable_pages() {
    fn check(file: &[u8], place: &PagePlace, expected: Option<Unsuitable>) {
        for quantisation in BOTH {
            match quantise_page(file, place, quantisation).unwrap() {
                Quantised::Version(_) => assert_eq!(expected, None),
                Quantised::Unsuitable(why) => assert_eq!(Some(why), expected),
            }
        }
    }
    for dtype in [Dtype::F8E4m3, Dtype::Q8_0, Dtype::Q4_0] {
        let place = place(dtype, Layout::Hnd, 64, 64);
        let rows = vec![0; usize::try_from(place.geometry().row_bytes()).unwrap()];
        let file = pack_page(&place, &rows, 1).unwrap();
        check(&file, &place, Some(Unsuitable::Dtype));
    }
    for (head_dim, v_head_dim) in [(80, 64), (64, 80), (16, 16)] {
        let place = place(Dtype::F16, Layout::Hnd, head_dim, v_head_dim);
        check(&page(&place, 3, || 1.0), &place, Some(Unsuitable::RowLength));
    }
    for dtype in FLOATS {
        let place = place(dtype, Layout::Hnd, 64, 64);
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for position in [1, 500, 3 * 2 * 64 * 20] {
                let mut count = 0;
                let file = page(&place, 20, || {
                    count += 1;
                    if count == position { odd } else { 1.0 }
                });
                check(&file, &place, Some(Unsuitable::NotFinite));
            }
        }
        check(&page(&place, 2, || 0.0), &place, None);
        check(&page(&place, 2, || -0.0), &place, None);
        check(&page(&place, 2, || 60_000.0), &place, None);
    }
    // The scale of a block is an f16.
    let large = place(Dtype::F32, Layout::Hnd, 64, 64);
    check(&page(&large, 2, || 1e30), &large, Some(Unsuitable::NotFinite));
    check(&page(&large, 2, || f32::MAX), &large, Some(Unsuitable::NotFinite));
}

#[test]
fn a_page_of_another_place_is_refused() {
    let here = place(Dtype::F16, Layout::Hnd, 64, 64);
    let there = place(Dtype::F16, Layout::Nhd, 64, 64);
    let file = page(&here, 3, || 1.0);
    assert!(quantise_page(&file, &there, Quantisation::Q8_0).is_err());
    assert!(quantise_page(&file[..4096], &here, Quantisation::Q8_0).is_err());
    assert!(quantise_page(&[], &here, Quantisation::Q8_0).is_err());
}

#[test]
fn a_blob_of_another_page_length_is_refused() {
    let place = place(Dtype::F16, Layout::Hnd, 64, 64);
    let file = page(&place, 30, random(1));
    let version = version(&file, &place, Quantisation::Q8_0);
    for length in [file.len() as u64 - 4096, file.len() as u64 + 4096] {
        let encoding = Quantisation::Q8_0.encoding();
        assert!(decoded(&version.blob, encoding, length, &Subject::File).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any bit pattern: a version that keeps every promise, or a page with odd values.
    #[test]
    fn any_bits(bits in proptest::collection::vec(any::<u32>(), 64),
                dtype in proptest::sample::select(FLOATS.to_vec()),
                quantisation in proptest::sample::select(BOTH.to_vec())) {
        let place = place(dtype, Layout::Hnd, 32, 32);
        let mut bits = bits.iter().cycle();
        let file = page(&place, 1, || {
            let bits = *bits.next().unwrap();
            match dtype {
                Dtype::F16 => f16::from_bits(u16::try_from(bits >> 16).unwrap()).to_f32(),
                // Half of all exponents lie beyond what an f16 scale reaches.
                _ => f32::from_bits(bits & 0xdfff_ffff),
            }
        });
        if let Quantised::Version(_) = quantise_page(&file, &place, quantisation).unwrap() {
            check_version(&file, &place, quantisation);
        }
    }
}

#[test]
fn rows_are_rounded_as_pages_are() {
    for (quantisation, dtype) in BOTH.into_iter().flat_map(|q| FLOATS.map(|dtype| (q, dtype))) {
        let place = place(dtype, Layout::Hnd, 64, 32);
        let page = page(&place, 9, random(5));
        let rounded = version(&page, &place, quantisation);
        let [before, after] =
            [&page, &rounded.page].map(|file| PageView::parse(file, place.geometry()).unwrap());
        for (row_elements, mut rows, expected) in
            [(64, before.k().to_vec(), after.k()), (32, before.v().to_vec(), after.v())]
        {
            assert_eq!(round_rows(dtype, row_elements, quantisation, &mut rows), Ok(()));
            assert!(rows == expected, "{quantisation:?} {dtype}");
        }
    }
}

#[test]
fn rows_that_are_not_rounded() {
    let mut rows = [0; 64];
    let mut round = |dtype, elements| round_rows(dtype, elements, Quantisation::Q8_0, &mut rows);
    assert_eq!(round(Dtype::F8E4m3, 64), Err(Unsuitable::Dtype));
    assert_eq!(round(Dtype::F16, 16), Err(Unsuitable::RowLength));
    assert_eq!(round(Dtype::F16, 0), Err(Unsuitable::RowLength));
    rows[..2].copy_from_slice(&f16::NAN.to_le_bytes());
    let mut round = |elements| round_rows(Dtype::F16, elements, Quantisation::Q4_0, &mut rows);
    assert_eq!(round(32), Err(Unsuitable::NotFinite));
}
