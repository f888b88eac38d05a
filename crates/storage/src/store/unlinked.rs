//! Removing an object's file in two steps, so that nobody waits for its bytes.
//!
//! The name of a page of 4 MiB goes in 10 us; its bytes go with the last descriptor, in 4 ms (ext4).
//! So the name is removed while whoever decided it holds the state, and the bytes afterwards, on a
//! thread of its own.

use std::io;

use super::Store;
use super::disk::{Access, DiskFile, DiskPath};
use super::record::ObjectId;

/// A file without a name: its bytes go when this does.
#[must_use = "its bytes are to be freed once no lock is held"]
#[derive(Debug)]
pub struct Unlinked(Option<Box<dyn DiskFile>>);

impl Store {
    /// Removes the name of an object's file on the disk, if it is there.
    pub fn unlink_object(&self, object: ObjectId) -> io::Result<Unlinked> {
        let path = DiskPath::Object(object);
        let file = self.disk.open(&path, Access::Read).ok();
        match self.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(Unlinked(file)),
        }
    }
}

impl Unlinked {
    /// Frees the bytes; only to be called while no lock is held.
    pub fn free(self) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Those who lack room wait for it.
                crate::sys::Share::Quarter.take();
                drop(self.0);
            });
        });
    }
}
