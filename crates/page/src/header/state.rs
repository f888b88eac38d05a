//! The header of a state: that of a page, with the tensors that the manifest lists.

use super::{
    BYTES_DTYPE, METADATA, PAD, Tensor, check_tensor, header_text, json_text, take_metadata,
};
use crate::error::{PageError, quoted};
use crate::layer_kind::StateShape;
use crate::limits::PAYLOAD_OFFSET;
use crate::metadata::Metadata;

/// Reads a header and accepts it only as that of a state of this shape; returns its metadata.
///
/// # Errors
/// As [`PageHeader::parse`](super::PageHeader::parse).
pub(crate) fn parse_state_header(
    first_bytes: &[u8], file_bytes: u64, shape: &StateShape,
) -> Result<Metadata, PageError> {
    let mut header = super::json::parse(json_text(first_bytes, file_bytes)?)?;
    let metadata = take_metadata(&mut header)?;
    let tensors = tensors(shape);
    let is_listed = |name: &str| tensors.iter().any(|expected| expected.name == name);
    if let Some(name) = header.keys().find(|name| !is_listed(name)) {
        return Err(PageError::Shape(format!(
            "tensor {} is unknown: a state holds what the manifest lists, and _pad where the file \
             is to be filled",
            quoted(name)
        )));
    }
    for expected in tensors {
        let Some(entry) = header.remove(expected.name) else {
            return Err(PageError::Shape(format!(
                "tensor {} is missing: the manifest says shape {:?}",
                expected.name, expected.shape
            )));
        };
        check_tensor(entry, &expected)?;
    }
    super::check_file_bytes(file_bytes, shape.file_bytes())?;
    Ok(metadata)
}

/// The 4096 header bytes of a state; equal arguments give equal bytes.
///
/// # Errors
/// [`PageError::Header`] if the metadata does not fit.
pub(crate) fn build_state_header(
    shape: &StateShape, metadata: &Metadata,
) -> Result<Vec<u8>, PageError> {
    header_text(&tensors(shape), metadata)
}

/// The tensors of a state in file order.
fn tensors(shape: &StateShape) -> Vec<Tensor<'_>> {
    let mut at = 0;
    let mut tensors = Vec::new();
    for tensor in &shape.state {
        let end = at + tensor.bytes().unwrap_or(0);
        tensors.push(Tensor {
            name: &tensor.name,
            dtype: tensor.dtype.safetensors_name(),
            shape: tensor.shape.iter().map(|dimension| u64::from(*dimension)).collect(),
            offsets: [at, end],
        });
        at = end;
    }
    let pad_bytes = shape.file_bytes() - PAYLOAD_OFFSET - at;
    if pad_bytes > 0 {
        tensors.push(Tensor {
            name: PAD,
            dtype: BYTES_DTYPE,
            shape: vec![pad_bytes],
            offsets: [at, at + pad_bytes],
        });
    }
    tensors
}

// `METADATA` is no name of a tensor, and neither is `PAD`: names with `_` first are refused.
const _: () = assert!(METADATA.as_bytes()[0] == b'_' && PAD.as_bytes()[0] == b'_');
