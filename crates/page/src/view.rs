//! Reading rows out of a page's bytes, wherever they are mapped.

use super::dtype::Dtype;
use super::error::PageError;
use super::geometry::{Geometry, Layout};
use super::header::PageHeader;
use super::limits::{PAYLOAD_OFFSET, index};

/// Distances in bytes between rows of `k` or of `v`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Strides {
    /// From a head to the next, same token.
    pub head: usize,
    /// From a token to the next, same head.
    pub token: usize,
}

/// The tensors of a page, over its bytes.
#[derive(Debug, Clone, Copy)]
pub struct PageView<'a> {
    geometry: Geometry,
    tokens: u32,
    k: &'a [u8],
    v: &'a [u8],
    side: &'a [u8],
}

impl<'a> PageView<'a> {
    /// A view of a whole page file, whose header is checked.
    ///
    /// # Errors
    /// As [`PageHeader::parse`].
    pub fn parse(file: &'a [u8], geometry: &Geometry) -> Result<Self, PageError> {
        let header = PageHeader::parse(file, file.len() as u64, geometry)?;
        Self::new(file, geometry, header.tokens)
    }

    /// A view of a whole page file that was checked before and has `tokens` tokens.
    ///
    /// # Errors
    /// [`PageError::Size`] if the file is not exactly that long.
    pub fn new(file: &'a [u8], geometry: &Geometry, tokens: u32) -> Result<Self, PageError> {
        let expected = geometry.file_bytes(tokens);
        if file.len() as u64 != expected {
            return Err(PageError::Size(format!(
                "page is {} bytes, {tokens} tokens are {expected}",
                file.len()
            )));
        }
        let payload = &file[index(PAYLOAD_OFFSET)..];
        let (k, rest) = payload.split_at(index(geometry.k_bytes(tokens)));
        let (v, rest) = rest.split_at(index(geometry.v_bytes(tokens)));
        let side = &rest[..index(geometry.side_bytes(tokens))];
        Ok(Self { geometry: *geometry, tokens, k, v, side })
    }

    /// The shape that the page was checked against.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How elements are stored.
    pub fn dtype(&self) -> Dtype {
        self.geometry.dtype()
    }

    /// Tokens in the page.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Tensor `k`: `[num_kv_heads, tokens, head_dim]` or `[tokens, num_kv_heads, head_dim]`.
    pub fn k(&self) -> &'a [u8] {
        self.k
    }

    /// Tensor `v`, same order; empty where `v_head_dim` is 0.
    pub fn v(&self) -> &'a [u8] {
        self.v
    }

    /// Tensor `side`, `[tokens, side_row_bytes]`; empty where the layer keeps nothing beside K and V.
    pub fn side(&self) -> &'a [u8] {
        self.side
    }

    /// Distances between the rows of `k`.
    pub fn k_strides(&self) -> Strides {
        self.strides(index(self.geometry.k_row_bytes()))
    }

    /// Distances between the rows of `v`.
    pub fn v_strides(&self) -> Strides {
        self.strides(index(self.geometry.v_row_bytes()))
    }

    /// K of one head and token: `[head_dim]`.
    ///
    /// # Panics
    /// As an index would, if `head` or `token` is not in the page.
    pub fn k_row(&self, head: u32, token: u32) -> &'a [u8] {
        self.row(self.k, index(self.geometry.k_row_bytes()), head, token)
    }

    /// V of one head and token: `[v_head_dim]`.
    ///
    /// # Panics
    /// As an index would, if `head` or `token` is not in the page.
    pub fn v_row(&self, head: u32, token: u32) -> &'a [u8] {
        self.row(self.v, index(self.geometry.v_row_bytes()), head, token)
    }

    fn strides(&self, row_bytes: usize) -> Strides {
        match self.geometry.layout() {
            Layout::Hnd => Strides { head: row_bytes * self.tokens as usize, token: row_bytes },
            Layout::Nhd => Strides {
                head: row_bytes,
                token: row_bytes * self.geometry.num_kv_heads() as usize,
            },
        }
    }

    fn row(&self, tensor: &'a [u8], row_bytes: usize, head: u32, token: u32) -> &'a [u8] {
        // Both are compared, because a token too far is a valid row of the next head.
        assert!(
            head < self.geometry.num_kv_heads() && token < self.tokens,
            "row (head {head}, token {token}) of a page with {} heads and {} tokens",
            self.geometry.num_kv_heads(),
            self.tokens
        );
        let strides = self.strides(row_bytes);
        let offset = head as usize * strides.head + token as usize * strides.token;
        &tensor[offset..offset + row_bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::GeometrySpec;
    use crate::{Metadata, build_header};

    #[test]
    fn rows_of_both_layouts() {
        // 2 heads, 3 tokens, K rows of 4 bytes, V rows of 2: every payload byte is its index.
        fn check(layout: Layout, k: Strides, k_row: u8, v_row: u8) {
            let geometry = Geometry::new(GeometrySpec {
                dtype: Dtype::F8E4m3,
                layout,
                num_layers: 1,
                num_kv_heads: 2,
                head_dim: 4,
                v_head_dim: 2,
                page_tokens: 4,
            })
            .unwrap();
            let mut file = build_header(&geometry, 3, &Metadata::new()).unwrap();
            file.extend((0..4096).map(|i| u8::try_from(i % 256).unwrap()));
            let view = PageView::parse(&file, &geometry).unwrap();
            assert_eq!((view.tokens(), view.k().len(), view.v().len()), (3, 24, 12));
            assert_eq!(view.k_strides(), k);
            assert_eq!(view.k_row(1, 2)[0], k_row);
            assert_eq!(view.v_row(1, 0)[0], v_row);
            assert_eq!((view.k_row(0, 0).len(), view.v_row(0, 0).len()), (4, 2));
            let beyond = std::panic::catch_unwind(|| view.k_row(0, 3).len());
            assert!(beyond.is_err());
        }
        check(Layout::Hnd, Strides { head: 12, token: 4 }, 20, 24 + 6);
        check(Layout::Nhd, Strides { head: 4, token: 8 }, 20, 24 + 2);
    }

    #[test]
    fn wrong_length() {
        let geometry = Geometry::new(GeometrySpec {
            dtype: Dtype::F16,
            layout: Layout::Hnd,
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 64,
            v_head_dim: 0,
            page_tokens: 4,
        })
        .unwrap();
        let error = PageView::new(&[0; 4096], &geometry, 1).unwrap_err();
        assert_eq!(error.to_string(), "page is 4096 bytes, 1 tokens are 8192");
    }
}
