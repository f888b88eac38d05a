//! Extended attributes by path.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Longest value of an attribute that anybody here asks for.
const ATTRIBUTE_BYTES_MAX: usize = 256;
/// Longest value of an attribute, and longest list of names (xattr(7)).
const LONGEST_ATTRIBUTE_BYTES: usize = 64 << 10;

/// The value of an extended attribute, or None where the file has no such attribute.
pub fn extended_attribute(path: &Path, name: &CStr) -> io::Result<Option<Vec<u8>>> {
    attribute_up_to(path, name, ATTRIBUTE_BYTES_MAX)
}

/// The same, however long the value is.
pub fn long_extended_attribute(path: &Path, name: &CStr) -> io::Result<Option<Vec<u8>>> {
    attribute_up_to(path, name, LONGEST_ATTRIBUTE_BYTES)
}

fn attribute_up_to(path: &Path, name: &CStr, bytes_max: usize) -> io::Result<Option<Vec<u8>>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut value = vec![0; bytes_max];
    let buffer = value.as_mut_ptr().cast();
    // SAFETY: both names end in NUL, and the kernel writes at most the buffer's length.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), buffer, bytes_max) };
    if let Ok(length) = usize::try_from(length) {
        value.truncate(length);
        return Ok(Some(value));
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::ENOTSUP)) => Ok(None),
        error => Err(error),
    }
}

/// Sets an extended attribute, whether it is there or not.
pub fn set_extended_attribute(path: &Path, name: &CStr, value: &[u8]) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let bytes = value.as_ptr().cast();
    // SAFETY: both names end in NUL, and the kernel reads as many bytes as the value has.
    let result = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), bytes, value.len(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives a directory the extended attributes of another one: those of users that are listed, the limits of
/// a mount, which are not, and its access lists.
pub fn copy_extended_attributes(from: &Path, to: &Path) -> io::Result<()> {
    const LIMITS: [&CStr; 3] = [c"user.kvfs.quota", c"user.kvfs.age", c"user.kvfs.ttl"];
    let listed = extended_attribute_names(from)?;
    for name in LIMITS.into_iter().chain(listed.iter().map(CString::as_c_str)) {
        if let Some(value) = attribute_up_to(from, name, LONGEST_ATTRIBUTE_BYTES)? {
            set_extended_attribute(to, name, &value)?;
        }
    }
    copy_access_lists(from, to)
}

/// Gives a file or directory the access lists of another one (acl(5)), or takes those that it has from the directory above
/// where the other has none.
pub fn copy_access_lists(from: &Path, to: &Path) -> io::Result<()> {
    for name in [c"system.posix_acl_access", c"system.posix_acl_default"] {
        if let Some(value) = attribute_up_to(from, name, LONGEST_ATTRIBUTE_BYTES)? {
            set_extended_attribute(to, name, &value)?;
        } else if attribute_up_to(to, name, LONGEST_ATTRIBUTE_BYTES)?.is_some() {
            remove_extended_attribute(to, name)?;
        }
    }
    Ok(())
}

/// The names of the attributes of a file; none where the filesystem has no such thing.
fn extended_attribute_names(path: &Path) -> io::Result<Vec<CString>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut names = vec![0_u8; LONGEST_ATTRIBUTE_BYTES];
    let buffer = names.as_mut_ptr().cast();
    // SAFETY: the path ends in NUL, and the kernel writes at most the buffer's length.
    let length = unsafe { libc::listxattr(path.as_ptr(), buffer, LONGEST_ATTRIBUTE_BYTES) };
    let Ok(length) = usize::try_from(length) else {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ENOTSUP) {
            Ok(Vec::new())
        } else {
            Err(error)
        };
    };
    let names = names[..length].split(|byte| *byte == 0).filter(|name| name.starts_with(b"user."));
    names.map(|name| CString::new(name).map_err(io::Error::other)).collect()
}

/// Removes an extended attribute.
pub fn remove_extended_attribute(path: &Path, name: &CStr) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: both names end in NUL.
    let result = unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
