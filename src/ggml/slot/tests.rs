use std::os::unix::fs::FileExt;

use super::*;
use crate::page::{Manifest, ManifestFields};

const TOKENS: [u32; 4] = [7, 8, 9, 10];

/// Two layers of two heads of 4 in f16: 16 bytes of K and of V for each of three tokens.
fn geometry() -> Geometry {
    *Manifest::new(ManifestFields::new("m", Dtype::F16, 2, 2, 4)).unwrap().geometry()
}

fn file(version: Version) -> Vec<u8> {
    let mut file = Vec::new();
    write_head(&mut file, &geometry(), version, &TOKENS, 3).unwrap();
    for tensor in 0..4 {
        write_tensor_head(&mut file, &geometry(), tensor > 1).unwrap();
        file.extend((0..48).map(|byte| tensor * 50 + byte));
    }
    file
}

fn open(bytes: &[u8]) -> Result<Slot, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all_at(bytes, 0).unwrap();
    Slot::open(file.path())
}

#[test]
fn what_was_written_is_read() {
    for version in Version::ALL {
        let slot = open(&file(version)).unwrap();
        assert_eq!((slot.tokens(), slot.cells()), (&TOKENS[..], 3));
        slot.check(&geometry()).unwrap();
        // Layer 1, tokens 1 and 2: its K is the second tensor, its V the fourth.
        let expected = [66..82, 166..182, 82..98, 182..198].into_iter().flatten();
        assert_eq!(slot.rows(1, 1, 2).unwrap(), expected.collect::<Vec<u8>>());
    }
}

/// Puts other words where the tokens are.
fn with_words(words: &[u32]) -> Vec<u8> {
    let file = file(Version::Four);
    let count = u32::try_from(words.len()).unwrap();
    let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    [&file[..8], &count.to_le_bytes(), &words, &file[28..]].concat()
}

#[test]
fn what_the_server_keeps_of_a_prompt() {
    let slot = open(&with_words(&[PROMPT, 1, 3, 7, 8, 9, 0])).unwrap();
    assert_eq!(slot.tokens(), [7, 8, 9]);
    assert_eq!(open(&with_words(&[PROMPT, 1, 0, 0])).unwrap().tokens(), [0_u32; 0]);
    let check = |words: &[u32]| {
        let error = open(&with_words(words)).unwrap_err();
        assert!(error.contains("more than tokens"), "{error}");
    };
    // A picture, another form, tokens that are not there, nothing at all.
    check(&[PROMPT, 1, 3, 7, 8, 9, 1]);
    check(&[PROMPT, 2, 3, 7, 8, 9, 0]);
    check(&[PROMPT, 1, 4, 7, 8, 9, 0]);
    check(&[PROMPT, 1, u32::MAX, 7, 8, 9, 0]);
    check(&[PROMPT, 1]);
    check(&[PROMPT]);
}

#[test]
fn a_sequence_is_in_one_stream() {
    let file = file(Version::Three);
    let check = |before: &[u32], behind: &[u32], expected: Result<u32, &str>| {
        let streams = u32::try_from(1 + before.len() + behind.len()).unwrap().to_le_bytes();
        let bytes =
            |counts: &[u32]| counts.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>();
        let file = [&file[..28], &streams, &bytes(before), &file[32..], &bytes(behind)].concat();
        match (open(&file), expected) {
            (Ok(slot), Ok(cells)) => assert_eq!(slot.cells(), cells),
            (Err(error), Err(line)) => assert!(error.contains(line), "{error}"),
            (found, _) => panic!("{found:?}"),
        }
    };
    check(&[], &[0, 0], Ok(3));
    check(&[0, 0], &[0], Ok(3));
    check(&[], &[1], Err("several streams"));
    check(&[], &[0; 256], Err("says that it has 257 streams"));
    // Nobody has used it.
    let empty = [&file[..28], [2_u32, 0, 0].map(u32::to_le_bytes).as_flattened()].concat();
    assert_eq!(open(&empty).unwrap().cells(), 0);
}

#[test]
fn rotated_rows_are_refused() {
    let mut file = file(Version::Four);
    file[84..88].copy_from_slice(&64_u32.to_le_bytes());
    let error = open(&file).unwrap_err();
    assert!(error.contains("rotated by 0 (K) and 64 (V)"), "{error}");
}

#[test]
fn every_byte_has_a_part() {
    Version::ALL.into_iter().for_each(every_byte_of_a_version_has_a_part);
}

fn every_byte_of_a_version_has_a_part(version: Version) {
    let file = file(version);
    let layout = Layout::new(&geometry(), version, 4, 3).unwrap();
    assert_eq!(layout.length(), file.len() as u64);
    let mut heads = Vec::new();
    write_head(&mut heads, &geometry(), version, &TOKENS, 3).unwrap();
    let mut tensor_head = Vec::new();
    write_tensor_head(&mut tensor_head, &geometry(), false).unwrap();
    for (offset, byte) in (0_u64..).zip(&file) {
        let (part, rest) = layout.part(offset).unwrap();
        let expected = match part {
            Part::Head { at } => heads[at as usize],
            Part::TensorHead { at, .. } => tensor_head[at as usize],
            Part::Rows { layer, is_v, at } => {
                let tensor = layer as usize + 2 * usize::from(is_v);
                (tensor * 50) as u8 + at as u8
            }
        };
        assert_eq!(*byte, expected, "{offset}: {part:?}");
        assert!(rest > 0 && layout.part(offset + rest).is_none_or(|(next, _)| next != part));
    }
    assert_eq!(layout.part(file.len() as u64), None);
}

#[test]
fn every_cut_is_refused() {
    for file in Version::ALL.map(file) {
        for length in 0..file.len() {
            assert!(open(&file[..length]).is_err(), "{length} of {} bytes", file.len());
        }
        assert!(open(&[file, vec![0]].concat()).is_err());
    }
}

#[test]
fn numbers_out_of_range_are_refused() {
    // Magic, version, tokens, then streams, cells, the first cell's position and sequences, V
    // transposed, layers.
    for (offset, line) in [
        (0, "is no slot file"),
        (4, "is no slot file"),
        (8, "tokens, and is too short"),
        (28, "streams"),
        (32, "cells, and is too short"),
        (36, "cell 0 is at position"),
        (40, "cell 0 is at position"),
        (72, "V transposed"),
        (76, "layers"),
    ] {
        let mut file = file(Version::Three);
        file[offset..offset + 4].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
        let error = open(&file).unwrap_err();
        assert!(error.contains(line), "{offset}: {error}");
    }
    // Bytes of a row.
    let mut file = file(Version::Three);
    file[84..92].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(open(&file).unwrap_err().contains("ends at byte"));
}

#[test]
fn another_shape_is_refused() {
    let slot = open(&file(Version::Three)).unwrap();
    let fields = || ManifestFields::new("m", Dtype::F16, 2, 2, 4);
    let check = |fields: ManifestFields, line: &str| {
        let error = slot.check(Manifest::new(fields).unwrap().geometry()).unwrap_err();
        assert!(error.contains(line), "{error}");
    };
    check(ManifestFields { num_layers: 3, ..fields() }, "has 2 layers, the manifest 3");
    check(ManifestFields { head_dim: 8, ..fields() }, "16 bytes of K and 16 of V");
    check(ManifestFields { dtype: Dtype::Bf16, ..fields() }, "has K of ggml type 1");
    check(ManifestFields { v_head_dim: Some(0), ..fields() }, "has V");
    let q8_0 = ManifestFields { dtype: Dtype::Q8_0, head_dim: 32, ..fields() };
    check(q8_0, "cannot be pages of q8_0");
}
