//! Extended attributes of inodes.

use serde_bytes::{ByteBuf, Bytes};

use super::{Life, Metadata};
use crate::store::database::decode;
use crate::store::record::InodeId;
use crate::store::{StoreError, keys};

/// Name and value of an extended attribute.
pub type Attribute = (Vec<u8>, Vec<u8>);

impl Metadata {
    /// Names and values of an inode's extended attributes.
    pub fn attributes(&self, inode: InodeId) -> Result<Vec<Attribute>, StoreError> {
        let prefix = keys::attributes(inode);
        let mut found = Vec::new();
        self.scan(&prefix, &prefix, |key, value| {
            if let Ok(value) = decode::<ByteBuf>(value) {
                found.push((key[prefix.len()..].to_vec(), value.into_vec()));
            }
            true
        })?;
        Ok(found)
    }

    /// Names alone: the values may be a megabyte.
    pub fn attribute_names(&self, inode: InodeId) -> Result<Vec<Vec<u8>>, StoreError> {
        let prefix = keys::attributes(inode);
        let mut found = Vec::new();
        self.scan(&prefix, &prefix, |key, _| {
            found.push(key[prefix.len()..].to_vec());
            true
        })?;
        Ok(found)
    }

    /// Bytes of names and values of all extended attributes but one.
    pub fn attribute_bytes(&self, inode: InodeId, except: &[u8]) -> Result<usize, StoreError> {
        let prefix = keys::attributes(inode);
        let mut bytes = 0;
        self.scan(&prefix, &prefix, |key, value| {
            let name = &key[prefix.len()..];
            if name != except {
                bytes += name.len() + value.len();
            }
            true
        })?;
        Ok(bytes)
    }

    /// One extended attribute.
    pub fn attribute(&self, inode: InodeId, name: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.get::<ByteBuf>(&keys::attribute(inode, name))?;
        Ok(value.map(ByteBuf::into_vec))
    }

    /// Stores an extended attribute.
    pub fn put_attribute(&mut self, life: Life, inode: InodeId, name: &[u8], value: &[u8]) {
        self.put(life, keys::attribute(inode, name), &Bytes::new(value));
    }

    /// Removes an extended attribute.
    pub fn remove_attribute(&mut self, life: Life, inode: InodeId, name: &[u8]) {
        self.remove(life, keys::attribute(inode, name));
    }
}
