//! The CUDA driver: a context, its streams and events. The unsafe code of this module tree is in here,
//! but for the launches themselves (`kernels`), which answer for what their arguments point to.
//!
//! The library is found by name when it is first asked for (`libcuda.so.1`), so the program runs
//! where there is none. Everything that belongs to a context makes it current before each call, so
//! that any thread may use it; that takes less than a launch by far.
//!
//! Host memory that the device copies from or to ([`memory`]) waits for the copy before it shows
//! its bytes. What happens among streams is ordered by events; a missing one gives wrong numbers,
//! which is why the tests run all of this under a driver that delays at random.

mod launch;
mod library;
mod memory;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult, CUstreamCaptureStatus};

use super::CudaError;

pub(super) use launch::{Grid, Kernel, Module};
pub(super) use memory::{DeviceMemory, Pinned, Registered};

/// `CU_STREAM_NON_BLOCKING`: no order with the default stream, which somebody else may use.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`, which makes events cheaper.
const EVENT_DISABLE_TIMING: u32 = 2;

/// What the driver answers, as a result.
fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Device { call, why: library::describe(result) })
}

/// What is to be known of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub compute_capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block may have.
    pub shared_bytes_max: u32,
    /// Largest y of a grid.
    pub grid_y_max: u32,
    /// Whether host memory can be registered that may only be read.
    pub registers_read_only: bool,
}

/// The primary context of a device. Clones are of the same.
#[derive(Debug, Clone)]
pub(super) struct Context(Arc<Primary>);

#[derive(Debug)]
struct Primary {
    device: sys::CUdevice,
    context: sys::CUcontext,
    properties: Properties,
}

// SAFETY: a context is current per thread, and may be current in several; the driver's functions
// are thread-safe.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Context {
    /// The device with a number among those that the driver shows; `CUDA_VISIBLE_DEVICES` chooses
    /// them.
    pub(super) fn open(number: u32) -> Result<Self, CudaError> {
        library::load()?;
        let mut device = 0;
        let ordinal = c_int::try_from(number).unwrap_or(c_int::MAX);
        // SAFETY: the driver is initialised, and writes one number.
        let result = unsafe { sys::cuDeviceGet(&raw mut device, ordinal) };
        if result == CUresult::CUDA_ERROR_INVALID_DEVICE {
            let why = format!("the NVIDIA driver shows no GPU with number {number}");
            return Err(CudaError::Unavailable(why));
        }
        check("cuDeviceGet", result)?;
        let properties = properties(device)?;
        if properties.compute_capability < library::COMPUTE_CAPABILITY_MIN {
            let (major, minor) = properties.compute_capability;
            let name = &properties.name;
            return Err(CudaError::Unavailable(format!(
                "{name} has compute capability {major}.{minor}, the kernels need 5.2"
            )));
        }
        let mut context = ptr::null_mut();
        // SAFETY: the device is the driver's, and the context is released when it is dropped.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check("cuDevicePrimaryCtxRetain", result)?;
        Ok(Self(Arc::new(Primary { device, context, properties })))
    }

    pub(super) fn properties(&self) -> &Properties {
        &self.0.properties
    }

    /// Makes it current in this thread.
    fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: it was retained and is not yet released.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    /// Free device memory, in bytes.
    pub(super) fn free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers are there to be written.
        let result = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check("cuMemGetInfo", result)?;
        Ok(free)
    }

    pub(super) fn stream(&self) -> Result<Stream, CudaError> {
        self.bind()?;
        let mut stream = ptr::null_mut();
        // SAFETY: the driver writes one handle, which is destroyed when it is dropped.
        let result = unsafe { sys::cuStreamCreate(&raw mut stream, STREAM_NON_BLOCKING) };
        check("cuStreamCreate", result)?;
        Ok(Stream { context: self.clone(), stream, is_owned: true })
    }

    pub(super) fn event(&self) -> Result<Event, CudaError> {
        self.bind()?;
        let mut event = ptr::null_mut();
        // SAFETY: the driver writes one handle, which is destroyed when it is dropped.
        let result = unsafe { sys::cuEventCreate(&raw mut event, EVENT_DISABLE_TIMING) };
        check("cuEventCreate", result)?;
        Ok(Event { context: self.clone(), event })
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and everything that belongs to it holds a clone.
        let result = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        library::log_failure("cuDevicePrimaryCtxRelease", result);
    }
}

/// The context that is current in this thread; it becomes so again when this is dropped. A program
/// with several devices relies on it.
#[derive(Debug)]
pub struct CurrentContext(Option<sys::CUcontext>);

impl CurrentContext {
    /// Remembers it. Without a driver there is none.
    #[must_use]
    pub fn keep() -> Self {
        if library::load().is_err() {
            return Self(None);
        }
        let mut context = ptr::null_mut();
        // SAFETY: the driver is initialised, and writes one handle.
        let result = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
        library::log_failure("cuCtxGetCurrent", result);
        Self((result == CUresult::CUDA_SUCCESS).then_some(context))
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        let Some(context) = self.0 else { return };
        // SAFETY: it was current in this thread; null is none.
        library::log_failure("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) });
    }
}

fn properties(device: sys::CUdevice) -> Result<Properties, CudaError> {
    let attribute = |attribute: CUdevice_attribute| {
        let mut value: c_int = 0;
        // SAFETY: the device is the driver's, and it writes one number.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
        check("cuDeviceGetAttribute", result)?;
        Ok::<_, CudaError>(u32::try_from(value).unwrap_or(0))
    };
    Ok(Properties {
        name: library::device_name(device)?,
        compute_capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?
            .max(1),
        shared_bytes_max: attribute(
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
        )?,
        grid_y_max: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
        // Older drivers do not know it.
        registers_read_only: attribute(
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
        )
        .is_ok_and(|value| value != 0),
    })
}

/// Work in order.
#[derive(Debug)]
#[allow(clippy::struct_field_names, reason = "the handle has no other name")]
pub(super) struct Stream {
    context: Context,
    stream: sys::CUstream,
    /// Or it is somebody else's, who outlives this.
    is_owned: bool,
}

// SAFETY: the driver's functions are thread-safe.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream of somebody else's; null is the default one.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if what is put there becomes a graph instead of being done: our own
    /// streams would become part of it, and the host could not wait for them.
    ///
    /// # Safety
    /// It must be a stream of the context's device, and outlive this.
    pub(super) unsafe fn of_caller(
        context: &Context, stream: *mut c_void,
    ) -> Result<Self, CudaError> {
        let callers = Self { context: context.clone(), stream: stream.cast(), is_owned: false };
        if library::has_graphs() && callers.is_captured()? {
            let what = "a stream that is captured into a graph, where the host cannot bring pages,";
            return Err(CudaError::Unsupported(what.to_owned()));
        }
        Ok(callers)
    }

    fn is_captured(&self) -> Result<bool, CudaError> {
        self.context.bind()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the handle lives, and the driver writes one number.
        let result = unsafe { sys::cuStreamIsCapturing(self.stream, &raw mut status) };
        // The default stream, while another one is captured.
        if result == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(true);
        }
        check("cuStreamIsCapturing", result)?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The driver's handle.
    pub(super) fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// What comes later here waits for what was in the event's stream when it was last recorded;
    /// for nothing if it never was.
    pub(super) fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: both handles live.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) })
    }

    /// The event happens when everything that is in the stream now has been done.
    pub(super) fn record(&self, event: &Event) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: both handles live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.event, self.stream) })
    }

    /// Copies the beginning of one memory to another, some time from now.
    ///
    /// # Panics
    /// If one of them has fewer bytes.
    pub(super) fn copy(
        &self, from: &DeviceMemory, to: &DeviceMemory, bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(bytes <= from.bytes() && bytes <= to.bytes(), "of both memories");
        if bytes == 0 {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: both hold so many bytes.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, self.stream) };
        check("cuMemcpyDtoDAsync", result)
    }

    /// Waits until everything has been done.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: the handle lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.is_owned {
            return;
        }
        let _ = self.context.bind();
        // SAFETY: the handle lives, and nobody uses it after this.
        let result = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        library::log_failure("cuStreamDestroy", result);
    }
}

/// A place in a stream.
#[derive(Debug)]
pub(super) struct Event {
    context: Context,
    event: sys::CUevent,
}

// SAFETY: the driver's functions are thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Waits until it has happened; at once if it was never recorded.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: the handle lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the handle lives, and nobody uses it after this.
        let result = unsafe { sys::cuEventDestroy_v2(self.event) };
        library::log_failure("cuEventDestroy", result);
    }
}
