//! Partial results in device memory, until the parts of a layer merge into one that goes to the
//! host.
//!
//! Each split of a launch leaves a part. When there is no room for more, they merge into one part
//! of a second memory, and when that is full, back: so any number of tokens takes the same memory,
//! and nothing waits.

use super::CudaError;
use super::arguments::Heads;
use super::driver::{Context, DeviceMemory, Pinned, Stream};
use super::kernels::CommonKernels;
use super::on_stream::DeviceResult;
use crate::attention::{Partials, Shape};

/// Memory for parts: with 40 heads of 128 in a decode step, 1024 of them take 21 MB.
const PARTS_BYTES: usize = 64 << 20;

/// More do not help: a layer of 4 GB leaves 1024 parts in 8 launches.
const PARTS_MAX: usize = 1024;

/// Fewer would merge all the time. A chunk of 512 queries has parts of 11 MB.
const PARTS_MIN: usize = 4;

/// Parts `(o, m, l)` as `crates/runtime/src/attention/state.rs` has them, `[capacity, rows]`.
#[derive(Debug)]
pub(super) struct Parts {
    memory: DeviceMemory,
    capacity: u32,
    rows: u32,
    v_head_dim: u32,
}

impl Parts {
    fn new(context: &Context, heads: Heads) -> Result<Self, CudaError> {
        let rows = heads.num_queries * heads.num_kv_heads * heads.group;
        let part_bytes = rows as usize * (heads.v_head_dim as usize + 2) * size_of::<f32>();
        let capacity = (PARTS_BYTES / part_bytes.max(1)).clamp(PARTS_MIN, PARTS_MAX);
        let memory = DeviceMemory::new(context, "partial results", capacity * part_bytes)?;
        let capacity = u32::try_from(capacity).unwrap_or(1);
        Ok(Self { memory, capacity, rows, v_head_dim: heads.v_head_dim })
    }

    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Rows of a part, and elements of a row.
    pub(super) fn shape(&self) -> (u32, u32) {
        (self.rows, self.v_head_dim)
    }

    /// Where `o`, `m` and `l` of a part lie in the memory, in bytes.
    fn offsets(&self, part: u32) -> (usize, usize, usize) {
        let (capacity, rows) = (self.capacity as usize, self.rows as usize);
        let (dim, part) = (self.v_head_dim as usize, part as usize);
        let float = size_of::<f32>();
        let m = capacity * rows * dim * float;
        let l = m + capacity * rows * float;
        (part * rows * dim * float, m + part * rows * float, l + part * rows * float)
    }

    /// Where they lie on the device.
    pub(super) fn addresses(&self, part: u32) -> (u64, u64, u64) {
        let (o, m, l) = self.offsets(part);
        let start = self.memory.address();
        (start + o as u64, start + m as u64, start + l as u64)
    }
}

/// The parts of one layer.
#[derive(Debug)]
pub(super) struct Gathered {
    heads: Heads,
    parts: Parts,
    used: u32,
    merged: Parts,
    merged_used: u32,
    result: Pinned,
}

impl Gathered {
    pub(super) fn new(context: &Context, heads: Heads) -> Result<Self, CudaError> {
        let parts = Parts::new(context, heads)?;
        let merged = Parts::new(context, heads)?;
        let bytes = parts.memory.bytes() / parts.capacity as usize;
        let result = Pinned::new(context, "partial results", bytes)?;
        Ok(Self { heads, parts, used: 0, merged, merged_used: 0, result })
    }

    pub(super) fn num_queries(&self) -> u32 {
        self.heads.num_queries
    }

    /// Splits that a launch may have.
    pub(super) fn splits_max(&self) -> u32 {
        self.parts.capacity
    }

    /// A layer begins.
    pub(super) fn clear(&mut self) {
        (self.used, self.merged_used) = (0, 0);
    }

    /// Room for so many parts: the first of them.
    pub(super) fn reserve(
        &mut self, kernels: &CommonKernels, stream: &Stream, count: u32,
    ) -> Result<(&Parts, u32), CudaError> {
        assert!(count <= self.parts.capacity, "as many as there is room for");
        if count > self.parts.capacity - self.used {
            self.merge(kernels, stream)?;
        }
        let first = self.used;
        self.used += count;
        Ok((&self.parts, first))
    }

    /// Makes room: everything becomes one part.
    fn merge(&mut self, kernels: &CommonKernels, stream: &Stream) -> Result<(), CudaError> {
        let to = (&self.merged, self.merged_used);
        kernels.merge(stream, self.heads, (&self.parts, self.used), to)?;
        self.used = 0;
        self.merged_used += 1;
        if self.merged_used == self.merged.capacity {
            let from = (&self.merged, self.merged_used);
            kernels.merge(stream, self.heads, from, (&self.parts, 0))?;
            (self.used, self.merged_used) = (1, 0);
        }
        Ok(())
    }

    /// Starts to merge all parts of the layer and to bring the result to the host.
    pub(super) fn begin_result(
        &mut self, kernels: &CommonKernels, stream: &Stream,
    ) -> Result<(), CudaError> {
        // Also without any part: merging none gives the empty part.
        self.merge(kernels, stream)?;
        if self.merged_used > 0 {
            let from = (&self.merged, self.merged_used);
            kernels.merge(stream, self.heads, from, (&self.parts, 0))?;
        }
        let rows = self.parts.rows as usize;
        let (o, m, l) = self.parts.offsets(0);
        let float = size_of::<f32>();
        let o_bytes = rows * self.parts.v_head_dim as usize * float;
        let ml_bytes = rows * float;
        let mut at = 0;
        for (from, bytes) in [(o, o_bytes), (m, ml_bytes), (l, ml_bytes)] {
            stream.download(&self.parts.memory, from, &mut self.result, at..at + bytes)?;
            at += bytes;
        }
        Ok(())
    }

    /// Merges all parts of the layer into memory of a caller's.
    ///
    /// # Safety
    /// As [`CommonKernels::deliver`].
    pub(super) unsafe fn deliver(
        &mut self, kernels: &CommonKernels, stream: &Stream, to: DeviceResult,
    ) -> Result<(), CudaError> {
        if self.merged_used > 0 {
            self.merge(kernels, stream)?;
        }
        let from = if self.merged_used > 0 {
            (&self.merged, self.merged_used)
        } else {
            (&self.parts, self.used)
        };
        // SAFETY: the caller's promise.
        unsafe { kernels.deliver(stream, self.heads, from, to) }
    }

    /// Waits for the result.
    pub(super) fn result(&mut self, shape: Shape) -> Result<Partials, CudaError> {
        let bytes = self.result.bytes()?;
        let mut values = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
        let rows = self.parts.rows as usize;
        let mut take = |count: usize| values.by_ref().take(count).collect::<Vec<_>>();
        let (o, m, l) = (take(rows * shape.v_head_dim()), take(rows), take(rows));
        Ok(Partials::from_parts(shape, o, m, l)?)
    }
}
