//! Attention on an NVIDIA GPU, for engines that compute there themselves.

use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::{Mutex, PoisonError};

use super::block::{self, Block};
use super::memory::{Caller, Structure};
use super::options::Options;
use super::status::{Failure, Status, guard};
use crate::attention::Shape;
use crate::cuda::{CudaAttention, CudaError, DeviceQueries, DeviceResult, Settings};

/// The heads of a layer, and what a GPU may use.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CudaConfig {
    /// `sizeof(kvfs_cuda_config)`
    pub size: usize,
    /// As in `kvfs_attention_config`.
    pub num_qo_heads: u32,
    /// As in `kvfs_attention_config`.
    pub num_kv_heads: u32,
    /// Elements of a K row and of a query, at most 256.
    pub head_dim: u32,
    /// Elements of a V row and of an output, at most 256; 0: `head_dim`.
    pub v_head_dim: u32,
    /// Bytes of each of the four pinned buffers that K and V go through, and of the device memory
    /// behind it; 0: 8 MiB.
    pub slot_bytes: usize,
    /// Threads that copy into them, of which the one that calls is one, at most 256; 0: 2.
    pub copy_threads: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: numbers without gaps.
unsafe impl Structure for CudaConfig {
    const NAME: &'static str = "kvfs_cuda_config";
    const REQUIRED_BYTES: usize = offset_of!(Self, slot_bytes);
}

/// Queries and results in device memory, all of f32, and the stream that they belong to. An address is
/// a `CUdeviceptr`, or a pointer of the runtime API as a number.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CudaCall {
    /// `sizeof(kvfs_cuda_call)`
    pub size: usize,
    /// A `CUstream` or `cudaStream_t` of the device, NULL for the default stream. The call comes
    /// after what is in it, and before what is put there later.
    pub stream: *mut c_void,
    /// `[num_queries, num_qo_heads, head_dim]`, already rotated for their positions.
    pub q: u64,
    /// `[num_queries]` in host memory, below 2^63, in any order: they decide what is read.
    pub positions: *const u64,
    /// How many, at most 4096; 0 is fine.
    pub num_queries: u64,
    /// `[num_queries, num_qo_heads, v_head_dim]`: the result, 0 without tokens; 0: partials are
    /// written instead.
    pub out: u64,
    /// `[num_qo_heads]`: logits that take part in the softmax of `out`, without values; 0: none.
    pub sinks: u64,
    /// `[num_queries, num_qo_heads, v_head_dim]`, as in `kvfs_partials`; not looked at if there is
    /// an `out`.
    pub o: u64,
    /// `[num_queries, num_qo_heads]`, as in `kvfs_partials`.
    pub m: u64,
    /// `[num_queries, num_qo_heads]`, as in `kvfs_partials`.
    pub l: u64,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for CudaCall {
    const NAME: &'static str = "kvfs_cuda_call";
    const REQUIRED_BYTES: usize = size_of::<Self>();
}

/// Attention on a GPU for one shape. Several threads may use one; it takes one call after the other.
#[derive(Debug)]
pub struct Cuda {
    inner: Mutex<CudaAttention>,
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        let status = match error {
            CudaError::Attention(error) => return error.into(),
            CudaError::Unavailable(_) | CudaError::Unsupported(_) => Status::Unsupported,
            CudaError::OutOfMemory { .. } => Status::Memory,
            CudaError::Device { .. } => Status::Device,
            CudaError::Read(_) | CudaError::WriteBack { .. } => Status::Page,
        };
        Self::new(status, error.to_string())
    }
}

impl CudaConfig {
    fn create(&self) -> Result<Cuda, Failure> {
        let v_head_dim = if self.v_head_dim == 0 { self.head_dim } else { self.v_head_dim };
        let [num_qo_heads, num_kv_heads, head_dim, v_head_dim] =
            [self.num_qo_heads, self.num_kv_heads, self.head_dim, v_head_dim].map(|n| n as usize);
        let shape = Shape::new(num_qo_heads, num_kv_heads, head_dim, v_head_dim)?;
        if self.reserved != 0 {
            return Err(Failure::argument("kvfs_cuda_config.reserved must be 0"));
        }
        let mut settings = Settings::default();
        if self.slot_bytes != 0 {
            settings.slot_bytes = self.slot_bytes;
        }
        if self.copy_threads != 0 {
            settings.copy_threads = self.copy_threads as usize;
        }
        if settings.copy_threads > crate::attention::THREADS_MAX {
            return Err(Failure::argument(format!("{} copy_threads", settings.copy_threads)));
        }
        Ok(Cuda { inner: Mutex::new(CudaAttention::new(shape, settings)?) })
    }
}

impl Cuda {
    fn run(
        &self, caller: &Caller, call: *const CudaCall, blocks: &[Block], options: *const Options,
    ) -> Result<(), Failure> {
        let mut cuda = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let call = caller.read(call)?;
        let num_queries = usize::try_from(call.num_queries).unwrap_or(usize::MAX);
        let positions = caller.slice(call.positions, num_queries, "positions")?;
        let (blocks, tokens) = block::borrow_all(caller, blocks, cuda.shape())?;
        let options = if options.is_null() { Options::default() } else { caller.read(options)? };
        let selection = options.selection(caller, tokens)?;
        let options = options.borrow(caller, selection.as_ref())?;
        let result = if call.out == 0 {
            DeviceResult::Partials { o: call.o, m: call.m, l: call.l }
        } else {
            DeviceResult::Output { out: call.out, sinks: call.sinks }
        };
        let is_given = |address: u64| address != 0 && address.is_multiple_of(4);
        let is_whole = match result {
            DeviceResult::Partials { o, m, l } => [o, m, l].into_iter().all(is_given),
            DeviceResult::Output { out, sinks } => is_given(out) && sinks.is_multiple_of(4),
        };
        if num_queries > 0 && !(is_whole && is_given(call.q)) {
            let why = "kvfs_cuda_call: q, and out or o, m and l, must be addresses of f32";
            return Err(Failure::argument(why));
        }
        let queries = DeviceQueries { q: call.q, positions };
        // SAFETY: the promises of the header.
        unsafe { cuda.run_on(call.stream, queries, &blocks, &options, result) }?;
        Ok(())
    }
}

/// Creates `*cuda` on the first GPU that the driver shows (`CUDA_VISIBLE_DEVICES` chooses), to be
/// freed with `kvfs_cuda_free`. It works in the primary context of that GPU, as the runtime API does,
/// which becomes the current context of the calling thread in every call.
///
/// `KVFS_STATUS_ARGUMENT` for a shape that cannot be, `KVFS_STATUS_UNSUPPORTED` without a driver or a
/// GPU, or for a shape that there are no kernels for, `KVFS_STATUS_MEMORY` if there is none for the
/// buffers, `KVFS_STATUS_DEVICE` for anything else that the driver refuses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_create(
    config: *const CudaConfig, cuda: *mut *mut Cuda,
) -> Status {
    let call = |caller: &Caller| caller.create(cuda, || caller.read(config)?.create());
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Frees what `kvfs_cuda_create` gave, after the device has done what it was asked for. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_free(cuda: *mut Cuda) {
    let call = |caller: &Caller| caller.take(cuda).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard(call) };
}

/// Attends to `num_blocks` blocks in host memory, in the order of the caller's stream. What no query
/// sees is not brought to the device. `options` may be NULL, as in `kvfs_attention_run`; masks of
/// values and `ALiBi` are `KVFS_STATUS_UNSUPPORTED`.
///
/// It returns when K and V have been copied or are in buffers, so blocks may change then; the result
/// is there for what comes later in the stream. It waits for the device only where calls before it
/// still use the buffers. A kernel that fails is an error of the stream, and of later calls.
///
/// `KVFS_STATUS_ARGUMENT` and `KVFS_STATUS_BLOCK` as `kvfs_attention_run`, the others as
/// `kvfs_cuda_create`; after `KVFS_STATUS_DEVICE` the handle can only be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_run(
    cuda: *const Cuda, call: *const CudaCall, blocks: *const Block, num_blocks: usize,
    options: *const Options,
) -> Status {
    let run = |caller: &Caller| {
        let cuda = caller.handle(cuda, "cuda")?;
        let blocks = caller.read_all(blocks, num_blocks)?;
        cuda.run(caller, call, &blocks, options)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(run) }
}
