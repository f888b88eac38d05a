//! `manifest.json`: the shape of the pages of one cache.

use std::ffi::c_char;

use super::block::DataType;
use super::memory::{Caller, Structure};
use super::status::{Failure, Status, guard};
use crate::page;

/// A manifest without contradictions. It never changes, so any number of threads may use one.
#[derive(Debug)]
pub struct Manifest(page::Manifest);

/// Order of the dimensions of a page's tensors.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `[num_kv_heads, tokens, head_dim]`
    Hnd = 0,
    /// `[tokens, num_kv_heads, head_dim]`
    Nhd = 1,
}

/// What a layer keeps.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// K and V of every token.
    Attention = 0,
    /// The same, and only the last `window` tokens are looked at.
    Sliding = 1,
    /// State snapshots instead of pages.
    Recurrent = 2,
    /// K and V of an encoder's output, which do not grow with the tokens.
    Cross = 3,
}

/// The shape of a cache's pages.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    /// `sizeof(kvfs_geometry)`, set before the call.
    pub size: usize,
    /// One of `kvfs_dtype`.
    pub dtype: u32,
    /// One of `kvfs_layout`.
    pub layout: u32,
    /// Layers of the model.
    pub num_layers: u32,
    /// KV heads of one layer (of this shard).
    pub num_kv_heads: u32,
    /// Elements of a K row.
    pub head_dim: u32,
    /// Elements of a V row; 0 where pages have no V (latent attention): the attention's
    /// `v_head_dim` is then the model's.
    pub v_head_dim: u32,
    /// Tokens of a full page.
    pub page_tokens: u32,
    /// Whether there is a `rope` for `kvfs_rotation_from_manifest`: 0 or 1.
    pub has_rope: u32,
    /// Bytes of a full page's file; the most of any layer, where some keep side rows (`kvfs_layer`).
    pub page_file_bytes: u64,
    /// Bytes of a token in a tail; the most of any layer as well.
    pub tail_row_bytes: u64,
}

// SAFETY: numbers without gaps.
unsafe impl Structure for Geometry {
    const NAME: &'static str = "kvfs_geometry";
    const REQUIRED_BYTES: usize = size_of::<usize>();
}

/// A layer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// `sizeof(kvfs_layer)`, set before the call.
    pub size: usize,
    /// One of `kvfs_layer_kind`.
    pub kind: u32,
    /// For `kvfs_options.window`, in tokens; 0 where there is none.
    pub window: u32,
    /// Bytes of a full page's file; 0 where the layer keeps no pages.
    pub page_file_bytes: u64,
    /// Bytes of a token in a tail, side row included; 0 where the layer keeps no pages.
    pub tail_row_bytes: u64,
    /// Bytes of a token beside K and V, behind them in a tail; 0 where the layer keeps none.
    pub side_row_bytes: u64,
}

// SAFETY: numbers without gaps.
unsafe impl Structure for Layer {
    const NAME: &'static str = "kvfs_layer";
    const REQUIRED_BYTES: usize = size_of::<usize>();
}

impl Manifest {
    pub(super) fn inner(&self) -> &page::Manifest {
        &self.0
    }

    fn geometry(&self) -> Geometry {
        let geometry = self.0.largest_geometry();
        Geometry {
            size: size_of::<Geometry>(),
            dtype: DataType::number(geometry.dtype()),
            layout: match geometry.layout() {
                page::Layout::Hnd => Layout::Hnd as u32,
                page::Layout::Nhd => Layout::Nhd as u32,
            },
            num_layers: geometry.num_layers(),
            num_kv_heads: geometry.num_kv_heads(),
            head_dim: geometry.head_dim(),
            v_head_dim: geometry.v_head_dim(),
            page_tokens: geometry.page_tokens(),
            has_rope: u32::from(self.0.fields().rope.is_some()),
            page_file_bytes: geometry.file_bytes(geometry.page_tokens()),
            tail_row_bytes: geometry.row_bytes(),
        }
    }

    fn layer(&self, layer: u32) -> Result<Layer, Failure> {
        let kind = self.0.layer_kind(page::Layer(layer)).ok_or_else(|| {
            let layers = self.0.geometry().num_layers();
            Failure::argument(format!("layer {layer} of {layers}: they count from 0"))
        })?;
        let (kind, window) = match kind {
            page::LayerKind::Attention | page::LayerKind::WithSide(_) => (LayerKind::Attention, 0),
            page::LayerKind::Sliding { window } => (LayerKind::Sliding, window),
            page::LayerKind::Recurrent | page::LayerKind::State(_) => (LayerKind::Recurrent, 0),
            page::LayerKind::Cross => (LayerKind::Cross, 0),
        };
        let geometry = self.0.layer_geometry(page::Layer(layer));
        let of_pages = |bytes: u64| if kind == LayerKind::Recurrent { 0 } else { bytes };
        Ok(Layer {
            size: size_of::<Layer>(),
            kind: kind as u32,
            window,
            page_file_bytes: of_pages(geometry.file_bytes(geometry.page_tokens())),
            tail_row_bytes: of_pages(geometry.row_bytes()),
            side_row_bytes: geometry.side_row_bytes(),
        })
    }
}

/// Creates `*manifest` from the `json_bytes` bytes of a `manifest.json`, to be freed with
/// `kvfs_manifest_free`. The bytes are not needed afterwards.
///
/// `KVFS_STATUS_MANIFEST` or `KVFS_STATUS_NEWER` if they cannot be used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_manifest_create(
    json: *const c_char, json_bytes: usize, manifest: *mut *mut Manifest,
) -> Status {
    let call = |caller: &Caller| {
        caller.create(manifest, || {
            let json = caller.slice(json.cast::<u8>(), json_bytes, "json")?;
            Ok(Manifest(page::Manifest::parse(json)?))
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Frees a manifest that no call uses any more. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_manifest_free(manifest: *mut Manifest) {
    let call = |caller: &Caller| caller.take(manifest).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard(call) };
}

/// Fills `*geometry`, whose `size` the caller has set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_manifest_geometry(
    manifest: *const Manifest, geometry: *mut Geometry,
) -> Status {
    let call =
        |caller: &Caller| caller.write(caller.handle(manifest, "manifest")?.geometry(), geometry);
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Fills `*out`, whose `size` the caller has set, with what layer `layer`, from 0, keeps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_manifest_layer(
    manifest: *const Manifest, layer: u32, out: *mut Layer,
) -> Status {
    let call =
        |caller: &Caller| caller.write(caller.handle(manifest, "manifest")?.layer(layer)?, out);
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}
