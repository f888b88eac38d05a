//! Pages and tails that the project's own code made.

use std::ffi::c_void;
use std::ptr;

use super::super::{
    Block, Geometry, Manifest, Status, Tensor, Values, kvfs_manifest_create, kvfs_manifest_free,
    kvfs_manifest_geometry, kvfs_page_block, kvfs_page_verify, kvfs_tail_block,
};
use super::{empty_block, last_error};
use crate::page::{
    self, Dtype, Layout, ManifestFields, PagePlace, PageView, TokenStart, pack_page,
};

/// The handle, freed at the end.
pub(super) struct Handle(pub(super) *mut Manifest);

impl Handle {
    pub(super) fn new(manifest: &page::Manifest) -> Self {
        let (json, mut handle) = (manifest.to_json(), ptr::null_mut());
        // SAFETY: both are alive.
        let status =
            unsafe { kvfs_manifest_create(json.as_ptr().cast(), json.len(), &raw mut handle) };
        assert_eq!(status, Status::Ok, "{}", last_error());
        Self(handle)
    }

    pub(super) fn block(&self, layer: u32, start: u64, file: &[u8]) -> (Status, Block) {
        let (data, mut block) = (file.as_ptr().cast::<c_void>(), empty_block());
        let out = &raw mut block;
        // SAFETY: everything is alive and as long as it says.
        let status = unsafe { kvfs_page_block(self.0, layer, start, data, file.len(), out) };
        (status, block)
    }

    fn verify(&self, layer: u32, start: u64, file: &[u8]) -> Status {
        // SAFETY: everything is alive and as long as it says.
        unsafe { kvfs_page_verify(self.0, layer, start, file.as_ptr().cast(), file.len()) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: freed once.
        unsafe { kvfs_manifest_free(self.0) };
    }
}

fn manifest(layout: Layout, v_head_dim: u32) -> page::Manifest {
    let mut fields = ManifestFields::new("tiny", Dtype::Q8_0, 2, 2, 64);
    (fields.layout, fields.v_head_dim, fields.page_tokens) = (layout, Some(v_head_dim), 16);
    page::Manifest::new(fields).unwrap()
}

#[test]
fn the_tensors_of_a_page() {
    for (layout, v_head_dim) in [(Layout::Hnd, 32), (Layout::Nhd, 64), (Layout::Hnd, 0)] {
        let manifest = manifest(layout, v_head_dim);
        let place = PagePlace::new(&manifest, page::Layer(1), TokenStart(32)).unwrap();
        let row = usize::try_from(manifest.geometry().row_bytes()).unwrap();
        let file = pack_page(&place, &vec![7; 5 * row], 5).unwrap();
        let (status, block) = Handle::new(&manifest).block(1, 32, &file);
        assert_eq!(status, Status::Ok, "{}", last_error());
        let view = PageView::parse(&file, manifest.geometry()).unwrap();
        let tensor = |tensor: Tensor| {
            (tensor.data.cast::<u8>(), tensor.bytes, tensor.head_stride, tensor.token_stride)
        };
        let (k, v) = (view.k_strides(), view.v_strides());
        assert_eq!(tensor(block.k), (view.k().as_ptr(), view.k().len(), k.head, k.token));
        if v_head_dim > 0 {
            assert_eq!(tensor(block.v), (view.v().as_ptr(), view.v().len(), v.head, v.token));
        }
        let values = if v_head_dim > 0 { Values::Rows } else { Values::Latent };
        assert_eq!((block.dtype, block.values), (5, values as u32));
        assert_eq!((block.tokens, block.first_position, block.shift), (5, 32, 0));
    }
}

#[test]
fn pages_for_elsewhere_and_damaged_ones() {
    let manifest = manifest(Layout::Hnd, 64);
    let place = PagePlace::new(&manifest, page::Layer(1), TokenStart(32)).unwrap();
    let row = usize::try_from(manifest.geometry().row_bytes()).unwrap();
    let mut file = pack_page(&place, &vec![7; 16 * row], 16).unwrap();
    let handle = Handle::new(&manifest);
    assert_eq!(handle.verify(1, 32, &file), Status::Ok, "{}", last_error());
    let (status, _) = handle.block(0, 32, &file);
    assert_eq!(status, Status::Page);
    assert!(last_error().contains("belongs elsewhere"), "{}", last_error());
    let (status, _) = handle.block(1, 32, &file[..file.len() - 1]);
    assert_eq!(status, Status::Page);
    *file.last_mut().unwrap() ^= 1;
    assert_eq!(handle.verify(1, 32, &file), Status::Page);
    assert!(last_error().contains("kvfs.checksum"), "{}", last_error());
}

#[test]
fn a_tail_and_its_geometry() {
    let manifest = manifest(Layout::Hnd, 32);
    let handle = Handle::new(&manifest);
    let mut geometry = Geometry {
        size: size_of::<Geometry>(),
        dtype: 0,
        layout: 9,
        num_layers: 0,
        num_kv_heads: 0,
        head_dim: 0,
        v_head_dim: 0,
        page_tokens: 0,
        has_rope: 9,
        page_file_bytes: 0,
        tail_row_bytes: 0,
    };
    // SAFETY: both are alive.
    let status = unsafe { kvfs_manifest_geometry(handle.0, &raw mut geometry) };
    assert_eq!(status, Status::Ok);
    assert_eq!((geometry.dtype, geometry.layout, geometry.num_layers), (5, 0, 2));
    assert_eq!((geometry.num_kv_heads, geometry.head_dim, geometry.v_head_dim), (2, 64, 32));
    assert_eq!((geometry.page_tokens, geometry.has_rope), (16, 0));
    // Two heads: K of 2 blocks, V of one, 34 bytes each.
    assert_eq!((geometry.tail_row_bytes, geometry.page_file_bytes), (204, 8192));

    let (rows, mut block) = (vec![7_u8; 3 * 204 + 203], empty_block());
    let (data, out) = (rows.as_ptr().cast::<c_void>(), &raw mut block);
    // SAFETY: everything is alive and as long as it says.
    let status = unsafe { kvfs_tail_block(handle.0, 48, data, rows.len(), out) };
    assert_eq!(status, Status::Ok);
    assert_eq!((block.tokens, block.first_position), (3, 48));
    assert_eq!((block.k.head_stride, block.k.token_stride), (68, 204));
    assert_eq!((block.v.data.addr() - block.k.data.addr(), block.v.head_stride), (136, 34));
}
