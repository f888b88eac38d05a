use std::os::unix::fs::FileExt;

use super::*;
use crate::page::{Manifest, ManifestFields};

const TOKENS: [u32; 4] = [7, 8, 9, 10];

/// Two layers of two heads of 4 in f16: 16 bytes of K and of V for each of three tokens.
fn geometry() -> Geometry {
    *Manifest::new(ManifestFields::new("m", Dtype::F16, 2, 2, 4)).unwrap().geometry()
}

fn file() -> Vec<u8> {
    let mut file = Vec::new();
    write_head(&mut file, &geometry(), &TOKENS, 3).unwrap();
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
    let slot = open(&file()).unwrap();
    assert_eq!((slot.tokens(), slot.cells()), (&TOKENS[..], 3));
    slot.check(&geometry()).unwrap();
    // Layer 1, tokens 1 and 2: its K is the second tensor, its V the fourth.
    let expected: Vec<u8> = [66..82, 166..182, 82..98, 182..198].into_iter().flatten().collect();
    assert_eq!(slot.rows(1, 1, 2).unwrap(), expected);
}

#[test]
fn every_byte_has_a_part() {
    let (file, layout) = (file(), Layout::new(&geometry(), 4, 3).unwrap());
    assert_eq!(layout.length(), file.len() as u64);
    let mut heads = Vec::new();
    write_head(&mut heads, &geometry(), &TOKENS, 3).unwrap();
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
    let file = file();
    for length in 0..file.len() {
        assert!(open(&file[..length]).is_err(), "{length} of {} bytes", file.len());
    }
    assert!(open(&[file, vec![0]].concat()).is_err());
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
        let mut file = file();
        file[offset..offset + 4].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
        let error = open(&file).unwrap_err();
        assert!(error.contains(line), "{offset}: {error}");
    }
    // Bytes of a row.
    let mut file = file();
    file[84..92].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(open(&file).unwrap_err().contains("ends at byte"));
}

#[test]
fn another_shape_is_refused() {
    let slot = open(&file()).unwrap();
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
