//! The engine's own CPU backend, an instance with threads of its own.
//!
//! It computes the operations of a graph that are not attention, on the same threads, so that no
//! thread has to wake another between a layer's matrices and its attention: threads of two pools
//! would look for work on the same processors, each taking half of the other's time.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use super::abi::{Backend, Graph, ThreadPool};
use super::engine::{Abort, Engine};

/// An instance of the CPU backend. It goes when dropped.
pub(super) struct Cpu {
    engine: &'static Engine,
    backend: *mut Backend,
    pool: Mutex<Threads>,
}

/// Threads that stay between graphs and look for the next one for a while, as those of
/// `llama-server` do.
struct Threads {
    pool: *mut ThreadPool,
    count: c_int,
}

impl Cpu {
    /// Nothing, if the engine has no memory.
    pub(super) fn new(engine: &'static Engine) -> Option<Self> {
        // SAFETY: the device is the engine's, which takes no parameters.
        let backend = unsafe { (engine.functions.device_init)(engine.cpu_device, ptr::null()) };
        if backend.is_null() {
            return None;
        }
        let pool = Mutex::new(Threads { pool: ptr::null_mut(), count: 0 });
        let cpu = Self { engine, backend, pool };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        cpu.set_threads(c_int::try_from(processors).unwrap_or(1));
        Some(cpu)
    }

    /// Computes with so many threads from now on.
    pub(super) fn set_threads(&self, count: c_int) {
        let (count, functions) = (count.max(1), self.engine.cpu_functions);
        let mut threads = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if count > threads.count {
            let mut parameters = MaybeUninit::uninit();
            // SAFETY: the engine fills the structure in.
            unsafe { (self.engine.functions.pool_parameters_init)(parameters.as_mut_ptr(), count) };
            // SAFETY: it has been filled in. Without memory there is no pool, and each graph makes
            // threads of its own.
            let pool = unsafe { (functions.pool_new)(parameters.as_mut_ptr()) };
            // SAFETY: the backend is one of the CPU.
            unsafe { (functions.set_pool)(self.backend, pool) };
            let old = std::mem::replace(&mut *threads, Threads { pool, count });
            old.free(self.engine);
        }
        // SAFETY: as above.
        unsafe { (functions.set_threads)(self.backend, count) };
    }

    /// Asks `abort` from now on whether to go on.
    ///
    /// # Safety
    /// The function may be called with the data for as long as graphs are computed.
    pub(super) unsafe fn set_abort(&self, abort: Option<Abort>, data: *mut c_void) {
        // SAFETY: the backend is one of the CPU, the rest the caller's.
        unsafe { (self.engine.cpu_functions.set_abort)(self.backend, abort, data) };
    }

    /// The engine's status.
    ///
    /// # Safety
    /// A graph of the engine, whose tensors have memory of the host.
    pub(super) unsafe fn compute(&self, graph: *mut Graph) -> c_int {
        // SAFETY: the backend is one of the CPU, the rest the caller's.
        unsafe { (self.engine.functions.graph_compute)(self.backend, graph) }
    }
}

impl Threads {
    fn free(&self, engine: &Engine) {
        if !self.pool.is_null() {
            // SAFETY: the pool is the engine's, and no backend has it any more.
            unsafe { (engine.cpu_functions.pool_free)(self.pool) };
        }
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        // SAFETY: the backend is the engine's, and nobody else has it.
        unsafe { (self.engine.functions.backend_free)(self.backend) };
        self.pool.get_mut().unwrap_or_else(PoisonError::into_inner).free(self.engine);
    }
}
