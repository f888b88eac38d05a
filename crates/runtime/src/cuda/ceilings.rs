//! What the link and the memory of a GPU give, and what filling the ring costs: what the figures of
//! `kvfs bench attention --cuda` are compared with.

use std::ops::Range;
use std::time::Instant;

use super::driver::{DeviceMemory, Pinned};
use super::on_stream::{DeviceQueries, DeviceResult};
use super::{CudaAttention, CudaError, layout, ring};
use crate::attention::pool::Pool;
use crate::attention::{KvBlock, Options, Queries, Shape};
use crate::reader::Sequence;

/// Bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// From pinned host memory to the device.
    pub upload: f64,
    /// Read and written together, of a copy within the device.
    pub device: f64,
}

impl CudaAttention {
    /// Measures them with copies of so many bytes, which should be far more than any cache: twice as much
    /// of device memory, and as much of pinned memory.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] and [`CudaError::Device`].
    pub fn ceilings(&self, bytes: usize) -> Result<Ceilings, CudaError> {
        let from = Pinned::new(&self.context, "a measurement", bytes)?;
        let [one, other] =
            [(), ()].map(|()| DeviceMemory::new(&self.context, "a measurement", bytes));
        let (one, other) = (one?, other?);
        let upload = || self.copies.upload(&from, 0..bytes, &one, 0);
        let copy = || self.copies.copy(&one, &other, bytes);
        // The first ones make memory present.
        upload()?;
        copy()?;
        Ok(Ceilings { upload: self.rate(bytes, upload)?, device: 2.0 * self.rate(bytes, copy)? })
    }

    #[allow(clippy::cast_precision_loss, reason = "bytes are far below 2^53")]
    fn rate(
        &self, bytes: usize, act: impl Fn() -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        const TIMES: usize = 4;
        self.copies.synchronize()?;
        let start = Instant::now();
        for _ in 0..TIMES {
            act()?;
        }
        self.copies.synchronize()?;
        Ok((TIMES * bytes) as f64 / start.elapsed().as_secs_f64())
    }
}

impl CudaAttention {
    /// Attends `rounds` times to all layers of a sequence with the same queries, which are on the device, as
    /// the results are until the end: what an engine gets that computes there. Returns the results of the
    /// last round, `[layers, num_queries, num_qo_heads, v_head_dim]`, normalised, and the seconds of each
    /// round, without those for memory, which an engine has anyway.
    ///
    /// # Errors
    /// As [`Scan::attend_on`](super::Scan::attend_on).
    pub fn attend_layers(
        &mut self, (sequence, tokens): (&Sequence, Range<u64>), queries: &Queries<'_>,
        options: &Options<'_>, rounds: usize,
    ) -> Result<(Vec<f32>, Vec<f64>), CudaError> {
        queries.check(self.shape())?;
        let result_bytes = queries.positions.len()
            * self.shape().num_qo_heads()
            * self.shape().v_head_dim()
            * size_of::<f32>();
        let engine = self.context.stream()?;
        let bytes: Vec<u8> = queries.q.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut given = Pinned::new(&self.context, "queries", bytes.len())?;
        given.bytes_mut()?[..bytes.len()].copy_from_slice(&bytes);
        let q = DeviceMemory::new(&self.context, "queries", bytes.len())?;
        let layers = sequence.layers().len();
        let results = DeviceMemory::new(&self.context, "results", layers * result_bytes)?;
        let mut back = Pinned::new(&self.context, "results", layers * result_bytes)?;
        engine.upload(&given, 0..bytes.len(), &q, 0)?;
        let asked = DeviceQueries { q: q.address(), positions: queries.positions };
        let round = |cuda: &mut Self| {
            let start = Instant::now();
            let mut scan = cuda.scan(sequence, tokens.clone())?;
            for layer in 0..layers {
                let out = results.address() + (layer * result_bytes) as u64;
                let result = DeviceResult::Output { out, sinks: 0 };
                // SAFETY: the stream is ours; both memories are large enough, and are freed after what
                // is under way is done, below.
                unsafe { scan.attend_on(engine.raw(), asked, options, result) }?;
            }
            drop(scan);
            engine.synchronize()?;
            Ok(start.elapsed().as_secs_f64())
        };
        let times: Result<Vec<f64>, CudaError> = (0..rounds).map(|_| round(self)).collect();
        let outcome = times.and_then(|times| {
            engine.download(&results, 0, &mut back, 0..layers * result_bytes)?;
            let values = back.bytes()?.as_chunks().0.iter();
            Ok((values.map(|value| f32::from_le_bytes(*value)).collect(), times))
        });
        self.launches.computes.synchronize()?;
        engine.synchronize()?;
        outcome
    }
}

/// Seconds that one thread takes to bring blocks into a slot of the ring, and to copy the same bytes
/// with nothing else to do. Needs no GPU.
///
/// # Errors
/// [`CudaError::Unsupported`] for blocks that the kernels do not take or that fit into no slot.
pub fn filling(
    shape: Shape, blocks: &[KvBlock<'_>], slot_bytes: usize,
) -> Result<(f64, f64), CudaError> {
    let pool = Pool::new(1).map_err(|error| CudaError::Unsupported(error.to_string()))?;
    let mut buffer = vec![1_u8; slot_bytes];
    // All blocks in one way, then in the other: what was just read is in the caches.
    let mut filling = 0.0;
    for block in blocks {
        let made = layout::layout(block, shape, 0..block.tokens)?;
        if made.bytes > slot_bytes {
            return Err(CudaError::Unsupported("a page larger than a slot".to_owned()));
        }
        let fitted = [(0, 0..block.tokens, made)];
        let start = Instant::now();
        ring::fill(&pool, &mut buffer, &fitted);
        filling += start.elapsed().as_secs_f64();
    }
    let start = Instant::now();
    for block in blocks {
        let mut at = 0;
        for bytes in [block.k.bytes, block.values().bytes] {
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        }
    }
    Ok((filling, start.elapsed().as_secs_f64()))
}
