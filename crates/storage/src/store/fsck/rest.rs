//! What hangs on inodes, what adds up, and files that no record knows.

use std::collections::HashSet;

use super::image::Image;
use crate::store::StoreError;
use crate::store::database::encode;
use crate::store::disk::{DiskDirectory, DiskPath};
use crate::store::keys;
use crate::store::quarantine::Take;
use crate::store::record::{InodeId, ObjectId, Totals};

pub(super) fn check(image: &mut Image<'_>) -> Result<(), StoreError> {
    check_attributes(image);
    check_remote_copies(image);
    check_encoded_copies(image);
    check_marks(image);
    check_totals(image);
    have_remote_counted(image);
    check_epoch(image);
    check_staging(image)?;
    check_unknown_files(image)
}

fn check_attributes(image: &mut Image<'_>) {
    let mut last = None;
    for key in std::mem::take(&mut image.attributes) {
        let id = keys::number(&key).map(InodeId);
        if id.is_some_and(|id| image.inodes.contains_key(&id)) {
            continue;
        }
        let removed = id.is_some_and(|id| image.changes.contains_key(&keys::inode(id)));
        // Attributes of one inode follow each other; those of one that went just now are no news.
        if !removed && last != Some(id) {
            let number = id.map_or(0, |id| id.0);
            let what = format!("inode {number:016x}: does not exist but has attributes, removed");
            image.find(&what, true);
        }
        last = Some(id);
        image.changes.insert(key, None);
    }
}

/// A copy of an object that does not exist is garbage in the remote.
fn check_remote_copies(image: &mut Image<'_>) {
    let stale: Vec<ObjectId> =
        image.remote.keys().filter(|object| !image.objects.contains_key(object)).copied().collect();
    for object in stale {
        let key = keys::remote_copy(object);
        if !image.changes.contains_key(&keys::object(object)) {
            let what = format!("object {object}: has a remote copy but no record, removed");
            image.find(&what, true);
        }
        image.changes.insert(key, None);
    }
}

/// An encoded copy of an object that does not exist is garbage on the disk.
fn check_encoded_copies(image: &mut Image<'_>) {
    let stale = image.encoded.keys().filter(|object| !image.objects.contains_key(object));
    for object in stale.copied().collect::<Vec<_>>() {
        if !image.was_clean {
            // A new version that a crash kept from taking its place.
            image.report.leftovers.unreferenced += 1;
        } else if !image.changes.contains_key(&keys::object(object)) {
            let what = format!("object {object}: has an encoded copy but no record, removed");
            image.find(&what, true);
        }
        image.remove_encoded(object);
    }
}

/// The marks are a list of the unsettled inodes, so that recovery need not look at all.
fn check_marks(image: &mut Image<'_>) {
    let unsettled: HashSet<InodeId> = image
        .inodes
        .iter()
        .filter(|(_, inode)| inode.file().is_some_and(|file| file.unsettled))
        .map(|(id, _)| *id)
        .collect();
    let marks = std::mem::take(&mut image.marks);
    for id in marks.symmetric_difference(&unsettled) {
        let missing = unsettled.contains(id);
        let changed = image.changes.contains_key(&keys::inode(*id));
        if !changed {
            let what = if missing {
                "may have been written to, but recovery would not look at it"
            } else {
                "marked for recovery without need"
            };
            image.find(&format!("inode {:016x}: {what}", id.0), true);
        }
        let change = missing.then(|| encode(&()));
        image.changes.insert(keys::unsettled(*id), change);
    }
}

fn check_totals(image: &mut Image<'_>) {
    if image.totals != image.counted {
        let (told, counted) = (image.totals, image.counted);
        let what = format!(
            "totals: {} objects, {} pages, {} bytes; counted: {}, {}, {}",
            told.objects, told.pages, told.bytes, counted.objects, counted.pages, counted.bytes
        );
        image.find(&what, true);
    }
    let mut after = Totals::default();
    for record in image.objects.values() {
        after.add(record);
    }
    if after != image.totals {
        image.changes.insert(keys::totals(), Some(encode(&after)));
    }
}

/// What only the remote has is counted anew by the next mount if a repair changes what is there.
fn have_remote_counted(image: &mut Image<'_>) {
    if image.changes.keys().any(|key| key.first() == Some(&b'R')) {
        image.changes.insert(keys::only_remote(), None);
    }
}

/// Numbers are never given out twice: the next epoch lies above all of them.
fn check_epoch(image: &mut Image<'_>) {
    let in_use = image.epoch_in_use;
    if in_use > image.epoch {
        let what = format!("epoch {}: numbers of epoch {in_use} are in use already", image.epoch);
        image.find(&what, true);
        if !image.changes.contains_key(&keys::epoch()) {
            image.put_epoch(in_use);
        }
    }
}

fn check_staging(image: &mut Image<'_>) -> Result<(), StoreError> {
    for name in image.store.disk.list(DiskDirectory::Staging)? {
        if let Some(path) = DiskPath::staged(&name) {
            image.report.leftovers.staged += 1;
            image.garbage.push(path);
        }
    }
    Ok(())
}

fn check_unknown_files(image: &mut Image<'_>) -> Result<(), StoreError> {
    let aside: HashSet<(ObjectId, bool)> =
        image.quarantine.iter().map(|(object, take)| (*object, *take == Take::Encoded)).collect();
    for shard in 0..=u8::MAX {
        let directory = DiskDirectory::ObjectShard(shard);
        for name in image.store.disk.list(directory)? {
            let path = DiskPath::stored(&name);
            let (object, is_encoded) = match path {
                Some(DiskPath::Object(object)) => (Some(object), false),
                Some(DiskPath::Encoded(object)) => (Some(object), true),
                _ => (None, false),
            };
            let object = object.filter(|object| crate::store::disk::shard(*object) == shard);
            let Some(object) = object else {
                let path = directory.relative().join(&name);
                let what = format!("{}: no file of a store, left alone", path.display());
                image.find(&what, false);
                continue;
            };
            let is_known = if is_encoded {
                image.encoded.contains_key(&object)
            } else {
                image.objects.contains_key(&object)
            };
            if is_known || aside.contains(&(object, is_encoded)) {
                continue;
            }
            let key = if is_encoded { keys::encoded_copy(object) } else { keys::object(object) };
            let had_record = image.changes.contains_key(&key);
            if image.was_clean && !had_record {
                let what = if is_encoded { "its encoded copy has" } else { "has" };
                image.find(&format!("object {object}: {what} no record, removed"), true);
            } else if !had_record {
                image.report.leftovers.unreferenced += 1;
            }
            image.garbage.extend(path);
        }
    }
    Ok(())
}
