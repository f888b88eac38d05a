//! Rows that are in no page yet.

use std::time::Duration;

use kvfs_page::{Layer, TokenStart};
use kvfs_runtime::reader::{ReadError, Sequence};

use crate::errors::Failure;

/// Before which token the rows of a layer are wanted: those that were asked for, once the layer has them, else all
/// that count.
pub(crate) fn end_of(
    sequence: &mut Sequence, layer: Layer, asked: Option<u64>,
) -> Result<u64, Failure> {
    // Also where nothing is asked for: a wrong layer is told.
    let listed = sequence.layer_tokens(layer)?;
    let Some(end) = asked else {
        // What an encoder gave has no ids.
        let is_cross = sequence.cross_layers().contains(&layer);
        return Ok(if is_cross { listed } else { sequence.valid_tokens()? });
    };
    let reached = sequence.wait_for(layer, end, Duration::ZERO)?;
    if reached < end {
        return Err(ReadError::Missing { layer, start: TokenStart(reached) }.into());
    }
    Ok(end)
}
