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

/// Puts an object's bytes and the reason into quarantine. The reason comes first: whoever is killed between the two
/// leaves no bytes that nobody can explain. Returns how many bytes were put there.
pub fn put(store: &Store, object: ObjectId, take: Take, reason: &str) -> io::Result<u64> {
    let note = format!("{object}.reason");
    discard(store, &note)?;
    let path = DiskPath::Quarantine(note.clone());
    store.disk.create(&path)?.write_all_at(format!("{reason}\n").as_bytes(), 0)?;
    if let Err(error) = put_bytes(store, object, take) {
        // Bytes that an interrupted attempt has brought there keep it.
        if store.disk.stat(&DiskPath::Quarantine(object.to_string())).is_err() {
            discard(store, &note)?;
        }
        return Err(error);
    }
    let bytes = store.disk.stat(&DiskPath::Quarantine(object.to_string()))?.length;
    trim(store)?;
    Ok(bytes)
}

fn put_bytes(store: &Store, object: ObjectId, take: Take) -> io::Result<()> {
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
    Ok(())
}

fn copy(source: &dyn DiskFile, store: &Store, target: &DiskPath) -> io::Result<()> {
    copy_all(source, create_anew(store, target)?.as_ref()).map(drop).inspect_err(|_| {
        // Some of it is no copy.
        if let Err(error) = store.disk.remove(target) {
            log::debug!("a part of a damaged file stays in quarantine: {error}");
        }
    })
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
        if is_too_much(newer, bytes) {
            discard(store, name)?;
            discard(store, &format!("{name}.reason"))?;
        }
    }
    Ok(())
}

/// Whether a file goes behind which there are so many newer ones, with so many bytes together with it.
fn is_too_much(newer: usize, bytes: u64) -> bool {
    newer >= FILES_MAX || bytes > BYTES_MAX
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::tier::counters::Counters;
    use crate::tier::ram::RamTier;

    fn make(store: &Store, path: &DiskPath, bytes: &[u8]) {
        store.disk.create(path).unwrap().write_all_at(bytes, 0).unwrap();
    }

    fn read(directory: &Path, name: &str) -> Vec<u8> {
        std::fs::read(directory.join("quarantine").join(name)).unwrap()
    }

    #[test]
    fn bytes_are_kept_with_the_reason_whichever_way_they_come() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(directory.path()).unwrap();
        let object = ObjectId(7);
        let [raw, staged, encoded] =
            [DiskPath::Object(object), DiskPath::Staging(object), DiskPath::Encoded(object)];
        let is_there = |path: &DiskPath| store.disk.stat(path).is_ok();
        make(&store, &raw, b"raw bytes");
        make(&store, &encoded, b"encoded");
        for (take, expected) in [
            (Take::Copy, &b"raw bytes"[..]),
            (Take::CopyOfDisk, b"raw bytes"),
            (Take::Beginning(3), b"raw"),
        ] {
            put(&store, object, take, "why").unwrap();
            assert_eq!(read(directory.path(), &object.to_string()), expected, "{take:?}");
            assert!(is_there(&raw));
        }
        put(&store, object, Take::Encoded, "encoded so").unwrap();
        assert_eq!(read(directory.path(), &object.to_string()), b"encoded");
        assert_eq!(read(directory.path(), &format!("{object}.reason")), b"encoded so\n");
        assert!(!is_there(&encoded));
        store.disk.remove(&raw).unwrap();
        for path in [raw, staged] {
            make(&store, &path, b"moved");
            put(&store, object, Take::Move, "why").unwrap();
            assert_eq!(read(directory.path(), &object.to_string()), b"moved");
            assert!(!is_there(&path));
        }
        assert!(put(&store, object, Take::Move, "nothing is there").is_err());
        store.disk.remove(&DiskPath::Quarantine(format!("{object}.reason"))).unwrap();
        assert_eq!(count(&store).unwrap(), 1);
    }

    #[test]
    fn what_is_only_in_memory_is_kept_too() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::open_or_create(directory.path()).unwrap();
        let ram = Arc::new(RamTier::open(1 << 20, Counters::default()).unwrap());
        store.ram = Some(Arc::clone(&ram));
        let object = ObjectId(7);
        let file = ram.create(object, 4096, Access::ReadWrite).unwrap().unwrap();
        file.write_all_at(b"page", 0).unwrap();
        drop(file);
        put(&store, object, Take::Move, "why").unwrap();
        assert_eq!(read(directory.path(), &object.to_string()), b"page");
        assert!(!ram.holds(object));
    }

    #[test]
    fn the_oldest_go_with_their_reasons() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(directory.path()).unwrap();
        let last = FILES_MAX as u64 + 2;
        for number in 1..=last {
            make(&store, &DiskPath::Staging(ObjectId(number)), b"page");
            put(&store, ObjectId(number), Take::Move, "why").unwrap();
        }
        assert_eq!(count(&store).unwrap(), FILES_MAX);
        let left = store.disk.list(DiskDirectory::Quarantine).unwrap();
        let kept = (3..=last).map(|number| ObjectId(number).to_string());
        let expected = kept.flat_map(|name| [format!("{name}.reason"), name]);
        let expected: BTreeSet<String> = expected.collect();
        assert_eq!(left.into_iter().collect::<BTreeSet<String>>(), expected);
        // What cannot be removed is told: a directory is no file of anybody's.
        let place = directory.path().join("quarantine").join(ObjectId(0).to_string());
        std::fs::create_dir(place).unwrap();
        make(&store, &DiskPath::Staging(ObjectId(last + 1)), b"page");
        assert!(put(&store, ObjectId(last + 1), Take::Move, "why").is_err());
    }

    #[test]
    fn as_many_and_as_large_as_promised_stay() {
        assert!(!is_too_much(FILES_MAX - 1, BYTES_MAX));
        assert!(is_too_much(FILES_MAX, 0));
        assert!(is_too_much(0, BYTES_MAX + 1));
    }
}
