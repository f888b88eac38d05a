//! Rows in the order in which tokens arrive, to and from pages in the order of the manifest.
//!
//! Rows are what the tail holds: per token `K[num_kv_heads, head_dim]`, then
//! `V[num_kv_heads, v_head_dim]`, then the side row, if the layer has any.

use super::check::PagePlace;
use super::checksum::PageHasher;
use super::error::PageError;
use super::geometry::{Geometry, Layout};
use super::header::build_header;
use super::limits::{PAYLOAD_OFFSET, index};
use super::metadata::{Declared, Metadata};
use super::view::PageView;

/// Bytes of rows that are spread over the heads at a time: they stay in the L2 cache while every
/// head picks its part.
const BLOCK_BYTES: usize = 256 << 10;

/// The page file of `tokens` rows, in the geometry's layout, with `metadata` in its header.
///
/// `rows` is `[tokens, row_bytes]`.
///
/// # Errors
/// [`PageError::Rows`] if `rows` has another length, otherwise as
/// [`build_header`].
pub fn pack_rows(
    geometry: &Geometry, rows: &[u8], tokens: u32, metadata: &Metadata,
) -> Result<Vec<u8>, PageError> {
    let header = build_header(geometry, tokens, metadata)?;
    let expected = u64::from(tokens) * geometry.row_bytes();
    if rows.len() as u64 != expected {
        return Err(PageError::Rows(format!(
            "{tokens} tokens are {expected} bytes of rows, {} were given",
            rows.len()
        )));
    }
    let mut file = vec![0; index(geometry.file_bytes(tokens))];
    let (header_part, payload) = file.split_at_mut(index(PAYLOAD_OFFSET));
    header_part.copy_from_slice(&header);
    let (k, rest) = payload.split_at_mut(index(geometry.k_bytes(tokens)));
    let (v, rest) = rest.split_at_mut(index(geometry.v_bytes(tokens)));
    let mut tensors = [k, v, rest];
    Pieces::new(geometry, tokens).for_each(|piece| {
        let (in_tensor, in_rows) = (piece.in_tensor, piece.in_rows);
        tensors[piece.tensor][in_tensor..in_tensor + piece.bytes]
            .copy_from_slice(&rows[in_rows..in_rows + piece.bytes]);
    });
    Ok(file)
}

/// The page file of `tokens` rows at a place, which says where it belongs and what its checksum
/// is, so that it can be told from a damaged or misplaced one wherever it is copied.
///
/// # Errors
/// As [`pack_rows`].
pub fn pack_page(place: &PagePlace, rows: &[u8], tokens: u32) -> Result<Vec<u8>, PageError> {
    let geometry = place.geometry();
    let declared = place.declared();
    let mut file = pack_rows(geometry, rows, tokens, &declared.to_metadata())?;
    let mut hasher = PageHasher::new();
    hasher.update(&file);
    let digest = hasher.finish(&place.identity(tokens));
    // The public checksum does not cover the header, so it can still be put there.
    let declared = Declared { checksum: Some(digest.page), ..declared };
    let header = build_header(geometry, tokens, &declared.to_metadata())?;
    file[..header.len()].copy_from_slice(&header);
    Ok(file)
}

/// The rows of a page: the inverse of [`pack_rows`], `[tokens, row_bytes]`.
pub fn unpack_rows(view: &PageView<'_>) -> Vec<u8> {
    let tensors = [view.k(), view.v(), view.side()];
    let mut rows = vec![0; tensors.iter().map(|tensor| tensor.len()).sum()];
    Pieces::new(view.geometry(), view.tokens()).for_each(|piece| {
        let (in_tensor, in_rows) = (piece.in_tensor, piece.in_rows);
        rows[in_rows..in_rows + piece.bytes]
            .copy_from_slice(&tensors[piece.tensor][in_tensor..in_tensor + piece.bytes]);
    });
    rows
}

/// Bytes that are contiguous both in a tensor and in the rows.
struct Piece {
    /// 0 for `k`, 1 for `v`, 2 for `side`.
    tensor: usize,
    in_tensor: usize,
    in_rows: usize,
    bytes: usize,
}

/// Where the pieces of a page's tensors lie.
struct Pieces {
    tokens: usize,
    row_bytes: usize,
    /// Per tensor: contiguous pieces of one token, bytes of each, offset within a row.
    parts: [(usize, usize, usize); 3],
}

impl Pieces {
    fn new(geometry: &Geometry, tokens: u32) -> Self {
        let heads = geometry.num_kv_heads() as usize;
        let (k, v) = (index(geometry.k_row_bytes()), index(geometry.v_row_bytes()));
        // In `nhd` all heads of a token lie together, as they do in a row: one piece.
        let (pieces, heads_per_piece) = match geometry.layout() {
            Layout::Hnd => (heads, 1),
            Layout::Nhd => (1, heads),
        };
        let side = index(geometry.side_row_bytes());
        Self {
            tokens: tokens as usize,
            row_bytes: index(geometry.row_bytes()),
            parts: [
                (pieces, k * heads_per_piece, 0),
                (pieces, v * heads_per_piece, k * heads),
                (1, side, (k + v) * heads),
            ],
        }
    }

    /// Visits every piece, block by block of tokens.
    fn for_each(&self, mut visit: impl FnMut(Piece)) {
        let block_tokens = (BLOCK_BYTES / self.row_bytes).max(1);
        for block in (0..self.tokens).step_by(block_tokens) {
            let block_end = (block + block_tokens).min(self.tokens);
            for (tensor, (pieces, bytes, in_row)) in self.parts.into_iter().enumerate() {
                if bytes == 0 {
                    continue;
                }
                for (piece, token) in
                    (0..pieces).flat_map(|p| (block..block_end).map(move |t| (p, t)))
                {
                    visit(Piece {
                        tensor,
                        in_tensor: (piece * self.tokens + token) * bytes,
                        in_rows: token * self.row_bytes + in_row + piece * bytes,
                        bytes,
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
