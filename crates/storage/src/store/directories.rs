//! The directories of a store, should one be missing: a copy left out empty ones, or a disk lost it with all that was in it.

use std::collections::BTreeSet;
use std::io;

use super::disk::{DiskDirectory, DiskPath, shard};
use super::metadata::Metadata;
use super::record::{ObjectId, ObjectRecord};
use super::{Store, StoreError, format, keys};

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
        let is_missing = |object| missing.contains(&shard(object));
        check_empty(store, metadata, is_missing, |first| {
            (DiskDirectory::ObjectShard(shard(first)), "such directories")
        })?;
        log::warn!("directories below objects/ are missing, and made anew: {}", missing.len());
    }
    check_packs(store, metadata)?;
    make(store, &missing)
}

/// A store that has packs has their directory.
fn check_packs(store: &Store, metadata: &Metadata) -> Result<(), StoreError> {
    let disk = store.disk.as_ref();
    match disk.list(DiskDirectory::Packs) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        outcome => return Ok(outcome.map(drop)?),
    }
    if !format::has_packs(disk)? {
        return Ok(());
    }
    check_empty(store, metadata, |_| true, |_| (DiskDirectory::Packs, "it"))
}

fn check_empty(
    store: &Store, metadata: &Metadata, may_be_lost: impl Fn(ObjectId) -> bool,
    directory_of: impl FnOnce(ObjectId) -> (DiskDirectory, &'static str),
) -> Result<(), StoreError> {
    let mut objects = Vec::new();
    metadata.scan_table::<ObjectRecord>(b'O', |key, _| {
        let object = keys::number(key).map(ObjectId);
        objects.extend(object.filter(|object| may_be_lost(*object)));
    })?;
    let mut lost = objects.into_iter().filter(|object| {
        let has = |path| store.disk.stat(&path).is_ok();
        let is_here = has(DiskPath::Object(*object)) || has(DiskPath::Encoded(*object));
        !is_here && !metadata.is_only_remote(*object).unwrap_or(false)
    });
    let Some(first) = lost.next() else { return Ok(()) };
    let (directory, there) = directory_of(first);
    Err(StoreError::Incomplete(format!(
        "{} is missing, and the store has the bytes of {} files in {there}: put it back, or have kvfs fsck \
         --repair take them for lost",
        store.path().join(directory.relative()).display(),
        lost.count() + 1
    )))
}
