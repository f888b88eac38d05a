//! Which objects the disk has in fewer bytes.

use super::{Life, Metadata};
use crate::store::record::{EncodedCopy, ObjectId};
use crate::store::{StoreError, keys};

impl Metadata {
    /// The encoded copy of an object on the disk.
    pub fn encoded_copy(&self, object: ObjectId) -> Result<Option<EncodedCopy>, StoreError> {
        if self.has_tiers { self.get(&keys::encoded_copy(object)) } else { Ok(None) }
    }

    /// Notes an encoded copy on the disk.
    pub fn put_encoded_copy(&mut self, object: ObjectId, copy: &EncodedCopy) {
        self.put(Life::Durable, keys::encoded_copy(object), copy);
    }

    /// The encoded copy is not the object any more, or is about to go. What it was.
    pub fn forget_encoded_copy(
        &mut self, object: ObjectId,
    ) -> Result<Option<EncodedCopy>, StoreError> {
        let copy = self.encoded_copy(object)?;
        if copy.is_some() {
            self.remove(Life::Durable, keys::encoded_copy(object));
        }
        Ok(copy)
    }

    /// Whether the disk has any encoded copy.
    pub fn has_encoded_copies(&self) -> Result<bool, StoreError> {
        self.has_records(b'Z')
    }
}
