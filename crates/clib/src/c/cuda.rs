//! Attention on an NVIDIA GPU, for engines that compute there themselves.

use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::block::{self, Block};
use super::memory::{Caller, Structure};
use super::options::Options;
use super::status::{Failure, Status, guard};
use crate::attention::Shape;
use crate::cuda::{
    CudaAttention, CudaError, CurrentContext, DeviceQueries, DeviceResult, Settings,
};

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
    /// Which of the GPUs that the driver shows (`CUDA_VISIBLE_DEVICES` chooses them), from 0 on.
    pub device: u32,
    /// Bytes of device memory in which the last pages of each layer of a sequence stay between scans, or
    /// as many as there is memory for; 0: none stay.
    pub hot_bytes: u64,
    /// Bytes of a sequence's mapped pages that the device may read where they are, if the system allows
    /// it; 0: 256 GiB.
    pub registered_bytes: u64,
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

/// Attention on a GPU for one shape. Several threads may use one; it takes one call after the other, and
/// one scan at a time.
#[derive(Debug)]
pub struct Cuda {
    home: Arc<Home>,
}

/// Where the attention is while no scan has it.
#[derive(Debug)]
pub(super) struct Home(Mutex<Option<Box<CudaAttention>>>);

impl Home {
    fn lock(&self) -> MutexGuard<'_, Option<Box<CudaAttention>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A scan is over.
    pub(super) fn put_back(&self, attention: Box<CudaAttention>) {
        *self.lock() = Some(attention);
    }
}

fn busy() -> Failure {
    Failure::argument("a scan has the kvfs_cuda: free it before, or use another one")
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        let status = match error {
            CudaError::Attention(error) => return error.into(),
            CudaError::Unavailable(_) | CudaError::Unsupported(_) => Status::Unsupported,
            CudaError::OutOfMemory { .. } => Status::Memory,
            CudaError::Device { .. } => Status::Device,
            CudaError::Read(error) => return error.into(),
            CudaError::WriteBack { .. } => Status::File,
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
        let mut settings =
            Settings { device: self.device, hot_bytes: self.hot_bytes, ..Settings::default() };
        if self.registered_bytes != 0 {
            settings.registered_bytes = self.registered_bytes;
        }
        if self.slot_bytes != 0 {
            settings.slot_bytes = self.slot_bytes;
        }
        if self.copy_threads != 0 {
            settings.copy_threads = self.copy_threads as usize;
        }
        if settings.copy_threads > crate::attention::THREADS_MAX {
            return Err(Failure::argument(format!("{} copy_threads", settings.copy_threads)));
        }
        let attention = Box::new(CudaAttention::new(shape, settings)?);
        Ok(Cuda { home: Arc::new(Home(Mutex::new(Some(attention)))) })
    }
}

impl CudaCall {
    /// Queries, and where the result goes.
    pub(super) fn borrow<'a>(
        &self, caller: &'a Caller,
    ) -> Result<(DeviceQueries<'a>, DeviceResult), Failure> {
        let num_queries = usize::try_from(self.num_queries).unwrap_or(usize::MAX);
        let positions = caller.slice(self.positions, num_queries, "positions")?;
        let result = if self.out == 0 {
            DeviceResult::Partials { o: self.o, m: self.m, l: self.l }
        } else {
            DeviceResult::Output { out: self.out, sinks: self.sinks }
        };
        let is_given = |address: u64| address != 0 && address.is_multiple_of(4);
        let is_whole = match result {
            DeviceResult::Partials { o, m, l } => [o, m, l].into_iter().all(is_given),
            DeviceResult::Output { out, sinks } => is_given(out) && sinks.is_multiple_of(4),
        };
        if num_queries > 0 && !(is_whole && is_given(self.q)) {
            let why = "kvfs_cuda_call: q, and out or o, m and l, must be addresses of f32";
            return Err(Failure::argument(why));
        }
        Ok((DeviceQueries { q: self.q, positions }, result))
    }
}

impl Cuda {
    /// For a scan, which puts it back.
    pub(super) fn take(&self) -> Result<(Box<CudaAttention>, Arc<Home>), Failure> {
        Ok((self.home.lock().take().ok_or_else(busy)?, Arc::clone(&self.home)))
    }

    /// Does something that is no scan.
    pub(super) fn with<T>(
        &self, act: impl FnOnce(&mut CudaAttention) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        act(self.home.lock().as_mut().ok_or_else(busy)?)
    }

    fn run(
        &self, caller: &Caller, call: *const CudaCall, blocks: &[Block], options: *const Options,
    ) -> Result<(), Failure> {
        self.with(|cuda| {
            let call = caller.read(call)?;
            let (queries, result) = call.borrow(caller)?;
            let (blocks, tokens) = block::borrow_all(caller, blocks, cuda.shape())?;
            let options =
                if options.is_null() { Options::default() } else { caller.read(options)? };
            let selection = options.selection(caller, tokens)?;
            let options = options.borrow(caller, selection.as_ref())?;
            // SAFETY: the promises of the header.
            unsafe { cuda.run_on(call.stream, queries, &blocks, &options, result) }?;
            Ok(())
        })
    }
}

/// As [`guard`], and the context that was current in the calling thread is so again.
///
/// # Safety
/// As [`guard`].
pub(super) unsafe fn guard_context(call: impl FnOnce(&Caller) -> Result<(), Failure>) -> Status {
    let call = |caller: &Caller| {
        let _current = CurrentContext::keep();
        call(caller)
    };
    // SAFETY: the caller's.
    unsafe { guard(call) }
}

/// Creates `*cuda` on a GPU, to be freed with `kvfs_cuda_free`. It works in the primary context of that
/// GPU, as the runtime API does; the context that is current in a calling thread stays so.
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
    unsafe { guard_context(call) }
}

/// Frees what `kvfs_cuda_create` gave, after the device has done what it was asked for; what a scan still
/// has is freed with it. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_free(cuda: *mut Cuda) {
    let call = |caller: &Caller| caller.take(cuda).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard_context(call) };
}

/// Attends to `num_blocks` blocks in host memory, in the order of the caller's stream. What no query
/// sees is not brought to the device. `options` may be NULL, as in `kvfs_attention_run`; masks of
/// values and `ALiBi` are `KVFS_STATUS_UNSUPPORTED`.
///
/// It returns when K and V have been copied or are in buffers, so blocks may change then; the result
/// is there for what comes later in the stream. It waits for the device only where calls before it
/// still use the buffers. A kernel that fails is an error of the stream, and of later calls. A stream
/// that is being captured into a graph is `KVFS_STATUS_UNSUPPORTED`: K and V are brought by the host.
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
    unsafe { guard_context(run) }
}
