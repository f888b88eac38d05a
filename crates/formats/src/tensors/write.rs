//! Writing tensors `[1, kv_heads, tokens, head_dim]` of a sequence, piece by piece.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use kvfs_page::{Dtype, Geometry, Layer, Strides};
use safetensors::tensor::{Dtype as TensorDtype, TensorInfo};

use super::TOKEN_IDS;
use super::header::Header;

/// Which of a layer's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `keys`.
    K,
    /// `values`.
    V,
}

/// Rows of all KV heads of tokens that follow each other.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The first token.
    pub first: u64,
    /// Tokens.
    pub count: usize,
    /// The row of (head, token) starts at `head * strides.head + token * strides.token`.
    pub bytes: &'a [u8],
    /// In bytes.
    pub strides: Strides,
}

/// Writes an empty file whose tensors come piece by piece.
#[derive(Debug)]
pub struct Writer<'a> {
    file: &'a File,
    geometry: Geometry,
    /// Of the whole sequence.
    tokens: u64,
    places: Places,
    header: Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Lays the file out for so many ids and rows of so many tokens; nothing is written yet.
    ///
    /// # Errors
    /// A line: the format has no such type.
    pub fn new(
        file: &'a File, geometry: &Geometry, num_ids: usize, tokens: u64,
    ) -> Result<Self, String> {
        let (header, mut places) = lay_out(geometry, num_ids, tokens)?;
        let header = Header::build(header)?;
        places.payload = header.len() as u64;
        Ok(Writer { file, geometry: *geometry, tokens, places, header })
    }

    /// Writes the header and the ids, as many as it was laid out for; rows come later.
    pub fn begin(&self, token_ids: &[u32]) -> io::Result<()> {
        let ids: Vec<u8> = token_ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        self.file.write_all_at(&self.header, 0)?;
        self.file.write_all_at(&ids, self.places.payload + self.places.token_ids)
    }

    /// Writes some rows of a layer, whose dtype and number of elements are the model's.
    ///
    /// # Panics
    /// If the model has no such layer, or the bytes lack a row.
    pub fn put(&self, layer: Layer, part: Part, run: &Run<'_>) -> io::Result<()> {
        let [k, v] = self.places.layers[layer.0 as usize];
        let (start, row_bytes) = match part {
            Part::K => (k, self.geometry.k_row_bytes()),
            Part::V => (v, self.geometry.v_row_bytes()),
        };
        let bytes = usize::try_from(row_bytes).map_err(io::Error::other)?;
        let mut of_head = Vec::with_capacity(run.count * bytes);
        for head in 0..self.geometry.num_kv_heads() {
            of_head.clear();
            let in_head = head as usize * run.strides.head;
            for token in 0..run.count {
                let at = in_head + token * run.strides.token;
                of_head.extend_from_slice(&run.bytes[at..at + bytes]);
            }
            let row = u64::from(head) * self.tokens + run.first;
            let at = self.places.payload + start + row * row_bytes;
            self.file.write_all_at(&of_head, at)?;
        }
        Ok(())
    }
}

/// Where things begin.
#[derive(Debug)]
struct Places {
    /// In the file; everything else counts from there.
    payload: u64,
    /// K and V.
    layers: Vec<[u64; 2]>,
    token_ids: u64,
}

/// The tensors of a file, one behind the other.
fn lay_out(
    geometry: &Geometry, num_ids: usize, tokens: u64,
) -> Result<(Vec<(String, TensorInfo)>, Places), String> {
    let dtype = match geometry.dtype() {
        Dtype::F16 => TensorDtype::F16,
        Dtype::Bf16 => TensorDtype::BF16,
        Dtype::F32 => TensorDtype::F32,
        Dtype::F8E4m3 => TensorDtype::F8_E4M3,
        other @ (Dtype::Q8_0 | Dtype::Q4_0) => {
            return Err(format!("has rows of {other}, for which safetensors has no type"));
        }
    };
    let tokens = usize::try_from(tokens).map_err(|error| error.to_string())?;
    let (heads, mut end) = (geometry.num_kv_heads() as usize, 0);
    let mut tensors = Vec::new();
    let mut add = |name: String, dtype: TensorDtype, shape: Vec<usize>| {
        let start = end;
        end += shape.iter().product::<usize>() * (dtype.bitsize() / 8);
        tensors.push((name, TensorInfo { dtype, shape, data_offsets: (start, end) }));
        start as u64
    };
    // What needs the widest alignment comes first.
    let token_ids = add(TOKEN_IDS.to_owned(), TensorDtype::I64, vec![1, num_ids]);
    let mut layers = Vec::new();
    for layer in 0..geometry.num_layers() {
        let mut part = |name: &str, dim: u32| {
            add(format!("layers.{layer}.{name}"), dtype, vec![1, heads, tokens, dim as usize])
        };
        let k = part("keys", geometry.head_dim());
        // Without V it is the beginning of K.
        let v = if geometry.v_head_dim() > 0 { part("values", geometry.v_head_dim()) } else { k };
        layers.push([k, v]);
    }
    Ok((tensors, Places { payload: 0, layers, token_ids }))
}
