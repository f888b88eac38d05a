//! K and V of the files of a mount, in memory.

use std::ffi::c_void;

use super::block::Block;
use super::manifest::Manifest;
use super::memory::Caller;
use super::status::{Failure, Status, guard};
use crate::attention::KvBlock;
use crate::page::limits::PAYLOAD_OFFSET;
use crate::page::{Layer, PagePlace, PageView, TokenStart};

impl Manifest {
    fn place(&self, layer: u32, start: u64) -> Result<PagePlace, Failure> {
        // No page may lie there, whatever its bytes are.
        PagePlace::new(self.inner(), Layer(layer), TokenStart(start))
            .map_err(|error| Failure::argument(error.to_string()))
    }

    fn page_block(&self, layer: u32, start: u64, file: &[u8]) -> Result<Block, Failure> {
        let place = self.place(layer, start)?;
        let payload = usize::try_from(PAYLOAD_OFFSET).unwrap_or(usize::MAX);
        let first_bytes = &file[..file.len().min(payload)];
        let header = place.check_header(first_bytes, file.len() as u64)?;
        let page = PageView::new(file, place.geometry(), header.tokens)?;
        Ok(Block::new(&KvBlock::page(&page, start)))
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
        caller.write(manifest.page_block(layer, start, file)?, block)
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

/// Fills `*block`, whose `size` the caller has set, with K and V of a tail: `rows_bytes` bytes of
/// rows, of each token `K[num_kv_heads, head_dim]`, then `V[num_kv_heads, v_head_dim]`, the first
/// of them at position `start`. A last row that is not whole is left out. The block points into
/// `rows`; what is appended to the file afterwards does not change it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_tail_block(
    manifest: *const Manifest, start: u64, rows: *const c_void, rows_bytes: usize,
    block: *mut Block,
) -> Status {
    let call = |caller: &Caller| {
        let geometry = caller.handle(manifest, "manifest")?.inner().geometry();
        let rows = caller.slice(rows.cast::<u8>(), rows_bytes, "rows")?;
        caller.write(Block::new(&KvBlock::tail(rows, geometry, start)), block)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}
