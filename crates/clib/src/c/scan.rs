//! A sequence of a mount, layer by layer, on an NVIDIA GPU.

use std::ffi::c_char;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cuda::{Cuda, CudaCall, Home, guard_context};
use super::memory::Caller;
use super::options::Options;
use super::status::{Failure, Status, guard};
use crate::cuda::{CudaAttention, Scan};
use crate::reader;

/// The pages and tails of a sequence of a mount, or of a copy of one, to be attended to.
#[derive(Debug)]
pub struct Sequence {
    inner: Mutex<Arc<reader::Sequence>>,
}

impl Sequence {
    fn lock(&self) -> MutexGuard<'_, Arc<reader::Sequence>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A scan of all layers of a sequence.
#[derive(Debug)]
pub struct CudaScan {
    /// Gone before what it borrows, which are the next two.
    scan: Mutex<Option<Scan<'static, 'static>>>,
    /// A leaked box.
    attention: NonNull<CudaAttention>,
    _sequence: Arc<reader::Sequence>,
    home: Arc<Home>,
    tokens: usize,
}

// A handle may be used and freed by any thread.
const _: fn() = || {
    fn is_sent<T: Send>() {}
    is_sent::<Scan<'static, 'static>>();
    is_sent::<Arc<reader::Sequence>>();
    is_sent::<Box<CudaAttention>>();
};

impl CudaScan {
    fn begin(cuda: &Cuda, sequence: &Sequence, tokens: Range<u64>) -> Result<Self, Failure> {
        let sequence = Arc::clone(&sequence.lock());
        let (attention, home) = cuda.take()?;
        let length = usize::try_from(tokens.end.saturating_sub(tokens.start)).unwrap_or(usize::MAX);
        let made = Self {
            scan: Mutex::new(None),
            attention: NonNull::from(Box::leak(attention)),
            _sequence: Arc::clone(&sequence),
            home,
            tokens: length,
        };
        // SAFETY: the box was leaked, and this is the only reference until the scan is gone.
        let attention: &'static mut CudaAttention = unsafe { &mut *made.attention.as_ptr() };
        // SAFETY: the value is shared, does not move, and is kept until the scan is gone.
        let sequence: &'static reader::Sequence = unsafe { &*Arc::as_ptr(&sequence) };
        *made.lock() = Some(attention.scan(sequence, tokens)?);
        Ok(made)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Scan<'static, 'static>>> {
        self.scan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attend(
        &self, caller: &Caller, call: *const CudaCall, options: *const Options,
    ) -> Result<(), Failure> {
        let mut scan = self.lock();
        let Some(scan) = scan.as_mut() else { return Err(through()) };
        let call = caller.read(call)?;
        let (queries, result) = call.borrow(caller)?;
        let options = if options.is_null() { Options::default() } else { caller.read(options)? };
        let selection = options.selection(caller, self.tokens)?;
        let options = options.borrow(caller, selection.as_ref())?;
        if scan.layer().is_none() {
            return Err(through());
        }
        // SAFETY: the promises of the header.
        unsafe { scan.attend_on(call.stream, queries, &options, result) }?;
        Ok(())
    }
}

impl Drop for CudaScan {
    fn drop(&mut self) {
        drop(self.lock().take());
        // SAFETY: it was leaked once, and the scan that had it is gone.
        let attention = unsafe { Box::from_raw(self.attention.as_ptr()) };
        self.home.put_back(attention);
    }
}

fn through() -> Failure {
    Failure::new(Status::Missing, "the scan has been through all layers: free it")
}

/// Creates `*sequence` of the directory of a sequence, `MOUNT/models/NAME/sequences/NAME`, to be freed
/// with `kvfs_sequence_free`. It is listed now, and whenever `kvfs_sequence_refresh` is called.
///
/// `KVFS_STATUS_MANIFEST` if it is none of a model, `KVFS_STATUS_FILE` if it cannot be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_sequence_open(
    directory: *const c_char, sequence: *mut *mut Sequence,
) -> Status {
    let call = |caller: &Caller| {
        caller.create(sequence, || {
            let opened = reader::Sequence::open(Path::new(caller.text(directory, "directory")?))?;
            Ok(Sequence { inner: Mutex::new(Arc::new(opened)) })
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Frees what `kvfs_sequence_open` gave; a scan of it goes on. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_sequence_free(sequence: *mut Sequence) {
    let call = |caller: &Caller| caller.take(sequence).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard(call) };
}

/// Lists the sequence anew, after pages were sealed or replaced. Rows that are appended to tails need no
/// refresh.
///
/// `KVFS_STATUS_ARGUMENT` while a scan of it is not freed, `KVFS_STATUS_FILE` and `KVFS_STATUS_PAGE` as
/// the kernel answers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_sequence_refresh(sequence: *const Sequence) -> Status {
    let call = |caller: &Caller| {
        let mut inner = caller.handle(sequence, "sequence")?.lock();
        let Some(sequence) = Arc::get_mut(&mut inner) else {
            return Err(Failure::argument(
                "a scan of the kvfs_sequence is under way: free it before",
            ));
        };
        Ok(sequence.refresh()?)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Writes to `*tokens` of how many tokens every layer has rows, and `tokens` ids if there is such a
/// file.
///
/// `KVFS_STATUS_FILE` if it cannot be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_sequence_tokens(
    sequence: *const Sequence, tokens: *mut u64,
) -> Status {
    let call = |caller: &Caller| {
        let valid = caller.handle(sequence, "sequence")?.lock().valid_tokens()?;
        caller.store(&[valid], tokens, "tokens")
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Creates `*scan` of all layers of a sequence, from token `start` to before `end`, to be freed with
/// `kvfs_cuda_scan_free`. Until then `cuda` takes no other call and `sequence` no refresh; both may be
/// freed.
///
/// Pages of the hot window are attended to where they are on the device. The others go through the
/// pinned buffers, or from where they are mapped, ahead of the layer that is attended to.
///
/// `KVFS_STATUS_ARGUMENT` if another scan has `cuda`; `KVFS_STATUS_MISSING` if a layer has no page or tail
/// for some of the tokens (rows of a tail are read when their turn comes); `KVFS_STATUS_UNSUPPORTED` for a sequence whose tokens were removed or moved;
/// `KVFS_STATUS_MEMORY` and `KVFS_STATUS_DEVICE` as `kvfs_cuda_create`. A hot window that finds less
/// memory than it was given is smaller, and no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_scan_begin(
    cuda: *const Cuda, sequence: *const Sequence, start: u64, end: u64, scan: *mut *mut CudaScan,
) -> Status {
    let call = |caller: &Caller| {
        caller.create(scan, || {
            let cuda = caller.handle(cuda, "cuda")?;
            CudaScan::begin(cuda, caller.handle(sequence, "sequence")?, start..end)
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard_context(call) }
}

/// Frees what `kvfs_cuda_scan_begin` gave; what was asked for is still done. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_scan_free(scan: *mut CudaScan) {
    let call = |caller: &Caller| caller.take(scan).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard_context(call) };
}

/// Writes to `*layer` the number of the layer that is attended to next.
///
/// `KVFS_STATUS_MISSING` after the last one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_scan_layer(scan: *const CudaScan, layer: *mut u32) -> Status {
    let call = |caller: &Caller| {
        let scan = caller.handle(scan, "scan")?.lock();
        let next = scan.as_ref().and_then(Scan::layer).ok_or_else(through)?;
        caller.store(&[next.0], layer, "layer")
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Attends to the next layer, in the order of the stream of `call`, as `kvfs_cuda_run` does; ranges of
/// a selection count from the first token of the scan. It returns when all of the layer is in buffers or on
/// its way, and meanwhile has begun to bring the layers behind it: the host is one layer ahead of the
/// device at most.
///
/// `KVFS_STATUS_MISSING` after the last layer, `KVFS_STATUS_PAGE` and `KVFS_STATUS_FILE` for a page that
/// cannot be read, which ends the scan; the others as `kvfs_cuda_run`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_scan_attend(
    scan: *const CudaScan, call: *const CudaCall, options: *const Options,
) -> Status {
    let attend = |caller: &Caller| caller.handle(scan, "scan")?.attend(caller, call, options);
    // SAFETY: the promises of the header.
    unsafe { guard_context(attend) }
}
