//! New K and V of an engine that computes on a GPU, on their way to a mount.

use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::cuda::{Cuda, guard_context};
use super::manifest::Manifest;
use super::memory::Caller;
use super::status::{Failure, Status};
use crate::cuda::{self, DeviceRows};
use crate::page::Layer;

/// Appends rows to a sequence while the next token is computed. Several threads may use one.
#[derive(Debug)]
pub struct WriteBack {
    inner: Mutex<cuda::WriteBack>,
}

// A handle may be used and freed by any thread.
const _: fn() = || {
    fn is_sent<T: Send>() {}
    is_sent::<cuda::WriteBack>();
};

impl WriteBack {
    fn lock(&self) -> MutexGuard<'_, cuda::WriteBack> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does something in the order in which rows are given.
///
/// # Safety
/// The promises of the header.
unsafe fn change(
    write_back: *const WriteBack,
    act: impl FnOnce(&Caller, &mut cuda::WriteBack) -> Result<(), Failure>,
) -> Status {
    let call = |caller: &Caller| {
        let write_back = caller.handle(write_back, "write_back")?;
        act(caller, &mut write_back.lock())
    };
    // SAFETY: the caller's.
    unsafe { guard_context(call) }
}

/// Creates `*write_back` to the sequence in `directory`, which holds `tokens` tokens and has the
/// directories of its layers, to be freed with `kvfs_write_back_free`. It takes 4 MiB of pinned memory, or
/// 64 rows. What cannot be written is `KVFS_STATUS_FILE` of this and all later calls: rows have no gaps,
/// and what is on the mount stays as it is.
///
/// `KVFS_STATUS_MEMORY` and `KVFS_STATUS_DEVICE` as `kvfs_cuda_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_write_back_create(
    cuda: *const Cuda, directory: *const c_char, manifest: *const Manifest, tokens: u64,
    write_back: *mut *mut WriteBack,
) -> Status {
    let call = |caller: &Caller| {
        caller.create(write_back, || {
            let directory = Path::new(caller.text(directory, "directory")?);
            let manifest = caller.handle(manifest, "manifest")?.inner();
            caller.handle(cuda, "cuda")?.with(|cuda| {
                let inner = cuda::WriteBack::new(cuda, directory, manifest, tokens)?;
                Ok(WriteBack { inner: Mutex::new(inner) })
            })
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard_context(call) }
}

/// Frees what `kvfs_write_back_create` gave, after what it was given is written. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_write_back_free(write_back: *mut WriteBack) {
    let call = |caller: &Caller| caller.take(write_back).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard_context(call) };
}

/// Takes the next rows of a layer, `bytes` bytes at `rows` in device memory: of each token K of all heads,
/// then V, then its side row, where the layer keeps such (`kvfs_layer.tail_row_bytes`). They are copied when everything that is in `stream` now has been done, and nobody waits; until
/// then nobody may free or change them (`kvfs_write_back_hold`).
///
/// `KVFS_STATUS_FILE` also for bytes that are no whole rows and for no layer of the manifest.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_write_back_rows(
    write_back: *const WriteBack, layer: u32, rows: u64, bytes: usize, stream: *mut c_void,
) -> Status {
    let act = |_: &Caller, write_back: &mut cuda::WriteBack| {
        let rows = DeviceRows { address: rows, bytes, stream };
        // SAFETY: the promises of the header.
        Ok(unsafe { write_back.append_device(Layer(layer), rows) }?)
    };
    // SAFETY: the promises of the header.
    unsafe { change(write_back, act) }
}

/// What comes later in a stream waits, on the device, until all rows that were given have been copied:
/// before their memory is used again.
///
/// `KVFS_STATUS_DEVICE` if the device has failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_write_back_hold(
    write_back: *const WriteBack, stream: *mut c_void,
) -> Status {
    let act = |_: &Caller, write_back: &mut cuda::WriteBack| {
        // SAFETY: the promises of the header.
        Ok(unsafe { write_back.hold(stream) }?)
    };
    // SAFETY: the promises of the header.
    unsafe { change(write_back, act) }
}

/// All layers have been given the rows of these tokens, `[count]`: their ids come after them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_write_back_tokens(
    write_back: *const WriteBack, tokens: *const u32, count: usize,
) -> Status {
    let act = |caller: &Caller, write_back: &mut cuda::WriteBack| {
        Ok(write_back.complete(caller.slice(tokens, count, "tokens")?)?)
    };
    // SAFETY: the promises of the header.
    unsafe { change(write_back, act) }
}

/// Waits until everything that was given is in the files.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_write_back_flush(write_back: *const WriteBack) -> Status {
    // SAFETY: the promises of the header.
    unsafe { change(write_back, |_, write_back| Ok(write_back.flush()?)) }
}

/// The same, and it survives a crash.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_write_back_sync(write_back: *const WriteBack) -> Status {
    // SAFETY: the promises of the header.
    unsafe { change(write_back, |_, write_back| Ok(write_back.sync()?)) }
}
