//! Publishing: the one place where an object's bytes become durable under a committed name.
//!
//! The order is the store's promise: bytes, fsync, rename into `objects/`, fsync of the
//! directory, commit of `meta.redb`. `publish` does all but the last step for a frozen layer.

use std::collections::BTreeSet;
use std::io;

use super::Store;
use super::disk::{Access, DiskDirectory, DiskPath, shard};
use super::flush::write_out;
use super::record::ObjectId;

/// A copy in memory whose bytes the disk has now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flushed {
    pub(crate) object: ObjectId,
    pub(crate) version: u64,
}

/// Makes the bytes of `objects` durable and moves those in `staging/` to `objects/`; those that
/// only memory has are copied first.
///
/// `moved` is told of each object that lies in `objects/` now. An object whose file is gone was
/// never written to after its name went: nothing to do.
pub(crate) fn publish<'a>(
    store: &Store, objects: impl Iterator<Item = &'a ObjectId>, mut moved: impl FnMut(ObjectId),
) -> io::Result<Vec<Flushed>> {
    let mut directories = BTreeSet::new();
    let (mut dirty, mut ready) = (Vec::new(), Vec::new());
    for &object in objects {
        if let Some(version) = store.ram.as_ref().and_then(|ram| ram.dirty_version(object)) {
            dirty.push(Flushed { object, version });
            continue;
        }
        match sync(store, object) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            outcome => {
                outcome?;
                ready.push(object);
            }
        }
    }
    let flushed = write_out(store, &dirty)?;
    ready.extend(flushed.iter().map(|copy| copy.object));
    for object in ready {
        match store.disk.rename(&DiskPath::Staging(object), &DiskPath::Object(object)) {
            Ok(()) => {
                directories.insert(DiskDirectory::ObjectShard(shard(object)));
                moved(object);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    for directory in directories {
        store.disk.sync_directory(directory)?;
    }
    Ok(flushed)
}

fn sync(store: &Store, object: ObjectId) -> io::Result<()> {
    store.open_object(object, Access::Read)?.sync()
}
