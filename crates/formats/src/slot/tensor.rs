//! K or V of one layer in a slot file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes before the values of a tensor, in either order.
pub(super) const HEAD_BYTES: u64 = 12;

/// How the values of a tensor stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// `[cells, kv_heads, head_dim]`
    Rows { bytes: u64 },
    /// `[kv_heads, head_dim, cells]`: V of an engine without flash attention.
    Columns { element_bytes: u32, elements: u32 },
}

/// K or V of one layer, in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub(super) kind: i32,
    pub(super) order: Order,
    pub(super) offset: u64,
}

impl Tensor {
    /// Bytes of one token.
    pub(super) fn row_bytes(&self) -> u64 {
        match self.order {
            Order::Rows { bytes } => bytes,
            Order::Columns { element_bytes, elements } => {
                u64::from(element_bytes) * u64::from(elements)
            }
        }
    }

    /// Rows of `count` of the file's `cells`, from `first` on, each of [`Tensor::row_bytes`].
    pub(super) fn rows(
        &self, file: &File, cells: u32, first: u32, count: u32,
    ) -> io::Result<Vec<u8>> {
        let row_bytes = usize::try_from(self.row_bytes()).map_err(io::Error::other)?;
        let mut rows = vec![0; row_bytes * count as usize];
        match self.order {
            Order::Rows { bytes } => {
                file.read_exact_at(&mut rows, self.offset + u64::from(first) * bytes)?;
            }
            Order::Columns { element_bytes, elements } => {
                let size = element_bytes as usize;
                let mut column = vec![0; size * count as usize];
                for element in 0..elements as usize {
                    let cell = element as u64 * u64::from(cells) + u64::from(first);
                    file.read_exact_at(&mut column, self.offset + cell * size as u64)?;
                    let values = column.chunks_exact(size);
                    for (row, value) in rows.chunks_exact_mut(row_bytes).zip(values) {
                        row[element * size..][..size].copy_from_slice(value);
                    }
                }
            }
        }
        Ok(rows)
    }
}
