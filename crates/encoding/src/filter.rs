//! What is done to the logical bytes of a chunk before zstd sees them.
//!
//! The first 4096 bytes (the header of a page) always stay as they are, and so do the bytes behind
//! the values (its `_pad`) where values are quantised.

use std::ops::Range;

use super::quantise;
use super::shuffle::{shuffle, unshuffle};
use super::{Encoding, Quantisation};
use kvfs_page::Dtype;
use kvfs_page::limits::PAYLOAD_OFFSET;

/// The floats that filters know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float {
    F16,
    Bf16,
    F32,
}

impl Float {
    /// The elements of a page, if they are floats of more than one byte.
    pub(super) fn of(dtype: Dtype) -> Option<Float> {
        match dtype {
            Dtype::F16 => Some(Float::F16),
            Dtype::Bf16 => Some(Float::Bf16),
            Dtype::F32 => Some(Float::F32),
            Dtype::F8E4m3 | Dtype::Q8_0 | Dtype::Q4_0 => None,
        }
    }

    pub(super) fn dtype(self) -> Dtype {
        match self {
            Float::F16 => Dtype::F16,
            Float::Bf16 => Dtype::Bf16,
            Float::F32 => Dtype::F32,
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Float::F16 | Float::Bf16 => 2,
            Float::F32 => 4,
        }
    }
}

/// How the bytes of a blob's chunks were prepared for zstd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filter {
    /// Not at all.
    None,
    /// Shuffled by significance.
    Shuffle(Float),
    /// The logical bytes from 4096 to `values_end` are the values of quantised blocks.
    Quantise { quantisation: Quantisation, float: Float, values_end: u64 },
}

impl Filter {
    /// The encoding of a blob with this filter.
    pub(super) fn encoding(self) -> Encoding {
        match self {
            Filter::None => Encoding::Zstd,
            Filter::Shuffle(_) => Encoding::ZstdShuffled,
            Filter::Quantise { quantisation, .. } => quantisation.encoding(),
        }
    }

    /// Bytes that the logical bytes `chunk` become. The range must begin and end at multiples of
    /// 4096 or at the end of the file, and be no longer than a chunk.
    pub(super) fn filtered_bytes(self, chunk: &Range<u64>) -> usize {
        match self {
            Filter::None | Filter::Shuffle(_) => as_index(chunk.end - chunk.start),
            Filter::Quantise { quantisation, float, values_end } => {
                let values = values_within(chunk, values_end);
                let count = (values.end - values.start) / float.bytes();
                let blocks = count / quantise::BLOCK_VALUES;
                as_index(chunk.end - chunk.start) - values.len()
                    + blocks * quantisation.dtype().block_bytes() as usize
            }
        }
    }

    /// Prepares the logical bytes of a chunk that begins at `start`; `filtered` is as long.
    ///
    /// Quantising is no work for here: it makes a new version, see `page_version`.
    pub(super) fn shuffled(float: Float, start: u64, logical: &[u8], filtered: &mut [u8]) {
        let chunk = start..start + logical.len() as u64;
        let values = values_within(&chunk, chunk.end);
        filtered[..values.start].copy_from_slice(&logical[..values.start]);
        shuffle(float.bytes(), &logical[values.clone()], &mut filtered[values]);
    }

    /// Turns `filtered`, of [`filtered_bytes`](Self::filtered_bytes), back into the logical bytes
    /// `chunk`.
    pub(super) fn undo(self, chunk: &Range<u64>, filtered: &[u8], logical: &mut [u8]) {
        match self {
            Filter::None => logical.copy_from_slice(filtered),
            Filter::Shuffle(float) => {
                let values = values_within(chunk, chunk.end);
                logical[..values.start].copy_from_slice(&filtered[..values.start]);
                unshuffle(float.bytes(), &filtered[values.clone()], &mut logical[values]);
            }
            Filter::Quantise { quantisation, float, values_end } => {
                let values = values_within(chunk, values_end);
                let rest_bytes = logical.len() - values.end;
                let (head, filtered) = filtered.split_at(values.start);
                let (blocks, rest) = filtered.split_at(filtered.len() - rest_bytes);
                logical[..values.start].copy_from_slice(head);
                logical[values.end..].copy_from_slice(rest);
                quantise::dequantise(quantisation, float, blocks, &mut logical[values]);
            }
        }
    }
}

/// The part of `chunk` that lies between the page header and `values_end`, counted from its start.
fn values_within(chunk: &Range<u64>, values_end: u64) -> Range<usize> {
    let end = values_end.clamp(chunk.start, chunk.end);
    let start = PAYLOAD_OFFSET.clamp(chunk.start, end);
    as_index(start - chunk.start)..as_index(end - chunk.start)
}

/// A byte count within one chunk as an index.
pub(super) fn as_index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a chunk is at most 4 MiB, which every usize holds")
}
