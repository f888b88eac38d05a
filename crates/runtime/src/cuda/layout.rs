//! Which bytes of a block go to the device, and where they lie there.
//!
//! What is copied keeps the order of its axes. Head-major tokens of a page that are not all wanted
//! are copied head by head; everything else is one piece for K and one for V, or one for both where
//! V lies among the rows of K, as in a tail.

use std::ops::Range;

use super::CudaError;
use crate::attention::{KvBlock, Shape, Tensor, Values};
use crate::page::Dtype;

/// Where K and V begin in the ring: more than any kernel asks for, and what the bus moves at once.
const ALIGNMENT: usize = 256;

/// Alignment of rows of a head, enough for each dtype.
const ROW_ALIGNMENT: usize = 16;

/// Bytes to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    pub(super) source: &'a [u8],
    /// Where to, from the beginning of the block's place.
    pub(super) at: usize,
}

/// Some tokens of a block, laid out.
#[derive(Debug)]
pub(super) struct Layout<'a> {
    pub(super) pieces: Vec<Piece<'a>>,
    /// Bytes of the place.
    pub(super) bytes: usize,
    pub(super) k_at: usize,
    pub(super) v_at: usize,
    /// Of heads and tokens.
    pub(super) k_strides: (u32, u32),
    pub(super) v_strides: (u32, u32),
}

/// One tensor's part of a layout.
struct Part<'a> {
    pieces: Vec<Piece<'a>>,
    bytes: usize,
    strides: (u32, u32),
}

/// Lays out `tokens` of a block, which was checked against the shape.
///
/// # Errors
/// [`CudaError::Unsupported`] for rows that the kernels cannot read.
pub(super) fn layout<'a>(
    block: &KvBlock<'a>, shape: Shape, tokens: Range<usize>,
) -> Result<Layout<'a>, CudaError> {
    let heads = shape.num_kv_heads();
    let row = |elements: usize| row_bytes(block.dtype, elements);
    let (k_row, v_row) = (row(shape.head_dim()), row(shape.v_head_dim()));
    let k = block.k;
    let among_k = match block.v {
        Values::Latent => Some((0, k)),
        Values::Rows(v) => offset_within(&k, &v).map(|offset| (offset, v)),
    };
    if let Some((offset, v)) = among_k {
        let v_end = offset + (heads - 1) * v.strides.head + v_row;
        let k_end = (heads - 1) * k.strides.head + k_row;
        // Within the bytes of a token, so that one piece has both.
        if (offset == 0 && v.strides == k.strides) || v_end.max(k_end) <= k.strides.token {
            let part = part(&k, heads, k_end.max(v_end), k_row, tokens, block.dtype)?;
            let is_same = v.strides == k.strides;
            let v_strides = if is_same { part.strides } else { strides(&v, block.dtype)? };
            aligned(offset, block.dtype)?;
            return Ok(Layout {
                pieces: part.pieces,
                bytes: part.bytes,
                k_at: 0,
                v_at: offset,
                k_strides: part.strides,
                v_strides,
            });
        }
    }
    let v = block.values();
    let end = |tensor: &Tensor<'_>, row: usize| (heads - 1) * tensor.strides.head + row;
    let mut of_k = part(&k, heads, end(&k, k_row), k_row, tokens.clone(), block.dtype)?;
    let of_v = part(&v, heads, end(&v, v_row), v_row, tokens, block.dtype)?;
    let v_at = of_k.bytes.next_multiple_of(ALIGNMENT);
    of_k.pieces.extend(of_v.pieces.into_iter().map(|piece| Piece { at: piece.at + v_at, ..piece }));
    Ok(Layout {
        pieces: of_k.pieces,
        bytes: (v_at + of_v.bytes).next_multiple_of(ALIGNMENT),
        k_at: 0,
        v_at,
        k_strides: of_k.strides,
        v_strides: of_v.strides,
    })
}

/// Most bytes that a token of a block takes, besides [`slack`].
pub(super) fn token_bytes(block: &KvBlock<'_>, shape: Shape) -> usize {
    let of = |tensor: Tensor<'_>| {
        let Tensor { strides, .. } = tensor;
        if strides.head < strides.token {
            strides.token
        } else {
            shape.num_kv_heads() * strides.token
        }
    };
    of(block.k) + of(block.values())
}

/// What alignment may take in a place.
pub(super) fn slack(shape: Shape) -> usize {
    2 * (ALIGNMENT + shape.num_kv_heads() * ROW_ALIGNMENT)
}

fn row_bytes(dtype: Dtype, elements: usize) -> usize {
    elements / dtype.block_elements() as usize * dtype.block_bytes() as usize
}

/// Where V begins in the bytes of K, if it lies there.
fn offset_within(k: &Tensor<'_>, v: &Tensor<'_>) -> Option<usize> {
    let (of_k, of_v) = (k.bytes.as_ptr_range(), v.bytes.as_ptr_range());
    let is_within = of_k.start <= of_v.start && of_v.end <= of_k.end;
    let has_same_tokens = k.strides.token == v.strides.token;
    (is_within && has_same_tokens).then(|| of_v.start.addr() - of_k.start.addr())
}

/// `token_end` is where a token's last row ends, from its first one on.
fn part<'a>(
    tensor: &Tensor<'a>, heads: usize, token_end: usize, row: usize, tokens: Range<usize>,
    dtype: Dtype,
) -> Result<Part<'a>, CudaError> {
    let (head, token) = (tensor.strides.head, tensor.strides.token);
    if tokens.is_empty() {
        return Ok(Part { pieces: Vec::new(), bytes: 0, strides: (0, 0) });
    }
    let start = tokens.start * token;
    let head_bytes = (tokens.len() - 1) * token + row;
    // Nothing but what is wanted lies between the first byte and the last.
    let is_whole = head < token || heads == 1 || head <= head_bytes.next_multiple_of(ROW_ALIGNMENT);
    if is_whole {
        let bytes = (tokens.len() - 1) * token + token_end;
        let source = &tensor.bytes[start..start + bytes];
        let strides = strides(tensor, dtype)?;
        return Ok(Part { pieces: vec![Piece { source, at: 0 }], bytes, strides });
    }
    let stride = head_bytes.next_multiple_of(ROW_ALIGNMENT);
    let piece = |index: usize| {
        let source = &tensor.bytes[index * head + start..][..head_bytes];
        Piece { source, at: index * stride }
    };
    aligned(token, dtype)?;
    let strides = (narrow(stride)?, narrow(token)?);
    Ok(Part { pieces: (0..heads).map(piece).collect(), bytes: heads * stride, strides })
}

fn strides(tensor: &Tensor<'_>, dtype: Dtype) -> Result<(u32, u32), CudaError> {
    aligned(tensor.strides.head, dtype)?;
    aligned(tensor.strides.token, dtype)?;
    Ok((narrow(tensor.strides.head)?, narrow(tensor.strides.token)?))
}

fn narrow(stride: usize) -> Result<u32, CudaError> {
    u32::try_from(stride).map_err(|_| CudaError::Unsupported(format!("a stride of {stride} bytes")))
}

/// What the loads of the kernels ask for (`kernels/arguments.h`).
fn aligned(bytes: usize, dtype: Dtype) -> Result<(), CudaError> {
    let alignment = match dtype {
        Dtype::F8E4m3 => 8,
        Dtype::Q8_0 | Dtype::Q4_0 => 2,
        _ => 16,
    };
    if bytes.is_multiple_of(alignment) {
        return Ok(());
    }
    Err(CudaError::Unsupported(format!(
        "{dtype} with a stride of {bytes} bytes, no multiple of {alignment},"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Strides;

    fn block(k: &[u8], v: Option<&'static [u8]>, head: usize, token: usize) -> KvBlock<'static> {
        let strides = Strides { head, token };
        let bytes: &'static [u8] = Box::leak(k.to_vec().into_boxed_slice());
        let rows = |bytes| Values::Rows(Tensor { bytes, strides });
        KvBlock {
            k: Tensor { bytes, strides },
            v: v.map_or(Values::Latent, rows),
            dtype: Dtype::F16,
            tokens: 10,
            first_position: 0,
            shift: 0,
        }
    }

    /// Two heads of 8 elements in f16: rows of 16 bytes.
    fn shape() -> Shape {
        Shape::new(2, 2, 8, 8).unwrap()
    }

    fn check(block: &KvBlock<'_>, tokens: Range<usize>, pieces: usize) {
        let made = layout(block, shape(), tokens.clone()).unwrap();
        assert_eq!(made.pieces.len(), pieces, "{tokens:?}");
        let mut place = vec![0xee; made.bytes];
        for piece in &made.pieces {
            place[piece.at..][..piece.source.len()].copy_from_slice(piece.source);
        }
        for (index, token) in tokens.clone().enumerate() {
            for head in 0..2 {
                for (tensor, at, strides) in [
                    (block.k, made.k_at, made.k_strides),
                    (block.values(), made.v_at, made.v_strides),
                ] {
                    let from = head * tensor.strides.head + token * tensor.strides.token;
                    let to = at + head * strides.0 as usize + index * strides.1 as usize;
                    assert_eq!(place[to..][..16], tensor.bytes[from..][..16], "{token} {head}");
                }
            }
        }
        let most = tokens.len() * token_bytes(block, shape()) + slack(shape());
        assert!(made.bytes <= most, "{} {most}", made.bytes);
    }

    fn noise(length: usize, seed: u8) -> &'static [u8] {
        let byte = |i: usize| (i * 7 + i / 251).to_le_bytes()[0] ^ seed;
        Box::leak((0..length).map(byte).collect::<Vec<u8>>().into_boxed_slice())
    }

    #[test]
    fn rows_are_found_where_they_are_said_to_be() {
        // [heads, tokens, dim], of a page: all of it, its beginning, its middle.
        let page = block(noise(320, 1), Some(noise(320, 2)), 160, 16);
        check(&page, 0..10, 2);
        check(&page, 0..4, 4);
        check(&page, 3..9, 4);
        // [tokens, heads, dim]
        let token_major = block(noise(320, 3), Some(noise(320, 4)), 16, 32);
        check(&token_major, 0..10, 2);
        check(&token_major, 2..7, 2);
        // Latent.
        check(&block(noise(320, 5), None, 160, 16), 0..10, 1);
        check(&block(noise(320, 5), None, 160, 16), 1..3, 2);
        // A tail: K of both heads, then V of both.
        let rows = noise(640, 6);
        let mut tail = block(rows, None, 16, 64);
        tail.k.bytes = rows;
        let strides = Strides { head: 16, token: 64 };
        tail.v = Values::Rows(Tensor { bytes: &rows[32..], strides });
        check(&tail, 0..10, 1);
        check(&tail, 4..5, 1);
    }

    #[test]
    fn rows_that_the_kernels_cannot_read() {
        let odd = block(noise(400, 1), Some(noise(400, 2)), 180, 18);
        assert!(matches!(layout(&odd, shape(), 0..10), Err(CudaError::Unsupported(_))));
    }
}
