//! The records of pages that are [held back](super::super::held_back): volatile, until the disk or the remote has the bytes.

use super::{Life, Metadata};
use crate::store::database::decode;
use crate::store::keys;
use crate::store::record::{
    Entry, Inode, InodeId, ObjectId, ObjectRecord, RemoteCopy, RemoteState,
};

/// Gives a new page its name and records, which no commit takes along. It waits for the remote like any other file.
pub fn hold_back(
    metadata: &mut Metadata, (parent, name): (InodeId, &[u8]), (id, inode): (InodeId, &Inode),
    (object, record): (ObjectId, &ObjectRecord),
) {
    metadata.held_back.insert(id, object, record.length);
    metadata.put(Life::Volatile, keys::object(object), record);
    metadata.put_inode(Life::Volatile, id, inode);
    let entry = Entry { inode: id, file_type: libc::S_IFREG };
    metadata.put_entry(Life::Volatile, parent, name, entry);
}

/// The page is held back no more: the next commit takes its records along. Returns its object, of which the disk or the
/// remote must have the bytes by then.
pub(super) fn let_go(metadata: &mut Metadata, id: InodeId) -> Option<ObjectId> {
    let object = metadata.held_back.remove(id)?;
    let key = keys::object(object);
    if let Some(Some(value)) = metadata.volatile.records.remove(&key) {
        if let Ok(record) = decode::<ObjectRecord>(&value)
            && let Some(checksum) = &record.checksum
        {
            metadata.count(None, Some(&record));
            metadata.note_page(checksum, id);
        }
        metadata.active.records.insert(key, Some(value));
    }
    Some(object)
}

/// The remote has the bytes of a page that was held back, verified: in place of the disk.
pub fn keep_in_remote(metadata: &mut Metadata, object: ObjectId, copy: &RemoteCopy) {
    metadata.active.publish.remove(&object);
    metadata.staged.remove(&object);
    metadata.put_remote_copy(object, &RemoteCopy { state: RemoteState::Only, ..*copy });
}

/// Forgets the record of an object that no commit has seen. Whether there was one.
pub(super) fn forget_object(metadata: &mut Metadata, object: ObjectId) -> bool {
    metadata.volatile.records.remove(&keys::object(object)).is_some()
}
