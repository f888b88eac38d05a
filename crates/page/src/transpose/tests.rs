//! Rows survive the way into a page and back, and lie where the shapes say.

use super::*;
use crate::{Dtype, GeometrySpec, Layer, Manifest, ManifestFields, PageHeader, TokenStart};

fn geometry(dtype: Dtype, layout: Layout, v_head_dim: u32) -> Geometry {
    Geometry::new(GeometrySpec {
        dtype,
        layout,
        num_layers: 1,
        num_kv_heads: 3,
        head_dim: 64,
        v_head_dim,
        page_tokens: 700,
    })
    .unwrap()
}

/// Bytes in which equal pieces are unlikely.
fn rows(geometry: &Geometry, tokens: u32) -> Vec<u8> {
    let bytes = u64::from(tokens) * geometry.row_bytes();
    (0..bytes).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]).collect()
}

#[test]
fn rows_come_back_and_lie_where_they_belong() {
    fn check(geometry: &Geometry, tokens: u32) {
        let rows = rows(geometry, tokens);
        let file = pack_rows(geometry, &rows, tokens, &Metadata::new()).unwrap();
        let view = PageView::parse(&file, geometry).unwrap();
        assert_eq!(unpack_rows(&view), rows);
        let heads = geometry.num_kv_heads();
        for (token, row) in (0..tokens).zip(rows.chunks(index(geometry.row_bytes()))) {
            let k = (0..heads).flat_map(|head| view.k_row(head, token));
            let v = (0..heads).flat_map(|head| view.v_row(head, token));
            let side_row = index(geometry.side_row_bytes());
            let side = &view.side()[token as usize * side_row..][..side_row];
            assert!(k.chain(v).chain(side).eq(row), "token {token}");
        }
        let oracle = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(oracle.tensor("k").unwrap().data(), view.k());
        if geometry.v_head_dim() > 0 {
            assert_eq!(oracle.tensor("v").unwrap().data(), view.v());
        }
        if geometry.side_row_bytes() > 0 {
            assert_eq!(oracle.tensor("side").unwrap().data(), view.side());
            assert_eq!(oracle.tensor("side").unwrap().shape()[0], tokens as usize);
        }
    }
    for dtype in Dtype::ALL {
        for layout in [Layout::Hnd, Layout::Nhd] {
            for v_head_dim in [64, 32, 0] {
                // One token, a short page, and a full one of more than one block.
                for tokens in [1, 5, 700] {
                    let geometry = geometry(dtype, layout, v_head_dim);
                    check(&geometry, tokens);
                    check(&geometry.with_side_rows(13).unwrap(), tokens);
                }
            }
        }
    }
}

#[test]
fn a_page_without_side_rows_is_byte_for_byte_what_it_was() {
    let geometry = geometry(Dtype::F16, Layout::Hnd, 32);
    let file = pack_rows(&geometry, &rows(&geometry, 9), 9, &Metadata::new()).unwrap();
    // Of the version before there were side rows.
    assert_eq!(crate::content_checksum(&file).to_string(), "ab123c84108701f723b071fca9b6da5c");
}

#[test]
fn refused() {
    fn check(rows: usize, tokens: u32, expected: &str) {
        let geometry = geometry(Dtype::F16, Layout::Hnd, 64);
        let error = pack_rows(&geometry, &vec![0; rows], tokens, &Metadata::new());
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
    check(767, 1, "1 tokens are 768 bytes of rows, 767 were given");
    check(0, 1, "1 tokens are 768 bytes of rows, 0 were given");
    check(0, 0, "page has 0 tokens, the manifest allows 1 to 700 (layout hnd)");
}

#[test]
fn a_packed_page_says_where_it_belongs() {
    let fields = ManifestFields::new("m", Dtype::F16, 4, 3, 64);
    let manifest = Manifest::new(fields).unwrap();
    let place = PagePlace::new(&manifest, Layer(2), TokenStart(2048)).unwrap();
    let file = pack_page(&place, &rows(manifest.geometry(), 9), 9).unwrap();
    let header = PageHeader::parse(&file, file.len() as u64, manifest.geometry()).unwrap();
    let declared = &header.declared;
    assert_eq!(declared.model, Some(manifest.identity()));
    assert_eq!(declared.layer, Some(Layer(2)));
    assert_eq!(declared.start, Some(TokenStart(2048)));
    assert!(declared.checksum.is_some());
}
