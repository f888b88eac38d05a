//! Publishing: the one place where an object's bytes become durable under a committed name.
//!
//! The order is the store's promise: bytes, fsync, rename into `objects/`, fsync of the
//! directory, commit of `meta.redb`. `publish` does all but the last step for a frozen layer.

use std::collections::BTreeSet;
use std::io;

use super::Store;
use super::disk::{Access, DiskDirectory, DiskPath, shard};
use super::record::ObjectId;

/// Makes the bytes of `objects` durable and moves those in `staging/` to `objects/`.
///
/// `moved` is told of each object that lies in `objects/` now. An object whose file is gone was
/// never written to after its name went: nothing to do.
pub(crate) fn publish<'a>(
    store: &Store, objects: impl Iterator<Item = &'a ObjectId>, mut moved: impl FnMut(ObjectId),
) -> io::Result<()> {
    let mut directories = BTreeSet::new();
    for &object in objects {
        let file = match store.open_object(object, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            outcome => outcome?,
        };
        file.sync()?;
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
    Ok(())
}
