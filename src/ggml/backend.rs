//! One context's stream of operations.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::abi::{
    Backend, Device, FLAG_COMPUTE, Graph, Registration, STATUS_FAILED, STATUS_SUCCESS,
};
use super::attend::{FlashAttention, Runtimes};
use super::rows::SetRows;
use super::tensor::TensorView;
use super::{buffer, guard, plugin, say};

const NAME: &CStr = c"KVFS";
/// "kvfs" and nothing that another backend has.
static GUID: [u8; 16] = *b"kvfs kv cache 01";

/// Rows of so many tensors are stored before the first attention only if attention runs elsewhere:
/// a layer has two.
const ROWS_WITHOUT_ATTENTION_MAX: u64 = 2;

/// Attention operations that ran here, in this process.
static ATTENDED: AtomicU64 = AtomicU64::new(0);
/// Rows operations.
static STORED: AtomicU64 = AtomicU64::new(0);

/// What belongs to one backend.
struct Stream {
    runtimes: Mutex<Runtimes>,
    stored: AtomicU64,
    attended: AtomicU64,
    warned: AtomicBool,
}

/// # Safety
/// For the engine, with this backend's device.
pub(super) unsafe extern "C" fn create(_: *mut Device, _: *const c_char) -> *mut Backend {
    guard(ptr::null_mut(), || {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let stream = Stream {
            runtimes: Mutex::new(Runtimes::new(threads)),
            stored: AtomicU64::new(0),
            attended: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        };
        let backend = Backend {
            guid: &raw const GUID,
            get_name: name,
            free,
            asynchronous: [ptr::null(); 10],
            graph_compute: compute,
            optional: [ptr::null(); 3],
            device: plugin().tables.device(),
            context: Box::into_raw(Box::new(stream)).cast(),
        };
        Box::into_raw(Box::new(backend))
    })
}

/// # Safety
/// `name` is a string.
pub(super) unsafe extern "C" fn function(
    _: *mut Registration, name: *const c_char,
) -> *const c_void {
    // SAFETY: the caller's.
    let name = unsafe { CStr::from_ptr(name) };
    match name.to_bytes() {
        b"ggml_backend_set_n_threads" => set_threads as *const c_void,
        b"kvfs_attention_count" => attention_count as *const c_void,
        b"kvfs_rows_count" => rows_count as *const c_void,
        _ => ptr::null(),
    }
}

/// Attention operations that ran here: layers times steps.
extern "C" fn attention_count() -> u64 {
    ATTENDED.load(Ordering::Relaxed)
}

/// Operations that stored rows here: K and V of each layer and step.
extern "C" fn rows_count() -> u64 {
    STORED.load(Ordering::Relaxed)
}

unsafe extern "C" fn name(_: *mut Backend) -> *const c_char {
    NAME.as_ptr()
}

/// # Safety
/// A backend that `create` made.
unsafe fn stream<'a>(backend: *mut Backend) -> &'a Stream {
    // SAFETY: the caller's.
    let context = unsafe { (*backend).context };
    // SAFETY: the context of such a backend is a box of this.
    unsafe { &*context.cast::<Stream>() }
}

/// # Safety
/// As [`stream`].
unsafe extern "C" fn set_threads(backend: *mut Backend, threads: c_int) {
    guard((), || {
        // SAFETY: the caller's.
        let stream = unsafe { stream(backend) };
        let mut runtimes = stream.runtimes.lock().unwrap_or_else(PoisonError::into_inner);
        runtimes.set_threads(usize::try_from(threads).unwrap_or(1));
    });
}

/// # Safety
/// As [`stream`], and nobody uses it any more.
unsafe extern "C" fn free(backend: *mut Backend) {
    // SAFETY: `create` made it from a box.
    let backend = unsafe { Box::from_raw(backend) };
    // SAFETY: the context of such a backend is a box of this.
    let stream = unsafe { Box::from_raw(backend.context.cast::<Stream>()) };
    guard((), || {
        let attended = stream.attended.load(Ordering::Relaxed);
        if attended > 0 {
            let stored = stream.stored.load(Ordering::Relaxed);
            say(&format!("attention ran here {attended} times, rows were stored {stored} times"));
        }
        drop(stream);
    });
}

/// # Safety
/// As [`stream`], and a graph of the engine, whose tensors have their memory.
unsafe extern "C" fn compute(backend: *mut Backend, graph: *mut Graph) -> c_int {
    guard(STATUS_FAILED, || {
        // SAFETY: the caller's.
        let stream = unsafe { stream(backend) };
        let functions = plugin().engine.functions;
        // SAFETY: the caller's.
        let count = unsafe { (functions.graph_n_nodes)(graph) };
        for index in 0..count {
            // SAFETY: the graph has so many nodes.
            let node = unsafe { (functions.graph_node)(graph, index) };
            // SAFETY: a node is a tensor.
            let Some(node) = (unsafe { TensorView::new(node) }) else { return STATUS_FAILED };
            if let Err(line) = stream.run(node) {
                say(&line);
                return STATUS_FAILED;
            }
        }
        STATUS_SUCCESS
    })
}

impl Stream {
    fn run(&self, node: TensorView<'_>) -> Result<(), String> {
        let (raw, engine) = (node.raw(), &plugin().engine);
        let operations = engine.operations;
        if operations.views.contains(&raw.op) || raw.flags & FLAG_COMPUTE == 0 {
            return Ok(());
        }
        let foreign = || format!("{}: not an operation that was taken", node.name());
        if raw.op == operations.set_rows {
            let rows = SetRows::new(node).ok_or_else(foreign)?;
            // SAFETY: the memory is a cache's; the rows and their numbers lie elsewhere.
            let out = unsafe { node.bytes_mut() }.ok_or_else(foreign)?;
            // SAFETY: rows are only taken for a buffer of this backend.
            unsafe { buffer::touch(node.root().raw().buffer) };
            rows.run(engine.functions.quantize_chunk, out)?;
            self.count_rows();
        } else if raw.op == operations.flash_attention {
            let attention = FlashAttention::new(node).ok_or_else(foreign)?;
            // SAFETY: the engine gives results memory of their own.
            let out = unsafe { node.bytes_mut() }.ok_or_else(foreign)?;
            let mut runtimes = self.runtimes.lock().unwrap_or_else(PoisonError::into_inner);
            attention.run(&mut runtimes, out)?;
            self.attended.fetch_add(1, Ordering::Relaxed);
            ATTENDED.fetch_add(1, Ordering::Relaxed);
        } else {
            return Err(foreign());
        }
        Ok(())
    }

    /// Rows that nobody here attends to are a setting gone wrong, which must not pass in silence.
    fn count_rows(&self) {
        STORED.fetch_add(1, Ordering::Relaxed);
        let stored = self.stored.fetch_add(1, Ordering::Relaxed) + 1;
        if stored > ROWS_WITHOUT_ATTENTION_MAX
            && self.attended.load(Ordering::Relaxed) == 0
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            say(
                "the KV cache is in the mount, but attention runs elsewhere: turn flash attention \
                 on, with K and V of one type (f16, bf16, q8_0, q4_0)",
            );
        }
    }
}
