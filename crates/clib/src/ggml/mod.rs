//! A backend for ggml, out of its tree: unpatched llama.cpp keeps its KV cache in files of a mount
//! and attends to them with [`attention`](crate::attention).
//!
//! `GGML_BACKEND_PATH=libkvfs.so KVFS_KV=/mnt/kv llama-server ...` is all. The engine loads the
//! library, which finds out which ggml it is and offers a device. Without `KVFS_KV` it offers none.
//! The device is of the type GPU, because only such a device owns KV buffers, but all it computes
//! itself is attention: the rest of a graph goes to the engine's own CPU backend, and weights stay
//! where they would be without it. Operations on memory of another device are refused.
//!
//! | file | question it answers |
//! |---|---|
//! | `abi`, `family` | how the engine's structures lie in memory |
//! | `library`, `engine` | which engine it is |
//! | `child`, `probe`, `trial` | whether its structures are those |
//! | `tensor` | what a tensor of the engine holds |
//! | `device`, `buffer`, `backend` | the functions that the engine calls |
//! | `region`, `files` | where a cache is |
//! | `cpu`, `replace` | who computes a graph, and how attention gets into it |
//! | `operation`, `visible` | what is attended to |
//! | `attend`, `job` | how, and on which threads |
//! | `cold`, `ring` | what of a cache has left memory, and who reads it ahead |
//! | `slot`, `restore`, `rows` | what the engine saves of a conversation, and how it comes back |
//!
//! `unsafe` is at the border to the engine: not in `files`, `operation`, `visible`, `cold`, `ring`, `slot` and
//! `restore`. No panic
//! crosses it: an operation that fails ends the engine's step.

#![allow(
    clippy::cast_possible_truncation,
    reason = "sizes of the engine fit the address space, and so a usize"
)]

mod abi;
mod attend;
mod backend;
mod buffer;
mod child;
mod cold;
mod cpu;
mod device;
mod engine;
mod family;
mod files;
mod job;
mod library;
mod operation;
mod probe;
mod region;
mod replace;
mod restore;
mod ring;
mod rows;
mod tensor;
mod trial;
mod visible;

use std::ffi::c_int;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

pub use abi::Registration;
use engine::Engine;

/// What is decided once in a process.
struct Plugin {
    engine: Engine,
    /// Where caches are.
    directory: PathBuf,
    /// Whose references slots may have.
    model: Option<restore::Model>,
    tables: device::Tables,
}

static PLUGIN: OnceLock<Result<Plugin, String>> = OnceLock::new();

/// The plug-in, in functions that the engine calls: it got them from a plug-in that is there.
fn plugin() -> &'static Plugin {
    PLUGIN.get().and_then(|plugin| plugin.as_ref().ok()).expect("the engine loaded the backend")
}

fn load() -> Result<Plugin, String> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let Some(directory) = variable(files::VARIABLE) else {
        return Err(format!("{} names no mount: the engine goes on without kvfs", files::VARIABLE));
    };
    let (engine, line) = Engine::find()?;
    let directory = files::directory(directory.as_ref())?;
    let model = variable(restore::VARIABLE);
    let model = model.map(|value| restore::Model::open(value.as_ref())).transpose()?;
    say(&format!("{line}; KV caches go to {}", directory.display()));
    Ok(Plugin { engine, directory, model, tables: device::Tables::new() })
}

/// Says one line to whoever runs the engine: it has a log, but not for others.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "kvfs: {line}");
}

/// Calls what must not panic across the border.
fn guard<T>(otherwise: T, call: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(otherwise)
}

/// The backend, for the engine that loads this library; NULL, after a line on standard error, if
/// it is not one to work with or `KVFS_KV` is no directory of a mount.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut Registration {
    guard(ptr::null_mut(), || {
        // The engine may ask again; what there is to say is said once.
        let loaded = PLUGIN.get_or_init(|| load().inspect_err(|line| say(line)));
        loaded.as_ref().map_or(ptr::null_mut(), |plugin| plugin.tables.registration())
    })
}

/// How much this library is to be preferred to others of its kind: there is one.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> c_int {
    1
}
