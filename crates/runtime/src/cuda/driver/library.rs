//! The driver's library: whether it is there, whether it has what is called here, and its errors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};

use super::check;
use crate::cuda::CudaError;

/// Of the oldest target of the kernels.
pub(super) const COMPUTE_CAPABILITY_MIN: (u32, u32) = (5, 2);

/// CUDA 9.0, the first one that takes the version of the PTX.
const DRIVER_VERSION_MIN: c_int = 9000;

/// What this program calls. The binding panics at the first call of a function that the library
/// lacks, so all of them are looked up before.
const FUNCTIONS: [&str; 35] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuLaunchKernel",
];

/// Finds the driver and initialises it, once; says why there is nothing to attend with.
pub(super) fn load() -> Result<(), CudaError> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    OUTCOME.get_or_init(initialise).clone().map_err(CudaError::Unavailable)
}

/// Whether streams can be captured: since CUDA 10.0. The driver was loaded before.
pub(super) fn has_graphs() -> bool {
    static OUTCOME: OnceLock<bool> = OnceLock::new();
    *OUTCOME.get_or_init(|| {
        // SAFETY: the library is present, and stays open.
        let library = unsafe { sys::culib() };
        // SAFETY: only whether it is there counts; the address is not used.
        unsafe { library.get::<*const c_void>(b"cuStreamIsCapturing") }.is_ok()
    })
}

fn initialise() -> Result<(), String> {
    // SAFETY: the library is opened by its name and closed again; NVIDIA's runs no code then.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver (libcuda.so.1) on this machine".to_owned());
    }
    // SAFETY: it is present, and stays open.
    let library = unsafe { sys::culib() };
    for name in FUNCTIONS {
        // SAFETY: only whether it is there counts; the address is not used.
        let symbol = unsafe { library.get::<*const c_void>(name.as_bytes()) };
        symbol.map_err(|_| format!("the NVIDIA driver is too old: it has no {name}"))?;
    }
    let mut version = 0;
    // SAFETY: it may be called before cuInit, and writes one number.
    let result = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    refuse(result, "cuDriverGetVersion")?;
    if version < DRIVER_VERSION_MIN {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(format!("the NVIDIA driver is of CUDA {major}.{minor}, it takes 9.0"));
    }
    // SAFETY: it takes no flags.
    refuse(unsafe { sys::cuInit(0) }, "cuInit")?;
    let mut count = 0;
    // SAFETY: the driver is initialised, and writes one number.
    refuse(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "cuDeviceGetCount")?;
    if count == 0 { Err("the NVIDIA driver shows no GPU".to_owned()) } else { Ok(()) }
}

fn refuse(result: CUresult, call: &str) -> Result<(), String> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err("the NVIDIA driver shows no GPU".to_owned()),
        other => Err(format!("{call}: {}", describe(other))),
    }
}

/// The driver's name of an error and its explanation.
pub(super) fn describe(result: CUresult) -> String {
    let text = |call: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text: *const c_char = ptr::null();
        // SAFETY: the driver writes one pointer, or nothing.
        let outcome = unsafe { call(result, &raw mut text) };
        if outcome != CUresult::CUDA_SUCCESS || text.is_null() {
            return "unknown".to_owned();
        }
        // SAFETY: it is a string of the driver's, which lives as long as the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    format!("{} ({})", text(sys::cuGetErrorName), text(sys::cuGetErrorString))
}

/// A failure to give something back: it is lost, and nobody can do anything about it.
pub(super) fn log_failure(call: &'static str, result: CUresult) {
    if let Err(error) = check(call, result) {
        log::debug!("{error}");
    }
}

pub(super) fn device_name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut name: [c_char; 128] = [0; 128];
    // SAFETY: the driver writes a string with its 0 into so many bytes.
    let result = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) };
    check("cuDeviceGetName", result)?;
    let bytes = name.map(c_char::cast_unsigned);
    let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy);
    Ok(text.map_or_else(|_| "a device without a name".to_owned(), |text| text.trim().to_owned()))
}
