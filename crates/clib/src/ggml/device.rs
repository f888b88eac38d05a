//! The registration and its one device, as the engine sees them.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::abi::{
    API_VERSION, Buffer, BufferType, DEVICE_TYPE_GPU, Device, Properties, RawTensor, Registration,
    SOURCES,
};
use super::engine::Operations;
use super::tensor::TensorView;
use super::{backend, buffer, guard, plugin};

const NAME: &CStr = c"KVFS";
const DEVICE_NAME: &CStr = c"KVFS0";
const DESCRIPTION: &CStr = c"KV cache in a kvfs mount";
/// A device without memory is left out, or divided by. Nobody runs out of this: the files of a
/// cache get their space when they are made.
const MEMORY_BYTES: usize = 1 << 40;

/// Whether the engine has asked about memory that the CPU cannot reach: then weights are on another
/// device.
static HAS_OTHER_MEMORY: AtomicBool = AtomicBool::new(false);

/// The tables that the engine keeps pointers to.
pub(super) struct Tables {
    registration: *mut Registration,
    device: *mut Device,
    buffer_type: *mut BufferType,
}

// SAFETY: the tables are written before anybody has them and only read after.
unsafe impl Send for Tables {}
// SAFETY: the same.
unsafe impl Sync for Tables {}

impl Tables {
    /// They stay for ever: the engine never says that it has forgotten them.
    pub(super) fn new() -> Self {
        let registration = Box::leak(Box::new(Registration {
            api_version: API_VERSION,
            get_name: registration_name,
            get_device_count: device_count,
            get_device: device_at,
            get_proc_address: backend::function,
            context: ptr::null_mut(),
        }));
        let device = Box::leak(Box::new(Device {
            get_name: name,
            get_description: description,
            get_memory: memory,
            get_type: kind,
            get_props: properties,
            init_backend: backend::create,
            get_buffer_type: buffer_type,
            get_host_buffer_type: ptr::null(),
            buffer_from_host_ptr: ptr::null(),
            supports_op: supports_operation,
            supports_buft: supports_buffer_type,
            optional: [ptr::null(); 4],
            registration,
            context: ptr::null_mut(),
        }));
        let buffer_type = Box::leak(Box::new(buffer::buffer_type(device)));
        Self { registration, device, buffer_type }
    }

    pub(super) fn registration(&self) -> *mut Registration {
        self.registration
    }

    pub(super) fn device(&self) -> *mut Device {
        self.device
    }

    pub(super) fn buffer_type(&self) -> *mut BufferType {
        self.buffer_type
    }
}

unsafe extern "C" fn registration_name(_: *mut Registration) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn device_count(_: *mut Registration) -> usize {
    1
}

unsafe extern "C" fn device_at(_: *mut Registration, _index: usize) -> *mut Device {
    guard(ptr::null_mut(), || plugin().tables.device())
}

unsafe extern "C" fn name(_: *mut Device) -> *const c_char {
    DEVICE_NAME.as_ptr()
}

unsafe extern "C" fn description(_: *mut Device) -> *const c_char {
    DESCRIPTION.as_ptr()
}

/// # Safety
/// As `ggml_backend_dev_memory` says: both point to a number.
unsafe extern "C" fn memory(_: *mut Device, free: *mut usize, total: *mut usize) {
    // SAFETY: the caller's.
    unsafe { free.write(MEMORY_BYTES) };
    // SAFETY: the caller's.
    unsafe { total.write(MEMORY_BYTES) };
}

unsafe extern "C" fn kind(_: *mut Device) -> c_int {
    DEVICE_TYPE_GPU
}

/// # Safety
/// `to` points to the structure.
unsafe extern "C" fn properties(_: *mut Device, to: *mut Properties) {
    let properties = Properties {
        name: DEVICE_NAME.as_ptr(),
        description: DESCRIPTION.as_ptr(),
        memory_free: MEMORY_BYTES,
        memory_total: MEMORY_BYTES,
        device_type: DEVICE_TYPE_GPU,
        device_id: ptr::null(),
        // Weights that stay on the CPU may be mapped.
        capabilities: [false, false, false, false, true],
    };
    // SAFETY: the caller's.
    unsafe { to.write(properties) };
}

unsafe extern "C" fn buffer_type(_: *mut Device) -> *mut BufferType {
    guard(ptr::null_mut(), || plugin().tables.buffer_type())
}

/// What the CPU can do on memory that it can reach; weights stay in buffers of the CPU. Beside another
/// device only what is done to a cache: the rest would take what lies between two layers back and forth.
///
/// # Safety
/// `operation` is a tensor of the engine, with all that it points to.
unsafe extern "C" fn supports_operation(_: *mut Device, operation: *const RawTensor) -> bool {
    guard(false, || {
        // SAFETY: the caller's.
        let Some(tensor) = (unsafe { TensorView::new(operation) }) else { return false };
        let engine = &plugin().engine;
        let Operations { set_rows, flash_attention, views, .. } = engine.operations;
        let op = tensor.raw().op;
        let is_of_cache = op == set_rows || op == flash_attention || views.contains(&op);
        let sources = (0..SOURCES).filter_map(|index| tensor.source(index));
        let within_reach = sources.map(|source| source.root()).all(|source| {
            let buffer = source.raw().buffer;
            // A weight that the engine looks for a place for has a buffer, but no memory in it.
            let is_weight = !is_of_cache && buffer::is_ours(buffer) && source.raw().data.is_null();
            !is_weight && is_within_reach(buffer)
        });
        let is_ours = |index| {
            let source: Option<TensorView<'_>> = tensor.source(index);
            source.is_some_and(|source| buffer::is_ours(source.root().raw().buffer))
        };
        if HAS_OTHER_MEMORY.load(Ordering::Relaxed) && !is_of_cache && !(0..SOURCES).any(is_ours) {
            return false;
        }
        // SAFETY: the caller's.
        within_reach
            && unsafe { (engine.functions.device_supports_op)(engine.cpu_device, operation) }
    })
}

/// Whether the CPU can use a buffer; NULL is one that is yet to be made.
fn is_within_reach(buffer: *mut Buffer) -> bool {
    if buffer.is_null() {
        return true;
    }
    let engine = &plugin().engine;
    // SAFETY: a buffer that a tensor has is one of the engine's.
    let kind = unsafe { (engine.functions.buffer_get_type)(buffer) };
    // SAFETY: the type is the engine's.
    unsafe { (engine.functions.device_supports_buft)(engine.cpu_device, kind) }
}

/// # Safety
/// `kind` is a buffer type of the engine.
unsafe extern "C" fn supports_buffer_type(_: *mut Device, kind: *mut BufferType) -> bool {
    guard(false, || {
        let engine = &plugin().engine;
        // SAFETY: the caller's.
        let is_reached =
            unsafe { (engine.functions.device_supports_buft)(engine.cpu_device, kind) };
        if !is_reached {
            HAS_OTHER_MEMORY.store(true, Ordering::Relaxed);
        }
        is_reached
    })
}
