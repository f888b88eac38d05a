//! The backend of one context: graphs of the engine, with attention on the runtime.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::abi::{
    Backend, Device, FLAG_COMPUTE, Graph, RawTensor, Registration, STATUS_FAILED, STATUS_SUCCESS,
};
use super::cold::{Faults, Plan, Written};
use super::cpu::Cpu;
use super::engine::Abort;
use super::family::{Table, WORDS_MAX, Word};
use super::job::{Job, chunks_of_stream};
use super::operation::FlashAttention;
use super::replace::Replaced;
use super::ring::{Pass, Ring};
use super::tensor::TensorView;
use super::{buffer, guard, plugin, say};
use crate::reader::limit_bytes;

const NAME: &CStr = c"KVFS";
/// "kvfs" and nothing that another backend has.
static GUID: [u8; 16] = *b"kvfs kv cache 01";

/// Rows of so many tensors are stored before the first attention only if attention runs elsewhere:
/// a layer has two.
const ROWS_WITHOUT_ATTENTION_MAX: u64 = 2;

/// Attention operations that ran here, in this process.
static ATTENDED: AtomicU64 = AtomicU64::new(0);

/// Stretches of cells that had left memory and were read ahead, in this process.
static READ: AtomicU64 = AtomicU64::new(0);

/// A backend: what the engine knows of it, with room for all that a family may have, and what it
/// does not.
#[repr(C)]
struct Own {
    words: [Word; WORDS_MAX],
    context: Context,
}

/// What belongs to one backend.
struct Context {
    cpu: Cpu,
    faults: Mutex<Faults>,
    /// Once it is needed.
    ring: OnceLock<Option<Ring>>,
    threads: AtomicUsize,
    stored: AtomicU64,
    attended: AtomicU64,
    warned: AtomicBool,
}

/// What a graph has for this backend.
#[derive(Default)]
struct Found<'a> {
    /// Operations that the runtime can do, with their nodes.
    attention: Vec<(*mut RawTensor, FlashAttention<'a>)>,
    /// Cells of caches.
    written: Written,
}

/// # Safety
/// For the engine, with this backend's device.
pub(super) unsafe extern "C" fn create(_: *mut Device, _: *const c_char) -> *mut Backend {
    guard(ptr::null_mut(), || {
        let Some(cpu) = Cpu::new(&plugin().engine) else { return ptr::null_mut() };
        let context = Context {
            cpu,
            faults: Mutex::default(),
            ring: OnceLock::new(),
            threads: AtomicUsize::new(1),
            stored: AtomicU64::new(0),
            attended: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        };
        let words = plugin().engine.family.fill(
            Table::Backend,
            &[
                ("guid", (&raw const GUID).cast()),
                ("get_name", name as *const c_void),
                ("free", free as *const c_void),
                ("graph_compute", compute as *const c_void),
                ("device", plugin().tables.device().cast_const().cast()),
            ],
        );
        Box::into_raw(Box::new(Own { words, context })).cast()
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
        b"ggml_backend_set_abort_callback" => set_abort as *const c_void,
        b"kvfs_attention_count" => attention_count as *const c_void,
        b"kvfs_read_ahead_count" => read_ahead_count as *const c_void,
        _ => ptr::null(),
    }
}

/// Attention operations that ran here: layers times steps.
extern "C" fn attention_count() -> u64 {
    ATTENDED.load(Ordering::Relaxed)
}

/// Stretches of cells that had left memory and were read ahead.
extern "C" fn read_ahead_count() -> u64 {
    READ.load(Ordering::Relaxed)
}

unsafe extern "C" fn name(_: *mut Backend) -> *const c_char {
    NAME.as_ptr()
}

/// # Safety
/// A backend that `create` made.
unsafe fn context<'a>(backend: *mut Backend) -> &'a Context {
    // SAFETY: the caller's.
    unsafe { &(*backend.cast::<Own>()).context }
}

/// # Safety
/// As [`context`].
unsafe extern "C" fn set_threads(backend: *mut Backend, threads: c_int) {
    guard((), || {
        // SAFETY: the caller's.
        let context = unsafe { context(backend) };
        context.cpu.set_threads(threads);
        context.threads.store(usize::try_from(threads).unwrap_or(1).max(1), Ordering::Relaxed);
    });
}

/// # Safety
/// As [`context`], and as [`Cpu::set_abort`].
unsafe extern "C" fn set_abort(backend: *mut Backend, abort: Option<Abort>, data: *mut c_void) {
    guard((), || {
        // SAFETY: the caller's.
        let context = unsafe { context(backend) };
        // SAFETY: the caller's.
        unsafe { context.cpu.set_abort(abort, data) };
    });
}

/// # Safety
/// As [`context`], and nobody uses it any more.
unsafe extern "C" fn free(backend: *mut Backend) {
    // SAFETY: `create` made it from a box.
    let own = unsafe { Box::from_raw(backend.cast::<Own>()) };
    guard((), || {
        let Own { context, .. } = *own;
        let attended = context.attended.load(Ordering::Relaxed);
        if attended > 0 {
            let stored = context.stored.load(Ordering::Relaxed);
            say(&format!("attention ran here {attended} times, rows were stored {stored} times"));
        }
        drop(context);
    });
}

/// # Safety
/// As [`context`], and a graph of the engine, whose tensors have their memory.
unsafe extern "C" fn compute(backend: *mut Backend, graph: *mut Graph) -> c_int {
    guard(STATUS_FAILED, || {
        // SAFETY: the caller's.
        let context = unsafe { context(backend) };
        // SAFETY: the caller's.
        unsafe { context.compute(graph) }.unwrap_or_else(|line| {
            say(&line);
            STATUS_FAILED
        })
    })
}

impl Context {
    /// # Safety
    /// A graph of the engine, whose tensors have their memory.
    unsafe fn compute(&self, graph: *mut Graph) -> Result<c_int, String> {
        // SAFETY: the caller's.
        let found = unsafe { self.find(graph) };
        let mut spans = Vec::with_capacity(found.attention.len());
        let mut plan = Plan::default();
        let is_search = self.faults.lock().unwrap_or_else(PoisonError::into_inner).are_many();
        for (_, operation) in &found.attention {
            let uses = chunks_of_stream(operation);
            spans.push(plan.add(operation, uses, &found.written, is_search));
        }
        let pass = self.begin(plan);
        let threads = self.threads.load(Ordering::Relaxed);
        let mut jobs = Vec::with_capacity(spans.len());
        for ((node, operation), spans) in found.attention.into_iter().zip(spans) {
            let spans = spans.filter(|_| pass.is_some());
            jobs.push((node, Box::new(Job::new(operation, threads, spans, pass.as_ref())?)));
        }
        let mut replaced = Replaced::default();
        for (node, job) in &jobs {
            let custom = plugin().engine.operations.custom;
            // SAFETY: the node is the graph's, which is the caller's; `replaced` goes before the jobs.
            unsafe { replaced.replace(*node, custom, job.as_custom()) };
        }
        // SAFETY: the caller's; the jobs are there.
        let status = unsafe { self.cpu.compute(graph) };
        drop(replaced);
        for (_, job) in &jobs {
            if job.is_done()? {
                self.count();
                ATTENDED.fetch_add(1, Ordering::Relaxed);
            } else if status == STATUS_SUCCESS {
                return Err("the engine left out an attention operation".to_owned());
            }
        }
        self.warn();
        Ok(status)
    }

    /// Starts to read what has left memory. Without threads and buffers for that the kernel reads it,
    /// fault by fault.
    fn begin(&self, plan: Plan) -> Option<Pass<'_>> {
        if plan.loads.is_empty() {
            return None;
        }
        let ring = self.ring.get_or_init(|| Ring::new(limit_bytes()).ok()).as_ref()?;
        READ.fetch_add(plan.loads.len() as u64, Ordering::Relaxed);
        Some(ring.begin(plan.loads))
    }

    /// Whoever set this up sees at once that it works.
    fn count(&self) {
        if self.attended.fetch_add(1, Ordering::Relaxed) == 0 {
            let directory = plugin().directory.display();
            say(&format!("attention runs here, over a KV cache in {directory}"));
        }
    }

    /// What a graph has for this backend.
    ///
    /// # Safety
    /// As [`compute`](Self::compute).
    unsafe fn find<'a>(&self, graph: *mut Graph) -> Found<'a> {
        let engine = &plugin().engine;
        let (functions, operations) = (engine.functions, engine.operations);
        let mut found = Found::default();
        // SAFETY: the caller's.
        for index in 0..unsafe { (functions.graph_n_nodes)(graph) } {
            // SAFETY: the graph has so many nodes.
            let node = unsafe { (functions.graph_node)(graph, index) };
            // SAFETY: a node is a tensor.
            let Some(tensor) = (unsafe { TensorView::new(node) }) else { continue };
            let raw = tensor.raw();
            if operations.views.contains(&raw.op) || raw.flags & FLAG_COMPUTE == 0 {
                continue;
            }
            if buffer::touch(tensor) {
                if raw.op == operations.set_rows {
                    self.stored.fetch_add(1, Ordering::Relaxed);
                    found.written.rows(tensor);
                } else {
                    found.written.all(tensor);
                }
            }
            if raw.op == operations.flash_attention
                && let Some(operation) = FlashAttention::new(tensor)
            {
                found.attention.push((node, operation));
            }
        }
        found
    }

    /// Rows that nobody here attends to are a setting gone wrong, which must not pass in silence.
    fn warn(&self) {
        if self.stored.load(Ordering::Relaxed) > ROWS_WITHOUT_ATTENTION_MAX
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
