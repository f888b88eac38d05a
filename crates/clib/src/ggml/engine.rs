//! The engine that loaded this library: which version it is, and the functions that are called.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use super::abi::{
    Backend, Buffer, BufferInterface, BufferType, Device, Graph, OPERATION_LAST, OPERATIONS_MAX,
    PoolParameters, RawTensor, Registration, ThreadPool, types,
};
use super::child::{self, Answer};
use super::family::{FAMILIES, Family};
use super::library::{Library, function_at};
use super::probe;
use super::trial::Trial;

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

/// Set to `strict`, only known versions are let in.
const VARIABLE: &str = "KVFS_GGML";

/// What is known of the engine.
#[derive(Clone, Copy)]
pub(super) struct Engine {
    pub(super) functions: Functions,
    pub(super) operations: Operations,
    pub(super) cpu_functions: CpuFunctions,
    pub(super) registration: *mut Registration,
    pub(super) cpu_device: *mut Device,
    pub(super) family: &'static Family,
}

// SAFETY: the device is one that the engine has for as long as it runs, for all threads.
unsafe impl Send for Engine {}
// SAFETY: the same.
unsafe impl Sync for Engine {}

impl Engine {
    /// Finds the engine in this process; with it comes a line that says which it is.
    ///
    /// # Errors
    /// A line that says why this is no engine to work with.
    pub(super) fn find() -> Result<(Self, String), String> {
        let base = Library::find("libggml-base.");
        let version = version(&base)?;
        let known = FAMILIES.iter().find(|family| family.versions.contains(&version.as_str()));
        let is_strict = std::env::var_os(VARIABLE).is_some_and(|value| value == "strict");
        let other = || format!("{}, and {VARIABLE}=strict lets no other in", unknown(&version));
        if is_strict && known.is_none() {
            return Err(other());
        }
        let (family, line) = match Self::in_child(&base) {
            Answer::Said(said) => judge(&version, &said)?,
            Answer::Died(how) => {
                return Err(format!("{}: a trial of it ended by {how}", refused(&version)));
            }
            Answer::Nothing(why) => match known {
                Some(family) => (family, format!("ggml {version}, a known version ({why})")),
                None => {
                    return Err(format!("{}, and it could not be tried: {why}", unknown(&version)));
                }
            },
        };
        // A build between releases may have the version of one and the structures of another.
        if is_strict && !known.is_some_and(|known| ptr::eq(known, family)) {
            return Err(other());
        }
        Ok((Self::new(&base, family)?, line))
    }

    fn new(base: &Library, family: &'static Family) -> Result<Self, String> {
        let functions = functions(base)?;
        let operations = operations(base)?;
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
        let cpu_functions = cpu_functions(base, registration)?;
        Ok(Self { functions, operations, cpu_functions, registration, cpu_device, family })
    }

    /// Asks the engine in a child process which family it is of: the answer is a number, or a line that
    /// says why it is of none.
    fn in_child(base: &Library) -> Answer {
        child::ask(|| match Self::probe(base) {
            Ok(family) => {
                let is_it = |known: &Family| ptr::eq(known, family);
                FAMILIES.iter().position(is_it).map_or(String::new(), |at| at.to_string())
            }
            Err(line) => line,
        })
    }

    fn probe(base: &Library) -> Result<&'static Family, String> {
        // Which family it is does not matter yet.
        let mut engine = Self::new(base, &FAMILIES[0])?;
        let trial = Trial::new(base, engine.operations)?;
        trial.check_tensor()?;
        trial.check_types()?;
        trial.check_filled(&engine)?;
        let tensor = trial.tensor(types::F32, [256, 1, 1, 1])?;
        // SAFETY: this is a child process, and the tensor is so long.
        engine.family = unsafe { probe::family(base, &engine.functions, tensor) }?;
        trial.check_live(&engine, engine.family)?;
        trial.check_graph(Box::leak(Box::new(engine)))?;
        Ok(engine.family)
    }
}

/// The family, and the line that tells of it.
fn judge(version: &str, said: &str) -> Result<(&'static Family, String), String> {
    let proved = said.parse::<usize>().ok().and_then(|at| FAMILIES.get(at));
    let Some(family) = proved else { return Err(format!("{}: {said}", refused(version))) };
    if family.versions.contains(&version) {
        return Ok((family, format!("ggml {version}")));
    }
    let line = format!(
        "ggml {version}, which this kvfs does not know, but all that it uses is as in ggml {}",
        family.name
    );
    Ok((family, line))
}

fn refused(version: &str) -> String {
    format!("the engine's ggml {version} is not one that this kvfs can work with")
}

fn unknown(version: &str) -> String {
    let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.versions).copied().collect();
    format!("the engine has ggml {version}; this kvfs knows {}", known.join(", "))
}

fn version(base: &Library) -> Result<String, String> {
    let version: unsafe extern "C" fn() -> *const c_char =
        // SAFETY: every version that has it has it like this.
        unsafe { base.function(c"ggml_version") }?;
    // SAFETY: it takes nothing and returns a string that stays.
    let version = unsafe { version() };
    // SAFETY: as above.
    Ok(unsafe { CStr::from_ptr(version) }.to_string_lossy().into_owned())
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

fn operations(base: &Library) -> Result<Operations, String> {
    let name: unsafe extern "C" fn(c_int) -> *const c_char =
        // SAFETY: the type is that of the header.
        unsafe { base.function(c"ggml_op_name") }?;
    let name = |op| {
        // SAFETY: the search ends before the engine's table does, or has ended a child process.
        let name = unsafe { name(op) };
        // SAFETY: a name is a string that stays.
        unsafe { CStr::from_ptr(name) }
    };
    let find = |wanted: &CStr| {
        let mut all = (0..OPERATIONS_MAX).take_while(|op| name(*op) != OPERATION_LAST);
        let missing = || format!("the engine has no operation {}", wanted.to_string_lossy());
        all.find(|op| name(*op) == wanted).ok_or_else(missing)
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
