//! What all records say of copies, read once beside a mount that begins: which files the remote does not have, and which the
//! disk does not.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use super::demotion::Demotion;
use super::{FileSystem, FsError};
use kvfs_page::names;
use kvfs_storage::store::database::Snapshot;
use kvfs_storage::store::record::{
    EncodedCopy, FileRecord, Inode, InodeId, ObjectId, ObjectKind, RemoteCopy, RemoteState,
};

/// Reads all records, beside the mount: which files the remote does not have, and which the
/// disk does not.
pub fn survey(fs: &FileSystem) -> Result<(), FsError> {
    let Some(tiers) = &fs.tiers else {
        return Ok(());
    };
    let snapshot = fs.core.state().metadata.snapshot()?;
    let mut copies = HashSet::new();
    snapshot.for_each::<RemoteCopy>(b'R', |object, _| {
        copies.insert(ObjectId(object));
    })?;
    let mut encoded_copies = HashSet::new();
    snapshot.for_each::<EncodedCopy>(b'Z', |object, _| {
        encoded_copies.insert(ObjectId(object));
    })?;
    let (mut arrivals, mut known, mut encoded) = (Vec::new(), Vec::new(), Vec::new());
    snapshot.for_each::<Inode>(b'I', |id, inode| {
        let file = inode.file().filter(|file| FileRecord::is_settled(file));
        let object = file.and_then(|file| file.object);
        encoded.extend(
            object
                .filter(|object| encoded_copies.contains(object))
                .map(|object| (InodeId(id), object)),
        );
        match object {
            Some(object) if copies.contains(&object) => {
                known.push((inode.atime.max(inode.mtime), InodeId(id), object));
            }
            Some(_) => {
                let bytes = file.map_or(0, |file| file.size);
                arrivals.push((InodeId(id), bytes, inode.ctime));
            }
            None => {}
        }
    })?;
    survey_positions(fs, &snapshot)?;
    drop(snapshot);
    for (id, object) in encoded {
        fs.demotion(tiers).survey_encoded((id, object))?;
        encoded_copies.remove(&object);
    }
    for object in encoded_copies {
        fs.demotion(tiers).forget_lone_copy(object)?;
    }
    let mut state = fs.core.state();
    for (id, bytes, since) in arrivals {
        state.metadata.arrivals.insert_since(id, bytes, since.into());
    }
    drop(state);
    // The policy takes what it is told of last for what was used last.
    known.sort_unstable();
    for (_, id, object) in known {
        fs.demotion(tiers).note_copy((id, object))?;
    }
    tiers.is_surveyed.store(true, Ordering::Release);
    Ok(())
}

/// Which files say where the rows of sequences stand: those stay on the disk, or come back.
fn survey_positions(fs: &FileSystem, snapshot: &Snapshot) -> Result<(), FsError> {
    let mut sequences = Vec::new();
    snapshot.for_each_named(b'E', |parent, offset_and_name| {
        if offset_and_name.get(8..) == Some(names::POSITIONS.as_bytes()) {
            sequences.push(InodeId(parent));
        }
    })?;
    for sequence in sequences {
        let name = names::POSITIONS.as_bytes();
        let is_one = {
            let mut state = fs.core.state();
            let entry = state.entry(sequence, name)?;
            entry.is_some_and(|entry| state.metadata.note_positions(sequence, name, entry.inode))
        };
        if is_one {
            fs.indexer().note_away(sequence)?;
        }
    }
    Ok(())
}

impl Demotion<'_> {
    /// Notes what is known of an object's copy now; the records above may be out of date.
    fn note_copy(&self, (id, object): (InodeId, ObjectId)) -> Result<(), FsError> {
        let mut state = self.core.state();
        let copy = state.metadata.remote_copy(object)?;
        let record = state.metadata.object(object)?;
        let (Some(copy), Some(record)) = (copy, record) else {
            return Ok(());
        };
        match copy.state {
            RemoteState::Held => {
                // Nobody knows whether a manifest names it: it is uploaded again.
                state.metadata.forget_remote_copy(object)?;
                state.metadata.note_arrival(id)?;
            }
            RemoteState::Named => {
                self.tiers.copies.note_remote_copy(object, &copy);
                if record.kind != ObjectKind::Manifest {
                    self.tiers.copies.allow_leaving(object, id, record.length);
                }
            }
            RemoteState::Only => {
                self.tiers.copies.note_remote_copy(object, &copy);
                drop(state);
                // A crash may have left its file.
                self.remove_left((id, object), record.length)?;
            }
        }
        Ok(())
    }
}
