//! The states of recurrent layers in a slot file.
//!
//! `llama_memory_recurrent::state_write` gives them, for a sequence (read in the sources of `@node-llama-cpp` 3.22.1):
//!
//! ```text
//! u32 cells (1), i32 position of the last token, u32 sequences (0: whoever reads it names one)
//! u32 whether S is transposed (0), u32 layers, those that are not recurrent too
//! per recurrent layer: i32 type, u64 bytes, R: what its convolution has seen
//! per recurrent layer: i32 type, u64 bytes (0 where the layer is nothing but a convolution), S
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::caches::Caches;
use super::read::{Fault, Reader};
use crate::types;
use kvfs_page::limits::index;
use kvfs_page::{Layer, StateShape};

/// R or S of a layer, in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tensor {
    kind: i32,
    bytes: u64,
    offset: u64,
}

/// The states of a sequence, as far as they were found.
#[derive(Debug)]
pub(super) struct Recurrent {
    /// Tokens that they have seen.
    pub(super) tokens: u32,
    /// 1, or 0 where the sequence has no tokens: then there are heads of tensors, and nothing behind them.
    cells: u32,
    layers: u32,
    /// Of each recurrent layer.
    r: Vec<Tensor>,
    s: Vec<Tensor>,
}

impl Recurrent {
    /// Reads what stands before the tensors.
    pub(super) fn read_cell(reader: &mut Reader) -> Result<Self, Fault> {
        let cells = reader.u32()?;
        if cells > 1 {
            return Err(format!("says that it has {cells} cells of recurrent layers").into());
        }
        let mut tokens = 0;
        if cells == 1 {
            let (position, sequences) = (reader.i32()?, reader.u32()?);
            if sequences != 0 {
                return Err("has states of no one sequence".to_owned().into());
            }
            let after = u32::try_from(position).ok().and_then(|position| position.checked_add(1));
            tokens = after.ok_or_else(|| format!("has states after position {position}"))?;
        }
        let (is_transposed, layers) = (reader.u32()?, reader.u32()?);
        if is_transposed != 0 {
            return Err("has states in another order than those that are known".to_owned().into());
        }
        Ok(Self { tokens, cells, layers, r: Vec::new(), s: Vec::new() })
    }

    /// Reads the tensors of so many layers.
    pub(super) fn read_tensors(&mut self, reader: &mut Reader, layers: usize) -> Result<(), Fault> {
        for tensors in [&mut self.r, &mut self.s] {
            for _ in 0..layers {
                let (kind, bytes) = (reader.i32()?, reader.u64()?);
                let offset = reader.offset();
                tensors.push(Tensor { kind, bytes, offset });
                reader.skip(bytes * u64::from(self.cells))?;
            }
        }
        Ok(())
    }

    /// Compares them with the manifest.
    pub(super) fn check(&self, caches: &Caches, layers: u32) -> Result<(), String> {
        if self.layers != layers {
            return Err(format!("has states of {} layers, the manifest {layers}", self.layers));
        }
        for (tensors, part) in [(&self.r, 0), (&self.s, 1)] {
            for (tensor, (layer, shape)) in tensors.iter().zip(&caches.states) {
                let (kind, bytes) = tensor_of(shape, part);
                let name = ["R", "S"][part];
                if tensor.bytes != bytes {
                    let found = tensor.bytes;
                    return Err(format!(
                        "layer {layer} has {name} of {found} bytes, the manifest's state {bytes}"
                    ));
                }
                if bytes > 0 && tensor.kind != kind {
                    let found = tensor.kind;
                    return Err(format!(
                        "layer {layer} has {name} of ggml type {found}, the manifest's state {kind}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// The tensors of the recurrent layer of this number among them, one behind the other.
    pub(super) fn state(&self, file: &File, number: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for tensor in [self.r[number], self.s[number]] {
            let begin = bytes.len();
            bytes.resize(begin + index(tensor.bytes), 0);
            file.read_exact_at(&mut bytes[begin..], tensor.offset)?;
        }
        Ok(bytes)
    }
}

/// The number of the type in ggml, and the bytes, of R (0) or S (1) of a state.
pub(super) fn tensor_of(shape: &StateShape, part: usize) -> (i32, u64) {
    let kind = |dtype| types::of_dtype(dtype).unwrap_or(types::F32);
    match shape.state.get(part) {
        Some(tensor) => (kind(tensor.dtype), tensor.bytes().unwrap_or(0)),
        // The engine has a tensor without elements there, of the type of the other.
        None => (shape.state.first().map_or(types::F32, |first| kind(first.dtype)), 0),
    }
}

/// What stands before the tensors.
pub(super) fn head(tokens: u32, layers: u32) -> [u32; 5] {
    [1, tokens.saturating_sub(1), 0, 0, layers]
}

/// The number of a layer among those that are recurrent.
pub(super) fn number_of(caches: &Caches, layer: Layer) -> Option<usize> {
    caches.states.iter().position(|(found, _)| *found == layer)
}
