//! The queries of a call on the device: scaled, in the order of the KV heads, and one rotated copy
//! for each distance by which pages have moved.

use std::f32::consts::LOG2_E;

use super::CudaError;
use super::arguments::Heads;
use super::driver::{Context, DeviceMemory, Pinned, Stream};
use super::kernels::{CommonKernels, QueryMemory, Turns};
use crate::attention::{AttentionError, KvBlock, Options, Pairing, Queries, Shape};

/// Where the queries of a call are, `[num_queries, num_qo_heads, head_dim]`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Given<'a> {
    Host(&'a [f32]),
    /// Its address; whoever gave it has made the stream wait for it.
    Device(u64),
}

/// The queries of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) q: Given<'a>,
    pub(super) positions: &'a [u64],
}

impl<'a> Asked<'a> {
    /// Queries in host memory.
    ///
    /// # Errors
    /// As `Queries::check`.
    pub(super) fn new(queries: &Queries<'a>, shape: Shape) -> Result<Self, AttentionError> {
        queries.check(shape)?;
        Ok(Self { q: Given::Host(queries.q), positions: queries.positions })
    }
}

/// Device memory for the queries of a call.
#[derive(Debug)]
pub(super) struct QueryBuffers {
    pinned: Pinned,
    given: DeviceMemory,
    prepared: DeviceMemory,
    turns_at: usize,
    positions_at: usize,
}

/// The shifts of some blocks, each once, in the order in which their copies lie.
pub(super) fn shifts(
    blocks: &[KvBlock<'_>], options: &Options<'_>,
) -> Result<Vec<i64>, AttentionError> {
    let mut shifts = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        if block.shift != 0 && options.rotation.is_none() {
            let why = format!("shifted by {}, without a rotation", block.shift);
            return Err(AttentionError::Block { index, why });
        }
        if !shifts.contains(&block.shift) {
            shifts.push(block.shift);
        }
    }
    if shifts.is_empty() {
        shifts.push(0);
    }
    Ok(shifts)
}

/// Bytes of the parts of what is uploaded: q, turns, positions.
struct Sizes {
    q: usize,
    turns: usize,
    positions: usize,
    prepared: usize,
}

impl Sizes {
    fn new(shape: Shape, num_queries: usize, copies: usize, pairs: usize) -> Self {
        let q = num_queries * shape.num_qo_heads() * shape.head_dim() * size_of::<f32>();
        let turns = (copies * pairs * 2 * size_of::<f32>()).next_multiple_of(8);
        let positions = num_queries * size_of::<u64>();
        Self { q: q.next_multiple_of(8), turns, positions, prepared: copies * q }
    }

    fn given(&self) -> usize {
        self.q + self.turns + self.positions
    }
}

impl QueryBuffers {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self {
            pinned: Pinned::new(context, "queries", 1)?,
            given: DeviceMemory::new(context, "queries", 1)?,
            prepared: DeviceMemory::new(context, "queries", 1)?,
            turns_at: 0,
            positions_at: 0,
        })
    }

    pub(super) fn memory(&self) -> QueryMemory<'_> {
        let Self { given, prepared, turns_at, positions_at, .. } = self;
        QueryMemory { given, turns_at: *turns_at, positions_at: *positions_at, prepared }
    }

    /// Brings the queries to the device and prepares them there, in the order of `stream`.
    pub(super) fn prepare(
        &mut self, (context, stream): (&Context, &Stream), kernels: &CommonKernels,
        (shape, heads): (Shape, Heads),
        (queries, options, shifts): (&Asked<'_>, &Options<'_>, &[i64]),
    ) -> Result<(), CudaError> {
        let rotation = options.rotation.filter(|_| shifts.iter().any(|shift| *shift != 0));
        let pairs = rotation.map_or(0, crate::attention::Rotation::pairs);
        let sizes = Sizes::new(shape, queries.positions.len(), shifts.len(), pairs);
        self.grow(context, stream, &sizes)?;
        (self.turns_at, self.positions_at) = (sizes.q, sizes.q + sizes.turns);
        let bytes = self.pinned.bytes_mut()?;
        let (q, first) = match queries.q {
            Given::Host(q) => {
                put(&mut bytes[..sizes.q], q.iter().map(|q| q.to_le_bytes()));
                (self.given.address(), 0)
            }
            Given::Device(address) => (address, sizes.q),
        };
        if let Some(rotation) = rotation {
            let turns = shifts.iter().flat_map(|shift| rotation.turns(-shift));
            let turns = turns.flat_map(|(cos, sin)| [cos.to_le_bytes(), sin.to_le_bytes()]);
            put(&mut bytes[self.turns_at..self.positions_at], turns);
        }
        // Far ahead of everything, who sees all of it.
        let position = |position: &u64| if options.causal { *position } else { 1 << 40 };
        let positions = queries.positions.iter().map(|of| position(of).to_le_bytes());
        put(&mut bytes[self.positions_at..], positions);
        stream.upload(&self.pinned, first..sizes.given(), &self.given, first)?;
        let narrow = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let turns = Turns {
            copies: narrow(shifts.len()),
            pairs: narrow(pairs),
            first: narrow(rotation.map_or(0, crate::attention::Rotation::first)),
            is_interleaved: rotation.is_some_and(|r| r.pairing() == Pairing::Interleaved),
        };
        let scale = options.scale(shape);
        let scale = options.soft_cap.map_or(scale * LOG2_E, |cap| scale / cap);
        kernels.prepare(stream, heads, scale, turns, (q, self.memory()))
    }

    fn grow(&mut self, context: &Context, stream: &Stream, sizes: &Sizes) -> Result<(), CudaError> {
        let (given, prepared) = (sizes.given(), sizes.prepared);
        if given <= self.given.bytes() && prepared <= self.prepared.bytes() {
            return Ok(());
        }
        // Kernels may still read the old ones.
        stream.synchronize()?;
        self.pinned = Pinned::new(context, "queries", given)?;
        self.given = DeviceMemory::new(context, "queries", given)?;
        self.prepared = DeviceMemory::new(context, "queries", prepared)?;
        Ok(())
    }
}

fn put<const N: usize>(bytes: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *bytes = value;
    }
}
