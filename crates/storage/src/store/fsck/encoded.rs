//! Encoded copies on the disk: there, as long as they should be, and of the object's bytes.

use std::io;

use super::image::Image;
use crate::page::{Checksum, PageIdentity};
use crate::store::StoreError;
use crate::store::disk::DiskPath;
use crate::store::record::{EncodedCopy, FileRecord, ObjectId, Role};
use crate::tier::encoded::verify;
use crate::tier::encoding::Subject;
use crate::tier::exchange::Item;

/// Whether the disk has a right encoded copy of an object. One that is wrong does not count any
/// more, and its file is garbage.
pub(super) fn check(
    image: &mut Image<'_>, object: ObjectId, file: &FileRecord,
) -> Result<bool, StoreError> {
    let Some(copy) = image.encoded.get(&object).copied() else {
        return Ok(false);
    };
    let Some(why) = damage(image, object, file, &copy)? else {
        return Ok(true);
    };
    // A mount does the same where the raw file is there.
    let is_left = image.store.disk.stat(&DiskPath::Object(object)).is_ok();
    if image.was_clean || !is_left {
        image.find(&format!("object {object}: {why}; it does not count any more"), true);
    }
    image.remove_encoded(object);
    Ok(false)
}

fn damage(
    image: &mut Image<'_>, object: ObjectId, file: &FileRecord, copy: &EncodedCopy,
) -> Result<Option<String>, StoreError> {
    let stat = match image.store.disk.stat(&DiskPath::Encoded(object)) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Some("its encoded copy is missing".to_owned()));
        }
        Err(error) => return Err(error.into()),
    };
    if stat.length != copy.stored_bytes {
        let (found, expected) = (stat.length, copy.stored_bytes);
        return Ok(Some(format!("its encoded copy has {found} bytes instead of {expected}")));
    }
    let record = image.objects.get(&object);
    let Some(checksum) = record.and_then(|record| record.checksum) else {
        return Ok(Some("it may have changed since it was encoded".to_owned()));
    };
    if !image.options.reads(object.0) {
        return Ok(None);
    }
    image.report.bytes_read += stat.length;
    let item = Item {
        object,
        length: file.size,
        checksum: Checksum(checksum),
        subject: match file.role {
            Role::Page(page) => Subject::Page(PageIdentity::from(&page)),
            _ => Subject::File,
        },
        encoded: Some(*copy),
    };
    match verify(image.store, &item, copy) {
        Ok(()) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Ok(Some(format!("its encoded copy: {error}")))
        }
        Err(error) => Err(error.into()),
    }
}
