//! Side rows of pages and tails, and the layers that keep none.

use std::ffi::c_void;

use super::super::{
    Block, Layer, LayerKind, Side, Status, kvfs_layer_tail_block, kvfs_manifest_layer,
    kvfs_page_side, kvfs_tail_block, kvfs_tail_side,
};
use super::pages::Handle;
use super::{empty_block, last_error};
use crate::page::{
    self, Dtype, ManifestFields, PagePlace, PageView, SideRows, TokenStart, pack_page,
};

/// Latent rows of 8 bytes, and in layer 0 three bytes beside each.
fn manifest() -> page::Manifest {
    let mut fields = ManifestFields::new("sparse", Dtype::F16, 2, 1, 4);
    (fields.v_head_dim, fields.page_tokens) = (Some(0), 16);
    let side = SideRows { name: "index_k".to_owned(), row_bytes: 3 };
    fields.layers = Some(vec![page::LayerKind::WithSide(side), page::LayerKind::Attention]);
    page::Manifest::new(fields).unwrap()
}

fn empty() -> Side {
    Side {
        size: size_of::<Side>(),
        tokens: 9,
        data: std::ptr::null(),
        bytes: 9,
        row_bytes: 9,
        stride: 9,
    }
}

fn rows(side: &Side) -> Vec<Vec<u8>> {
    // SAFETY: the library says that so many bytes may be read.
    let bytes = unsafe { std::slice::from_raw_parts(side.data.cast::<u8>(), side.bytes) };
    let row = |token| bytes[token * side.stride..][..side.row_bytes].to_vec();
    (0..usize::try_from(side.tokens).unwrap()).map(row).collect()
}

/// Each byte of a row is told by its number.
fn numbered(tokens: u8, row_bytes: u8) -> Vec<u8> {
    (0..tokens * row_bytes).collect()
}

fn page_side(handle: &Handle, layer: u32, file: &[u8]) -> (Status, Side) {
    let (data, mut side) = (file.as_ptr().cast::<c_void>(), empty());
    // SAFETY: everything is alive and as long as it says.
    let status = unsafe { kvfs_page_side(handle.0, layer, 0, data, file.len(), &raw mut side) };
    (status, side)
}

fn tail(handle: &Handle, layer: u32, rows: &[u8]) -> [(Status, u64); 2] {
    let (data, mut block, mut side) = (rows.as_ptr().cast::<c_void>(), empty_block(), empty());
    let out: *mut Block = &raw mut block;
    // SAFETY: everything is alive and as long as it says.
    let of_block = unsafe { kvfs_layer_tail_block(handle.0, layer, 0, data, rows.len(), out) };
    // SAFETY: as before.
    let of_side = unsafe { kvfs_tail_side(handle.0, layer, data, rows.len(), &raw mut side) };
    [(of_block, block.tokens), (of_side, side.tokens)]
}

#[test]
fn side_rows_of_a_page() {
    let (manifest, handle) = (manifest(), Handle::new(&manifest()));
    let place = PagePlace::new(&manifest, page::Layer(0), TokenStart(0)).unwrap();
    let file = pack_page(&place, &numbered(5, 11), 5).unwrap();
    let (status, side) = page_side(&handle, 0, &file);
    assert_eq!(status, Status::Ok, "{}", last_error());
    let view = PageView::parse(&file, place.geometry()).unwrap();
    assert_eq!((side.data.cast(), side.bytes), (view.side().as_ptr(), 15));
    assert_eq!((side.tokens, side.row_bytes, side.stride), (5, 3, 3));
    let expected: Vec<_> = numbered(5, 11).chunks(11).map(|row| row[8..].to_vec()).collect();
    assert_eq!(rows(&side), expected);

    // Of the layer that keeps none, and a page that lacks what its layer keeps.
    assert_eq!(page_side(&handle, 1, &file).0, Status::Argument);
    assert!(last_error().contains("layer 1 keeps no side rows"), "{}", last_error());
    let place = PagePlace::new(&manifest, page::Layer(1), TokenStart(0)).unwrap();
    let plain = pack_page(&place, &numbered(5, 8), 5).unwrap();
    assert_eq!(page_side(&handle, 0, &plain).0, Status::Page);
    assert!(last_error().contains("tensor side is missing"), "{}", last_error());
    assert_eq!(handle.block(0, 0, &plain).0, Status::Page);
}

#[test]
fn side_rows_of_a_tail() {
    let handle = Handle::new(&manifest());
    let whole = numbered(3, 11);
    let (data, mut side) = (whole.as_ptr().cast::<c_void>(), empty());
    // SAFETY: everything is alive and as long as it says.
    let status = unsafe { kvfs_tail_side(handle.0, 0, data, whole.len(), &raw mut side) };
    assert_eq!((status, side.stride), (Status::Ok, 11));
    assert_eq!(rows(&side), [[8, 9, 10], [19, 20, 21], [30, 31, 32]]);
    let ok = |tokens| (Status::Ok, tokens);
    assert_eq!(tail(&handle, 0, &whole), [ok(3), ok(3)]);
    // K alone of three tokens: nobody takes it for rows of two.
    assert_eq!(tail(&handle, 0, &whole[..24]), [ok(0), ok(0)]);
    assert_eq!(tail(&handle, 0, &[]), [ok(0), ok(0)]);
    assert_eq!(tail(&handle, 1, &whole[..25]), [ok(3), (Status::Argument, 9)]);
    assert_eq!(tail(&handle, 2, &whole)[0].0, Status::Argument);

    // Whoever does not say which layer cannot know where a row ends.
    let mut block = empty_block();
    // SAFETY: everything is alive and as long as it says.
    let status = unsafe { kvfs_tail_block(handle.0, 0, data, whole.len(), &raw mut block) };
    assert_eq!(status, Status::Argument);
    assert!(last_error().contains("kvfs_layer_tail_block"), "{}", last_error());
}

#[test]
fn layers_say_how_long_their_rows_are() {
    let handle = Handle::new(&manifest());
    let layer = |number| {
        let mut layer = Layer {
            size: size_of::<Layer>(),
            kind: 9,
            window: 9,
            page_file_bytes: 9,
            tail_row_bytes: 9,
            side_row_bytes: 9,
        };
        // SAFETY: both are alive.
        let status = unsafe { kvfs_manifest_layer(handle.0, number, &raw mut layer) };
        assert_eq!((status, layer.kind), (Status::Ok, LayerKind::Attention as u32));
        [layer.page_file_bytes, layer.tail_row_bytes, layer.side_row_bytes]
    };
    assert_eq!(layer(0), [8192, 11, 3]);
    assert_eq!(layer(1), [8192, 8, 0]);
}
