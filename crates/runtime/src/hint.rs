//! What a program knows of its cache and a mount does not: that nobody will go on with something.
//!
//! A hint changes what leaves memory or the disk first, and nothing else: whoever gives a wrong one waits longer.

use std::ffi::CStr;
use std::io;
use std::path::Path;

use crate::sys;

/// Where a mount takes hints.
const ATTRIBUTE: &CStr = c"user.kvfs.hint";

/// What will become of a file, a sequence, a directory or a prefix of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Its user waits for something else, such as a tool, and will go on.
    Waiting,
    /// Nobody will go on with it.
    Finished,
}

/// Gives a hint for what is there now. The mount takes it at once, and works through what is below a directory in the
/// background.
///
/// # Errors
/// As setxattr(2): `EPERM` of what belongs to somebody else, `EAGAIN` where too many are being carried out, `EOPNOTSUPP`
/// where hints are not known.
pub fn give(path: &Path, hint: Hint) -> io::Result<()> {
    let word: &[u8] = match hint {
        Hint::Waiting => b"waiting",
        Hint::Finished => b"finished",
    };
    sys::set_extended_attribute(path, ATTRIBUTE, word)
}
