//! Which mount was the last, noted beside the database: one that somebody put back from an earlier time is not taken for
//! that of the store.
//!
//! With an older `meta.redb` a mount gives out numbers that objects have already, and takes objects for garbage that
//! it does not know. The note is an extended attribute of `FORMAT`. It is written after the commit that begins a mount, so no
//! crash leaves it ahead of the database; where it cannot be kept there is none.

use super::StoreError;
use super::database::{decode, encode};
use super::disk::{Disk, DiskPath};

/// The epoch of the last mount, if it is known.
pub(super) fn noted(disk: &dyn Disk) -> Option<u32> {
    let note = disk.note(&DiskPath::Format).ok().flatten()?;
    decode(&note).ok()
}

/// Compares it with the epoch that a database tells.
///
/// # Errors
/// [`StoreError::Corrupt`] if the database is that of an earlier mount.
pub(super) fn check(disk: &dyn Disk, epoch: u32) -> Result<(), StoreError> {
    match noted(disk) {
        Some(last) if last > epoch => Err(StoreError::Corrupt(format!(
            "it is older than the store: of mount {epoch}, and the last one was mount {last}"
        ))),
        _ => Ok(()),
    }
}

/// Notes the mount that began.
pub(super) fn note(disk: &dyn Disk, epoch: u32) {
    if let Err(error) = disk.set_note(&DiskPath::Format, &encode(&epoch)) {
        log::debug!("which mount was the last is not noted: {error}");
    }
}
