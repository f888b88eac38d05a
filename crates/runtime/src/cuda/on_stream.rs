//! Attention in the order of a stream of the caller's, with queries and results in device memory: for
//! engines that compute on the GPU themselves. The host waits only for buffers that calls before this one
//! still use.

use std::ffi::c_void;

use super::driver::Stream;
use super::queries::{Asked, Given, shifts};
use super::{CudaAttention, CudaError};
use crate::attention::{AttentionError, KvBlock, Options};

/// Queries in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DeviceQueries<'a> {
    /// `[num_queries, num_qo_heads, head_dim]` of f32, already rotated for their positions.
    pub q: u64,
    /// `[num_queries]`, in host memory: they decide what is read.
    pub positions: &'a [u64],
}

impl<'a> DeviceQueries<'a> {
    pub(super) fn asked(&self) -> Result<Asked<'a>, AttentionError> {
        if let Some(position) = self.positions.iter().find(|at| i64::try_from(**at).is_err()) {
            return Err(AttentionError::Arguments(format!("a query at position {position}")));
        }
        Ok(Asked { q: Given::Device(self.q), positions: self.positions })
    }
}

/// Where the result goes, in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceResult {
    /// To be merged with others, as [`Partials`](crate::attention::Partials) has them.
    Partials {
        /// `[num_queries, num_qo_heads, v_head_dim]` of f32
        o: u64,
        /// `[num_queries, num_qo_heads]` of f32
        m: u64,
        /// `[num_queries, num_qo_heads]` of f32
        l: u64,
    },
    /// The normalised result.
    Output {
        /// `[num_queries, num_qo_heads, v_head_dim]` of f32
        out: u64,
        /// `[num_qo_heads]` of f32, or 0 for none: logits that take part in the softmax, without
        /// values.
        sinks: u64,
    },
}

impl CudaAttention {
    /// As [`run`](CudaAttention::run), after what is in the caller's stream, and before what comes
    /// there later.
    ///
    /// # Errors
    /// As [`run`](CudaAttention::run), and [`CudaError::Unsupported`] for a stream that is being captured
    /// into a graph. A kernel that fails later is an error of a later call.
    ///
    /// # Safety
    /// `stream` must be a `CUstream` of the device, or null for the default one, and the addresses
    /// those of its memory, as large as said, until the stream has done it.
    pub unsafe fn run_on(
        &mut self, stream: *mut c_void, queries: DeviceQueries<'_>, blocks: &[KvBlock<'_>],
        options: &Options<'_>, result: DeviceResult,
    ) -> Result<(), CudaError> {
        let tokens = self.check(blocks)?;
        let asked = queries.asked()?;
        let shifts = shifts(blocks, options)?;
        // SAFETY: the caller's promise.
        let callers = unsafe { self.after(stream) }?;
        let step = self.launches.begin(&asked, options, tokens, &shifts)?;
        let wanted = super::attention::seen_blocks(step.rules(), blocks, &shifts);
        self.pass(self.shape(), wanted, |cuda| cuda.launches.consume(&step, &mut cuda.ring))?;
        // SAFETY: the caller's promise.
        unsafe { self.launches.deliver(result) }?;
        self.before(&callers)
    }

    /// What is computed from here on comes after what is in a caller's stream now.
    ///
    /// # Safety
    /// It must be a `CUstream` of the device, or null for the default one.
    pub(super) unsafe fn after(&self, stream: *mut c_void) -> Result<Stream, CudaError> {
        // SAFETY: the caller's promise.
        let callers = unsafe { Stream::of_caller(&self.context, stream) }?;
        callers.record(&self.asked)?;
        self.launches.computes.wait(&self.asked)?;
        Ok(callers)
    }

    /// What comes into the caller's stream from here on waits for what is computed until now.
    pub(super) fn before(&self, callers: &Stream) -> Result<(), CudaError> {
        self.launches.computes.record(&self.answered)?;
        callers.wait(&self.answered)
    }
}
