//! When files were used last, on record.

use super::{Life, Metadata};
use crate::store::record::{Inode, InodeId};

impl Metadata {
    /// Stores a record in which nothing is new but the last use. Names are not published anew for that alone: a cache that
    /// is only read would otherwise be told to the remote all over, again and again.
    pub fn put_use(&mut self, life: Life, inode: InodeId, record: &Inode) {
        let before = self.names_changed;
        self.put_inode(life, inode, record);
        self.names_changed = before;
    }
}
