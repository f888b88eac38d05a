//! Many names of a directory of a mount in one call.

use std::ffi::{OsStr, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::memory::{Caller, Structure};
use super::status::{Failure, Status, guard};
use crate::batch;

/// One of many names, and what came of it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Named {
    /// `sizeof(kvfs_named)`, the same in all elements of an array, whose stride it is.
    pub size: usize,
    /// In the directory: ends with NUL, has no slash, is not empty.
    pub name: *const c_char,
    /// Where `kvfs_read_many` puts the bytes of the file. `kvfs_have_many` does not look at it.
    pub data: *mut u8,
    /// Bytes that may be written there.
    pub capacity: usize,
    /// Set by the call: bytes of the file; 0 where there is none.
    pub length: u64,
    /// Set by the call: 1 if something has this name, else 0.
    pub found: u32,
    /// Set by the call: 0, or the errno with which the file cannot be read; `ERANGE` if it has more bytes than there is
    /// room, of which none is written then.
    pub error: u32,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for Named {
    const NAME: &'static str = "kvfs_named";
    const REQUIRED_BYTES: usize = size_of::<Self>();
}

/// Somebody else's memory that a call fills in.
struct Asked<'a> {
    caller: &'a Caller,
    first: *mut Named,
    all: Vec<Named>,
    names: Vec<&'a [u8]>,
    directory: &'a Path,
}

impl<'a> Asked<'a> {
    fn new(
        caller: &'a Caller, directory: *const c_char, first: *mut Named, count: usize,
    ) -> Result<Self, Failure> {
        let directory = Path::new(OsStr::from_bytes(caller.name(directory, "directory")?));
        let all = caller.read_all(first.cast_const(), count)?;
        let names = all.iter().map(|named| caller.name(named.name, "a name"));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { caller, first, all, names, directory })
    }

    /// Tells what came of one of them.
    fn put(&mut self, index: usize, found: Option<u64>, error: u32) -> Result<(), Failure> {
        let named = &mut self.all[index];
        (named.found, named.length) = (u32::from(found.is_some()), found.unwrap_or(0));
        named.error = error;
        let at = self.first.wrapping_byte_add(index * named.size);
        self.caller.write(*named, at)
    }

    /// The bytes of one of them, if there is room.
    fn put_value(&mut self, index: usize, value: io::Result<Option<&[u8]>>) -> Result<(), Failure> {
        match value {
            Ok(None) => self.put(index, None, 0),
            Ok(Some(bytes)) => {
                let named = self.all[index];
                let fits = bytes.len() <= named.capacity;
                if fits {
                    self.caller.store(bytes, named.data, "data")?;
                }
                let error = if fits { 0 } else { libc::ERANGE };
                self.put(index, Some(bytes.len() as u64), error.unsigned_abs())
            }
            Err(error) => {
                let error = error.raw_os_error().unwrap_or(libc::EIO);
                self.put(index, Some(0), error.unsigned_abs())
            }
        }
    }
}

fn failed(directory: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| {
        let status = match error.kind() {
            io::ErrorKind::InvalidInput => Status::Argument,
            _ => Status::File,
        };
        Failure::new(status, format!("{}: {error}", directory.display()))
    }
}

/// Tells which of `count` names in `directory` (`MOUNT/files/...` or `MOUNT/models/...`) are there, and how many bytes
/// their files have: `found` and `length` of each. The mount is asked about all of them at once; in a directory of
/// something else each costs a system call.
///
/// `KVFS_STATUS_FILE` if the directory may not be entered or the mount is gone, `KVFS_STATUS_ARGUMENT` if a name is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_have_many(
    directory: *const c_char, names: *mut Named, count: usize,
) -> Status {
    let call = |caller: &Caller| {
        let mut asked = Asked::new(caller, directory, names, count)?;
        let found = batch::have_many(asked.directory, &asked.names);
        let found = found.map_err(failed(asked.directory))?;
        found.into_iter().enumerate().try_for_each(|(index, size)| asked.put(index, size, 0))
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Reads `count` files of `directory`, each as a whole into its `data`: `found`, `length` and `error` of each. Small files
/// of a mount come many at once, large ones are opened. What is wrong with one of them is no failure of the call.
///
/// `KVFS_STATUS_FILE` if the mount is gone, `KVFS_STATUS_ARGUMENT` if a name is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_read_many(
    directory: *const c_char, names: *mut Named, count: usize,
) -> Status {
    let call = |caller: &Caller| {
        let mut asked = Asked::new(caller, directory, names, count)?;
        let (names, directory) = (asked.names.clone(), asked.directory);
        let (mut index, mut outcome) = (0, Ok(()));
        let read = batch::read_each(directory, &names, |value| {
            if outcome.is_ok() {
                outcome = asked.put_value(index, value);
            }
            index += 1;
        });
        read.map_err(failed(directory)).and(outcome)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}
