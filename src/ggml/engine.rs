//! The engine that loaded this library: which version it is, and the functions that are called.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use super::abi::{Buffer, BufferInterface, BufferType, Graph, OPERATIONS_MAX, RawTensor, VERSIONS};

/// Functions of the engine's `libggml-base`.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub(super) buffer_init:
        unsafe extern "C" fn(*mut BufferType, BufferInterface, *mut c_void, usize) -> *mut Buffer,
    pub(super) buffer_get_type: unsafe extern "C" fn(*mut Buffer) -> *mut BufferType,
    pub(super) buffer_type_is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
    pub(super) graph_n_nodes: unsafe extern "C" fn(*mut Graph) -> c_int,
    pub(super) graph_node: unsafe extern "C" fn(*mut Graph, c_int) -> *mut RawTensor,
    pub(super) quantize_chunk: Quantize,
}

/// `ggml_quantize_chunk`: type, rows, blocks, first element, rows, elements of a row, importance.
pub(super) type Quantize =
    unsafe extern "C" fn(c_int, *const f32, *mut c_void, i64, i64, i64, *const f32) -> usize;

/// Numbers of the operations that matter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operations {
    pub(super) set_rows: c_int,
    pub(super) flash_attention: c_int,
    /// Those that compute nothing.
    pub(super) views: [c_int; 5],
}

/// What is known of the engine.
pub(super) struct Engine {
    pub(super) functions: Functions,
    pub(super) operations: Operations,
}

impl Engine {
    /// Finds the engine in this process.
    ///
    /// # Errors
    /// A line that says why this is no engine to work with.
    pub(super) fn find() -> Result<Self, String> {
        let library = Library::find();
        let version: unsafe extern "C" fn() -> *const c_char = library.symbol(c"ggml_version")?;
        // SAFETY: it takes nothing and returns a string that stays.
        let version = unsafe { version() };
        // SAFETY: as above.
        let version = unsafe { CStr::from_ptr(version) }.to_string_lossy();
        if !VERSIONS.contains(&version.as_ref()) {
            return Err(format!(
                "the engine has ggml {version}; this kvfs knows {}: use one of them, or another kvfs",
                VERSIONS.join(" and ")
            ));
        }
        let functions = Functions {
            buffer_init: library.symbol(c"ggml_backend_buffer_init")?,
            buffer_get_type: library.symbol(c"ggml_backend_buffer_get_type")?,
            buffer_type_is_host: library.symbol(c"ggml_backend_buft_is_host")?,
            graph_n_nodes: library.symbol(c"ggml_graph_n_nodes")?,
            graph_node: library.symbol(c"ggml_graph_node")?,
            quantize_chunk: library.symbol(c"ggml_quantize_chunk")?,
        };
        check_layout(&library, &functions)?;
        Ok(Self { functions, operations: operations(&library)? })
    }
}

/// Looks whether a buffer of the engine's own has its fields where they are expected: the version
/// number of a development build says little.
fn check_layout(library: &Library, functions: &Functions) -> Result<(), String> {
    const BYTES: usize = 4096;
    let cpu: unsafe extern "C" fn() -> *mut BufferType =
        library.symbol(c"ggml_backend_cpu_buffer_type")?;
    let allocate: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer =
        library.symbol(c"ggml_backend_buft_alloc_buffer")?;
    let free: unsafe extern "C" fn(*mut Buffer) = library.symbol(c"ggml_backend_buffer_free")?;
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

fn operations(library: &Library) -> Result<Operations, String> {
    let name: unsafe extern "C" fn(c_int) -> *const c_char = library.symbol(c"ggml_op_name")?;
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
        views: [
            find(c"NONE")?,
            find(c"VIEW")?,
            find(c"RESHAPE")?,
            find(c"PERMUTE")?,
            find(c"TRANSPOSE")?,
        ],
    })
}

/// `libggml-base` as the dynamic linker has it.
struct Library(*mut c_void);

impl Library {
    /// An engine that is itself a plug-in (of Python or Node) has its libraries loaded locally, so
    /// the default search does not see them: the library is looked for by name.
    fn find() -> Self {
        let mut path: Option<PathBuf> = None;
        // SAFETY: the callback gets the address of `path`, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(find_base), (&raw mut path).cast()) };
        let path =
            path.and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        let Some(path) = path else { return Self(libc::RTLD_DEFAULT) };
        // SAFETY: with NOLOAD nothing is loaded, so no code runs; it stays for as long as the
        // engine does.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        Self(if handle.is_null() { libc::RTLD_DEFAULT } else { handle })
    }

    /// A function; `F` is its type.
    fn symbol<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is one of `dlopen` or the default.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            let name = name.to_string_lossy();
            return Err(format!("the engine has no {name}: build it with GGML_BACKEND_DL=ON"));
        }
        // SAFETY: `F` is a pointer to a function of that name's type in every version let in.
        Ok(unsafe { std::mem::transmute_copy(&found) })
    }
}

/// # Safety
/// For `dl_iterate_phdr` alone, with the address of an `Option<PathBuf>`.
unsafe extern "C" fn find_base(
    object: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void,
) -> c_int {
    // SAFETY: the linker gives an object.
    let name = unsafe { (*object).dlpi_name };
    if name.is_null() {
        return 0;
    }
    // SAFETY: the name of an object is a string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let path = PathBuf::from(name.as_ref());
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    if !file.starts_with("libggml-base.so") {
        return 0;
    }
    // SAFETY: the address that the caller gave.
    unsafe { *found.cast::<Option<PathBuf>>() = Some(path) };
    1
}
