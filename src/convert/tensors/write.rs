//! Writing tensors `[1, kv_heads, tokens, head_dim]` of a sequence, page by page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use safetensors::tensor::{Dtype as TensorDtype, TensorInfo};

use super::TOKEN_IDS;
use super::header::Header;
use crate::attention::{Tensor, Values};
use crate::page::{Dtype, Geometry};
use crate::reader::Sequence;

/// Writes the first `tokens` of a sequence and these ids to an empty file.
///
/// # Errors
/// A line, or the end of one about the sequence.
pub(crate) fn write(
    file: &File, sequence: &Sequence, token_ids: &[u32], tokens: u64,
) -> Result<(), String> {
    let geometry = *sequence.manifest().geometry();
    let (header, places) = lay_out(&geometry, token_ids.len(), tokens)?;
    let bytes = Header::build(header)?;
    let payload = bytes.len() as u64;
    let outcome = file.write_all_at(&bytes, 0).and_then(|()| {
        let ids: Vec<u8> = token_ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        file.write_all_at(&ids, payload + places.token_ids)
    });
    outcome.map_err(|error| error.to_string())?;
    let mut stream = sequence.stream(0..tokens).map_err(|error| error.to_string())?;
    while let Some(layer) = stream.layer() {
        let [k, v] = places.layers[layer.0 as usize].map(|at| payload + at);
        let mut first = 0;
        while let Some(run) = stream.next_run().map_err(|error| error.to_string())? {
            for block in run.blocks() {
                let piece = Piece { file, geometry: &geometry, first, count: block.tokens, tokens };
                let outcome =
                    piece.write(block.k, geometry.k_row_bytes(), k).and_then(|()| match block.v {
                        Values::Rows(rows) => piece.write(rows, geometry.v_row_bytes(), v),
                        Values::Latent => Ok(()),
                    });
                outcome.map_err(|error| error.to_string())?;
                first += block.tokens as u64;
            }
        }
    }
    Ok(())
}

/// Where things begin, behind the header.
struct Places {
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
    Ok((tensors, Places { layers, token_ids }))
}

/// Tokens that stand together in a page or a tail.
struct Piece<'a> {
    file: &'a File,
    geometry: &'a Geometry,
    first: u64,
    count: usize,
    /// Of the whole sequence.
    tokens: u64,
}

impl Piece<'_> {
    /// Writes what it has of K or V, which begins at `start`.
    fn write(&self, rows: Tensor<'_>, row_bytes: u64, start: u64) -> io::Result<()> {
        let bytes = usize::try_from(row_bytes).map_err(io::Error::other)?;
        let mut of_head = Vec::with_capacity(self.count * bytes);
        for head in 0..self.geometry.num_kv_heads() {
            of_head.clear();
            let in_head = head as usize * rows.strides.head;
            for token in 0..self.count {
                let at = in_head + token * rows.strides.token;
                of_head.extend_from_slice(&rows.bytes[at..at + bytes]);
            }
            let row = u64::from(head) * self.tokens + self.first;
            self.file.write_all_at(&of_head, start + row * row_bytes)?;
        }
        Ok(())
    }
}
