//! Memory of the device, and host memory that it copies from and to by itself.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::library::log_failure;
use super::{Context, Event, Stream, check};
use crate::cuda::CudaError;

/// As [`check`], with a variant of its own for a lack of memory.
fn check_memory(
    call: &'static str, result: CUresult, what: &'static str, bytes: usize,
) -> Result<(), CudaError> {
    if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(CudaError::OutOfMemory { what, bytes });
    }
    check(call, result)
}

/// Device memory, aligned to 256 bytes. Nobody has written it.
#[derive(Debug)]
pub(in crate::cuda) struct DeviceMemory {
    context: Context,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    pub(in crate::cuda) fn new(
        context: &Context, what: &'static str, bytes: usize,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        // The driver refuses 0.
        let bytes = bytes.max(1);
        let mut address = 0;
        // SAFETY: the driver writes one address; the memory is freed when it is dropped.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
        check_memory("cuMemAlloc", result, what, bytes)?;
        Ok(Self { context: context.clone(), address, bytes })
    }

    pub(in crate::cuda) fn address(&self) -> u64 {
        self.address
    }

    pub(in crate::cuda) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: it was allocated and is not yet freed. The driver waits for what uses it.
        log_failure("cuMemFree", unsafe { sys::cuMemFree_v2(self.address) });
    }
}

/// Host memory that the device reads and writes by itself.
pub(in crate::cuda) trait HostMemory {
    /// Where it is, and how much. The pointer may be read by the device, written only for
    /// [`Pinned`].
    #[doc(hidden)]
    fn raw(&self) -> (*mut u8, usize);
    /// Happens when the last copy is done.
    #[doc(hidden)]
    fn last_copy(&self) -> &Event;
}

/// Host memory of the driver's. Its bytes are seen and changed only while no copy is under way.
#[derive(Debug)]
pub(in crate::cuda) struct Pinned {
    start: *mut u8,
    bytes: usize,
    last_copy: Event,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Zeroed. It is cached memory, not write-combined, which cannot be read.
    pub(in crate::cuda) fn new(
        context: &Context, what: &'static str, bytes: usize,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        let bytes = bytes.max(1);
        let last_copy = context.event()?;
        let mut start: *mut c_void = ptr::null_mut();
        // SAFETY: the driver writes one address; the memory is freed when it is dropped.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, 0) };
        check_memory("cuMemHostAlloc", result, what, bytes)?;
        let start = start.cast::<u8>();
        // SAFETY: so many bytes were allocated, and any bits are bytes.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { start, bytes, last_copy })
    }

    /// The bytes, once the last copy is done.
    pub(in crate::cuda) fn bytes(&self) -> Result<&[u8], CudaError> {
        self.last_copy.synchronize()?;
        // SAFETY: the memory is initialised and lives as long as this; the device is done with it,
        // and a new copy to it needs it mutable.
        Ok(unsafe { std::slice::from_raw_parts(self.start, self.bytes) })
    }

    /// The bytes, to be changed, once the last copy is done.
    pub(in crate::cuda) fn bytes_mut(&mut self) -> Result<&mut [u8], CudaError> {
        self.last_copy.synchronize()?;
        // SAFETY: as above, and nobody else has it.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) })
    }
}

impl HostMemory for Pinned {
    fn raw(&self) -> (*mut u8, usize) {
        (self.start, self.bytes)
    }

    fn last_copy(&self) -> &Event {
        &self.last_copy
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.last_copy.synchronize().is_err() {
            // The device may still write to it: better lost than given to somebody else.
            return;
        }
        // SAFETY: it was allocated and is not yet freed, and no copy is under way.
        log_failure("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.start.cast()) });
    }
}

/// Memory of somebody else's that may only be read, such as a mapped file.
#[derive(Debug)]
pub(in crate::cuda) struct Registered<T: AsRef<[u8]>> {
    owner: Arc<T>,
    last_copy: Event,
}

impl<T: AsRef<[u8]>> Registered<T> {
    /// The owner's bytes must stay where they are while it lives; they are pinned until this is
    /// dropped.
    pub(in crate::cuda) fn new(context: &Context, owner: Arc<T>) -> Result<Self, CudaError> {
        let last_copy = context.event()?;
        let bytes = (*owner).as_ref();
        let start = bytes.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: the memory lives until it is unregistered, and READ_ONLY says that the device
        // does not write there.
        let result = unsafe {
            sys::cuMemHostRegister_v2(start, bytes.len(), sys::CU_MEMHOSTREGISTER_READ_ONLY)
        };
        check_memory("cuMemHostRegister", result, "registered pages", bytes.len())?;
        Ok(Self { owner, last_copy })
    }

    pub(in crate::cuda) fn owner(&self) -> &Arc<T> {
        &self.owner
    }
}

impl<T: AsRef<[u8]>> HostMemory for Registered<T> {
    fn raw(&self) -> (*mut u8, usize) {
        let bytes = (*self.owner).as_ref();
        (bytes.as_ptr().cast_mut(), bytes.len())
    }

    fn last_copy(&self) -> &Event {
        &self.last_copy
    }
}

impl<T: AsRef<[u8]>> Drop for Registered<T> {
    fn drop(&mut self) {
        // A failure means that the device is lost, and reads no more.
        let _ = self.last_copy.synchronize();
        let start = (*self.owner).as_ref().as_ptr().cast_mut().cast();
        // SAFETY: it was registered, and no copy is under way.
        log_failure("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(start) });
    }
}

impl Stream {
    /// Copies bytes to the device, some time from now.
    ///
    /// # Panics
    /// If either range is not within its memory.
    pub(in crate::cuda) fn upload(
        &self, from: &impl HostMemory, range: Range<usize>, to: &DeviceMemory, at: usize,
    ) -> Result<(), CudaError> {
        let (start, length) = from.raw();
        assert!(range.start <= range.end && range.end <= length, "of the host memory");
        assert!(at <= to.bytes && range.len() <= to.bytes - at, "of the device memory");
        if range.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let source = start.wrapping_add(range.start).cast::<c_void>();
        // SAFETY: both ranges were checked. The host memory is not changed or freed before its
        // event, which is recorded next.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address + at as u64, source, range.len(), self.stream)
        };
        check("cuMemcpyHtoDAsync", result)?;
        self.record(from.last_copy())
    }

    /// Copies bytes from the device, some time from now.
    ///
    /// # Panics
    /// If either range is not within its memory.
    pub(in crate::cuda) fn download(
        &self, from: &DeviceMemory, at: usize, to: &mut Pinned, range: Range<usize>,
    ) -> Result<(), CudaError> {
        assert!(at <= from.bytes && range.len() <= from.bytes - at, "of the device memory");
        // SAFETY: the range was checked, and the driver waits for the copy before memory is freed.
        unsafe { self.download_from(from.address + at as u64, to, range) }
    }

    /// The same from an address.
    ///
    /// # Panics
    /// If the range is not within the host memory.
    ///
    /// # Safety
    /// So many bytes must be there on the device until the copy is done.
    pub(in crate::cuda) unsafe fn download_from(
        &self, address: u64, to: &mut Pinned, range: Range<usize>,
    ) -> Result<(), CudaError> {
        assert!(range.start <= range.end && range.end <= to.bytes, "of the host memory");
        if range.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let target = to.start.wrapping_add(range.start).cast::<c_void>();
        // SAFETY: the range was checked, the rest is the caller's promise. Nobody sees the host
        // memory before its event, which is recorded next.
        let result =
            unsafe { sys::cuMemcpyDtoHAsync_v2(target, address, range.len(), self.stream) };
        check("cuMemcpyDtoHAsync", result)?;
        self.record(&to.last_copy)
    }
}
