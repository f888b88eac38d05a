//! What holds for every header that is built, damaged or made up.

use super::tests::{K, P, V, geometry, parse};
use super::*;
use crate::{Dtype, GeometrySpec};
use proptest::prelude::*;

#[test]
fn build_is_read_back_and_by_safetensors() {
    fn check(geometry: &Geometry, tokens: u32, metadata: &Metadata) {
        let mut file = build_header(geometry, tokens, metadata).unwrap();
        assert_eq!(file, build_header(geometry, tokens, metadata).unwrap());
        file.resize(index(geometry.file_bytes(tokens)), 0);
        let header = PageHeader::parse(&file, file.len() as u64, geometry).unwrap();
        assert_eq!((header.tokens, &header.metadata), (tokens, metadata));

        let oracle = safetensors::SafeTensors::deserialize(&file).unwrap();
        let k = oracle.tensor("k").unwrap();
        let shape: Vec<u64> = k.shape().iter().map(|n| *n as u64).collect();
        assert_eq!(shape, geometry.k_shape(tokens));
        assert_eq!(k.dtype().to_string(), geometry.dtype().safetensors_name());
        assert_eq!(k.data().len() as u64, geometry.k_bytes(tokens));
        let v_bytes = oracle.tensor("v").map_or(0, |v| v.data().len() as u64);
        assert_eq!(v_bytes, geometry.v_bytes(tokens));
        let (_, oracle) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        let read = oracle.metadata().clone().unwrap_or_default();
        assert_eq!(read.into_iter().collect::<Metadata>(), *metadata);
    }
    let awkward = Metadata::from([
        ("kvfs.layer".to_owned(), "3".to_owned()),
        ("quote\"\\".to_owned(), "line\n\u{1}é𝄞".to_owned()),
    ]);
    for layout in [Layout::Hnd, Layout::Nhd] {
        for (dtype, v_head_dim) in Dtype::ALL.into_iter().flat_map(|d| [(d, 32), (d, 0)]) {
            let spec = GeometrySpec {
                dtype,
                layout,
                num_layers: 1,
                num_kv_heads: 2,
                head_dim: 64,
                v_head_dim,
                page_tokens: 64,
            };
            let geometry = Geometry::new(spec).unwrap();
            for tokens in [1, 7, 64] {
                check(&geometry, tokens, &Metadata::new());
                check(&geometry, tokens, &awkward);
            }
        }
    }
}

#[test]
fn build_refuses() {
    let geometry = geometry(Layout::Hnd, 32);
    let text = |value: Result<Vec<u8>, PageError>| value.unwrap_err().to_string();
    assert_eq!(
        text(build_header(&geometry, 17, &Metadata::new())),
        "page has 17 tokens, the manifest allows 1 to 16 (layout hnd)"
    );
    let long = Metadata::from([("a".to_owned(), "b".repeat(4088))]);
    assert_eq!(
        text(build_header(&geometry, 4, &long)),
        "header would be 4302 bytes, the limit is 4088: shorten the metadata"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A changed header is refused, or it still describes the same tensors.
    #[test]
    fn flipped_bytes(flips in proptest::collection::vec((0..400usize, 1..=255u8), 1..4)) {
        let geometry = geometry(Layout::Hnd, 32);
        let metadata = Metadata::from([("kvfs.layer".to_owned(), "3".to_owned())]);
        let mut header = build_header(&geometry, 4, &metadata).unwrap();
        for (at, mask) in flips {
            header[at] ^= mask;
        }
        if let Ok(found) = PageHeader::parse(&header, 8192, &geometry) {
            prop_assert_eq!(found.tokens, 4);
            let mut file = header;
            file.resize(8192, 0);
            let oracle = safetensors::SafeTensors::deserialize(&file);
            prop_assert!(oracle.is_ok(), "accepted what safetensors refuses");
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..5000),
                                file_bytes in any::<u64>()) {
        prop_assert!(PageHeader::parse(&bytes, file_bytes, &geometry(Layout::Nhd, 32)).is_err());
    }

    /// Random text out of the words of a header reaches deeper than random bytes.
    #[test]
    fn random_words_never_panic(words in proptest::collection::vec(proptest::sample::select(vec![
        "{", "}", "[", "]", ",", ":", "\"k\"", "\"v\"", "\"_pad\"", "\"__metadata__\"", "\"dtype\"",
        "\"shape\"", "\"data_offsets\"", "\"F16\"", "\"U8\"", "0", "4", "1024", "-1", "1e9",
        "18446744073709551615", "null", K, V, P,
    ]), 0..40)) {
        let json = format!("{{{}}}", words.concat());
        if let Ok(found) = parse(&json) {
            prop_assert_eq!(found.tokens, 4);
        }
    }
}
