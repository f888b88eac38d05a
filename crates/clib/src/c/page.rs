//! K and V of the files of a mount, in memory, and what layers keep beside them.

use std::ffi::c_void;

use super::block::Block;
use super::manifest::Manifest;
use super::memory::{Caller, Structure};
use super::status::{Failure, Status, guard};
use crate::attention::KvBlock;
use crate::page::limits::PAYLOAD_OFFSET;
use crate::page::{Geometry, Layer, PagePlace, PageView, TokenStart};

/// Side rows of consecutive tokens of one layer: that of a token starts at byte `token * stride`. It owns nothing.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Side {
    /// `sizeof(kvfs_side)`, set before the call.
    pub size: usize,
    /// How many; 0 is fine.
    pub tokens: u64,
    /// The first row. Of any alignment; it is only read.
    pub data: *const c_void,
    /// Bytes that may be read from `data` on.
    pub bytes: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// From a row to the next, in bytes: `row_bytes` in a page.
    pub stride: usize,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for Side {
    const NAME: &'static str = "kvfs_side";
    const REQUIRED_BYTES: usize = size_of::<usize>();
}

impl Side {
    fn new(rows: &[u8], tokens: u64, row_bytes: u64, stride: u64) -> Self {
        let number = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        Self {
            size: size_of::<Self>(),
            tokens,
            data: rows.as_ptr().cast(),
            bytes: rows.len(),
            row_bytes: number(row_bytes),
            stride: number(stride),
        }
    }
}

impl Manifest {
    fn place(&self, layer: u32, start: u64) -> Result<PagePlace, Failure> {
        // No page may lie there, whatever its bytes are.
        PagePlace::new(self.inner(), Layer(layer), TokenStart(start))
            .map_err(|error| Failure::argument(error.to_string()))
    }

    fn page_view<'a>(
        &self, layer: u32, start: u64, file: &'a [u8],
    ) -> Result<PageView<'a>, Failure> {
        let place = self.place(layer, start)?;
        let payload = usize::try_from(PAYLOAD_OFFSET).unwrap_or(usize::MAX);
        let first_bytes = &file[..file.len().min(payload)];
        let header = place.check_header(first_bytes, file.len() as u64)?;
        Ok(PageView::new(file, place.geometry(), header.tokens)?)
    }

    /// Of a layer that has a side row for each token.
    fn side_geometry(&self, layer: u32) -> Result<Geometry, Failure> {
        if self.inner().side_rows(Layer(layer)).is_none() {
            let why = format!("layer {layer} keeps no side rows (kvfs_layer.side_row_bytes)");
            return Err(Failure::argument(why));
        }
        Ok(self.inner().layer_geometry(Layer(layer)))
    }

    /// Of a layer whose tails have rows.
    fn tail_geometry(&self, layer: u32) -> Result<Geometry, Failure> {
        Ok(*self.place(layer, 0)?.geometry())
    }
}

/// Fills `*block`, whose `size` the caller has set, with K and V of the page of layer `layer` that
/// starts at token `start`, at the positions that it was written for. `file` is the whole page
/// file in memory, `[file_bytes]`; the block points into it.
///
/// Reads the first 4096 bytes and checks shape and place. What a mount shows as a page was
/// verified; for any other file there is `kvfs_page_verify`.
///
/// `KVFS_STATUS_ARGUMENT` if the cache has no page there, `KVFS_STATUS_PAGE` if the file is not
/// that page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_page_block(
    manifest: *const Manifest, layer: u32, start: u64, file: *const c_void, file_bytes: usize,
    block: *mut Block,
) -> Status {
    let call = |caller: &Caller| {
        let manifest = caller.handle(manifest, "manifest")?;
        let file = caller.slice(file.cast::<u8>(), file_bytes, "file")?;
        let page = manifest.page_view(layer, start, file)?;
        caller.write(Block::new(&KvBlock::page(&page, start)), block)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Checks all bytes of a page file, which is given as to `kvfs_page_block`, against the checksum
/// that it declares. A page that declares none passes if its header is right.
///
/// `KVFS_STATUS_PAGE` if it is damaged, or not that page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_page_verify(
    manifest: *const Manifest, layer: u32, start: u64, file: *const c_void, file_bytes: usize,
) -> Status {
    let call = |caller: &Caller| {
        let place = caller.handle(manifest, "manifest")?.place(layer, start)?;
        place.verify_bytes(caller.slice(file.cast::<u8>(), file_bytes, "file")?)?;
        Ok(())
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Fills `*side`, whose `size` the caller has set, with the side rows of the page that `kvfs_page_block` of the same
/// arguments gives K and V of. It points into `file`.
///
/// `KVFS_STATUS_ARGUMENT` if the layer keeps none, otherwise as `kvfs_page_block`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_page_side(
    manifest: *const Manifest, layer: u32, start: u64, file: *const c_void, file_bytes: usize,
    side: *mut Side,
) -> Status {
    let call = |caller: &Caller| {
        let manifest = caller.handle(manifest, "manifest")?;
        let file = caller.slice(file.cast::<u8>(), file_bytes, "file")?;
        let row_bytes = manifest.side_geometry(layer)?.side_row_bytes();
        let page = manifest.page_view(layer, start, file)?;
        let rows = Side::new(page.side(), u64::from(page.tokens()), row_bytes, row_bytes);
        caller.write(rows, side)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Fills `*block`, whose `size` the caller has set, with K and V of a tail of layer `layer`: `rows_bytes` bytes of
/// rows, of each token `K[num_kv_heads, head_dim]`, then `V[num_kv_heads, v_head_dim]`, then its side row, where
/// the layer keeps such, the first of them at position `start`. A last row that is not whole is left out; where
/// there are side rows, all of them are then. The block points into `rows`; what is appended to the file
/// afterwards does not change it.
///
/// `KVFS_STATUS_ARGUMENT` if the layer has no tails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_layer_tail_block(
    manifest: *const Manifest, layer: u32, start: u64, rows: *const c_void, rows_bytes: usize,
    block: *mut Block,
) -> Status {
    let call = |caller: &Caller| {
        let geometry = caller.handle(manifest, "manifest")?.tail_geometry(layer)?;
        let rows = whole_rows(&geometry, caller.slice(rows.cast::<u8>(), rows_bytes, "rows")?);
        caller.write(Block::new(&KvBlock::tail(rows, &geometry, start)), block)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Fills `*side`, whose `size` the caller has set, with the side rows of the tail that `kvfs_layer_tail_block` of
/// the same arguments gives K and V of. It points into `rows`.
///
/// `KVFS_STATUS_ARGUMENT` if the layer keeps none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_tail_side(
    manifest: *const Manifest, layer: u32, rows: *const c_void, rows_bytes: usize, side: *mut Side,
) -> Status {
    let call = |caller: &Caller| {
        let geometry = caller.handle(manifest, "manifest")?.side_geometry(layer)?;
        let rows = whole_rows(&geometry, caller.slice(rows.cast::<u8>(), rows_bytes, "rows")?);
        let tokens = geometry.rows_in(rows.len() as u64);
        let first = usize::try_from(geometry.side_row_offset()).unwrap_or(usize::MAX);
        let rows = &rows[first.min(rows.len())..];
        let rows = Side::new(rows, tokens, geometry.side_row_bytes(), geometry.row_bytes());
        caller.write(rows, side)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// What of a tail has rows.
fn whole_rows<'a>(geometry: &Geometry, rows: &'a [u8]) -> &'a [u8] {
    let whole = geometry.rows_in(rows.len() as u64) * geometry.row_bytes();
    &rows[..usize::try_from(whole).unwrap_or(usize::MAX).min(rows.len())]
}

/// `kvfs_layer_tail_block` of a model of which all layers have the same rows.
///
/// `KVFS_STATUS_ARGUMENT` if some keep side rows: nobody can tell then where a row ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_tail_block(
    manifest: *const Manifest, start: u64, rows: *const c_void, rows_bytes: usize,
    block: *mut Block,
) -> Status {
    let call = |caller: &Caller| {
        let manifest = caller.handle(manifest, "manifest")?.inner();
        if manifest.has_side_rows() {
            let why =
                "layers of this model keep side rows: kvfs_layer_tail_block is told which one";
            return Err(Failure::argument(why.to_owned()));
        }
        let geometry = manifest.geometry();
        let rows = caller.slice(rows.cast::<u8>(), rows_bytes, "rows")?;
        caller.write(Block::new(&KvBlock::tail(rows, geometry, start)), block)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}
