//! Publishing: the one place where an object's bytes become durable under a committed name.
//!
//! The order is the store's promise: bytes, fsync, rename into `objects/`, fsync of the
//! directory, commit of `meta.redb`. `publish` does all but the last step for a frozen layer.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Store;
use super::disk::{Access, DiskDirectory, DiskPath, shard};
use super::flush::write_out;
use super::record::ObjectId;
pub use super::reserve::is_full;
use crate::sys::side_by_side;

/// A copy in memory whose bytes the disk has now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flushed {
    /// Whose bytes.
    pub object: ObjectId,
    /// Of the copy in memory, at the time its bytes were written.
    pub version: u64,
}

/// Makes the bytes of `objects` durable and moves those in `staging/` to `objects/`; those that
/// only memory has are copied first.
///
/// `moved` is told of each object that lies in `objects/` now. An object whose file is gone was
/// never written to after its name went: nothing to do.
pub fn publish<'a>(
    store: &Store, objects: impl Iterator<Item = &'a ObjectId>, mut moved: impl FnMut(ObjectId),
) -> io::Result<Vec<Flushed>> {
    let (mut dirty, mut clean) = (Vec::new(), Vec::new());
    for &object in objects {
        match store.ram.as_ref().and_then(|ram| ram.dirty_version(object)) {
            Some(version) => dirty.push(Flushed { object, version }),
            None => clean.push(object),
        }
    }
    let mut ready = sync_all(store, &clean)?;
    let flushed = write_out(store, &dirty)?;
    ready.extend(flushed.iter().map(|copy| copy.object));
    let mut directories = BTreeSet::new();
    for object in ready {
        let rename = || store.disk.rename(&DiskPath::Staging(object), &DiskPath::Object(object));
        // The directory may need another block, and the same commit may be what makes room.
        match store.reserve.lend(store.disk.as_ref(), rename) {
            Ok(()) => {
                directories.insert(DiskDirectory::ObjectShard(shard(object)));
                moved(object);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    for directory in directories {
        store.disk.sync_directory(directory).map_err(|error| lost(&error))?;
    }
    Ok(flushed)
}

/// Makes the bytes of these objects durable; those that have a file.
fn sync_all(store: &Store, objects: &[ObjectId]) -> io::Result<Vec<ObjectId>> {
    for object in objects {
        store.reserve.lend(store.disk.as_ref(), || store.buffer.put_on_disk(*object))?;
    }
    if store.disk.sync_all_files(objects.len())? {
        return Ok(objects.to_vec());
    }
    let has_failed = AtomicBool::new(false);
    let sync = |object: &ObjectId| {
        if has_failed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let outcome = match store.open_written(*object, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.and_then(|file| file.sync().map_err(|error| lost(&error))),
        };
        has_failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
        outcome.map(|()| Some(*object))
    };
    all_synced(side_by_side(store.disk.syncs_at_once(), objects, sync))
}

/// The objects that were synced, if nothing failed.
///
/// Of several errors the one counts that does not pass: the kernel tells of lost bytes once, and whoever tried
/// again would take them for durable.
fn all_synced(outcomes: Vec<io::Result<Option<ObjectId>>>) -> io::Result<Vec<ObjectId>> {
    let (mut synced, mut failure) = (Vec::new(), None);
    for outcome in outcomes {
        match outcome {
            Ok(object) => synced.extend(object),
            Err(error) if failure.as_ref().is_none_or(may_pass) => failure = Some(error),
            Err(_) => {}
        }
    }
    failure.map_or(Ok(synced), Err)
}

/// What a failed sync was about may be lost, whatever the reason: network filesystems and quotas say ENOSPC and
/// EDQUOT there, too. The kernel tells once, and the next sync succeeds.
pub(super) fn lost(error: &io::Error) -> io::Error {
    if let Some(code @ (libc::EMFILE | libc::ENFILE)) = error.raw_os_error() {
        // What was to be synced could not be opened: no sync says so.
        return io::Error::from_raw_os_error(code);
    }
    io::Error::other(format!("a sync failed, and what was written may be lost: {error}"))
}

/// Something is used up that may come back; no sync has failed, so the commit can be tried again.
pub fn may_pass(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(code, Some(libc::ENOSPC | libc::EDQUOT | libc::EMFILE | libc::ENFILE))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::super::faulty_disk::{Events, FaultyDisk};
    use super::*;

    const SHARD: &str = "objects/00";

    fn store(path: &Path) -> (Store, Arc<Events>) {
        let mut store = Store::open_or_create(path).unwrap();
        let disk = FaultyDisk::open(path);
        let events = Arc::clone(&disk.events);
        store.set_disk(Arc::new(disk)).unwrap();
        (store, events)
    }

    fn write(store: &Store, object: ObjectId) {
        store.create_object(object).unwrap().write_all_at(b"bytes", 0).unwrap();
    }

    fn names(object: ObjectId) -> (String, String) {
        (format!("staging/{object}"), format!("{SHARD}/{object}"))
    }

    #[test]
    fn bytes_are_durable_before_their_name_and_the_name_before_the_answer() {
        let directory = tempfile::tempdir().unwrap();
        let (store, events) = store(directory.path());
        let (one, gone) = (ObjectId(1), ObjectId(2));
        write(&store, one);
        events.take_steps();
        let mut moved = Vec::new();
        publish(&store, [one, gone].iter(), |object| moved.push(object)).unwrap();
        assert_eq!(moved, [one]);
        let (from, to) = names(one);
        assert_eq!(
            events.take_steps(),
            [from.clone(), format!("{from} -> {to}"), SHARD.to_owned()]
        );
        assert_eq!(std::fs::read(directory.path().join(to)).unwrap(), b"bytes");
    }

    #[test]
    fn many_are_synced_at_once_and_those_that_are_gone_are_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let (store, events) = store(directory.path());
        let objects: Vec<ObjectId> = (0..100).map(ObjectId).collect();
        objects[1..].iter().for_each(|object| write(&store, *object));
        events.take_steps();
        let mut moved = Vec::new();
        publish(&store, objects.iter(), |object| moved.push(object)).unwrap();
        assert_eq!(moved, objects[1..]);
        let steps = events.take_steps();
        assert_eq!((&*steps[0], &*steps[100], steps.len()), ("everything", SHARD, 101));
    }

    #[test]
    fn what_cannot_be_made_durable_is_not_published() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let (store, events) = store(path);
        let one = ObjectId(1);
        write(&store, one);
        let (from, to) = names(one);
        for unsyncable in [&*from, SHARD] {
            events.fail_to_sync(Some(unsyncable));
            let error = publish(&store, [one].iter(), |_| ()).unwrap_err();
            // Though the disk said that it was full.
            assert!(!may_pass(&error), "{unsyncable}: {error}");
            assert_eq!(path.join(&to).exists(), unsyncable == SHARD);
        }
        events.fail_to_sync(None);
        // Neither open nor gone.
        let two = ObjectId(2);
        std::os::unix::fs::symlink("/etc/passwd", path.join(names(two).0)).unwrap();
        assert!(publish(&store, [two].iter(), |_| ()).is_err());
        // Where it belongs is no directory.
        let three = ObjectId(3);
        write(&store, three);
        std::fs::remove_dir_all(path.join(SHARD)).unwrap();
        std::fs::write(path.join(SHARD), b"").unwrap();
        assert!(publish(&store, [three].iter(), |_| ()).is_err());
    }

    #[test]
    fn an_error_that_does_not_pass_hides_behind_no_other() {
        fn check(codes: &[i32], expected: i32) {
            let failed = codes.iter().map(|code| Err(io::Error::from_raw_os_error(*code)));
            let outcomes = [Ok(Some(ObjectId(1))), Ok(None)].into_iter().chain(failed).collect();
            let error = all_synced(outcomes).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(expected), "{codes:?}");
        }
        check(&[libc::ENOSPC], libc::ENOSPC);
        check(&[libc::ENOSPC, libc::EIO], libc::EIO);
        check(&[libc::EIO, libc::ENOSPC], libc::EIO);
        check(&[libc::EMFILE, libc::ESTALE, libc::EDQUOT], libc::ESTALE);
        let synced = all_synced(vec![Ok(Some(ObjectId(1))), Ok(None), Ok(Some(ObjectId(2)))]);
        assert_eq!(synced.unwrap(), [ObjectId(1), ObjectId(2)]);
    }
}
