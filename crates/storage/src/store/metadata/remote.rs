//! What is known of the remote: which objects it has, how far they are relied upon, and who it is.

use super::{Life, Metadata};
use crate::store::database::decode;
use crate::store::record::{FileRecord, Inode, InodeId, ObjectId, RemoteCopy, RemoteState, Single};
use crate::store::{StoreError, keys};

impl Metadata {
    /// The copy of an object in the remote.
    pub fn remote_copy(&self, object: ObjectId) -> Result<Option<RemoteCopy>, StoreError> {
        self.get(&keys::remote_copy(object))
    }

    /// Whether the disk's copy of an object, if there still is one, does not count.
    pub fn is_only_remote(&self, object: ObjectId) -> Result<bool, StoreError> {
        let is_possible = self.has_tiers || self.has_remote_copies;
        let copy = if is_possible { self.remote_copy(object)? } else { None };
        Ok(copy.is_some_and(|copy| copy.state == RemoteState::Only))
    }

    /// Whether the remote has a file's bytes, verified and named.
    pub(super) fn is_named(&self, file: &FileRecord) -> bool {
        let copy = file.object.and_then(|object| self.remote_copy(object).ok().flatten());
        copy.is_some_and(|copy| copy.state != RemoteState::Held)
    }

    /// A file that the remote does not have, or not reliably, is to be looked at.
    pub fn note_arrival(&mut self, id: InodeId) -> Result<(), StoreError> {
        let inode = self.inode(id)?;
        if let Some(file) = inode.as_ref().and_then(Inode::file) {
            self.arrivals.insert(id, file.size);
        }
        Ok(())
    }

    /// Notes a copy in the remote.
    pub fn put_remote_copy(&mut self, object: ObjectId, copy: &RemoteCopy) {
        // What cannot be read is for fsck to find, which has everything counted anew.
        if let Ok(Some(old)) = self.remote_copy(object) {
            self.only_remote.subtract(&old);
        }
        self.only_remote.add(copy);
        self.put(Life::Durable, keys::remote_copy(object), copy);
    }

    /// Relies on a copy in the remote more, or less, than before.
    pub fn set_remote_state(&mut self, object: ObjectId, copy: RemoteCopy, state: RemoteState) {
        self.put_remote_copy(object, &RemoteCopy { state, ..copy });
    }

    /// The remote's copy is not the object any more.
    pub fn forget_remote_copy(&mut self, object: ObjectId) -> Result<(), StoreError> {
        if let Some(old) = self.remote_copy(object)? {
            self.only_remote.subtract(&old);
            self.remove(Life::Durable, keys::remote_copy(object));
        }
        Ok(())
    }

    /// Whether the remote has, or had, any object.
    pub fn has_remote_copies(&self) -> Result<bool, StoreError> {
        self.has_records(b'R')
    }

    /// What is known of the remote as a whole: who it and the store are to each other, where it was, what the
    /// store published there.
    pub fn single<T: Single>(&self) -> Result<Option<T>, StoreError> {
        self.get(&keys::single::<T>())
    }

    /// Notes it.
    pub fn put_single<T: Single>(&mut self, record: &T) {
        self.put(Life::Durable, keys::single::<T>(), record);
    }

    /// The highest numbers that manifests of stores were seen to have, as of the last commit: in a remote that is sealed,
    /// or in one that is not. A store has one of these.
    pub fn manifests_seen(&self, sealed: bool) -> Result<Vec<(u128, u64)>, StoreError> {
        let mut seen = Vec::new();
        for record in self.snapshot()?.records(keys::manifests_seen(sealed))? {
            let (key, value) = record?;
            let Some(store) = keys::store_seen(&key) else { break };
            seen.push((store, decode(&value)?));
        }
        Ok(seen)
    }

    /// Notes such a number; none, if the store is gone for good.
    pub fn set_manifest_seen(&mut self, store: u128, number: Option<u64>, sealed: bool) {
        let key = keys::manifest_seen(store, sealed);
        match number {
            Some(number) => self.put(Life::Durable, key, &number),
            None => self.remove(Life::Durable, key),
        }
    }
}
