//! Times that somebody sets: `stat` shows them, limits do not go by them.
//!
//! Who copies a file with its times (`cp -a`, `mv` from another file system) makes a new one that looks old. What
//! came a moment ago would be deleted as not used for long. So where a time is set, the last use before stays on record
//! with the file, as an attribute that nobody sees.

use super::Retention;
use crate::FsError;
use crate::core::state::State;
use kvfs_storage::store::Store;
use kvfs_storage::store::record::{Inode, InodeId, Time};

/// The last use before times were set that are older. Stored, and set by the daemon alone.
pub(crate) const USED: &[u8] = b"user.kvfs.used";

/// The last use that the records tell of. The mtime is that which `stat` shows.
pub(crate) fn recorded_use(state: &State, id: InodeId, inode: &Inode) -> Result<Time, FsError> {
    let shown = inode.atime.max(inode.mtime);
    // Whoever sets a time changes the inode: for most there is nothing to look up.
    if inode.ctime <= shown {
        return Ok(shown);
    }
    Ok(shown.max(kept_use(state, id)?.unwrap_or_default()))
}

/// The last use before times were set, if that is on record.
pub(crate) fn kept_use(state: &State, id: InodeId) -> Result<Option<Time>, FsError> {
    Ok(state.metadata.attribute(id, USED)?.and_then(|value| parse(&value)))
}

impl Retention {
    /// The last use of a file, whose times are about to be set.
    pub(crate) fn use_until_now(
        &self, (state, store): (&State, &Store), id: InodeId, inode: &Inode,
    ) -> Result<Time, FsError> {
        // The file of one that is being written may go any moment.
        let shown = state.attributes_of(store, id, inode);
        let mtime = shown.map_or(inode.mtime, |shown| shown.mtime);
        let recorded = recorded_use(state, id, &Inode { mtime, ..inode.clone() })?;
        Ok(recorded.max(self.uses().of(id).unwrap_or_default()))
    }

    /// Times of a file were set: limits go on by what was its last use, and a use before does not become its atime.
    pub(crate) fn keep_use(&self, state: &mut State, (id, inode): (InodeId, &Inode), used: Time) {
        self.uses().forget(id);
        // Limits are counted in seconds.
        if inode.atime.max(inode.mtime).seconds < used.seconds {
            let life = state.metadata.life(id);
            let value = format!("{} {}", used.seconds, used.nanoseconds);
            state.metadata.put_attribute(life, id, USED, value.as_bytes());
        }
    }
}

fn parse(value: &[u8]) -> Option<Time> {
    let (seconds, nanoseconds) = std::str::from_utf8(value).ok()?.split_once(' ')?;
    Some(Time { seconds: seconds.parse().ok()?, nanoseconds: nanoseconds.parse().ok()? })
}
