#![allow(
    clippy::cast_possible_truncation,
    reason = "offsets of small files, and bytes that count up"
)]

use std::os::unix::fs::FileExt;

use super::read::PROMPT;
use super::*;
use kvfs_page::{Dtype, ManifestFields};

mod kinds;

const TOKENS: [u32; 4] = [7, 8, 9, 10];

/// Two layers of two heads of 4 in f16: 16 bytes of K and of V for each of three tokens.
fn manifest() -> Manifest {
    Manifest::new(ManifestFields::new("m", Dtype::F16, 2, 2, 4)).unwrap()
}

fn format() -> Format {
    Format::new(&manifest()).unwrap()
}

fn head(version: Version) -> Head<'static> {
    Head { version, tokens: &TOKENS, cells: 3, is_transposed: false, session: None }
}

fn file_of(head: Head<'_>) -> Vec<u8> {
    let mut file = Vec::new();
    head.write(&mut file, &format()).unwrap();
    for tensor in 0..4 {
        if head.is_transposed && tensor > 1 {
            write_transposed_head(&mut file, &format(), 2).unwrap();
        } else {
            write_tensor_head(&mut file, &format(), tensor > 1).unwrap();
        }
        file.extend((0..48).map(|byte| tensor * 50 + byte));
    }
    file
}

fn file(version: Version) -> Vec<u8> {
    file_of(head(version))
}

fn open(bytes: &[u8]) -> Result<Slot, String> {
    open_for(&manifest(), bytes)
}

pub(super) fn open_for(manifest: &Manifest, bytes: &[u8]) -> Result<Slot, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all_at(bytes, 0).unwrap();
    Slot::open(file.path(), manifest)
}

#[test]
fn what_was_written_is_read() {
    for version in Version::ALL {
        let slot = open(&file(version)).unwrap();
        assert_eq!((slot.token_ids(), slot.num_tokens()), (&TOKENS[..], 3));
        slot.check(&manifest()).unwrap();
        // Layer 1, tokens 1 and 2: its K is the second tensor, its V the fourth.
        let expected = [66..82, 166..182, 82..98, 182..198].into_iter().flatten();
        assert_eq!(slot.read_rows(Layer(1), 1, 2).unwrap(), expected.collect::<Vec<u8>>());
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
    assert_eq!(slot.token_ids(), [7, 8, 9]);
    assert_eq!(open(&with_words(&[PROMPT, 1, 0, 0])).unwrap().token_ids(), [0_u32; 0]);
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
            (Ok(slot), Ok(cells)) => {
                assert_eq!(slot.num_tokens(), cells);
                assert_eq!(slot.streams() as usize, 1 + before.len() + behind.len());
            }
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
    assert_eq!(open(&empty).unwrap().num_tokens(), 0);
}

/// Where sequences share a cache, one takes the cells that others left.
#[test]
fn cells_in_another_order_are_read_in_that_of_positions() {
    let check = |file: &[u8], positions: [u32; 3], expected: Result<(), &str>| {
        let in_order = open(file).unwrap();
        let mut file = file.to_vec();
        for (cell, position) in positions.iter().enumerate() {
            file[36 + 12 * cell..][..4].copy_from_slice(&position.to_le_bytes());
        }
        let slot = match (open(&file), expected) {
            (Ok(slot), Ok(())) => slot,
            (Err(error), Err(line)) => return assert!(error.contains(line), "{error}"),
            (found, _) => panic!("{positions:?}: {found:?}"),
        };
        slot.check(&manifest()).unwrap();
        for layer in [0, 1].map(Layer) {
            let mut all = Vec::new();
            for position in 0..3 {
                let cell = positions.iter().position(|at| *at == position).unwrap() as u32;
                let row = slot.read_rows(layer, position, 1).unwrap();
                assert_eq!(row, in_order.read_rows(layer, cell, 1).unwrap(), "{positions:?}");
                all.extend(row);
            }
            assert_eq!(slot.read_rows(layer, 0, 3).unwrap(), all);
        }
    };
    let transposed = file_of(Head { is_transposed: true, ..head(Version::Three) });
    for file in [file(Version::Three), transposed] {
        for positions in [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2, 1], [2, 1, 0]] {
            check(&file, positions, Ok(()));
        }
        check(&file, [1, 2, 1], Err("cell 2 is at position 1"));
        check(&file, [0, 1, 3], Err("cell 2 is at position 3"));
        check(&file, [0, u32::MAX, 1], Err("cell 1 is at position -1"));
    }
}

/// V is `[elements, cells]`: eight elements of three tokens, in two bytes each.
#[test]
fn v_that_is_transposed_is_turned() {
    let slot = open(&file_of(Head { is_transposed: true, ..head(Version::Three) })).unwrap();
    slot.check(&manifest()).unwrap();
    let v = |token: u8| {
        (0..8_u8).flat_map(move |element| [0, 1].map(|b| 150 + 6 * element + 2 * token + b))
    };
    let expected = (66..82).chain(v(1)).chain(82..98).chain(v(2));
    assert_eq!(slot.read_rows(Layer(1), 1, 2).unwrap(), expected.collect::<Vec<u8>>());
    // As many bytes, in other elements.
    let mut file = file_of(Head { is_transposed: true, ..head(Version::Three) });
    let at = file.len() - 60;
    assert_eq!(file[at + 4..][..8], [2, 0, 0, 0, 8, 0, 0, 0]);
    file[at + 4..][..8].copy_from_slice(&[4, 0, 0, 0, 4, 0, 0, 0]);
    let error = open(&file).unwrap().check(&manifest()).unwrap_err();
    assert!(error.contains("layer 1 has V transposed, in elements of 4 bytes"), "{error}");
}

#[test]
fn a_session_of_one_sequence_is_a_slot() {
    let session = file_of(Head { session: Some("llama"), ..head(Version::Three) });
    let slot = open(&session).unwrap();
    assert_eq!((slot.token_ids(), slot.num_tokens()), (&TOKENS[..], 3));
    assert_eq!(
        slot.read_rows(Layer(0), 0, 1).unwrap(),
        open(&file(Version::Three)).unwrap().read_rows(Layer(0), 0, 1).unwrap()
    );
    for length in 0..session.len() {
        assert!(open(&session[..length]).is_err(), "{length} of {} bytes", session.len());
    }
    // The second cell belongs to another sequence.
    let mut session = session;
    let at = 12 + 16 + 9 + 8 + 12 + 8;
    assert_eq!(session[at..][..4], 0_u32.to_le_bytes());
    session[at] = 1;
    assert!(open(&session).unwrap_err().contains("cells of several sequences"));
}

#[test]
fn rows_that_are_rotated_otherwise_are_refused() {
    let mut file = file(Version::Four);
    file[84..88].copy_from_slice(&64_u32.to_le_bytes());
    let error = open(&file).unwrap().check(&manifest()).unwrap_err();
    assert!(error.contains("0 elements of K and 64 of V rotated together"), "{error}");
}

#[test]
fn every_byte_has_a_part() {
    Version::ALL.into_iter().for_each(every_byte_of_a_version_has_a_part);
}

fn every_byte_of_a_version_has_a_part(version: Version) {
    let file = file(version);
    let layout = Layout::new(&format(), version, 4, 3);
    assert_eq!(layout.length(), file.len() as u64);
    let mut heads = Vec::new();
    head(version).write(&mut heads, &format()).unwrap();
    let mut tensor_head = Vec::new();
    write_tensor_head(&mut tensor_head, &format(), false).unwrap();
    for (offset, byte) in (0_u64..).zip(&file) {
        let (part, rest) = layout.part(offset).unwrap();
        let expected = match part {
            Part::Head { number: 0, at } => heads[at as usize],
            Part::TensorHead { at, .. } => tensor_head[at as usize],
            Part::Rows { layer, is_v, first: 0, at } => {
                let tensor = layer.0 as usize + 2 * usize::from(is_v);
                (tensor * 50) as u8 + at as u8
            }
            other => panic!("{other:?}"),
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
        (72, "V in another order"),
        (76, "layers, the manifest 2"),
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
    let file = file(Version::Three);
    let fields = || ManifestFields::new("m", Dtype::F16, 2, 2, 4);
    let check = |fields: ManifestFields, line: &str| {
        let manifest = Manifest::new(fields).unwrap();
        let slot = open_for(&manifest, &file);
        let error = slot.and_then(|slot| slot.check(&manifest)).unwrap_err();
        assert!(error.contains(line), "{error}");
    };
    check(ManifestFields { num_layers: 3, ..fields() }, "has 2 layers, the manifest 3");
    check(
        ManifestFields { head_dim: 8, ..fields() },
        "layer 0 has K of 16 bytes for each token, the manifest of 32",
    );
    check(
        ManifestFields { dtype: Dtype::Bf16, ..fields() },
        "layer 0 has K of ggml type 1, the manifest's dtype is 30",
    );
    check(ManifestFields { v_head_dim: Some(0), ..fields() }, "has V");
    let q8_0 = ManifestFields { dtype: Dtype::Q8_0, head_dim: 32, ..fields() };
    check(q8_0, "does not say whether its quantised rows are rotated");
    let f8 = ManifestFields { dtype: Dtype::F8E4m3, ..fields() };
    check(f8, "cannot be pages of f8_e4m3");
}
