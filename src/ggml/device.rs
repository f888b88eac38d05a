//! The registration and its one device, as the engine sees them.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use super::abi::{
    API_VERSION, BufferType, DEVICE_TYPE_GPU, Device, Properties, RawTensor, Registration,
};
use super::attend::FlashAttention;
use super::rows::SetRows;
use super::tensor::TensorView;
use super::{backend, buffer, guard, plugin};

const NAME: &CStr = c"KVFS";
const DEVICE_NAME: &CStr = c"KVFS0";
const DESCRIPTION: &CStr = c"KV cache in a kvfs mount";
/// A device without memory is left out, or divided by. Nobody runs out of this: the files of a
/// cache get their space when they are made.
const MEMORY_BYTES: usize = 1 << 40;

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
    guard(0, || usize::from(plugin().directory.is_some()))
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

/// # Safety
/// `operation` is a tensor of the engine, with all that it points to.
unsafe extern "C" fn supports_operation(_: *mut Device, operation: *const RawTensor) -> bool {
    guard(false, || {
        // SAFETY: the caller's.
        let Some(tensor) = (unsafe { TensorView::new(operation) }) else { return false };
        let operations = plugin().engine.operations;
        let op = tensor.raw().op;
        if op == operations.set_rows {
            SetRows::new(tensor).is_some() && is_in_cache(tensor)
        } else if op == operations.flash_attention {
            FlashAttention::new(tensor).is_some_and(|attention| is_in_cache(attention.k()))
        } else {
            operations.views.contains(&op)
        }
    })
}

/// Whether the memory of a tensor is a buffer of this backend.
fn is_in_cache(tensor: TensorView<'_>) -> bool {
    let buffer = tensor.root().raw().buffer;
    if buffer.is_null() {
        return false;
    }
    let plugin = plugin();
    // SAFETY: a buffer that a tensor has is one of the engine's.
    let kind = unsafe { (plugin.engine.functions.buffer_get_type)(buffer) };
    kind == plugin.tables.buffer_type()
}

/// # Safety
/// `kind` is a buffer type of the engine.
unsafe extern "C" fn supports_buffer_type(_: *mut Device, kind: *mut BufferType) -> bool {
    guard(false, || {
        // SAFETY: the caller's.
        unsafe { (plugin().engine.functions.buffer_type_is_host)(kind) }
    })
}
