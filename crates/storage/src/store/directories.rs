//! The directories of a store, should one be missing: a copy left out empty ones, or a disk lost it with all that was in it.

use std::collections::BTreeSet;

use super::disk::{DiskDirectory, DiskPath, shard};
use super::metadata::Metadata;
use super::record::{ObjectId, ObjectRecord};
use super::{Store, StoreError, keys};

/// Directories below `objects/` that are missing.
pub(super) fn missing(store: &Store) -> Result<BTreeSet<u8>, StoreError> {
    let names = store.disk.list(DiskDirectory::Objects)?;
    let there: BTreeSet<u8> =
        names.iter().filter_map(|name| u8::from_str_radix(name, 16).ok()).collect();
    Ok((0..=u8::MAX).filter(|shard| !there.contains(shard)).collect())
}

/// Makes what is missing.
pub(super) fn make(store: &Store, missing: &BTreeSet<u8>) -> Result<(), StoreError> {
    for directory in [DiskDirectory::Staging, DiskDirectory::Quarantine, DiskDirectory::Objects] {
        store.disk.create_directory(directory)?;
    }
    for &shard in missing {
        store.disk.create_directory(DiskDirectory::ObjectShard(shard))?;
    }
    if !missing.is_empty() {
        store.disk.sync_directory(DiskDirectory::Objects)?;
    }
    Ok(())
}

/// Has a mount find all of them.
///
/// # Errors
/// [`StoreError::Incomplete`] if records tell of bytes in one that is missing: it may be put back.
pub fn complete(store: &Store, metadata: &Metadata) -> Result<(), StoreError> {
    if store.is_read_only() {
        return Ok(());
    }
    let missing = missing(store)?;
    if !missing.is_empty() {
        check_empty(store, metadata, &missing)?;
        log::warn!("directories below objects/ are missing, and made anew: {}", missing.len());
    }
    make(store, &missing)
}

fn check_empty(
    store: &Store, metadata: &Metadata, missing: &BTreeSet<u8>,
) -> Result<(), StoreError> {
    let mut objects = Vec::new();
    metadata.scan_table::<ObjectRecord>(b'O', |key, _| {
        let object = keys::number(key).map(ObjectId);
        objects.extend(object.filter(|object| missing.contains(&shard(*object))));
    })?;
    let mut lost = objects.into_iter().filter(|object| {
        let is_packed = store.disk.stat(&DiskPath::Object(*object)).is_ok();
        !is_packed && !metadata.is_only_remote(*object).unwrap_or(false)
    });
    let Some(first) = lost.next() else { return Ok(()) };
    let directory = DiskDirectory::ObjectShard(shard(first)).relative();
    Err(StoreError::Incomplete(format!(
        "{} is missing, and the store has the bytes of {} files in such directories: put it back, or have kvfs \
         fsck --repair take them for lost",
        store.path().join(directory).display(),
        lost.count() + 1
    )))
}
