//! `quarantine/`: refused and corrupt bytes, kept for whoever wants to know why.
//!
//! Bounded: the oldest go when there are more than `FILES_MAX` or they take more than `BYTES_MAX`, so
//! that an engine that writes broken pages all night does not fill the disk. What remains of the reason
//! goes with its bytes.

use std::io;

use super::Store;
use super::disk::{Access, DiskDirectory, DiskFile, DiskPath, copy_all, copy_beginning};
use super::record::ObjectId;

/// Files kept in quarantine: 64 pages of the default geometry are 256 MiB.
const FILES_MAX: usize = 64;
/// Bytes that they may take on the disk: as many as the largest page has.
const BYTES_MAX: u64 = 1 << 30;
/// Bytes of a block, as `stat` counts them.
const BLOCK_BYTES: u64 = 512;

/// How the bytes get into quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// The object's file itself: nothing refers to it any more.
    Move,
    /// A copy.
    Copy,
    /// A copy of so many bytes: its writer still has the file, which may be far longer than what it was
    /// meant to be, and have holes.
    Beginning(u64),
    /// A copy of the file that the disk has, whatever memory has.
    CopyOfDisk,
    /// The object's encoded copy, as it lies there.
    Encoded,
}

/// Puts an object's bytes and the reason into quarantine.
pub fn put(store: &Store, object: ObjectId, take: Take, reason: &str) -> io::Result<()> {
    let disk = store.disk.as_ref();
    let target = DiskPath::Quarantine(object.to_string());
    match take {
        Take::Move if store.ram.as_ref().is_some_and(|ram| ram.holds(object)) => {
            copy(store.open_object(object, Access::Read)?.as_ref(), store, &target)?;
            store.remove_object(object)?;
        }
        Take::Move => {
            let from = [DiskPath::Staging(object), DiskPath::Object(object)];
            let moved = disk.rename(&from[0], &target);
            moved.or_else(|_| disk.rename(&from[1], &target))?;
        }
        Take::Copy => {
            copy(store.open_object(object, Access::Read)?.as_ref(), store, &target)?;
        }
        Take::Beginning(bytes_max) => {
            let source = store.open_object(object, Access::Read)?;
            copy_beginning(source.as_ref(), create_anew(store, &target)?.as_ref(), bytes_max)?;
        }
        Take::CopyOfDisk => {
            copy(disk.open(&DiskPath::Object(object), Access::Read)?.as_ref(), store, &target)?;
        }
        Take::Encoded => disk.rename(&DiskPath::Encoded(object), &target)?,
    }
    let note = format!("{object}.reason");
    discard(store, &note)?;
    disk.create(&DiskPath::Quarantine(note))?.write_all_at(format!("{reason}\n").as_bytes(), 0)?;
    trim(store)
}

fn copy(source: &dyn DiskFile, store: &Store, target: &DiskPath) -> io::Result<()> {
    copy_all(source, create_anew(store, target)?.as_ref()).map(drop)
}

fn create_anew(store: &Store, target: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
    match store.disk.remove(target) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => store.disk.create(target),
    }
}

/// Number of quarantined objects.
pub fn count(store: &Store) -> io::Result<usize> {
    let names = store.disk.list(DiskDirectory::Quarantine)?;
    Ok(names.iter().filter(|name| !name.contains('.')).count())
}

fn discard(store: &Store, name: &str) -> io::Result<()> {
    match store.disk.remove(&DiskPath::Quarantine(name.to_owned())) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Names are object numbers, which grow with time: the smallest are the oldest.
fn trim(store: &Store) -> io::Result<()> {
    let mut names = store.disk.list(DiskDirectory::Quarantine)?;
    names.retain(|name| !name.contains('.'));
    names.sort_unstable();
    let mut bytes = 0_u64;
    for (newer, name) in names.iter().rev().enumerate() {
        let stat = store.disk.stat(&DiskPath::Quarantine(name.clone()));
        let taken = stat.map_or(0, |stat| stat.blocks.saturating_mul(BLOCK_BYTES));
        bytes = bytes.saturating_add(taken);
        if newer >= FILES_MAX || bytes > BYTES_MAX {
            discard(store, name)?;
            discard(store, &format!("{name}.reason"))?;
        }
    }
    Ok(())
}
