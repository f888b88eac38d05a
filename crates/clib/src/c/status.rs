//! How a call ends, and the text that says why.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::memory::Caller;
use crate::attention::AttentionError;
use crate::page::PageError;
use crate::reader::ReadError;

/// Version of this interface, to be compared with `kvfs_abi_version()`.
pub const KVFS_ABI_VERSION: u32 = 1;

/// How a call ended: one value for each thing that a caller can do about it. A call that does not
/// end with `KVFS_STATUS_OK` has changed nothing, except that a handle to be created is NULL.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Arguments that contradict each other or the shape: correct the call.
    Argument = 1,
    /// A block that does not hold what it says: leave it out, or read it again.
    /// `kvfs_last_error_block()` is its index.
    Block = 2,
    /// Bytes that are no page of this cache at this place, or damaged: compute the tokens anew.
    Page = 3,
    /// Bytes that are no manifest: this cache cannot be used.
    Manifest = 4,
    /// A manifest that a newer kvfs wrote: upgrade.
    Newer = 5,
    /// Right, but not something that this processor or this version of the library can do: use
    /// another backend, or leave the new field out.
    Unsupported = 6,
    /// A defect of the library, to be reported with what it wrote to standard error. Its handles can
    /// still be used and freed.
    Internal = 7,
    /// Less memory than is needed, of the device or pinned: free some, or use another backend.
    Memory = 8,
    /// The device refused or failed: free the handle, and use another backend.
    Device = 9,
    /// What the call names is not there, such as a sequence: there is nothing to reuse.
    Missing = 10,
    /// There is something of that name already: choose another one, or clear it.
    Exists = 11,
    /// A file that cannot be read or written; the text has the error of the system call.
    File = 12,
}

/// What a call failed with.
#[derive(Debug, PartialEq)]
pub(super) struct Failure {
    status: Status,
    text: String,
    block: Option<usize>,
}

impl Failure {
    pub(super) fn new(status: Status, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), block: None }
    }

    pub(super) fn argument(text: impl Into<String>) -> Self {
        Self::new(Status::Argument, text)
    }

    pub(super) fn block(index: usize, why: &str) -> Self {
        AttentionError::Block { index, why: why.to_owned() }.into()
    }

    #[cfg(test)]
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The same, about a block.
    pub(super) fn of_block(self, index: usize) -> Self {
        Self::block(index, &self.text)
    }

    fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("unknown");
        Self::new(Status::Internal, format!("a defect of kvfs, please report it: {text}"))
    }
}

impl From<AttentionError> for Failure {
    fn from(error: AttentionError) -> Self {
        let (status, block) = match &error {
            AttentionError::Arguments(_) => (Status::Argument, None),
            AttentionError::Block { index, .. } => (Status::Block, Some(*index)),
            AttentionError::Unsupported(_) => (Status::Unsupported, None),
        };
        Self { status, text: error.to_string(), block }
    }
}

impl From<PageError> for Failure {
    fn from(error: PageError) -> Self {
        let status = match &error {
            PageError::Manifest(_) => Status::Manifest,
            PageError::Newer { .. } => Status::Newer,
            _ => Status::Page,
        };
        Self::new(status, error.to_string())
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let status = match error {
            ReadError::Attention(error) => return error.into(),
            ReadError::Arguments(_) => Status::Argument,
            ReadError::Manifest { .. } => Status::Manifest,
            ReadError::Missing { .. } => Status::Missing,
            ReadError::Refused { .. } => Status::Page,
            ReadError::Changed(_) | ReadError::Disconnected(_) | ReadError::Io { .. } => {
                Status::File
            }
        };
        Self::new(status, error.to_string())
    }
}

/// What the last call that failed on a thread left.
struct LastError {
    text: CString,
    block: usize,
}

thread_local! {
    static LAST_ERROR: RefCell<LastError> =
        RefCell::new(LastError { text: CString::default(), block: usize::MAX });
}

/// Runs a call and keeps what it failed with; a panic is a failure too.
///
/// # Safety
/// As [`Caller::new`], for all that `call` reads and writes.
pub(super) unsafe fn guard(call: impl FnOnce(&Caller) -> Result<(), Failure>) -> Status {
    // SAFETY: the caller's.
    let caller = unsafe { Caller::new() };
    let result = catch_unwind(AssertUnwindSafe(|| call(&caller)));
    let Err(failure) = result.unwrap_or_else(|panic| Err(Failure::panicked(&*panic))) else {
        return Status::Ok;
    };
    let text = CString::new(failure.text.replace('\0', "\\0")).unwrap_or_default();
    // A thread that is ending has no last error any more.
    let _ = LAST_ERROR.try_with(|last| {
        *last.borrow_mut() = LastError { text, block: failure.block.unwrap_or(usize::MAX) };
    });
    failure.status
}

/// The version of the interface that the library has. A program checks once that it equals
/// `KVFS_ABI_VERSION` of the header that it was compiled with. New functions, new fields at the
/// end of structures and new values do not change it.
#[unsafe(no_mangle)]
pub extern "C" fn kvfs_abi_version() -> u32 {
    KVFS_ABI_VERSION
}

/// The version of the library, such as `"0.1.0"`. It is valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn kvfs_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no NUL"),
        };
    VERSION.as_ptr()
}

/// Why the last call that failed on this thread did: one line of UTF-8 that says what, where and
/// what to do; `""` if none failed. It is valid until the next call that fails on this thread, or
/// the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn kvfs_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// The index of the block that the last call that failed on this thread was about, if it ended
/// with `KVFS_STATUS_BLOCK`, else `SIZE_MAX`.
#[unsafe(no_mangle)]
pub extern "C" fn kvfs_last_error_block() -> usize {
    LAST_ERROR.try_with(|last| last.borrow().block).unwrap_or(usize::MAX)
}
