use std::collections::BTreeMap;
use std::io::Write;

use safetensors::tensor::{Dtype as TensorDtype, View, serialize};

use super::*;
use crate::Rows;
use kvfs_page::{Dtype, Layer, Manifest, ManifestFields};

/// A tensor whose bytes are counted, so that each of them tells where it comes from.
#[derive(Clone)]
struct Sample {
    dtype: TensorDtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Sample {
    fn dtype(&self) -> TensorDtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        (&self.bytes).into()
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

type Samples = BTreeMap<&'static str, Sample>;

/// Element `[batch, head, token, dim]` is `base + 1000 * batch + 100 * head + 10 * token + dim`.
fn values(base: u16, [batch, heads, tokens, dims]: [u16; 4]) -> Sample {
    let mut bytes = Vec::new();
    for batch in 0..batch {
        for head in 0..heads {
            for token in 0..tokens {
                for dim in 0..dims {
                    let value = base + 1000 * batch + 100 * head + 10 * token + dim;
                    bytes.extend_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
    let shape = [batch, heads, tokens, dims].map(usize::from).to_vec();
    Sample { dtype: TensorDtype::F16, shape, bytes }
}

fn integers(shape: &[usize], numbers: &[i64]) -> Sample {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Sample { dtype: TensorDtype::I64, shape: shape.to_vec(), bytes }
}

/// Two layers of two heads of 4, V of 2, for three tokens of two sequences; the first one is padded.
fn samples() -> Samples {
    BTreeMap::from([
        ("layers.0.keys", values(0, [2, 2, 3, 4])),
        ("layers.0.values", values(10_000, [2, 2, 3, 2])),
        ("layers.1.keys", values(20_000, [2, 2, 3, 4])),
        ("layers.1.values", values(30_000, [2, 2, 3, 2])),
        ("input_ids", integers(&[2, 4], &[0, 11, 12, 13, 20, 21, 22, 23])),
        ("attention_mask", integers(&[2, 4], &[0, 1, 1, 1, 1, 1, 1, 1])),
    ])
}

fn file_of(samples: &Samples) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&serialize(samples, None).unwrap()).unwrap();
    file
}

fn open(samples: &Samples, row: Option<usize>) -> Result<Tensors, String> {
    Tensors::of(file_of(samples), Selection { batch_row: row, ..Selection::default() })
}

fn manifest() -> Manifest {
    let mut fields = ManifestFields::new("m", Dtype::F16, 2, 2, 4);
    fields.v_head_dim = Some(2);
    Manifest::new(fields).unwrap()
}

fn bytes(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_layer_with_side_rows_has_no_such_file() {
    let mut fields = manifest().fields().clone();
    let side = kvfs_page::SideRows { name: "index_k".to_owned(), row_bytes: 4 };
    fields.layers =
        Some(vec![kvfs_page::LayerKind::Attention, kvfs_page::LayerKind::WithSide(side)]);
    let why = open(&samples(), Some(1)).unwrap().check(&Manifest::new(fields).unwrap());
    assert_eq!(why.unwrap_err(), "has K and V alone, and layer 1 keeps index_k beside them");
}

#[test]
fn rows_are_those_of_the_sequence_that_was_selected() {
    let second = open(&samples(), Some(1)).unwrap();
    second.check(&manifest()).unwrap();
    assert_eq!((second.token_ids(), second.num_tokens()), (&[20, 21, 22, 23][..], 3));
    // Token 2 of layer 1: K of both heads, then V of both.
    let k = [21_020, 21_021, 21_022, 21_023, 21_120, 21_121, 21_122, 21_123];
    let v = [31_020, 31_021, 31_120, 31_121];
    let expected = bytes(&[&k[..], &v].concat());
    assert_eq!(second.read_rows(Layer(1), 2, 1).unwrap(), expected);
}

#[test]
fn padding_is_left_out() {
    let first = open(&samples(), Some(0)).unwrap();
    assert_eq!((first.token_ids(), first.num_tokens()), (&[11, 12, 13][..], 2));
    let k = [10, 11, 12, 13, 110, 111, 112, 113];
    let expected = bytes(&[&k[..], &[10_010, 10_011, 10_110, 10_111]].concat());
    assert_eq!(first.read_rows(Layer(0), 0, 1).unwrap(), expected);
}

#[test]
fn what_does_not_fit_is_refused() {
    fn check(name: &'static str, sample: Option<Sample>, row: Option<usize>, expected: &str) {
        let mut samples = samples();
        samples.remove(name);
        samples.extend(sample.map(|sample| (name, sample)));
        let outcome = open(&samples, row).and_then(|found| found.check(&manifest()));
        let line = outcome.expect_err(expected);
        assert!(line.contains(expected), "{line}");
    }
    let mask = |numbers: [i64; 8]| Some(integers(&[2, 4], &numbers));
    check("", None, None, "has 2 sequences: say which one with --row");
    check("", None, Some(2), "has 2 sequences, counted from 0: no --row 2");
    check("layers.1.keys", None, Some(0), "has no K of layer 1");
    check("layers.1.values", None, Some(0), "has no V of layer 1");
    check("input_ids", None, Some(0), "name a file with --tokens");
    check("input_ids", Some(integers(&[2, 1], &[1, 2])), Some(1), "ids of 1: if the rest is room");
    check("input_ids", Some(integers(&[4], &[1, 2, 3, 4])), Some(1), "not [2, tokens]");
    check("input_ids", Some(integers(&[2, 3], &[1, -1, 3, -4, 5, 6])), Some(1), "that are no ids");
    check("attention_mask", mask([0, 1, 1, 1, 1, 0, 1, 1]), Some(1), "more than the beginning");
    check("attention_mask", mask([0; 8]), Some(1), "more than the beginning");
    check("layers.1.keys", Some(values(0, [2, 2, 2, 4])), Some(0), "another batch or number");
    check("layers.1.keys", Some(values(0, [2, 4, 3, 4])), Some(0), "layer 1 has K of 4 heads");
    check(
        "layers.1.values",
        Some(values(0, [2, 2, 3, 4])),
        Some(0),
        "layer 1 has V of 2 heads with 4",
    );
    check("key_cache.1", Some(values(0, [2, 2, 3, 4])), Some(0), "two tensors for K of layer 1");
    check("layers.9.keys", Some(values(0, [2, 2, 3, 4])), Some(0), "has no K of layer 2");
    check("0.2", Some(integers(&[2], &[2, 2])), Some(0), "has 0.2, which is no length");
    check("0.2", Some(integers(&[], &[-2])), Some(0), "has -2 tokens");
    let flat = Sample { shape: vec![12, 4], ..values(0, [2, 2, 3, 4]) };
    check("layers.0.keys", Some(flat), Some(0), "has layers.0.keys of 2 dimensions, not 4");
    let bf16 = Sample { dtype: TensorDtype::BF16, ..values(0, [2, 2, 3, 4]) };
    check("layers.0.keys", Some(bf16), Some(0), "layer 0 has K of BF16, the manifest says f16");
}

#[test]
fn room_for_more_tokens_is_left_out() {
    let mut samples = samples();
    samples.remove("attention_mask");
    samples.insert("input_ids", integers(&[2, 2], &[10, 11, 20, 21]));
    let line = open(&samples, Some(1)).unwrap_err();
    assert!(line.contains("say so with --num-tokens"), "{line}");
    let select = |num_tokens| {
        let selection = Selection { batch_row: Some(1), num_tokens, token_ids: None };
        Tensors::of(file_of(&samples), selection).map(|found| found.num_tokens())
    };
    assert_eq!(select(Some(1)), Ok(1));
    assert_eq!(select(Some(2)), Ok(2));
    assert!(select(Some(0)).unwrap_err().contains("has no tokens"));
    assert!(select(Some(4)).unwrap_err().contains("has room for 3 tokens"));
    // As MLX-LM tells.
    let with = |lengths: [i64; 2]| {
        let mut samples = samples.clone();
        samples.insert("0.2", integers(&[], &lengths[..1]));
        samples.insert("1.2", integers(&[], &lengths[1..]));
        open(&samples, Some(0)).map(|found| found.num_tokens())
    };
    assert_eq!(with([2, 2]), Ok(2));
    assert!(with([2, 1]).unwrap_err().contains("has another length in"));
}

#[test]
fn caches_that_are_rings_are_refused() {
    fn check(class: &str, is_known: bool) {
        let texts = [("1.0".to_owned(), class.to_owned())].into();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&serialize(&samples(), Some(texts)).unwrap()).unwrap();
        let selection = Selection { batch_row: Some(0), ..Selection::default() };
        assert_eq!(Tensors::of(file, selection).is_ok(), is_known, "{class}");
    }
    check("KVCache", true);
    check("RotatingKVCache", false);
    check("QuantizedKVCache", false);
}

#[test]
fn a_file_that_is_none_is_refused() {
    fn check(bytes: &[u8], expected: &str) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let line = Tensors::of(file, Selection::default()).expect_err(expected);
        assert!(line.contains(expected), "{line}");
    }
    let whole = serialize(&samples(), None).unwrap();
    check(b"", "is no safetensors file");
    check(b"GGUF\0\0\0\0\0\0\0\0", "is no safetensors file");
    check(&whole[..20], "is no safetensors file");
    check(&whole[..whole.len() - 1], "its header says");
    check(&[&whole[..], b"x"].concat(), "its header says");
    check(b"\x02\0\0\0\0\0\0\0{}", "has no tensors named like layers.0.keys");
    check(b"\x02\0\0\0\0\0\0\0{]", "has a header that is none");
}

/// Whatever a header says, the file is refused, or has all the rows that it tells of.
#[test]
fn damaged_headers_do_no_harm() {
    let whole = serialize(&samples(), None).unwrap();
    let payload = super::header::Header::read(&file_of(&samples())).unwrap().payload;
    let header_bytes = usize::try_from(payload).unwrap();
    let mut taken = 0;
    for at in 0..header_bytes {
        for byte in [0, b'0', b'1', b'9', b'"', b',', b']', b'k', 255] {
            let mut damaged = whole.clone();
            damaged[at] = byte;
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&damaged).unwrap();
            let selection = Selection { batch_row: Some(1), ..Selection::default() };
            let Ok(found) = Tensors::of(file, selection) else { continue };
            if found.check(&manifest()).is_ok() {
                for layer in [Layer(0), Layer(1)] {
                    found.read_rows(layer, 0, found.num_tokens()).unwrap();
                }
                taken += 1;
            }
        }
    }
    // A byte that is as it was, a space, a name of something else.
    assert!(taken > 50, "{taken}");
}
