//! The shape of a model's pages: how many bytes everything is, and in which order.

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use super::error::PageError;
use super::limits::{
    FILE_ALIGNMENT, MAX_FILE_BYTES, MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_PAGE_TOKENS,
    PAYLOAD_OFFSET,
};

/// Order of the dimensions of `k` and `v`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// `[num_kv_heads, tokens, head_dim]`: the rows of one head are contiguous.
    #[default]
    Hnd,
    /// `[tokens, num_kv_heads, head_dim]`: the rows of one token are contiguous.
    Nhd,
}

impl Layout {
    /// The name in a manifest and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hnd => "hnd",
            Self::Nhd => "nhd",
        }
    }
}

/// The numbers of a [`Geometry`], not yet validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GeometrySpec {
    /// How elements are stored.
    pub dtype: Dtype,
    /// Order of heads and tokens.
    pub layout: Layout,
    /// Layers of the model.
    pub num_layers: u32,
    /// KV heads of one layer (of this shard).
    pub num_kv_heads: u32,
    /// Elements of one K row.
    pub head_dim: u32,
    /// Elements of one V row; 0 where the model keeps no V (latent attention).
    pub v_head_dim: u32,
    /// Tokens of a full page.
    pub page_tokens: u32,
}

/// The validated shape of a model's pages. All sizes are bytes and cannot overflow.
///
/// Layers differ in what they keep beside K and V: that of one is [`Manifest::layer_geometry`].
///
/// [`Manifest::layer_geometry`]: super::Manifest::layer_geometry
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    spec: GeometrySpec,
    /// Bytes that a token has beside K and V.
    side_row_bytes: u32,
}

impl Geometry {
    /// Validates the numbers.
    ///
    /// # Errors
    /// [`PageError::Manifest`] names the number, its value and its limit.
    pub fn new(spec: GeometrySpec) -> Result<Self, PageError> {
        let bounds = [
            ("num_layers", spec.num_layers, 1, MAX_LAYERS),
            ("num_kv_heads", spec.num_kv_heads, 1, MAX_KV_HEADS),
            ("head_dim", spec.head_dim, 1, MAX_HEAD_DIM),
            ("v_head_dim", spec.v_head_dim, 0, MAX_HEAD_DIM),
            ("page_tokens", spec.page_tokens, 1, MAX_PAGE_TOKENS),
        ];
        for (name, value, least, most) in bounds {
            if value < least || value > most {
                return Err(PageError::Manifest(format!(
                    "{name} is {value}: must be from {least} to {most}"
                )));
            }
        }
        let block = spec.dtype.block_elements();
        for (name, value) in [("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)] {
            if !value.is_multiple_of(block) {
                return Err(PageError::Manifest(format!(
                    "{name} is {value}: {} rows are a multiple of {block} elements",
                    spec.dtype
                )));
            }
        }
        Self { spec, side_row_bytes: 0 }.checked()
    }

    /// The same with so many bytes of each token beside K and V.
    ///
    /// # Errors
    /// [`PageError::Manifest`] if a page would be too large.
    pub(super) fn with_side_rows(self, row_bytes: u32) -> Result<Self, PageError> {
        Self { side_row_bytes: row_bytes, ..self }.checked()
    }

    fn checked(self) -> Result<Self, PageError> {
        let page_tokens = self.page_tokens();
        let file_bytes = self.file_bytes(page_tokens);
        if file_bytes > MAX_FILE_BYTES {
            return Err(PageError::Manifest(format!(
                "a full page would be {file_bytes} bytes, the limit is {MAX_FILE_BYTES}: lower \
                 page_tokens ({page_tokens})"
            )));
        }
        Ok(self)
    }

    /// How elements are stored.
    pub fn dtype(&self) -> Dtype {
        self.spec.dtype
    }

    /// Order of heads and tokens.
    pub fn layout(&self) -> Layout {
        self.spec.layout
    }

    /// Layers of the model.
    pub fn num_layers(&self) -> u32 {
        self.spec.num_layers
    }

    /// KV heads of one layer.
    pub fn num_kv_heads(&self) -> u32 {
        self.spec.num_kv_heads
    }

    /// Elements of one K row.
    pub fn head_dim(&self) -> u32 {
        self.spec.head_dim
    }

    /// Elements of one V row; 0 where there is no `v`.
    pub fn v_head_dim(&self) -> u32 {
        self.spec.v_head_dim
    }

    /// Tokens of a full page.
    pub fn page_tokens(&self) -> u32 {
        self.spec.page_tokens
    }

    /// Bytes of K of one token and one head.
    pub fn k_row_bytes(&self) -> u64 {
        self.dtype().row_bytes(self.head_dim())
    }

    /// Bytes of V of one token and one head.
    pub fn v_row_bytes(&self) -> u64 {
        self.dtype().row_bytes(self.v_head_dim())
    }

    /// Bytes of one token beside K and V; 0 where there is no `side`.
    pub fn side_row_bytes(&self) -> u64 {
        u64::from(self.side_row_bytes)
    }

    /// Byte of a row at which its part beside K and V begins.
    pub fn side_row_offset(&self) -> u64 {
        u64::from(self.num_kv_heads()) * (self.k_row_bytes() + self.v_row_bytes())
    }

    /// Bytes of one token in the tail: `K[num_kv_heads, head_dim]`, then
    /// `V[num_kv_heads, v_head_dim]`, then what is kept beside them.
    pub fn row_bytes(&self) -> u64 {
        self.side_row_offset() + self.side_row_bytes()
    }

    /// Rows in a tail of so many bytes. A last one that is not whole is none; where rows have a part
    /// beside K and V there are none at all then: whoever leaves that part out shifts all that follow, and
    /// they would be read as something else.
    pub fn rows_in(&self, tail_bytes: u64) -> u64 {
        let row_bytes = self.row_bytes();
        if self.side_row_bytes > 0 && !tail_bytes.is_multiple_of(row_bytes) {
            return 0;
        }
        tail_bytes / row_bytes
    }

    /// Bytes of tensor `k` with `tokens` tokens.
    pub fn k_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * u64::from(self.num_kv_heads()) * self.k_row_bytes()
    }

    /// Bytes of tensor `v` with `tokens` tokens; 0 where there is no `v`.
    pub fn v_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * u64::from(self.num_kv_heads()) * self.v_row_bytes()
    }

    /// Bytes of tensor `side` with `tokens` tokens; 0 where there is none.
    pub fn side_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * self.side_row_bytes()
    }

    /// Bytes of tensor `_pad`, which fills the file to a multiple of 4096; 0 where there is none.
    pub fn pad_bytes(&self, tokens: u32) -> u64 {
        let data_bytes = self.data_bytes(tokens);
        data_bytes.next_multiple_of(FILE_ALIGNMENT) - data_bytes
    }

    /// Bytes of a page file with `tokens` tokens: header, `k`, `v`, `side`, `_pad`.
    pub fn file_bytes(&self, tokens: u32) -> u64 {
        PAYLOAD_OFFSET + self.data_bytes(tokens).next_multiple_of(FILE_ALIGNMENT)
    }

    fn data_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * self.row_bytes()
    }

    /// Shape of tensor `k` with `tokens` tokens.
    pub fn k_shape(&self, tokens: u32) -> [u64; 3] {
        self.shape(tokens, self.head_dim())
    }

    /// Shape of tensor `v` with `tokens` tokens.
    pub fn v_shape(&self, tokens: u32) -> [u64; 3] {
        self.shape(tokens, self.v_head_dim())
    }

    /// Shape of tensor `side` with `tokens` tokens.
    pub fn side_shape(&self, tokens: u32) -> [u64; 2] {
        [u64::from(tokens), self.side_row_bytes()]
    }

    fn shape(&self, tokens: u32, dim: u32) -> [u64; 3] {
        let heads = u64::from(self.num_kv_heads());
        let tokens = u64::from(tokens);
        let dim = self.dtype().stored_dim(dim);
        match self.layout() {
            Layout::Hnd => [heads, tokens, dim],
            Layout::Nhd => [tokens, heads, dim],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: GeometrySpec = GeometrySpec {
        dtype: Dtype::F16,
        layout: Layout::Hnd,
        num_layers: 32,
        num_kv_heads: 8,
        head_dim: 128,
        v_head_dim: 128,
        page_tokens: 1024,
    };

    #[test]
    fn sizes() {
        // (row, k, v, pad, file) of a page with `tokens`
        fn check(spec: GeometrySpec, tokens: u32, expected: (u64, u64, u64, u64, u64)) {
            let geometry = Geometry::new(spec).unwrap();
            let found = (
                geometry.row_bytes(),
                geometry.k_bytes(tokens),
                geometry.v_bytes(tokens),
                geometry.pad_bytes(tokens),
                geometry.file_bytes(tokens),
            );
            assert_eq!(found, expected);
            assert!(geometry.file_bytes(tokens).is_multiple_of(4096));
        }
        let mib = 1 << 20;
        check(LLAMA, 1024, (4096, 2 * mib, 2 * mib, 0, 4 * mib + 4096));
        check(LLAMA, 1, (4096, 2048, 2048, 0, 8192));
        let latent = GeometrySpec { num_kv_heads: 1, head_dim: 576, v_head_dim: 0, ..LLAMA };
        check(latent, 3, (1152, 3456, 0, 640, 8192));
        let quantised = GeometrySpec { dtype: Dtype::Q8_0, ..LLAMA };
        check(quantised, 1, (2176, 1088, 1088, 1920, 8192));
    }

    #[test]
    fn side_rows() {
        let latent = GeometrySpec { num_kv_heads: 1, head_dim: 576, v_head_dim: 0, ..LLAMA };
        let plain = Geometry::new(latent).unwrap();
        let side = plain.with_side_rows(132).unwrap();
        assert_eq!((side.row_bytes(), side.k_row_bytes()), (1152 + 132, 1152));
        assert_eq!((side.side_bytes(3), side.side_shape(3)), (396, [3, 132]));
        assert_eq!((side.pad_bytes(3), side.file_bytes(3)), (4096 - 3 * 1284, 8192));
        // One row fewer than it has bytes for in a plain layer: those are the index keys.
        assert_eq!(side.file_bytes(1024), 4096 + 1024 * 1284);
        assert!(plain.with_side_rows(0).unwrap() == plain && side != plain);
        let large = Geometry::new(GeometrySpec { page_tokens: 1 << 16, ..latent }).unwrap();
        let error = large.with_side_rows(1 << 16).unwrap_err().to_string();
        assert!(error.starts_with("a full page would be 4370"), "{error}");
    }

    #[test]
    fn a_tail_that_lacks_side_rows_has_no_rows() {
        let plain = Geometry::new(LLAMA).unwrap();
        let row = plain.row_bytes();
        assert_eq!([row - 1, row, 2 * row + 5].map(|bytes| plain.rows_in(bytes)), [0, 1, 2]);
        let side = plain.with_side_rows(128).unwrap();
        let row = side.row_bytes();
        assert_eq!(
            [0, row - 1, row, 2 * row, 2 * row + 5].map(|bytes| side.rows_in(bytes)),
            [0, 0, 1, 2, 0]
        );
        // K and V alone of some tokens are never rows of fewer tokens.
        assert_eq!(side.rows_in(31 * plain.row_bytes()), 0);
    }

    #[test]
    fn refused() {
        fn check(spec: GeometrySpec, expected: &str) {
            assert_eq!(Geometry::new(spec), Err(PageError::Manifest(expected.to_owned())));
        }
        let spec = LLAMA;
        check(GeometrySpec { num_layers: 0, ..spec }, "num_layers is 0: must be from 1 to 4096");
        check(
            GeometrySpec { num_kv_heads: 1025, ..spec },
            "num_kv_heads is 1025: must be from 1 to 1024",
        );
        check(GeometrySpec { head_dim: 0, ..spec }, "head_dim is 0: must be from 1 to 4096");
        check(
            GeometrySpec { v_head_dim: 4097, ..spec },
            "v_head_dim is 4097: must be from 0 to 4096",
        );
        check(
            GeometrySpec { page_tokens: u32::MAX, ..spec },
            "page_tokens is 4294967295: must be from 1 to 1048576",
        );
        check(
            GeometrySpec { dtype: Dtype::Q4_0, head_dim: 80, ..spec },
            "head_dim is 80: q4_0 rows are a multiple of 32 elements",
        );
        check(
            GeometrySpec { page_tokens: 1 << 18, ..spec },
            "a full page would be 1073745920 bytes, the limit is 1073741824: lower page_tokens \
             (262144)",
        );
    }
}
