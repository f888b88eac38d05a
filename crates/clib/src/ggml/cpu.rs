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

/// Numbers of threads that are kept ready. An engine has two: for one query, and for many.
const POOLS_MAX: usize = 4;

/// An instance of the CPU backend. It goes when dropped.
pub(super) struct Cpu {
    engine: &'static Engine,
    backend: *mut Backend,
    /// The one in use is the last. There is none until the engine says how many threads it wants.
    pools: Mutex<Vec<Threads>>,
}

/// Threads that stay between graphs and look for the next one for a while, as those of
/// `llama-server` do. While another pool is in use they sleep.
struct Threads {
    pool: *mut ThreadPool,
    count: c_int,
}

impl Cpu {
    /// Nothing, if the engine has no memory.
    pub(super) fn new(engine: &'static Engine) -> Option<Self> {
        // SAFETY: the device is the engine's, which takes no parameters.
        let backend = unsafe { (engine.functions.device_init)(engine.cpu_device, ptr::null()) };
        (!backend.is_null()).then_some(Self { engine, backend, pools: Mutex::default() })
    }

    pub(super) fn backend(&self) -> *mut Backend {
        self.backend
    }

    /// Computes with so many threads from now on.
    pub(super) fn set_threads(&self, count: c_int) {
        let (count, functions) = (count.max(1), self.engine.cpu_functions);
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if pools.last().is_some_and(|last| last.count == count) {
            return;
        }
        let known = pools.iter().position(|threads| threads.count == count);
        let threads = known.map_or_else(|| Threads::new(self.engine, count), |at| pools.remove(at));
        // SAFETY: the backend is one of the CPU. Without a pool each graph makes threads of its own.
        unsafe { (functions.set_pool)(self.backend, threads.pool) };
        // SAFETY: as above.
        unsafe { (functions.set_threads)(self.backend, count) };
        pools.push(threads);
        if pools.len() > POOLS_MAX {
            pools.remove(0).free(self.engine);
        }
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
    /// Without memory there is no pool.
    fn new(engine: &Engine, count: c_int) -> Self {
        let mut parameters = MaybeUninit::uninit();
        // SAFETY: the engine fills the structure in.
        unsafe { (engine.functions.pool_parameters_init)(parameters.as_mut_ptr(), count) };
        // SAFETY: it has been filled in.
        let pool = unsafe { (engine.cpu_functions.pool_new)(parameters.as_mut_ptr()) };
        Self { pool, count }
    }

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
        for threads in self.pools.get_mut().unwrap_or_else(PoisonError::into_inner) {
            threads.free(self.engine);
        }
    }
}
