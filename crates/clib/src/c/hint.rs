//! What an engine knows of its cache and a mount does not.

use std::ffi::{OsStr, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::memory::Caller;
use super::status::{Failure, Status, guard};
use crate::hint;

/// What will become of a file, a sequence, a directory or a prefix.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    /// Its user waits for something else, such as a tool, and will go on.
    Waiting = 0,
    /// Nobody will go on with it: what only it has leaves memory before everything else.
    Finished = 1,
}

/// Tells the mount of `path` what will become of it: `hint` is one of `kvfs_hint`. It is about the pages that are there
/// now, and an open takes it back. Nothing is deleted.
///
/// `KVFS_STATUS_MISSING` if there is no such path, `KVFS_STATUS_UNSUPPORTED` where hints are not known,
/// `KVFS_STATUS_FILE` if it is somebody else's, or too many hints are being carried out: try that again in a moment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_give_hint(path: *const c_char, hint: u32) -> Status {
    let call = |caller: &Caller| {
        let path = Path::new(OsStr::from_bytes(caller.name(path, "path")?));
        let hint = match hint {
            _ if hint == Hint::Waiting as u32 => hint::Hint::Waiting,
            _ if hint == Hint::Finished as u32 => hint::Hint::Finished,
            _ => return Err(Failure::argument(format!("hint is {hint}: none of kvfs_hint"))),
        };
        hint::give(path, hint).map_err(failed(path))
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| {
        let status = match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => Status::Missing,
            Some(libc::EOPNOTSUPP) => Status::Unsupported,
            _ => Status::File,
        };
        Failure::new(status, format!("{}: {error}", path.display()))
    }
}
