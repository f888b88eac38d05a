//! ggml's structures that are the same in all families of its versions, as they lie in memory.
//!
//! Those that differ are in `family`; that these are what they were is for `trial` to show. What the
//! engine has a function for (nodes of a graph, the type of a buffer) is asked for and not declared.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::family::{WORDS_MAX, Word};

/// `GGML_BACKEND_API_VERSION`
pub(super) const API_VERSION: c_int = 2;
/// Dimensions of a tensor.
pub(super) const DIMS: usize = 4;
/// Sources of a tensor.
pub(super) const SOURCES: usize = 10;
/// Room for the parameters of an operation.
pub(super) const PARAMETERS: usize = 16;
/// More operations than any version has.
pub(super) const OPERATIONS_MAX: c_int = 128;
/// The last operation of all families, behind all that are looked for.
pub(super) const OPERATION_LAST: &CStr = c"GLU";
/// `GGML_OP_NONE`: it is the first.
pub(super) const OPERATION_NONE: c_int = 0;
/// `GGML_TENSOR_FLAG_COMPUTE`: nodes without it are left out of a computation.
pub(super) const FLAG_COMPUTE: i32 = 16;
/// `GGML_TENSOR_FLAG_OUTPUT`
pub(super) const FLAG_OUTPUT: i32 = 2;

pub(super) const STATUS_SUCCESS: c_int = 0;
pub(super) const STATUS_FAILED: c_int = -1;
/// `GGML_BACKEND_DEVICE_TYPE_GPU`
pub(super) const DEVICE_TYPE_GPU: c_int = 1;

/// `enum ggml_type`: the numbers are part of the GGUF format.
pub(super) mod types {
    pub(in crate::ggml) const F32: i32 = 0;
    pub(in crate::ggml) const F16: i32 = 1;
    pub(in crate::ggml) const Q4_0: i32 = 2;
    pub(in crate::ggml) const Q8_0: i32 = 8;
    pub(in crate::ggml) const I32: i32 = 26;
    pub(in crate::ggml) const I64: i32 = 27;
    pub(in crate::ggml) const BF16: i32 = 30;
}

/// `struct ggml_tensor`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawTensor {
    pub(super) kind: i32,
    pub(super) buffer: *mut Buffer,
    pub(super) ne: [i64; DIMS],
    pub(super) nb: [usize; DIMS],
    pub(super) op: c_int,
    pub(super) op_params: [i32; PARAMETERS],
    pub(super) flags: i32,
    pub(super) src: [*mut RawTensor; SOURCES],
    pub(super) view_src: *mut RawTensor,
    pub(super) view_offs: usize,
    pub(super) data: *mut c_void,
    pub(super) name: [c_char; 64],
    pub(super) extra: *mut c_void,
    pub(super) padding: [u8; 8],
}

/// `struct ggml_custom_op_params`: what an operation of `GGML_OP_CUSTOM` calls.
#[repr(C)]
pub(super) struct Custom {
    /// Of the destination, the thread, how many threads, and the data.
    pub(super) function: unsafe extern "C" fn(*mut RawTensor, c_int, c_int, *mut c_void),
    pub(super) tasks: c_int,
    pub(super) data: *mut c_void,
}

/// `GGML_N_TASKS_MAX`: as many as there are threads.
pub(super) const TASKS_MAX: c_int = -1;

/// `struct ggml_threadpool_params`, which the engine fills in.
#[repr(C)]
pub(super) struct PoolParameters {
    pub(super) cpu_mask: [bool; 512],
    pub(super) threads: c_int,
    pub(super) priority: c_int,
    pub(super) poll: u32,
    pub(super) strict: bool,
    pub(super) paused: bool,
}

/// `struct ggml_threadpool`, which only the engine looks into.
#[repr(C)]
pub(super) struct ThreadPool {
    opaque: [u8; 0],
}

/// `struct ggml_cgraph`, which only the engine looks into.
#[repr(C)]
pub(super) struct Graph {
    opaque: [u8; 0],
}

/// `struct ggml_backend_buffer`, whose words are those of a family.
#[repr(C)]
pub(super) struct Buffer {
    opaque: [u8; 0],
}

/// `struct ggml_backend_buffer_i`, which is handed over by value. It lies in memory then, and the engine
/// takes as much of it as it knows.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct BufferInterface(pub(super) [Word; WORDS_MAX]);

/// `struct ggml_backend_buffer_type`
#[repr(C)]
pub(super) struct BufferType {
    pub(super) get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char,
    pub(super) alloc_buffer: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
    pub(super) get_alignment: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub(super) get_max_size: *const c_void,
    pub(super) get_alloc_size: unsafe extern "C" fn(*mut BufferType, *const RawTensor) -> usize,
    pub(super) is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
    pub(super) device: *mut Device,
    pub(super) context: *mut c_void,
}

/// `struct ggml_backend`, whose words are those of a family.
#[repr(C)]
pub(super) struct Backend {
    opaque: [u8; 0],
}

/// `struct ggml_init_params`
#[repr(C)]
pub(super) struct InitParameters {
    pub(super) bytes: usize,
    pub(super) memory: *mut c_void,
    pub(super) without_data: bool,
}

/// `struct ggml_context`, which only the engine looks into.
#[repr(C)]
pub(super) struct TensorContext {
    opaque: [u8; 0],
}

/// `struct ggml_backend_device`
#[repr(C)]
pub(super) struct Device {
    pub(super) get_name: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub(super) get_description: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub(super) get_memory: unsafe extern "C" fn(*mut Device, *mut usize, *mut usize),
    pub(super) get_type: unsafe extern "C" fn(*mut Device) -> c_int,
    pub(super) get_props: unsafe extern "C" fn(*mut Device, *mut Properties),
    pub(super) init_backend: unsafe extern "C" fn(*mut Device, *const c_char) -> *mut Backend,
    pub(super) get_buffer_type: unsafe extern "C" fn(*mut Device) -> *mut BufferType,
    pub(super) get_host_buffer_type: *const c_void,
    pub(super) buffer_from_host_ptr: *const c_void,
    pub(super) supports_op: unsafe extern "C" fn(*mut Device, *const RawTensor) -> bool,
    pub(super) supports_buft: unsafe extern "C" fn(*mut Device, *mut BufferType) -> bool,
    /// Operations on weights of others, and events.
    pub(super) optional: [*const c_void; 4],
    pub(super) registration: *mut Registration,
    pub(super) context: *mut c_void,
}

/// `struct ggml_backend_dev_props`
#[repr(C)]
pub(super) struct Properties {
    pub(super) name: *const c_char,
    pub(super) description: *const c_char,
    pub(super) memory_free: usize,
    pub(super) memory_total: usize,
    pub(super) device_type: c_int,
    pub(super) device_id: *const c_char,
    /// Asynchronous, host buffer, buffer from a host pointer, events, mapped weights. The last came with
    /// 0.23; before, it is padding.
    pub(super) capabilities: [bool; 5],
}

/// `struct ggml_backend_reg`
#[repr(C)]
#[derive(Debug)]
pub struct Registration {
    pub(super) api_version: c_int,
    pub(super) get_name: unsafe extern "C" fn(*mut Registration) -> *const c_char,
    pub(super) get_device_count: unsafe extern "C" fn(*mut Registration) -> usize,
    pub(super) get_device: unsafe extern "C" fn(*mut Registration, usize) -> *mut Device,
    pub(super) get_proc_address:
        unsafe extern "C" fn(*mut Registration, *const c_char) -> *const c_void,
    pub(super) context: *mut c_void,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<RawTensor>() == 336 && offset_of!(RawTensor, data) == 248);
    assert!(size_of::<Custom>() == 24 && offset_of!(Custom, data) == 16);
    assert!(size_of::<PoolParameters>() == 528 && offset_of!(PoolParameters, threads) == 512);
    assert!(offset_of!(Device, supports_op) == 72 && offset_of!(Device, registration) == 120);
};
