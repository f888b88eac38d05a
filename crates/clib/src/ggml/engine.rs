//! The engine that loaded this library: which version it is, and the functions that are called.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::abi::{
    Backend, Buffer, BufferInterface, BufferType, Device, Graph, OPERATIONS_MAX, PoolParameters,
    RawTensor, Registration, ThreadPool, VERSIONS,
};
use super::library::{Library, function_at};

/// Functions of the engine.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub(super) buffer_init:
        unsafe extern "C" fn(*mut BufferType, BufferInterface, *mut c_void, usize) -> *mut Buffer,
    pub(super) buffer_get_type: unsafe extern "C" fn(*mut Buffer) -> *mut BufferType,
    pub(super) buffer_type_is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
    pub(super) nbytes: unsafe extern "C" fn(*const RawTensor) -> usize,
    pub(super) graph_n_nodes: unsafe extern "C" fn(*mut Graph) -> c_int,
    pub(super) graph_node: unsafe extern "C" fn(*mut Graph, c_int) -> *mut RawTensor,
    pub(super) graph_compute: unsafe extern "C" fn(*mut Backend, *mut Graph) -> c_int,
    pub(super) backend_free: unsafe extern "C" fn(*mut Backend),
    pub(super) device_init: unsafe extern "C" fn(*mut Device, *const c_char) -> *mut Backend,
    pub(super) device_supports_op: unsafe extern "C" fn(*mut Device, *const RawTensor) -> bool,
    pub(super) device_supports_buft: unsafe extern "C" fn(*mut Device, *mut BufferType) -> bool,
    pub(super) pool_parameters_init: unsafe extern "C" fn(*mut PoolParameters, c_int),
}

/// Functions of the engine's CPU backend, which its registration gives out.
#[derive(Clone, Copy)]
pub(super) struct CpuFunctions {
    pub(super) set_threads: unsafe extern "C" fn(*mut Backend, c_int),
    pub(super) set_abort: unsafe extern "C" fn(*mut Backend, Option<Abort>, *mut c_void),
    pub(super) set_pool: unsafe extern "C" fn(*mut Backend, *mut ThreadPool),
    pub(super) pool_new: unsafe extern "C" fn(*mut PoolParameters) -> *mut ThreadPool,
    pub(super) pool_free: unsafe extern "C" fn(*mut ThreadPool),
}

/// `ggml_abort_callback`: whether the user wants the computation to end.
pub(super) type Abort = unsafe extern "C" fn(*mut c_void) -> bool;

/// Numbers of the operations that matter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operations {
    pub(super) set_rows: c_int,
    pub(super) flash_attention: c_int,
    pub(super) custom: c_int,
    /// Those that compute nothing.
    pub(super) views: [c_int; 5],
}

/// What is known of the engine.
pub(super) struct Engine {
    pub(super) functions: Functions,
    pub(super) operations: Operations,
    pub(super) cpu_functions: CpuFunctions,
    pub(super) cpu_device: *mut Device,
}

// SAFETY: the device is one that the engine has for as long as it runs, for all threads.
unsafe impl Send for Engine {}
// SAFETY: the same.
unsafe impl Sync for Engine {}

impl Engine {
    /// Finds the engine in this process.
    ///
    /// # Errors
    /// A line that says why this is no engine to work with.
    pub(super) fn find() -> Result<Self, String> {
        let base = Library::find("libggml-base.");
        check_version(&base)?;
        let functions = functions(&base)?;
        check_layout(&base, &functions)?;
        let operations = operations(&base)?;
        let registration: unsafe extern "C" fn() -> *mut Registration =
            // SAFETY: as the header of this version says.
            unsafe { Library::find("libggml-cpu").function(c"ggml_backend_cpu_reg") }?;
        // SAFETY: it takes nothing.
        let registration = unsafe { registration() };
        let device: unsafe extern "C" fn(*mut Registration, usize) -> *mut Device =
            // SAFETY: as above.
            unsafe { base.function(c"ggml_backend_reg_dev_get") }?;
        // SAFETY: the registration is the engine's, and has one device.
        let cpu_device = unsafe { device(registration, 0) };
        let cpu_functions = cpu_functions(&base, registration)?;
        Ok(Self { functions, operations, cpu_functions, cpu_device })
    }
}

fn check_version(base: &Library) -> Result<(), String> {
    let version: unsafe extern "C" fn() -> *const c_char =
        // SAFETY: every version that has it has it like this.
        unsafe { base.function(c"ggml_version") }?;
    // SAFETY: it takes nothing and returns a string that stays.
    let version = unsafe { version() };
    // SAFETY: as above.
    let version = unsafe { CStr::from_ptr(version) }.to_string_lossy();
    if VERSIONS.contains(&version.as_ref()) {
        return Ok(());
    }
    Err(format!(
        "the engine has ggml {version}; this kvfs knows {}: use one of them, or another kvfs",
        VERSIONS.join(" and ")
    ))
}

fn functions(base: &Library) -> Result<Functions, String> {
    /// The function of a header that each version let in has.
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the type is that of the header.
            unsafe { base.function($name) }?
        };
    }
    Ok(Functions {
        buffer_init: function!(c"ggml_backend_buffer_init"),
        buffer_get_type: function!(c"ggml_backend_buffer_get_type"),
        buffer_type_is_host: function!(c"ggml_backend_buft_is_host"),
        nbytes: function!(c"ggml_nbytes"),
        graph_n_nodes: function!(c"ggml_graph_n_nodes"),
        graph_node: function!(c"ggml_graph_node"),
        graph_compute: function!(c"ggml_backend_graph_compute"),
        backend_free: function!(c"ggml_backend_free"),
        device_init: function!(c"ggml_backend_dev_init"),
        device_supports_op: function!(c"ggml_backend_dev_supports_op"),
        device_supports_buft: function!(c"ggml_backend_dev_supports_buft"),
        pool_parameters_init: function!(c"ggml_threadpool_params_init"),
    })
}

fn cpu_functions(base: &Library, cpu: *mut Registration) -> Result<CpuFunctions, String> {
    let address: unsafe extern "C" fn(*mut Registration, *const c_char) -> *const c_void =
        // SAFETY: the type is that of the header.
        unsafe { base.function(c"ggml_backend_reg_get_proc_address") }?;
    macro_rules! function {
        ($name:literal) => {{
            // SAFETY: the registration is the engine's, the name a string.
            let found = unsafe { address(cpu, $name.as_ptr()) };
            // SAFETY: the type is that of the header.
            unsafe { function_at(found, $name) }?
        }};
    }
    Ok(CpuFunctions {
        set_threads: function!(c"ggml_backend_set_n_threads"),
        set_abort: function!(c"ggml_backend_set_abort_callback"),
        set_pool: function!(c"ggml_backend_cpu_set_threadpool"),
        pool_new: function!(c"ggml_threadpool_new"),
        pool_free: function!(c"ggml_threadpool_free"),
    })
}

/// Looks whether a buffer of the engine's own has its fields where they are expected: the version
/// number of a development build says little.
fn check_layout(base: &Library, functions: &Functions) -> Result<(), String> {
    const BYTES: usize = 4096;
    let cpu: unsafe extern "C" fn() -> *mut BufferType =
        // SAFETY: the type is that of the header.
        unsafe { base.function(c"ggml_backend_cpu_buffer_type") }?;
    let allocate: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer =
        // SAFETY: as above.
        unsafe { base.function(c"ggml_backend_buft_alloc_buffer") }?;
    let free: unsafe extern "C" fn(*mut Buffer) =
        // SAFETY: as above.
        unsafe { base.function(c"ggml_backend_buffer_free") }?;
    // SAFETY: it takes nothing.
    let kind = unsafe { cpu() };
    // SAFETY: the type is the engine's.
    let buffer = unsafe { allocate(kind, BYTES) };
    if buffer.is_null() {
        return Err("the engine has no memory".to_owned());
    }
    // SAFETY: a buffer is at least as large in every version: the smallest has two pointers less,
    // and the engine's allocator rounds up.
    let found = unsafe { (*buffer).kind };
    // SAFETY: the same.
    let size = unsafe { (*buffer).size };
    // SAFETY: the same type, which has a function for this.
    let host = unsafe { (functions.buffer_type_is_host)(kind) };
    // SAFETY: the buffer is not used any more.
    unsafe { free(buffer) };
    if found == kind && (BYTES..BYTES + 4096).contains(&size) && host {
        return Ok(());
    }
    Err("the engine's tables are not those of its version of ggml: use a release".to_owned())
}

fn operations(base: &Library) -> Result<Operations, String> {
    let name: unsafe extern "C" fn(c_int) -> *const c_char =
        // SAFETY: the type is that of the header.
        unsafe { base.function(c"ggml_op_name") }?;
    let find = |wanted: &CStr| {
        let matches = |op: &c_int| {
            // SAFETY: every version that is let in has each of the operations that are looked for,
            // so the search ends before its table does.
            let name = unsafe { name(*op) };
            // SAFETY: a name is a string that stays.
            unsafe { CStr::from_ptr(name) == wanted }
        };
        let missing = || format!("the engine has no operation {}", wanted.to_string_lossy());
        (0..OPERATIONS_MAX).find(matches).ok_or_else(missing)
    };
    Ok(Operations {
        set_rows: find(c"SET_ROWS")?,
        flash_attention: find(c"FLASH_ATTN_EXT")?,
        custom: find(c"CUSTOM")?,
        views: [
            find(c"NONE")?,
            find(c"VIEW")?,
            find(c"RESHAPE")?,
            find(c"PERMUTE")?,
            find(c"TRANSPOSE")?,
        ],
    })
}
