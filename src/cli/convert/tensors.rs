//! Rows of a sequence as tensors of Hugging Face's shape.

use std::fs::File;

use indicatif::ProgressBar;
use kvfs_formats::tensors::{Part, Run, Writer};

use super::unwritten::Unwritten;
use crate::attention::Values;
use crate::reader::Sequence;

/// Writes the first `tokens` of a sequence and these ids to an empty file.
///
/// # Errors
/// [`Unwritten`].
pub(super) fn write(
    file: &File, sequence: &Sequence, (token_ids, tokens): (&[u32], u64), bar: &ProgressBar,
) -> Result<(), Unwritten> {
    let geometry = sequence.manifest().geometry();
    let writer = Writer::new(file, geometry, token_ids.len(), tokens)?;
    writer.begin(token_ids)?;
    let mut stream = sequence.stream(0..tokens).map_err(|error| error.to_string())?;
    while let Some(layer) = stream.layer() {
        let mut first = 0;
        while let Some(run) = stream.next_run().map_err(|error| error.to_string())? {
            for block in run.blocks() {
                let count = block.tokens;
                let put = |part, bytes, strides| {
                    let rows = Run { first, count, bytes, strides };
                    writer.put(layer, part, &rows)
                };
                put(Part::K, block.k.bytes, block.k.strides)?;
                if let Values::Rows(rows) = block.v {
                    put(Part::V, rows.bytes, rows.strides)?;
                }
                first += count as u64;
                bar.inc(count as u64 * geometry.row_bytes());
            }
        }
    }
    Ok(())
}
