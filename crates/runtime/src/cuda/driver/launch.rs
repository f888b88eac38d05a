//! Modules of kernels, and their launches.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute};

use super::library::log_failure;
use super::{Context, Stream, check};
use crate::cuda::CudaError;

/// Threads of a block, as `BLOCK_THREADS` in `kernels/device.h`.
const BLOCK_THREADS: u32 = 128;

/// Largest x of a grid, on every device.
const GRID_X_MAX: u32 = (1 << 31) - 1;

/// PTX that the driver has compiled. Clones are of the same.
#[derive(Debug, Clone)]
pub(in crate::cuda) struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    module: sys::CUmodule,
}

// SAFETY: the handle belongs to the context, and the driver's functions are thread-safe.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Module {
    /// Compiles PTX; the driver remembers what it compiled.
    pub(in crate::cuda) fn load(context: &Context, ptx: &CStr) -> Result<Self, CudaError> {
        context.bind()?;
        let mut module = ptr::null_mut();
        // SAFETY: the text ends with a 0, and the module is unloaded when it is dropped.
        let result = unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) };
        check("cuModuleLoadData", result)?;
        Ok(Self(Arc::new(Loaded { context: context.clone(), module })))
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if a block needs more shared memory or threads than there are.
    pub(in crate::cuda) fn kernel(&self, name: &'static str) -> Result<Kernel, CudaError> {
        let context = &self.0.context;
        context.bind()?;
        let symbol = CString::new(name).unwrap_or_default();
        let mut function = ptr::null_mut();
        // SAFETY: the module lives, and the name ends with a 0.
        let result =
            unsafe { sys::cuModuleGetFunction(&raw mut function, self.0.module, symbol.as_ptr()) };
        check("cuModuleGetFunction", result)?;
        let attribute = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: the function is of a module that lives, and the driver writes one number.
            let result = unsafe { sys::cuFuncGetAttribute(&raw mut value, attribute, function) };
            check("cuFuncGetAttribute", result)?;
            Ok::<_, CudaError>(u32::try_from(value).unwrap_or(u32::MAX))
        };
        let shared = attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let threads = attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        let most = context.properties().shared_bytes_max;
        if shared > most || threads < BLOCK_THREADS {
            return Err(CudaError::Unsupported(format!(
                "{name}, which takes {shared} of {most} bytes of shared memory and blocks of \
                 {threads} threads, on this GPU"
            )));
        }
        Ok(Kernel { _module: self.clone(), function, name })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: it was loaded, and no kernel of it is left.
        log_failure("cuModuleUnload", unsafe { sys::cuModuleUnload(self.module) });
    }
}

/// A function of a module.
#[derive(Debug, Clone)]
pub(in crate::cuda) struct Kernel {
    /// Or the function would be gone.
    _module: Module,
    function: sys::CUfunction,
    name: &'static str,
}

// SAFETY: the handle belongs to the module, and the driver's functions are thread-safe.
unsafe impl Send for Kernel {}

/// Blocks of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct Grid {
    pub(in crate::cuda) x: u32,
    pub(in crate::cuda) y: u32,
}

impl Stream {
    /// Launches a kernel; without blocks it does nothing.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if there are more blocks than the device takes.
    ///
    /// # Safety
    /// `A` must be what the kernel's only parameter is in `kernels/`, and the addresses in it must be
    /// those of live memory, as large as the kernel takes it to be, until the stream has done it.
    pub(in crate::cuda) unsafe fn launch<A: Copy>(
        &self, kernel: &Kernel, grid: Grid, arguments: &A,
    ) -> Result<(), CudaError> {
        if grid.x == 0 || grid.y == 0 {
            return Ok(());
        }
        let y_max = self.context.properties().grid_y_max;
        if grid.x > GRID_X_MAX || grid.y > y_max {
            let (Grid { x, y }, name) = (grid, kernel.name);
            return Err(CudaError::Unsupported(format!("{name} with {x} x {y} blocks")));
        }
        self.context.bind()?;
        let mut parameters = [ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the parameter, whose size it knows from the kernel, before it
        // returns; the caller answers for what is in it.
        let result = unsafe {
            sys::cuLaunchKernel(
                kernel.function,
                grid.x,
                grid.y,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", result)
    }
}
