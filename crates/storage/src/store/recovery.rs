//! What a mount does before it answers, so that a crash leaves no trace but freed space.
//!
//! 1. Everything in `staging/` goes: no committed name refers to it.
//! 2. Files that were being written in place get the size and time that their bytes have.
//! 3. In the background, files in `objects/` go that no record referred to before the mount answered.
//!    Their numbers are smaller than any that this mount gives out and numbers are never reused, so the
//!    sweep needs no lock against the running mount.

use std::collections::HashSet;

use super::database::Snapshot;
use super::disk::{Access, DiskDirectory, DiskPath};
use super::metadata::scan::has_any_record;
use super::metadata::{Life, Metadata};
use super::record::{EncodedCopy, FileRecord, Inode, InodeId, ObjectId, ObjectRecord, Role, Time};
use super::{Store, StoreError, keys};

/// What recovery found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Files that were being written in place.
    pub files_settled: usize,
    /// Tails with rows: their model tells whether they are full.
    pub tails: Vec<InodeId>,
    /// Files that a client of the dead mount can still write to: its descriptors and mappings
    /// outlive the daemon.
    pub still_changing: Vec<(InodeId, ObjectId)>,
}

impl std::fmt::Display for Recovered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Recovered { files_settled, tails, still_changing } = self;
        let (tails, changing) = (tails.len(), still_changing.len());
        if files_settled + tails + changing == 0 {
            return f.write_str("no file was being written");
        }
        write!(
            f,
            "{files_settled} files that were being written have come to rest, {tails} tails have rows, {changing} files \
             may still be written to by programs that have them open"
        )
    }
}

/// Step 1, before the metadata is opened: that takes some room, and what is in `staging/` may fill the disk. On
/// read-only media it is left to whoever can write there.
pub fn empty_staging(store: &Store) -> Result<(), StoreError> {
    if store.is_read_only() {
        return Ok(());
    }
    let staged = store.disk.list(DiskDirectory::Staging)?;
    for path in staged.iter().filter_map(|name| DiskPath::staged(name)) {
        store.disk.remove(&path)?;
    }
    Ok(())
}

/// Step 2.
pub fn recover(store: &Store, metadata: &mut Metadata) -> Result<Recovered, StoreError> {
    let mut recovered = Recovered::default();
    let mut unsettled = Vec::new();
    metadata.scan_table::<()>(b'U', |key, ()| {
        unsettled.extend(keys::number(key).map(InodeId));
    })?;
    for inode in unsettled {
        match settle(store, metadata, inode)? {
            Some(object) => recovered.still_changing.push((inode, object)),
            None => recovered.files_settled += 1,
        }
        let settled = metadata.inode(inode)?;
        let file = settled.as_ref().and_then(Inode::file);
        let has_rows = |file: &FileRecord| matches!(file.role, Role::Tail { .. }) && file.size > 0;
        recovered.tails.extend(file.is_some_and(has_rows).then_some(inode));
    }
    Ok(recovered)
}

/// Reads size and times of a file that was being written in place. Append-only files stay
/// unsettled: they are written to as long as they live. So does a file that is not at rest; its
/// object is returned.
fn settle(
    store: &Store, metadata: &mut Metadata, id: InodeId,
) -> Result<Option<ObjectId>, StoreError> {
    let Some(mut inode) = metadata.inode(id)? else {
        return Ok(None);
    };
    let Some(file) = inode.file_mut() else {
        return Ok(None);
    };
    let Some(object) = file.object else {
        return Ok(None);
    };
    let opened = match store.open_object(object, Access::Read) {
        // Opening that one file will answer EIO; the rest of the store is not to blame.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            log::error!("object {object} of inode {} is missing: run kvfs fsck", id.0);
            return Ok(None);
        }
        outcome => outcome?,
    };
    let changing = !file.role.is_append_only() && !opened.is_at_rest()?;
    let stat = opened.stat()?;
    file.size = stat.length;
    file.blocks = stat.blocks;
    let append = file.role.is_append_only();
    file.unsettled = changing || append;
    // The file of an object may have been made ahead of it, and nobody changed it.
    inode.mtime = if stat.length == 0 { inode.mtime.max(stat.mtime) } else { stat.mtime };
    // A write changes both.
    inode.ctime = inode.ctime.max(inode.mtime.min(Time::now()));
    metadata.put_inode(Life::Durable, id, &inode);
    if let Some(record) = metadata.object(object)?.filter(|_| !append) {
        let length = stat.length;
        metadata.put_object(object, &ObjectRecord { length, ..record });
        if !changing {
            // The next commit gives it its checksum: without one it goes nowhere.
            metadata.publish(object);
        }
    }
    Ok(changing.then_some(object))
}

/// Step 3, still to be done: what is garbage is decided by the records that were durable before
/// anybody used this mount. What a client removes stays until a commit removes it, since a crash brings
/// the name back; what a client makes has a number from this mount.
#[derive(Debug)]
pub struct Unswept {
    durable: Snapshot,
    /// The first number of this mount.
    below: ObjectId,
}

/// Lets somebody look at the records while nobody changes them.
pub trait Within:
    Fn(&dyn Fn(&Metadata) -> Result<bool, StoreError>) -> Result<bool, StoreError>
{
}

impl<F> Within for F where
    F: Fn(&dyn Fn(&Metadata) -> Result<bool, StoreError>) -> Result<bool, StoreError>
{
}

impl Unswept {
    /// To be called before anybody uses the mount; `None` if the last one ended in good order.
    pub fn find(store: &Store, metadata: &mut Metadata) -> Result<Option<Unswept>, StoreError> {
        if metadata.was_clean || store.is_read_only() {
            return Ok(None);
        }
        let below = metadata.new_object();
        metadata.staged.remove(&below);
        Ok(Some(Unswept { durable: metadata.snapshot()?, below }))
    }

    /// Removes objects that no record refers to, and encoded copies that are not on record. Returns
    /// how many.
    ///
    /// The mount makes and removes encoded copies of old objects meanwhile, record and file in one step. So
    /// `within` lets it look at the records of now, and remove the file, while nobody changes either.
    ///
    /// # Errors
    /// The last one of those that kept a file or a directory from being looked at; the others were.
    pub fn sweep(&self, store: &Store, within: impl Within) -> Result<usize, StoreError> {
        let referenced = self.referenced()?;
        let mut removed = 0;
        let mut failure = None;
        for shard in 0..=u8::MAX {
            for name in store.disk.list(DiskDirectory::ObjectShard(shard))? {
                let Some(path) = DiskPath::stored(&name) else { continue };
                match self.remove_garbage(store, &path, &referenced, &within) {
                    Ok(was_removed) => removed += usize::from(was_removed),
                    Err(error) => failure = Some(error),
                }
            }
        }
        failure.map_or(Ok(removed), Err)
    }

    /// Removes a file if it is garbage; whether it was.
    fn remove_garbage(
        &self, store: &Store, path: &DiskPath, referenced: &HashSet<ObjectId>, within: &impl Within,
    ) -> Result<bool, StoreError> {
        let remove_if = |is_garbage: bool| {
            if is_garbage {
                store.remove_if_there(path)?;
            }
            Ok(is_garbage)
        };
        match *path {
            DiskPath::Object(object) => {
                remove_if(object < self.below && !referenced.contains(&object))
            }
            DiskPath::Encoded(object) if !self.was_encoded(object)? => within(&|metadata| {
                remove_if(!has_any_record(metadata, &keys::encoded_copy(object))?)
            }),
            _ => Ok(false),
        }
    }

    /// The numbers of all objects that had a record.
    fn referenced(&self) -> Result<HashSet<ObjectId>, StoreError> {
        let mut found = HashSet::new();
        self.durable.for_each(b'O', |number, _: ObjectRecord| {
            found.insert(ObjectId(number));
        })?;
        Ok(found)
    }

    fn was_encoded(&self, object: ObjectId) -> Result<bool, StoreError> {
        let copy: Option<EncodedCopy> = self.durable.get(&keys::encoded_copy(object))?;
        Ok(copy.is_some())
    }
}

/// The number that an object's file name stands for.
pub(crate) fn parse(name: &str) -> Option<ObjectId> {
    (name.len() == 16).then(|| u64::from_str_radix(name, 16).ok().map(ObjectId)).flatten()
}

#[cfg(test)]
mod tests;
